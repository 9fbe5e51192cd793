"""The training of `sa2va-nano`: losses, interrupted stages, the whole command at its smallest; the shipped weights."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rl_reward_network.embedded.datasets as embedded
import tools.nano.__main__ as command
import tools.nano.card as nano_card
import tools.nano.train as training
from rl_reward_network.atomic_io import read_json
from rl_reward_network.embedded.angiograms import LOOKS, TREE, render_series
from rl_reward_network.embedded.regions import caption_correct, make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.config import PromptConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.rewards.metrics import dice
from tools.nano.conversations import corpus
from tools.nano.model import nano_losses, nano_tokenizer, new_nano
from tools.nano.pictures import PROMPT_TARGETS, Pictures
from tools.nano.score import describe
from tools.nano.train import NanoTrainer, Stage

SMALL = Stage(steps=6, learning_rate=1e-3, vessels=2, phrases=1, descriptions=1, by_codes=True, blind=(1, 0), prompts=2)
SMALLER = replace(SMALL, vessels=1, blind=(0, 0), prompts=1)
SHORT = replace(SMALLER, steps=2)
LOSSES = ("text", "code", "mask", "dice", "iou")


def test_sizes_keep_the_contract_and_equal_seeds_give_equal_weights() -> None:
    tokenizer = nano_tokenizer(corpus())
    (model, processor), (same, _), (other, _) = (new_nano(tokenizer, seed) for seed in (1, 1, 2))
    assert sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000
    assert (processor.grid, processor.max_tiles) == (16, 1)
    assert type(model.grounding_encoder).__name__ == "Sam2Model"
    assert all(map(torch.equal, model.parameters(), same.parameters()))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


# ---- training -----------------------------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Everything a stage leaves."""
    helpers = load_file(folder.with_name(f"{folder.name}_helpers.safetensors"))
    return Sa2VAForConditionalGeneration.from_pretrained(folder).state_dict() | helpers


def train_all(folder: Path, pictures: Pictures, stages: list[Stage]) -> list[Path]:
    trainer = NanoTrainer(folder, pictures)
    return [trainer.train(number, stage) for number, stage in enumerate(stages)]


