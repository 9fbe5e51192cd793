"""Train `sa2va-nano`, the small Sa2VA that comes with this project, from scratch, and write its model card.

    sa2va-rl nano

Stages of about half an hour on two cores. Interrupted training continues when the command is run again. Each stage
leaves a model that `--model_path` of every command takes; the last one is scored on the embedded test patients.
"""

from dataclasses import dataclass
from pathlib import Path

from rl_reward_network.flags import check_at_least


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
    """Render, train, score, write the card."""
    check_at_least(args, 0, "seed")
    check_at_least(args, 1, "angiograms", "scenes", "stages")
    check_at_least(args, -1, "gpu")
    from rl_reward_network.embedded.nano.stage import train_nano

    changed = [name for name in ("seed", "angiograms", "scenes") if getattr(args, name) != getattr(Args, name)]
    changed += ["stages"] * (args.stages is not None)
    command = " ".join(["sa2va-rl nano", *(f"--{name} {getattr(args, name)}" for name in changed)])
    model = train_nano(args.output_dir, args.seed, args.angiograms, args.scenes, args.stages, args.gpu, command)
    print(f"\nmodel and card: {model}")
