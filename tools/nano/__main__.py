"""Train `sa2va-nano`, the small Sa2VA that comes with this project, from scratch, and write its model card.

    python -m tools.nano

Stages of about half an hour on two cores. Interrupted training continues when the command is run again. Each stage
leaves a model that `--model_path` of every command takes; the last one is scored on the embedded test patients.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from rl_reward_network.atomic_io import read_json, whole_folder
from rl_reward_network.cli.app import run
from rl_reward_network.embedded.datasets import embedded_angiograms
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.flags import check_at_least
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.models.sa2va.loading_sa2va import check_device
from tools.nano.card import write_card
from tools.nano.pictures import open_pictures
from tools.nano.score import TEST_SCENES, score_regions, score_vessels
from tools.nano.train import STAGES, NanoTrainer, beside


@dataclass(frozen=True)
class Args:
    """Train sa2va-nano from scratch on rendered images."""

    output_dir: Path = Path("outputs/sa2va_nano")
    """Where images, checkpoints and the model of each stage are kept."""
    seed: int = 0
    """Seed of images, weights and batches."""
    angiograms: int = 4800
    """Training angiograms, one patient each; none of them is in the embedded data set."""
    scenes: int = 8000
    """Training scenes of coloured objects."""
    stages: int | None = None
    """Stop after so many stages; without it after the last."""
    gpu: int | None = None
    """Index of the GPU; without it the first one if there is any, else the CPU; -1 is the CPU."""


def main(args: Args) -> None:
    """Render, train stage by stage, score the last model and write its card."""
    check_at_least(args, 0, "seed")
    check_at_least(args, 1, "angiograms", "scenes", "stages")
    count = len(STAGES) if args.stages is None else args.stages
    if count > len(STAGES):
        raise ValueError(f"stages is {count}, expected 1 to {len(STAGES)}")
    config = RunConfig(output_dir=args.output_dir, gpu=args.gpu)
    check_device(config.device)
    config = replace(config, data_root=embedded_angiograms())
    pictures = open_pictures(args.output_dir, args.angiograms, args.scenes, args.seed)
    trainer = NanoTrainer(args.output_dir, pictures, args.seed, config.device)
    results = []
    for number, stage in enumerate(STAGES[:count]):
        results.append(trainer.train(number, stage))
        print(f"stage {number + 1} of {count}: {results[-1]}")
    final = args.output_dir / "sa2va-nano"
    with whole_folder(final) as folder:
        shutil.copytree(results[-1], folder, dirs_exist_ok=True)
        inputs = open_inputs(replace(config, model_path=str(folder)))
        regions = score_regions(inputs.segmenter.model, inputs.segmenter.processor, list(make_scenes(*TEST_SCENES)))
        stages = [read_json(beside(result, "made.json")) for result in results]
        names = ("seed", "angiograms", "scenes", "stages")
        changed = [f"--{name} {getattr(args, name)}" for name in names if getattr(args, name) != getattr(Args, name)]
        made = {
            "command": " ".join(["python -m tools.nano", *changed]),
            "seed": args.seed,
            "minutes": [stage["seconds"] / 60 for stage in stages],
            "machine": " and ".join(dict.fromkeys(stage["machine"] for stage in stages)),
            "parameters": sum(parameter.numel() for parameter in inputs.segmenter.model.parameters()),
            "versions": stages[-1]["versions"],
        }
        write_card(folder, inputs, score_vessels(inputs), regions, made)
    print(f"\nmodel and card: {final}")


if __name__ == "__main__":
    run(main, Args)
