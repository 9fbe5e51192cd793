"""Every number of the embedded world: nano by look and prompt, the gap, no gap, looks seen, phrases, captions.

    python -m benchmarks.embedded_world

About three minutes on two cores, less when the mask bank has the masks already. `scikit-learn` is needed (it comes with
the test extras).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.embedded import DEFAULT_FOLDER, angiogram_folder
from rl_reward_network.data.regions import make_scenes
from rl_reward_network.data.splits import select
from rl_reward_network.env.observation import observe_image
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.training.nano_card import score_table
from rl_reward_network.training.nano_score import TEST_SCENES, score_regions, score_vessels
from rl_reward_network.training.world import World, WorldConfig, open_world
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Measure the embedded world."""

    model_path: str = DEFAULT_MODEL
    """The model; a retrained one is named by its folder."""
    output_dir: Path = Path("outputs")
    """Where the mask bank is kept."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU."""


def main(args: Args) -> None:
    """Measure and print."""
    config = WorldConfig(model_path=args.model_path, output_dir=args.output_dir, gpu=args.gpu)
    world = open_world(config)
    vessels = score_vessels(world)
    print(score_table(vessels))
    without = score_vessels(open_world(replace(config, data_root=angiogram_folder(DEFAULT_FOLDER, no_gap=True))))
    regions = score_regions(world.segmenter.model, world.segmenter.processor, list(make_scenes(*TEST_SCENES)))
    default = next(iter(vessels.dice.values()))["all"]
    several = sum(share >= 0.10 for share in vessels.best_on.values())
    lines = {
        "default prompt, Dice": (f"{default:.3f}", "0.65 to 0.80"),
        "oracle, Dice": (f"{vessels.oracle_dice['all']:.3f}", ">= 0.75, goal 0.82"),
        "oracle on its worst look, Dice": (f"{min(vessels.oracle_dice.values()):.3f}", ">= 0.70"),
        "oracle, recall": (f"{vessels.oracle_recall['all']:.3f}", ">= 0.75"),
        "prompts that are best on 10 % of images or more": (str(several), ">= 3"),
        "oracle - best fixed, Dice": (f"{vessels.gap:.3f}", ">= 0.05"),
        "the same without a gap": (f"{without.gap:.3f}", "<= 0.01"),
        "looks told apart from the observation": (f"{looks_seen(world):.1%}", ">= 80 %"),
        "phrases, cIoU": (f"{regions.phrase_ciou:.3f}", ">= 0.40, goal 0.60"),
        "captions right": (f"{regions.captions_right:.1%}", ">= 50 %, goal 70 %"),
    }
    table = Table("what", "measured", "bar", title=f"{args.model_path}, {vessels.images} test images")
    for name, (measured, bar) in lines.items():
        table.add_row(name, measured, bar)
    Console().print(table)


def looks_seen(world: World) -> float:
    """Accuracy on validation patients of a logistic regression from the observation to the look."""
    looks = read_json(world.config.data_root / "looks.json")

    def examples(*splits: str) -> tuple[np.ndarray, list[str]]:
        samples = [sample for split in splits for sample in select(world.samples, world.split, split)]
        return np.stack([observe_image(s.load_image()) for s in samples]), [looks[s.image_path.name] for s in samples]

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return float(classifier.fit(*examples("reward", "policy")).score(*examples("val")))


if __name__ == "__main__":
    run(main, Args)
