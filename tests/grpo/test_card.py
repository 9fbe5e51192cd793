"""The Python lines of the cards of a final_model and of a merged model, as a reader would run them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from torch import Tensor

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.merge import Args, main
from rl_reward_network.grpo.card import _changes, card_text, training_facts
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, load_sa2va_model
from tests.cards import run_card
from tests.conftest import tube_image
from tests.grpo.test_merge import write_run

IMAGE, _ = tube_image(64, 0)
ROUNDING = 1e-5  # on some processors weights that are mapped from a file round otherwise than copied ones


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small finished run, and its model."""
    folder = tmp_path_factory.mktemp("run")
    return folder, write_run(folder)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(IMAGE).save(tmp_path / "scan.png")
    return tmp_path / "scan.png"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def test_the_lines_of_a_final_models_card_load_it(run: tuple[Path, Any], image: Path) -> None:
    folder, trained = run
    card = card_text(read_json(folder / "final_model" / "config.json"))
    whole, lora = run_card(card, folder / "final_model", image)
    assert whole["processor"].max_tiles == 1
    picture = Image.open(image)
    expected = trained.predict_forward(image=picture, text=whole["text"], processor=whole["processor"])
    assert whole["result"]["prediction"] == expected["prediction"]
    for mask, same in zip(whole["result"]["mask_probabilities"], expected["mask_probabilities"], strict=True):
        np.testing.assert_allclose(mask, same, atol=ROUNDING)
    assert isinstance(lora["model"], PeftModel)
    torch.testing.assert_close(logits(lora["model"]), logits(trained), atol=ROUNDING, rtol=0)
    assert (logits(trained) - logits(load_sa2va_model("sa2va-nano")[0])).abs().max() > 100 * ROUNDING


def test_the_lines_of_a_merged_models_card_load_it(run: tuple[Path, Any], image: Path, tmp_path: Path) -> None:
    folder, trained = run
    main(Args(folder, tmp_path / "merged"))
    (names,) = run_card((tmp_path / "merged" / "README.md").read_text(), tmp_path / "merged", image)
    assert type(names["model"]) is Sa2VAForConditionalGeneration
    torch.testing.assert_close(logits(names["model"]), logits(trained), atol=1e-4, rtol=0)
    assert names["result"]["prediction"]


@pytest.mark.parametrize(("loop1", "rewards"), [(0, "loop2_iou 1, learned 1"), (1, "iou 1, loop2_iou 1, learned 1")])
def test_a_card_names_the_rewards_of_the_trained_loops_only(run: tuple[Path, Any], loop1: int, rewards: str) -> None:
    config = read_json(run[0] / "final_model" / "config.json")
    config["settings"]["training"] |= {"objective": "grpo", "mask_to_caption_weight": loop1}
    config["settings"]["weights"] = {"iou": 1.0, "caption": 0.0, "loop2_iou": 1.0, "learned": 1.0}
    assert training_facts(config)["rewards"] == rewards


@pytest.mark.parametrize("merged", [False, True])
def test_a_card_says_how_the_model_was_trained(run: tuple[Path, Any], merged: bool) -> None:
    config = read_json(run[0] / "final_model" / "config.json")
    config["settings"]["training"]["objective"] = "grpo"
    card = card_text(config, merged=merged)
    assert "# sa2va-nano, fine-tuned by GRPO" in card
    assert "- segmentation\n- grpo\n" in card
    config["settings"]["training"]["objective"] = "supervised"
    card = card_text(config, merged=merged)
    assert "# sa2va-nano, fine-tuned on true masks, supervised\n" in card
    assert "- segmentation\n- supervised\n" in card
    assert "| mask policy | none: masks are not sampled |" in card
    assert not any(word in card.replace("GRPO_RUN", "") for word in ("GRPO", "reinforcement"))


def test_a_card_has_the_settings_of_a_qwen_vl_where_they_are_not_the_default(run: tuple[Path, Any]) -> None:
    config = read_json(run[0] / "final_model" / "config.json")
    plain, changed = card_text(config), {"image_resize": "training", "region_prompt": "crop"}
    assert not any(name.replace("_", " ") in plain or name in plain for name in changed)
    config["settings"] |= changed
    config["inputs"] |= changed
    card = card_text(config)
    assert "| image resize | training |" in card
    assert "| region prompt | crop |" in card
    assert 'processor.set_image_resize("training")\nimage, text' in card
    assert "set_image_resize" not in card_text(config, merged=True)


def test_a_card_says_that_intervals_of_few_groups_are_rough() -> None:
    numbers = {"mean": 0.1, "low": 0.0, "high": 0.2, "groups": 7}
    row = {"metric": "dice", "before": numbers, "after": numbers, "gain": numbers, "verdict": "cannot tell"}
    said = {"verdict": {"sentence": "Cannot tell."}, "items": 9, "config": {"METEOR": ""}, "totals": {}}
    assert "7 test groups, fewer than 20: the intervals are rough." in "\n".join(_changes({**said, "rows": [row]}))
    many = {**row, "gain": {**numbers, "groups": 20}}
    assert "rough" not in "\n".join(_changes({**said, "rows": [many]}))


@pytest.mark.parametrize("base", ["ByteDance/Sa2VA-4B", "../../models/mine", "sa2va-nano"])
def test_the_metadata_are_those_of_the_hub(run: tuple[Path, Any], base: str) -> None:
    config = read_json(run[0] / "final_model" / "config.json")
    config["inputs"] |= {"model_path": base, "data_root": "HaochenWang/Grasp-Any-Region-Dataset"}
    row = {"metric": "dice", "verdict": "better"}
    row |= {name: {"mean": 0.81234, "low": 0.8, "high": 0.9, "groups": 30} for name in ("before", "after", "gain")}
    nothing = {"metric": "cldice", "verdict": "cannot tell"}
    nothing |= {
        name: {"mean": float("nan"), "low": None, "high": None, "groups": 0} for name in ("before", "after", "gain")
    }
    evaluation = {
        "rows": [row, nothing],
        "config": {"METEOR": ""},
        "items": 40,
        "totals": {},
        "verdict": {"sentence": ""},
    }
    for merged in (False, True):
        card = ModelCard(card_text(config, evaluation, merged), ignore_metadata_errors=False)
        data = card.data
        assert (data.library_name, data.pipeline_tag) == ("transformers", "image-segmentation")
        assert data.base_model == (base if base == "ByteDance/Sa2VA-4B" else None)
        assert data.datasets == ["HaochenWang/Grasp-Any-Region-Dataset"]
        (result,) = data.eval_results
        assert (result.metric_type, result.metric_value, result.dataset_split) == ("dice", 0.8123, "test")
        assert card.text.lstrip().startswith("# "), "the title is behind the metadata"
    assert "model-index" not in card_text(config).split("---")[1]
