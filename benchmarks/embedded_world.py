"""All numbers of the embedded data: Dice by look and prompt, oracle gap with and without planting, captions.

    python -m benchmarks.embedded_world

About three minutes on two cores, less when the mask bank has the masks already.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.common import show
from rl_reward_network.cli.app import run
from rl_reward_network.data.splits import select
from rl_reward_network.embedded.datasets import embedded_angiograms, read_looks
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.observation import observe_image
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.default import DEFAULT_MODEL
from tools.nano.card import score_table
from tools.nano.score import TEST_SCENES, score_regions, score_vessels


@dataclass(frozen=True)
class Args:
    """Measure the embedded data."""

    model_path: str = DEFAULT_MODEL
    """The model; a retrained one is named by its folder."""
    output_dir: Path = Path("outputs")
    """Parent folder of the mask bank."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU."""


def main(args: Args) -> None:
    """Measure and print."""
    folders = [embedded_angiograms(no_gap=no_gap) for no_gap in (False, True)]  # refuses what is not ours, first
    config = RunConfig(model_path=args.model_path, data_root=folders[0], output_dir=args.output_dir, gpu=args.gpu)
    inputs = open_inputs(config)
    vessels = score_vessels(inputs)
    no_gap = score_vessels(open_inputs(replace(config, data_root=folders[1]))).gap
    regions = score_regions(inputs.segmenter.model, inputs.segmenter.processor, list(make_scenes(*TEST_SCENES)))
    print(score_table(vessels))
    default = next(iter(vessels.dice.values()))["all"]
    several = sum(share >= 0.10 for share in vessels.best_on.values())
    lines = [
        ("default prompt, Dice", f"{default:.3f}", "0.65 to 0.80"),
        ("default prompt, recall", f"{vessels.default_recall:.3f}", ""),
        ("oracle, Dice", f"{vessels.oracle_dice['all']:.3f}", ">= 0.75, goal 0.82"),
        ("oracle on its worst look, Dice", f"{min(vessels.oracle_dice.values()):.3f}", ">= 0.70"),
        ("oracle, recall", f"{vessels.oracle_recall['all']:.3f}", ">= 0.75"),
        ("prompts that are best on 10 % of images or more", several, ">= 3"),
        ("best fixed prompt", vessels.best_fixed, ""),
        ("oracle - best fixed, Dice", f"{vessels.gap:.3f}", ">= 0.05"),
        ("oracle - best fixed without a planted gap", f"{no_gap:.3f}", "<= 0.01"),
        ("looks classified from the observation", f"{look_accuracy(inputs):.1%}", ">= 80 %"),
        ("phrases, cIoU", f"{regions.phrase_ciou:.3f}", ">= 0.40, goal 0.60"),
        ("captions right", f"{regions.captions_right:.1%}", ">= 50 %, goal 70 %"),
    ]
    show(("what", "measured", "bar"), lines, f"{args.model_path}, {vessels.images} test images")


def look_accuracy(inputs: RunInputs) -> float:
    """Accuracy on validation patients of a logistic regression from the observation to the look."""
    looks = read_looks(inputs.config.data_root)

    def examples(*splits: str) -> tuple[np.ndarray, list[str]]:
        samples = [sample for split in splits for sample in select(inputs.samples, inputs.split, split)]
        return np.stack([observe_image(s.load_image()) for s in samples]), [looks[s.image_path.name] for s in samples]

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return float(classifier.fit(*examples("reward", "policy")).score(*examples("val")))


if __name__ == "__main__":
    run(main, Args)
