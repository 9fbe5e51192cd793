"""The training of `sa2va-nano` as a whole: images, stages, scores, model card."""

import shutil
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


def train_nano(
    output_dir: Path, seed: int, angiograms: int, scenes: int, stages: int | None, gpu: int | None, command: str
) -> Path:
    """Train stage by stage, score the last model and write its card; returns the model's folder.

    Args:
        output_dir: where images, checkpoints and models are kept.
        seed: of images, weights and batches.
        angiograms, scenes: numbers of training images.
        stages: number of stages; None is all.
        gpu: index; -1 is the CPU; None is the first one, if there is any.
        command: what the card names as the way to train the model.

    Raises:
        ValueError: `stages` or `gpu` is out of range, or the folder of the embedded data holds something else.
    """
    count = len(STAGES) if stages is None else stages
    if not 1 <= count <= len(STAGES):
        raise ValueError(f"stages is {count}, expected 1 to {len(STAGES)}")
    device = RunConfig(gpu=gpu).device
    check_device(device)
    test_data = embedded_angiograms()
    trainer = NanoTrainer(output_dir, open_pictures(output_dir, angiograms, scenes, seed), seed, device)
    results = []
    for number, stage in enumerate(STAGES[:count]):
        results.append(trainer.train(number, stage))
        print(f"stage {number + 1} of {count}: {results[-1]}")
    final = output_dir / "sa2va-nano"
    with whole_folder(final) as folder:
        shutil.copytree(results[-1], folder, dirs_exist_ok=True)
        inputs = open_inputs(RunConfig(model_path=str(folder), data_root=test_data, output_dir=output_dir, gpu=gpu))
        regions = score_regions(inputs.segmenter.model, inputs.segmenter.processor, list(make_scenes(*TEST_SCENES)))
        write_card(folder, inputs, score_vessels(inputs), regions, _facts(command, seed, inputs, results))
    return final


def _facts(command: str, seed: int, inputs: RunInputs, results: list[Path]) -> CardFacts:
    """What the card reports of the training."""
    stages = [stage_facts(result) for result in results]
    return CardFacts(
        command=command,
        seed=seed,
        minutes=tuple(stage["seconds"] / 60 for stage in stages),
        machine=" and ".join(dict.fromkeys(stage["machine"] for stage in stages)),
        parameters=sum(parameter.numel() for parameter in inputs.segmenter.model.parameters()),
        versions=stages[-1]["versions"],
    )