@pytest.mark.parametrize("kill_after", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_a_training_killed_in_either_stage_ends_in_the_same_weights_and_log(
    tmp_path: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch, kill_after: int
) -> None:
    """Stages of 4 steps, with a checkpoint after 2."""
    monkeypatch.setattr(training, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(training, "LOG_EVERY", 1)
    last = 2 if kill_after == 3 else 4  # steps of the second stage
    stages = [replace(SMALLER, steps=4), replace(SMALLER, steps=last, by_codes=False, louder_places=4.0, watched=2)]
    whole = train_all(tmp_path / "whole", pictures, stages)
    taken: list[list[int]] = []
    deaths, take = [kill_after], NanoTrainer._step

    def step_until_killed(trainer: NanoTrainer, stage: Stage, key: list[int], optimiser: torch.optim.Optimizer) -> dict:
        if len(taken) == kill_after and deaths:
            raise KeyboardInterrupt(deaths.pop())
        taken.append(key)
        return take(trainer, stage, key, optimiser)

    monkeypatch.setattr(NanoTrainer, "_step", step_until_killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(tmp_path / "broken", pictures, stages)
    assert not (tmp_path / "broken" / f"stage_{1 + kill_after // 4}").exists()
    taken.clear()
    resumed = train_all(tmp_path / "broken", pictures, stages)
    assert taken == ([[0, 0, 2], [0, 0, 3], [0, 1, 0], [0, 1, 1]] if kill_after == 3 else [[0, 1, 2], [0, 1, 3]])
    for expected, actual in zip(map(weights, whole), map(weights, resumed), strict=True):
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    logs = []
    for folder in ("whole", "broken"):
        lines = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        logs.append([{name: value for name, value in line.items() if name != "seconds"} for line in lines])
    assert logs[0] == logs[1]
    assert [set(line) - {"stage", "step"} for line in logs[0]] == 4 * [{*LOSSES}] + last * [{*LOSSES, "region"}]


def test_the_batches_are_those_that_the_shipped_weights_were_trained_on(tmp_path: Path, pictures: Pictures) -> None:
    """Tokens, masks (pixels) and attributes of one step; slack is for other processors."""
    stage = replace(SMALL, steps=1, by_codes=False, watched=2)
    batch = training.batch_of(stage, pictures, NanoTrainer(tmp_path, pictures).processor, [0, 0, 0])
    assert batch["with_image"]["input_ids"].sum() == 433_418
    assert batch["text_only"]["input_ids"].sum() == 14_814
    assert [int(masks.sum()) for masks in batch["masks"]] == pytest.approx([12_244, 5_165, 18_942], abs=10)
    assert batch["attributes"].tolist() == [[4, 1, 0, 5], [3, 1, 1, 2]]
    assert batch["region_scenes"]["attributes"].sum() == 58


def test_each_stage_leaves_a_model_that_loads_and_the_next_goes_on_from_it(tmp_path: Path, pictures: Pictures) -> None:
    first = NanoTrainer(tmp_path, pictures).train(0, SHORT)
    facts = read_json(tmp_path / "stage_1_made.json")
    assert facts["seconds"] > 0
    assert facts["machine"].endswith("CPU cores")
    assert facts["versions"]["torch"] == torch.__version__
    model, processor = load_sa2va_model(first)
    assert model.segment([pictures.scenes[0]], ["the vessel"], processor, max_new_tokens=2)
    for trainer, stage in (
        (NanoTrainer(tmp_path, pictures, seed=5), SHORT),
        (NanoTrainer(tmp_path, pictures), replace(SHORT, learning_rate=2e-3)),
        (NanoTrainer(tmp_path, replace(pictures, name="others")), SHORT),
    ):
        with pytest.raises(ValueError, match=r"stage_1_made\.json: settings are .*--output_dir"):
            trainer.train(0, stage)
    again = NanoTrainer(tmp_path, pictures)
    assert again.train(0, SHORT) == first
    before, state = weights(first), again.model.state_dict() | again.helpers.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in before.items())
    after = weights(again.train(1, replace(SHORT, by_codes=False)))
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert torch.equal(before["codes"], after["codes"])  # without a gradient, weight decay leaves them alone too


def test_a_loss_that_is_not_finite_stops_the_training(tmp_path: Path, pictures: Pictures) -> None:
    trainer = NanoTrainer(tmp_path, pictures)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="loss is nan; lower"):
        trainer.train(0, SHORT)
    assert not (tmp_path / "stage_1").exists()


def test_losses_reach_every_part_by_codes_and_by_words(tmp_path: Path, pictures: Pictures) -> None:
    trainer = NanoTrainer(tmp_path, pictures)
    for by_codes in (True, False):
        stage = replace(SMALL, by_codes=by_codes, watched=0 if by_codes else 2)
        batch = training.batch_of(stage, pictures, trainer.processor, [0, 0, 0])
        trainer.model.zero_grad()
        trainer.helpers.zero_grad()
        losses = nano_losses(trainer.model, trainer.helpers, batch, by_codes)
        assert set(losses) == {*LOSSES, *([] if by_codes else ["region"])}
        sum(losses.values()).backward()
        assert (trainer.helpers.codes.grad is not None) == by_codes
        assert (trainer.helpers.reader.weight.grad is not None) == (not by_codes)
        parts = {
            "vision": trainer.model.model.vision_tower,
            "words": trainer.model.model.language_model,
            "projection": trainer.model.text_hidden_fcs,
            "SAM 2's encoder": trainer.model.grounding_encoder.vision_encoder,
            "IoU head": trainer.model.grounding_encoder.mask_decoder.iou_prediction_head,
        }
        for name, part in parts.items():
            assert any(p.grad is not None and p.grad.abs().max() > 0 for p in part.parameters()), name


# ---- the whole command ---------------------------------------------------------------------------------------------

SMALLEST = command.Args(output_dir=Path("somewhere"), angiograms=6, scenes=3, stages=2, gpu=-1)


@pytest.fixture
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "PATIENTS", 24)
    monkeypatch.setattr(embedded, "FRAMES", 1)
    monkeypatch.setattr(command, "STAGES", (SHORT, replace(SHORT, by_codes=False, watched=2)))
    monkeypatch.setattr(command, "TEST_SCENES", (1, 2))
    short = PromptConfig(max_new_tokens=4)  # an untrained model never ends its answer
    monkeypatch.setattr(command, "open_inputs", partial(command.open_inputs, prompt_config=short))
    monkeypatch.setattr(nano_card, "PER_LOOK", 1)


