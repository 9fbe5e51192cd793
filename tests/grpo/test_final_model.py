"""The final_model of a run: merged into a full checkpoint of the same outputs, refusals, and its card as it is used."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_reward_network.atomic_io import read_json, weights_fingerprint, write_json
from rl_reward_network.cli import segment
from rl_reward_network.cli.merge import Args, main
from rl_reward_network.curves import save_checkpoint
from rl_reward_network.data.splits import Split
from rl_reward_network.grpo.final_model import _changes, card_text, merge_run, training_facts, write_results
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.prompts import DESCRIBE
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings
from rl_reward_network.grpo.stage import wanted_settings
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.models.lora import save_trainable
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.report.before_after import BeforeAfter, summary
from rl_reward_network.report.table import Results, paired_rows
from tests.cards import run_card
from tests.conftest import tube_image
from tests.grpo.nano import nano, regions, shake

SCALE = 0.01  # enough to change words and masks, too little to lose [SEG]
SETTINGS = GRPOSettings(learning_rate=1e-3, mask_policy="gaussian", pathwise_weight=0.0)
PLAN = GRPOPlan("quick", lora_r=4, lora_alpha=8, settings=SETTINGS)
NAN = float("nan")
ROUNDING = 1e-5  # on some processors weights that are mapped from a file round otherwise than copied ones


def write_run(run: Path, plan: GRPOPlan = PLAN, model_path: str = "sa2va-nano") -> Any:
    """The final_model of a GRPO run, with all that is read of it; returns its model."""
    model, _ = nano(plan.lora_r)
    shake(model, SCALE)
    split = Split({"reward": ("a",), "policy": ("b",), "val": ("c",), "test": ("d",)}, 0, "ab" * 32)
    inputs = GRPOInputs(
        RunConfig(seed=7), RegionConfig(), "regions", "rendered regions, 3 images", list(regions()), split
    )
    base, _ = load_sa2va_model("sa2va-nano")
    config = {
        "stage": "grpo",
        "settings": wanted_settings(inputs, plan, weights_fingerprint(base)),
        "inputs": {"model_path": model_path, "max_dynamic_patch": 1},
        "data": inputs.summary,
        "meteor_variant": "exact+stem",
        "steps": 120,
        "commit": "0123abc",
    }
    save_trainable(model, run / "final_model" / "trainable")
    write_json(run / "final_model" / "config.json", config | {"version": "0.12.0"})
    return model


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The unmerged model of a run, and the folder it was merged into."""
    folder = tmp_path_factory.mktemp("merged")
    model = write_run(folder / "run")
    main(Args(folder / "run", folder / "mine"))
    return model, folder / "mine"


def test_the_merged_model_answers_and_draws_as_the_unmerged_one(merged: Any) -> None:
    unmerged, folder = merged
    model, processor = load_sa2va_model(folder)
    base, _ = load_sa2va_model("sa2va-nano")
    changed = 0.0
    for item in regions()[:4]:
        image, _ = item.load()
        mine, own, start = (each.segment([image], [item.question], processor)[0][0] for each in (model, unmerged, base))
        assert mine.answer == own.answer
        assert len(mine.mask_logits) == 1, "or no mask would be compared"
        assert (mine.mask_logits - own.mask_logits).abs().max() <= 1e-4
        np.testing.assert_array_equal(mine.masks(), own.masks())
        changed += float((start.mask_logits - own.mask_logits).abs().max())
    assert changed > 1, "training has changed the masks"


def test_the_merged_model_describes_as_the_unmerged_one(merged: Any) -> None:
    unmerged, folder = merged
    model, processor = load_sa2va_model(folder)
    for item in regions()[:3]:
        image, mask = item.load()
        assert mask is not None
        asked = {"image": image, "text": f"<image>{DESCRIBE}", "mask_prompts": [mask[None]], "processor": processor}
        said = [each.predict_forward(**asked, max_new_tokens=24)["prediction"] for each in (model, unmerged)]
        assert said[0] == said[1] != ""
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - unmerged(input_ids=ids).logits).abs().max() <= 1e-4


