"""Train `sa2va-nano`, the small Sa2VA that comes with this project, from scratch, and write its model card.

    sa2va-rl nano

Stages of about half an hour on two cores. Run it again after any stop and it goes on; each stage leaves a model that
`--model_path` of every command takes. The last one is scored on the embedded test patients.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rl_reward_network.artefacts import whole_folder
from rl_reward_network.embedded.datasets import embedded_angiograms
from rl_reward_network.embedded.nano.card import CardFacts, write_card
from rl_reward_network.embedded.nano.pictures import open_pictures
from rl_reward_network.embedded.nano.score import TEST_SCENES, score_regions, score_vessels
from rl_reward_network.embedded.nano.train import STAGES, NanoTrainer, stage_facts
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.sa2va.loading_sa2va import check_device


@dataclass(frozen=True)
class Args:
    """Train sa2va-nano from scratch on rendered pictures."""

    output_dir: Path = Path("outputs/sa2va_nano")
    """Where pictures, checkpoints and the model of each stage are kept."""
    seed: int = 0
    """Seed of pictures, weights and batches."""
    angiograms: int = 4800
    """Training angiograms, one patient each; none of them is in the embedded data set."""
    scenes: int = 8000
    """Training scenes of coloured objects."""
    stages: int = len(STAGES)
    """Stop after so many stages."""
    gpu: int | None = None
    """Index of the GPU; without it the first one if there is any, else the CPU; -1 is the CPU."""


def main(args: Args) -> None:
    """Render, train stage by stage, score, say where the model is."""
    if not 1 <= args.stages <= len(STAGES):
        raise ValueError(f"stages is {args.stages}, expected 1 to {len(STAGES)}")
    device = RunConfig(gpu=args.gpu).device
    check_device(device)
    test_data = embedded_angiograms()
    pictures = open_pictures(args.output_dir, args.angiograms, args.scenes, args.seed)
    trainer = NanoTrainer(args.output_dir, pictures, args.seed, device)
    results = []
    for number, stage in enumerate(STAGES[: args.stages]):
        results.append(trainer.train(number, stage))
        print(f"stage {number + 1} of {args.stages}: {results[-1]}")
    final = args.output_dir / "sa2va-nano"
    with whole_folder(final) as temporary:
        shutil.copytree(results[-1], temporary, dirs_exist_ok=True)
        world = open_inputs(
            RunConfig(model_path=str(temporary), data_root=test_data, output_dir=args.output_dir, gpu=args.gpu)
        )
        regions = score_regions(world.segmenter.model, world.segmenter.processor, list(make_scenes(*TEST_SCENES)))
        write_card(temporary, world, score_vessels(world), regions, _facts(args, world, results))
    print(f"\nmodel and card: {final}")


def _facts(args: Args, world: RunInputs, results: list[Path]) -> CardFacts:
    """What the card says about the training, wherever it is scored."""
    stages = [stage_facts(result) for result in results]
    changed = [
        name for name in ("seed", "angiograms", "scenes", "stages") if getattr(args, name) != getattr(Args, name)
    ]
    return CardFacts(
        command=" ".join(["sa2va-rl nano", *(f"--{name} {getattr(args, name)}" for name in changed)]),
        seed=args.seed,
        minutes=tuple(stage["seconds"] / 60 for stage in stages),
        machine=" and ".join(dict.fromkeys(stage["machine"] for stage in stages)),
        parameters=sum(parameter.numel() for parameter in world.segmenter.model.parameters()),
        versions=stages[-1]["versions"],
    )