@pytest.mark.usefixtures("small_data")
def test_it_ends_in_a_model_with_a_card_that_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(SMALLEST)
    final = Path("somewhere/sa2va-nano")
    assert capsys.readouterr().out.splitlines()[-1] == f"model and card: {final}"
    model, _ = load_sa2va_model(final)
    made = read_json(final / "scores.json")["made"]
    assert made["command"] == "python -m tools.nano --angiograms 6 --scenes 3 --stages 2"
    assert made["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert len(made["minutes"]) == 2
    assert "somewhere" not in (final / "README.md").read_text()
    assert {path.name for path in Path("somewhere").glob("stage_*")} >= {"stage_1", "stage_2"}


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize(
    ("changes", "message"), [({"gpu": 0}, "cuda:0.*0 GPUs"), ({"stages": 3}, "stages is 3"), ({"seed": -1}, "seed")]
)
def test_wrong_settings_are_refused_before_anything_is_rendered(
    changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=message):
        command.main(replace(SMALLEST, **changes))
    assert not Path("somewhere").exists()


# ---- the shipped weights ------------------------------------------------------------------------------------------


def test_the_shipped_model_is_small_and_has_a_card() -> None:
    folder = EMBEDDED["sa2va-nano"]
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    card = (folder / "README.md").read_text()
    assert "As it is, it segments nothing of yours" in card
    results = (Path(__file__).resolve().parents[2] / "docs/results.md").read_text()
    assert [dice for dice in ("0.139", "0.285", "0.720", "0.723") if dice not in card or dice not in results] == []
    assert (folder / "overlays.png").exists()
    scores = json.loads((folder / "scores.json").read_text())
    assert scores["made"]["parameters"] <= 4_000_000
    for number in (scores["angiograms"]["oracle_dice"]["all"], scores["angiograms"]["gap"]):
        assert f"{number:.3f}" in card


def test_the_shipped_model_segments_every_look_and_describes_what_it_is_shown() -> None:
    model, processor = load_sa2va_model("sa2va-nano")
    for number, look in enumerate(LOOKS):
        frames = [next(iter(render_series(np.random.default_rng([42, number, i]), look, 1))) for i in range(3)]
        fitting = [prompt for prompt in PROMPTS if PROMPT_TARGETS[prompt, look] == "tree"]
        images = [np.repeat(frame.image[..., None], 3, axis=2) for frame in frames]
        values = [
            dice(
                np.stack([answer.masks().any(axis=0) for answer in answers]),
                np.stack([frame.parts & TREE > 0] * len(fitting)),
            )
            for frame, answers in zip(frames, model.segment(images, fitting, processor), strict=True)
        ]
        assert np.mean(np.max(values, axis=1)) >= 0.70, look

    right = total = 0
    for scene in make_scenes(6, seed=3):
        for region in scene.objects:
            result = describe(model, processor, scene, region)
            right, total = right + caption_correct(result["prediction"], region), total + 1
            assert not result["prediction_masks"]
    assert right / total >= 0.5
    (answers,) = model.segment([scene.image], [PROMPTS[0]], processor)
    assert answers[0].answer == "Sure, [SEG].<|im_end|>"