def test_segment_loads_it_and_writes_the_unmerged_models_mask(merged: Any, tmp_path: Path) -> None:
    unmerged, folder = merged
    item = regions()[0]
    image, _ = item.load()
    Image.fromarray(image).save(tmp_path / "image.png")
    written = []
    for model in (folder, folder.parent / "run", folder.parent / "run" / "final_model"):  # the last two are merged here
        flags = {"prompt": item.question, "output": tmp_path / "mask.png", "device": "cpu"}
        segment.main(segment.Args((tmp_path / "image.png",), str(model), **flags))
        written.append(np.asarray(Image.open(tmp_path / "mask.png")) > 0)
    processor = Sa2VAProcessor.from_pretrained("sa2va-nano")
    expected = unmerged.segment([image], [item.question], processor)[0][0].masks().any(axis=0)
    assert 0.001 < expected.mean() < 0.9
    for mask in written:
        np.testing.assert_array_equal(mask, expected)


def test_the_folder_is_a_plain_checkpoint(merged: Any) -> None:
    unmerged, folder = merged
    state = load_file(folder / "model.safetensors")
    assert not any("lora" in name or "base_layer" in name for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not (folder / "adapter_config.json").exists()
    name = "model.language_model.layers.0.mlp.up_proj"
    layer = unmerged.get_submodule(name)
    base, _ = load_sa2va_model("sa2va-nano")
    delta = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # alpha / rank is 2
    torch.testing.assert_close(state[f"{name}.weight"], base.get_submodule(name).weight + delta)
    assert read_json(folder / "config.json")["max_tiles"] == 1


def test_the_card_says_what_it_is(merged: Any) -> None:
    card = (merged[1] / "README.md").read_text()
    base, _ = load_sa2va_model("sa2va-nano")
    for line in (
        "# sa2va-nano, fine-tuned by GRPO",
        f"| base | sa2va-nano, weights {weights_fingerprint(base)} |",
        "| data | rendered regions, 3 images |",
        "| data fingerprint | abababababababab |",
        "| rewards | iou 1, caption 1, loop2_caption 1, loop2_iou 1 |",
        "| caption judge | none: METEOR (exact+stem) |",
        "| steps | 120 |",
        "| learning rate | 0.001 |",
        "| LoRA | rank 4, alpha 8 |",
        "| seed | 7 |",
        "| commit | 0123abc |",
        "Not evaluated when this was written.",
        "## Licence",
    ):
        assert f"\n{line}" in card
    assert "control run" not in card


def test_the_card_shows_the_evaluation_and_names_a_control(tmp_path: Path) -> None:
    write_run(tmp_path / "run", replace(PLAN, shuffle_rewards=True, judge={"model": "a-judge", "base_url": "http://x"}))
    before = {"cycle_iou": np.array([0.5, 0.6, 0.4, 0.5, 0.6, 0.4]), "meteor": np.full(6, 0.7)}
    after = {"cycle_iou": np.array([0.6, 0.7, 0.5, 0.6, 0.7, 0.5]), "meteor": np.array([0.7] * 5 + [0.6])}
    rows, ids = paired_rows(before, after, list("abcdef")), tuple(zip("123456", "abcdef", strict=True))
    result = BeforeAfter(Results(rows, ids, "cycle_iou"), {"cIoU": (0.8, 0.75)}, {"METEOR": "full"})
    write_json(tmp_path / "run" / "evaluation" / "eval.json", summary(result))
    merge_run(tmp_path / "run", tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert f"\n{result.verdict.sentence} Means over groups of 6 test items" in card
    told = ("IoU of mask' | 0.50 [", "METEOR (full) | 0.70 [", "+0.10 [+0.10, +0.10] |", "caption judge | a-judge")
    assert all(f"| {text}" in card for text in (*told, "cIoU, all items together | 0.80 | 0.75 | -0.05 | |"))
    assert "Not evaluated" not in card
    assert "**A control run: its rewards were shuffled" in card


def test_no_path_of_this_machine_is_in_the_card(tmp_path: Path) -> None:
    base, processor = load_sa2va_model("sa2va-nano")
    base.save_pretrained(tmp_path / "models" / "own-sa2va")
    processor.save_pretrained(tmp_path / "models" / "own-sa2va")
    write_run(tmp_path / "out" / "run", model_path="../../models/own-sa2va")
    merge_run(tmp_path / "out" / "run", tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "# own-sa2va, fine-tuned by GRPO" in card
    assert "../" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("kept", ["teacher", "student", "nothing compared"])
def test_a_mean_teachers_checkpoint_merges_to_what_validation_kept(kept: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, objective="mean_teacher")
    student = write_run(tmp_path / "run", replace(PLAN, settings=settings))
    checkpoint, name = tmp_path / "run" / "checkpoint-7", "text_hidden_fcs.0.bias"
    (tmp_path / "run" / "final_model").rename(checkpoint)
    (checkpoint / "config.json").rename(tmp_path / "run" / "config.json")
    write_json(checkpoint / "trainer_state.json", {"global_step": 7})
    teacher = {name: student.get_parameter(name).detach() + 1}
    save_file(teacher, checkpoint / "ema.safetensors")
    peak = {name: tensor + 1 for name, tensor in teacher.items()} if kept == "teacher" else {}
    gold = [] if kept == "nothing compared" else [0.1, 0.2]
    validation = {"gold": gold, "peak": peak, "peak_is_teacher": kept == "teacher"}
    save_checkpoint(checkpoint / "grpo_state.pt", {"seconds": 60.0, "validation": validation})
    main(Args(checkpoint, tmp_path / "mine"))
    found = load_file(tmp_path / "mine" / "model.safetensors")[name] - student.get_parameter(name).detach()
    expected = {"teacher": 2.0, "student": 0.0, "nothing compared": 1.0}[kept]
    torch.testing.assert_close(found, torch.full_like(found, expected))
    assert not (tmp_path / "mine" / "grpo_state.pt").exists()


def test_the_processor_and_further_files_of_the_training_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    final_model = tmp_path / "run" / "final_model"
    config = read_json(final_model / "config.json")
    write_json(final_model / "config.json", config | {"inputs": config["inputs"] | {"max_dynamic_patch": 3}})
    (final_model / "notes.json").write_text('"of the training"')
    main(Args(output=tmp_path / "mine", path=final_model / "trainable"))
    assert (tmp_path / "mine" / "notes.json").read_text() == '"of the training"'
    assert read_json(tmp_path / "mine" / "processor_config.json")["sa2va"]["max_tiles"] == 3
    assert load_sa2va_model(tmp_path / "mine")[1].max_tiles == 3


def test_what_is_no_grpo_run_is_refused_and_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: .*GRPO run.*name outputs/sa2va_grpo_"):
        merge_run(tmp_path / "nowhere", tmp_path / "mine")
    write_json(tmp_path / "policy" / "final_model" / "config.json", {"stage": "policy"})
    with pytest.raises(ValueError, match=r"final_model: .*GRPO run"):
        merge_run(tmp_path / "policy" / "final_model", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"output .*mine exists"):
        merge_run(tmp_path / "run", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_another_base_model_and_a_broken_run_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    write_run(tmp_path / "run")
    with pytest.raises(ValueError, match="other weights than in training; give --base_model"):
        merge_run(tmp_path / "run", tmp_path / "mine", str(tiny_checkpoint))
    file = tmp_path / "run" / "final_model" / "trainable" / "trainable.safetensors"
    state = load_file(file)
    state["surplus"] = torch.zeros(1)
    save_file(state, file)
    message = r"trainable\.safetensors: 1 tensors do not fit this model, first \['surplus'\]"
    with pytest.raises(ValueError, match=message):
        merge_run(tmp_path / "run", tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing half-written"


# ---- the card as it is used -----------------------------------------------------------------------------------------


@pytest.fixture
def config(merged: tuple[Any, Path]) -> Any:
    """config.json of the final_model of the merged run."""
    return read_json(merged[1].with_name("run") / "final_model" / "config.json")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    Image.fromarray(tube_image(64, 0)[0]).save(tmp_path / "scan.png")
    return tmp_path / "scan.png"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


def test_the_lines_of_a_final_models_card_load_it(merged: tuple[Any, Path], config: Any, image: Path) -> None:
    trained, folder = merged
    whole, lora = run_card(card_text(config), folder.with_name("run") / "final_model", image)
    assert whole["processor"].max_tiles == 1
    picture = Image.open(image)
    expected = trained.predict_forward(image=picture, text=whole["text"], processor=whole["processor"])
    assert whole["result"]["prediction"] == expected["prediction"]
    for mask, same in zip(whole["result"]["mask_probabilities"], expected["mask_probabilities"], strict=True):
        np.testing.assert_allclose(mask, same, atol=ROUNDING)
    assert isinstance(lora["model"], PeftModel)
    torch.testing.assert_close(logits(lora["model"]), logits(trained), atol=ROUNDING, rtol=0)
    assert (logits(trained) - logits(load_sa2va_model("sa2va-nano")[0])).abs().max() > 100 * ROUNDING


def test_the_lines_of_a_merged_models_card_load_it(merged: tuple[Any, Path], image: Path) -> None:
    trained, folder = merged
    (names,) = run_card((folder / "README.md").read_text(), folder, image)
    assert type(names["model"]) is Sa2VAForConditionalGeneration
    torch.testing.assert_close(logits(names["model"]), logits(trained), atol=1e-4, rtol=0)
    assert names["result"]["prediction"]


@pytest.mark.parametrize(("loop1", "rewards"), [(0, "loop2_iou 1, learned 1"), (1, "iou 1, loop2_iou 1, learned 1")])
def test_a_card_names_the_rewards_of_the_trained_loops_only(config: Any, loop1: int, rewards: str) -> None:
    config["settings"]["training"] |= {"objective": "grpo", "mask_to_caption_weight": loop1}
    config["settings"]["weights"] = {"iou": 1.0, "caption": 0.0, "loop2_iou": 1.0, "learned": 1.0}
    assert training_facts(config)["rewards"] == rewards


@pytest.mark.parametrize("whole", [False, True])
def test_a_card_says_how_the_model_was_trained(config: Any, whole: bool) -> None:
    for objective, how in (("grpo", "by GRPO"), ("supervised", "on true masks, supervised\n")):
        config["settings"]["training"]["objective"] = objective
        card = card_text(config, merged=whole)
        assert f"# sa2va-nano, fine-tuned {how}" in card
        assert f"- segmentation\n- {objective}\n" in card
    assert "| mask policy | none: masks are not sampled |" in card
    assert not any(word in card.replace("GRPO_RUN", "") for word in ("GRPO", "reinforcement"))


def test_a_card_has_the_settings_of_a_qwen_vl_where_they_are_not_the_default(config: Any) -> None:
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


def test_a_model_of_a_release_candidate_gets_the_card_of_its_evaluation(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    trained, evaluation = tmp_path / "run" / "final_model", tmp_path / "run" / "evaluation" / "eval.json"
    config = json.loads((trained / "config.json").read_text())
    inputs, settings = config.pop("inputs"), config.pop("settings")
    old = {"world": inputs, "origin": {**settings, "settings": settings.pop("training")}}
    write_json(trained / "config.json", config | old | {"version": "1.0.0rc1"})
    numbers = {"mean": 0.1, "low": 0.0, "high": 0.2, "groups": 7}
    row = {"metric": "dice", "before": numbers, "after": numbers, "gain": numbers, "word": "cannot tell"}
    said = {"verdict": {"sentence": "Cannot tell."}, "items": 9, "config": {"METEOR": ""}, "totals": {}}
    write_json(evaluation, {**said, "rows": [row]})
    write_results(trained, evaluation)
    merge_run(trained, tmp_path / "mine")
    for folder in (trained, tmp_path / "mine"):
        assert "| +0.10 [+0.00, +0.20] | cannot tell |" in (folder / "README.md").read_text()


@pytest.mark.parametrize("base", ["ByteDance/Sa2VA-4B", "../../models/mine", "sa2va-nano"])
def test_the_metadata_are_those_of_the_hub(config: Any, base: str) -> None:
    config["inputs"] |= {"model_path": base, "data_root": "HaochenWang/Grasp-Any-Region-Dataset"}
    row: dict[str, Any] = {"metric": "dice", "verdict": "better"}
    row |= {name: {"mean": 0.81234, "low": 0.8, "high": 0.9, "groups": 30} for name in ("before", "after", "gain")}
    nothing = {"metric": "cldice", "verdict": "cannot tell"}
    nothing |= {name: {"mean": NAN, "low": None, "high": None, "groups": 0} for name in ("before", "after", "gain")}
    evaluation = {"rows": [row, nothing], "config": {"METEOR": ""}, "items": 40, "totals": {}}
    evaluation["verdict"] = {"sentence": ""}
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
