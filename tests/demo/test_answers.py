"""What the page shows: pictures, words, and a clear message for whatever cannot be shown."""

import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.random_checkpoint import write_random_checkpoint
from rl_reward_network.demo.answers import Answers, interval_refusal, load_answers
from rl_reward_network.demo.examples import write_examples
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, draw_region
from rl_reward_network.segment.maker import MaskMaker


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network") / "best_reward_net"
    RewardNetwork(RewardNetworkConfig(channels=(4, 8), members=2)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def answers(network: Path, folder: Path) -> Answers:
    return load_answers(folder, None, None, network, "cpu")


@pytest.fixture(scope="module")
def examples(folder: Path) -> list[Path]:
    return write_examples(folder / "examples")


def test_an_answer_has_every_picture_and_the_predicted_quality(answers: Answers, examples: list[Path]) -> None:
    shown = answers.segment(str(examples[0]), PROMPTS[0], False, 0.5)
    image = answers.open(str(examples[0]))
    for picture in (shown.overlay, shown.soft, shown.errors, shown.fused):
        assert picture is not None
        assert (picture.shape, picture.dtype) == (image.shape, np.uint8)
    assert (shown.overlay != image).any()
    lines = shown.words.splitlines()
    assert lines[:2] == [f"Prompt: {PROMPTS[0]}", "Answer: Sure, [SEG]."]
    assert re.fullmatch(r"Predicted Dice: 0\.\d{3}, score 0\.\d{3}", lines[3])
    assert lines[4].startswith("Spread between the networks: 0.")
    assert lines[5] == "No 90 % interval: none was fitted to masks of these weights"
    assert len(lines) == 6


def test_an_interval_is_shown_where_there_is_one(answers: Answers, examples: list[Path]) -> None:
    assert answers.maker.network is not None
    fitted = copy(answers.maker.network)
    fitted.config = replace(fitted.config, intervals={"Sa2VA": DiceInterval(-1.0, 1.0, 0.02, 40)})
    shown = replace(answers, maker=replace(answers.maker, network=fitted)).segment(str(examples[0]), "one", False, 0.5)
    assert re.search(r"^Predicted Dice \[90 % interval\]: 0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\], score", shown.words, re.M)
    assert "No 90 %" not in shown.words
    few = replace(fitted.config, intervals={"Sa2VA": DiceInterval(-1.0, 1.0, 0.02, 8)})
    assert interval_refusal(few) == "it needs 9 validation patients, got 8"


def test_the_weight_moves_the_fused_mask_from_sa2va_to_the_network(answers: Answers, examples: list[Path]) -> None:
    own, fused = (answers.segment(str(examples[0]), PROMPTS[0], False, weight) for weight in (0.0, 1.0))
    assert fused.fused is not None
    assert own.fused is not None
    painted = (own.overlay != answers.open(str(examples[0]))).any(axis=2)
    np.testing.assert_array_equal((own.fused != answers.open(str(examples[0]))).any(axis=2), painted)
    assert (own.fused != fused.fused).any()


def test_without_a_network_its_pictures_are_left_out(answers: Answers, examples: list[Path]) -> None:
    plain = replace(answers, maker=replace(answers.maker, network=None))
    shown = plain.segment(str(examples[0]), PROMPTS[0], False, 0.5)
    assert shown.errors is None
    assert shown.fused is None
    assert "Predicted" not in shown.words
    assert "interval" not in shown.words
    labels = [label for _, label in plain.all_prompts(str(examples[0]))]
    assert ["Please segment " + label for label in labels] == list(PROMPTS)


def test_all_prompts_are_shown_with_their_predicted_dice(answers: Answers, examples: list[Path]) -> None:
    pictures = answers.all_prompts(str(examples[1]))
    assert ["Please segment " + label.split(" ", 1)[1] for _, label in pictures] == list(PROMPTS)
    assert all(0 <= float(label.split(" ")[0]) <= 1 for _, label in pictures)
    single = answers.segment(str(examples[1]), PROMPTS[3], False, 0.5)
    np.testing.assert_array_equal(pictures[3][0], single.overlay)
    assert f"Predicted Dice: {pictures[3][1].split(' ')[0]}," in single.words


def test_a_region_gets_its_caption(answers: Answers, examples: list[Path]) -> None:
    region = np.zeros((256, 256), bool)
    region[100:140, 100:140] = True
    caption = answers.caption(str(examples[3]), region)
    assert caption.startswith("a ")
    assert "<|" not in caption


@pytest.mark.parametrize(("how", "words"), [("outline", "red outline"), ("crop", "cropped to it")])
def test_a_region_is_drawn_for_a_model_that_cannot_be_shown_one_and_the_caption_says_so(
    how: Any, words: str, folder: Path, examples: list[Path], tmp_path: Path
) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny-qwen3-vl")
    answers, asked = load_answers(folder, str(tmp_path / "model"), device="cpu"), {}
    region, predict = np.zeros((256, 256), bool), answers.maker.model.predict_forward
    region[100:140, 100:140] = True
    answers.maker.processor.region_prompt = how

    def predict_forward(**named: Any) -> Any:
        asked.update(named)
        return predict(**named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers.maker.model, "predict_forward", predict_forward)
        caption = answers.caption(str(examples[3]), region)
    assert "cannot be shown a region" in caption
    assert words in caption
    assert "<|" not in caption
    assert asked["text"] == f"<image>{QUESTIONS[how]}"
    assert np.array_equal(asked["image"], draw_region(answers.open(str(examples[3])), region, how))


def refused(answers: Answers, path: Path | None, prompt: str = PROMPTS[0], by_policy: bool = False) -> str:
    with pytest.raises(ValueError) as error:
        answers.segment(None if path is None else str(path), prompt, by_policy, 0.5)
    return str(error.value)


def test_what_cannot_be_shown_is_refused_by_a_clear_message(answers: Answers, examples: list[Path]) -> None:
    assert "upload one" in refused(answers, None)
    assert "prompt is empty" in refused(answers, examples[0], prompt="  ")
    assert "--policy RUN" in refused(answers, examples[0], by_policy=True)
    assert "2,001 characters, expected at most 2,000" in refused(answers, examples[0], prompt="a" * 2001)
    with pytest.raises(ValueError, match="draw over the object"):
        answers.caption(str(examples[3]), None)
    with pytest.raises(ValueError, match="drawn on another image"):
        answers.caption(str(examples[3]), np.ones((3, 5), bool))


def test_no_call_reads_a_file_elsewhere(answers: Answers, examples: list[Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "patient.png"
    elsewhere.write_bytes(examples[0].read_bytes())
    region = np.ones((256, 256), bool)
    for call in (
        answers.open,
        answers.all_prompts,
        lambda path: answers.segment(path, PROMPTS[0], False, 0.5),
        lambda path: answers.caption(path, region),
    ):
        with pytest.raises(ValueError, match="no upload and no example"):
            call(str(elsewhere))


def test_a_large_image_is_shrunk_and_the_words_say_so(answers: Answers, folder: Path) -> None:
    Image.new("L", (1536, 768), 90).save(folder / "large.png")
    shown = answers.segment(str(folder / "large.png"), PROMPTS[0], False, 0.5)
    assert shown.overlay.shape == (512, 1024, 3)
    assert shown.words.startswith("Image: 1536 x 768 pixels, shrunk to 1024 x 512\n")


def test_the_policy_chooses_the_prompt(answers: Answers, examples: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskMaker, "_choose", lambda *_: PROMPTS[2])
    trained = replace(answers, maker=replace(answers.maker, policy=object()))
    assert f"Prompt: {PROMPTS[2]}" in trained.segment(str(examples[0]), "", True, 0.5).words


def test_the_prompts_of_a_policy_stand_in_the_list(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    of_run = replace(answers.maker, trained={"prompts": ["one", "two"]})
    monkeypatch.setattr("rl_reward_network.demo.answers.load_mask_maker", lambda *_, **__: of_run)
    monkeypatch.setattr("rl_reward_network.demo.answers.default_model", lambda policy: "models/mine")
    loaded = load_answers(Path("uploads"), None, Path("run"))
    assert (loaded.prompts, loaded.model_path) == (("one", "two"), "models/mine")


def test_the_best_fixed_prompt_is_selected_where_the_run_deploys_it(answers: Answers) -> None:
    prompts = ("one", "two", "three")
    fixed = replace(answers, prompts=prompts, maker=replace(answers.maker, prompt="two"))
    assert fixed.first_prompt == "two"
    assert replace(fixed, maker=replace(fixed.maker, policy=object())).first_prompt == "one"
