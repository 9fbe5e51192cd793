"""A GRPO run as a whole: what it writes, what it refuses, and that it goes on where it was cut off."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_reward_network import __version__
from rl_reward_network.atomic_io import read_json, weights_fingerprint, write_json
from rl_reward_network.grpo import inputs as inputs_file
from rl_reward_network.grpo import stage as stage_file
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.final_model import grpo_model
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.rewards import Reward, loop_rewards
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights, meanings, with_preset
from rl_reward_network.grpo.stage import find_grpo_run, load_model, startup_lines, training_arguments, wanted_settings
from rl_reward_network.models.lora import freeze_parameters, read_trainable, setup_lora
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import GRPO_RUN, Run
from tests.grpo.nano import ONE_STEP, PLAN, changed, train
from tests.models.test_reward_network import network_of


class Judge:
    """A judge that likes everything."""

    last_failure, counts = "", {"asked": 0}

    def note(self, **counts: int) -> None:
        pass

    def failing(self) -> str | None:
        return None

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> list[float | None]:
        return [1.0] * len(predictions)


def trained(run: Path, part: str = "final_model") -> dict[str, Tensor]:
    return read_trainable(run / part / "trainable")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_run_writes_all_that_it_says(grpo_run: Path) -> None:
    written = {path.name for path in grpo_run.iterdir() if not path.name.startswith("evaluation")}
    assert written == {
        *(".lock", "checkpoint-1", "checkpoint-2", "config.json", "cost.json", "done.json", "final_model", "logs"),
        *("metrics.jsonl", "split.json", "timings.jsonl"),
    }
    assert {path.name for path in (grpo_run / "final_model").iterdir()} == {"README.md", "config.json", "trainable"}
    card = (grpo_run / "final_model" / "README.md").read_text()
    said = ("sa2va-rl merge --model_path <this folder>", "| steps | 2 |", "in `trainable/`, for sa2va-nano.")
    assert all(text in card for text in (*said, "Not evaluated"))
    assert str(grpo_run.parent) not in card
    assert same(trained(grpo_run), trained(grpo_run, "checkpoint-2"))


def test_config_says_what_was_trained_on_what(grpo_run: Path, grpo_inputs: GRPOInputs) -> None:
    config = read_json(grpo_run / "config.json")
    model, _ = load_sa2va_model("sa2va-nano")
    origin = config["settings"]
    assert (config["stage"], config["kind"], config["data"]) == ("grpo", "regions", grpo_inputs.summary)
    assert (origin["mode"], origin["lora_r"], origin["lora_alpha"]) == ("quick", 4, 8)
    assert origin["training"] == asdict(PLAN.settings)
    assert origin["weights"] == asdict(RewardWeights())
    assert origin["model_fingerprint"] == weights_fingerprint(model)
    assert origin["data_fingerprint"] == grpo_inputs.split.fingerprint
    assert config["groups"] == {"reward": 3, "policy": 2, "val": 1, "test": 2}
    assert (config["inputs"]["data_root"], config["inputs"]["output_dir"]) == ("../../scenes", "..")
    assert config["inputs"]["model_path"] == "sa2va-nano"
    assert config["labels"] == len(grpo_inputs.pick("reward", "policy")), "the masks of all regions"
    assert set(config["trainable"]) == trained(grpo_run).keys()
    frozen = config["frozen_because_unreached"]
    assert frozen
    assert all("mask_decoder" in name or "prompt_encoder" in name for name in frozen)
    rows = {name: (count, trains) for name, count, trains in config["parameters"]}
    assert rows["vision tower"][1] == rows["SAM 2 mask decoder"][1] == 0
    assert rows["LoRA"][0] == rows["LoRA"][1] > 0
    assert config["meteor_variant"] in ("full", "exact+stem")
    assert "torch" in config["versions"]
    final = read_json(grpo_run / "final_model" / "config.json")
    assert final.pop("steps") == 2
    assert 0 < final.pop("minutes") < 5
    assert final.pop("resumed") is False
    assert final.pop("validation") is None, "the plan has no validation"
    assert 0.1 < final.pop("peak_memory_gib") < 24
    assert min(final.pop("seconds").values()) > 0
    assert final == config


def test_a_run_is_not_gone_on_with_under_other_settings(grpo_run: Path, grpo_inputs: GRPOInputs) -> None:
    other = changed(replace(PLAN, weights=RewardWeights(iou=0.5)), learning_rate=1e-4)
    message = r"it began with other settings \(weights\.iou was 1\.0, now 0\.5; training\.learning_rate was 0\.01"
    with pytest.raises(ValueError, match=message):
        train(grpo_inputs, other, grpo_run)
    began = read_json(grpo_run / "config.json")["settings"]
    Run(grpo_run, GRPO_RUN).check_same(began)
    with pytest.raises(ValueError, match=r"other settings \(seed was 0, now 1; model_fingerprint\)"):
        Run(grpo_run, GRPO_RUN).check_same(began | {"seed": 1, "model_fingerprint": "0"})


def test_what_only_a_qwen_vl_has_is_compared_in_both_directions(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    crop = replace(grpo_inputs, regions=replace(grpo_inputs.regions, region_prompt="crop"))
    default, cropped = (wanted_settings(one, PLAN, "0") for one in (grpo_inputs, crop))
    for began, wanted in ((default, cropped), (cropped, default)):
        write_json(tmp_path / "config.json", {"stage": "grpo", "settings": began, "version": __version__})
        with pytest.raises(ValueError, match=r"other settings \(region_prompt was \w+, now \w+\)"):
            Run(tmp_path, GRPO_RUN).check_same(wanted)
    earlier = {name: value for name, value in default.items() if name not in ("image_resize", "region_prompt")}
    write_json(tmp_path / "config.json", {"stage": "grpo", "settings": earlier, "version": __version__})
    Run(tmp_path, GRPO_RUN).check_same(default)


def test_an_interrupted_run_ends_as_the_whole_one(grpo_run: Path, resumed_run: Path) -> None:
    assert same(trained(grpo_run), trained(resumed_run))
    assert read_json(resumed_run / "final_model" / "config.json")["steps"] == 2
    assert (resumed_run / "metrics.jsonl").read_text() == (grpo_run / "metrics.jsonl").read_text()


def test_a_run_out_of_time_trains_no_further_when_it_is_resumed(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    late = changed(PLAN, **ONE_STEP | {"max_minutes": 1e-9, "max_steps": 5, "num_iterations": 2, "save_steps": 2})
    train(grpo_inputs, late, tmp_path)
    whole = trained(tmp_path)
    shutil.rmtree(tmp_path / "final_model")
    (tmp_path / "done.json").unlink()
    train(grpo_inputs, late, tmp_path)
    assert read_json(tmp_path / "final_model" / "config.json")["steps"] == 2, "not between two uses of the rollouts"
    assert same(whole, trained(tmp_path))


def test_the_newest_run_of_these_settings_is_found(grpo_run: Path, grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    grpo_inputs = replace(grpo_inputs, config=replace(grpo_inputs.config, output_dir=tmp_path))
    light = shutil.ignore_patterns("checkpoint-*", "logs")
    for number in (1, 2, 3):
        shutil.copytree(grpo_run, tmp_path / f"sa2va_grpo_{number}", ignore=light)
    (tmp_path / "sa2va_grpo_3" / "config.json").write_text('{"stage": "grpo", "settings": {"mode": "full"}}')
    assert find_grpo_run(grpo_inputs, PLAN, lambda run: True) == tmp_path / "sa2va_grpo_2"
    for other in (changed(PLAN, learning_rate=1e-4), replace(PLAN, lora_r=8)):
        assert find_grpo_run(grpo_inputs, other, lambda run: True) is None


def test_a_learning_rate_of_0_is_a_run_that_changes_nothing(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    run = train(grpo_inputs, changed(PLAN, learning_rate=0.0, **ONE_STEP), tmp_path / "still")
    start = dict(load_sa2va_model("sa2va-nano")[0].named_parameters())
    for name, tensor in trained(run).items():
        if "lora_B" in name:
            assert not tensor.any(), name
        elif "lora_" not in name:
            assert torch.equal(tensor, start[name]), name


def test_rewards_that_are_all_equal_are_told_and_what_was_trained_is_kept(
    grpo_inputs: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = {"same": Reward(lambda **columns: [0.5] * len(columns["prompts"]), 1.0)}
    monkeypatch.setattr(stage_file, "loop_rewards", lambda *_: {"loop1": equal, "loop2": equal})
    message = r"nothing was trained: the rewards of every group were all alike; the last .*checkpoint-1"
    for _ in range(2):  # resuming it says the same, and trains no further
        with pytest.raises(ValueError, match=message):
            train(grpo_inputs, changed(PLAN, **ONE_STEP), tmp_path / "equal")
    assert (tmp_path / "equal" / "checkpoint-1" / "trainable").exists(), "hours must not be lost"
    assert not (tmp_path / "equal" / "final_model").exists(), "nor look finished"
    assert grpo_model(tmp_path / "equal") == tmp_path / "equal" / "checkpoint-1", "it can be evaluated and merged"


def test_one_step_is_a_whole_run_and_what_did_not_move_is_told(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    one = changed(PLAN, **ONE_STEP, lr_scheduler_type="linear", warmup_steps=5)
    with pytest.warns(UserWarning, match=r"trainable tensors did not move: \d+ because its gradient passes lora_B"):
        train(grpo_inputs, one, tmp_path / "one")
    assert read_json(tmp_path / "one" / "final_model" / "config.json")["steps"] == 1
    moved = trained(tmp_path / "one").items()
    assert any(tensor.any() for name, tensor in moved if "lora_B" in name), "the first step has a rate"


SUPERVISED = {"objective": "supervised", "mask_policy": "gaussian", "pathwise_weight": 0.0, **ONE_STEP}


def test_a_run_that_got_worse_says_so_and_keeps_the_initial_model(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    """One step of a size that ruins any model: what is deployed is what it began with, bit by bit."""
    run = tmp_path / "worse"
    train(grpo_inputs, replace(changed(PLAN, **SUPERVISED | {"learning_rate": 1.0}), eval_steps=1), run)
    outcome = read_json(run / "final_model" / "config.json")["validation"]
    assert outcome["metric"] == "val/cycle_iou"
    assert outcome["last"] < outcome["before"] == outcome["best"]
    assert (outcome["kept_step"], outcome["last_step"]) == (0, 1)
    start = dict(load_sa2va_model("sa2va-nano")[0].named_parameters())
    kept = trained(run)
    for name, tensor in kept.items():
        assert not tensor.any() if "lora_B" in name else "lora_A" in name or torch.equal(tensor, start[name]), name
    assert not same(trained(run, "checkpoint-1"), kept), "training did move them"
    first = "Worse than the initial model: on "
    assert (run / "final_model" / "README.md").read_text().split("\n\n")[1].startswith(f"**{first}")
    result, page = run_grpo_evaluation(run / "final_model", items=1)
    assert result.verdict.sentence.startswith(first)
    assert (result.after.values["cycle_iou"] == result.before.values["cycle_iou"]).all()
    assert f'<p class="verdict">{first}' in page.read_text()


def test_labelled_items_are_validated_first(grpo_inputs: GRPOInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    items = grpo_inputs.pick("val")
    mixed = [replace(item, labelled=number % 2 == 0) for number, item in enumerate(items)]
    monkeypatch.setattr(GRPOInputs, "pick", lambda self, *_: mixed)
    monkeypatch.setattr(inputs_file, "VALIDATED", (len(items) + 1) // 2)
    assert [item.labelled for item in inputs_file.validation_prompts(grpo_inputs)] == [True] * ((len(items) + 1) // 2)


class LostJudge(Judge):
    """A judge that is lost after the first step."""

    def __init__(self) -> None:
        self.answers = iter([None])

    def failing(self) -> str | None:
        return next(self.answers, "LLM judge http://there: 26 of the last 50 calls failed")


def test_a_lost_judge_stops_the_run_with_a_checkpoint(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    plan = replace(changed(PLAN, max_steps=3, save_steps=100), judge={"model": "some", "loops": ["loop1"]})
    message = r"^step 2: LLM judge http://there: 26 of .*; --resume goes on from .*checkpoint-2$"
    with pytest.raises(ValueError, match=message):
        train(grpo_inputs, plan, tmp_path / "lost", judge=LostJudge())
    assert not (tmp_path / "lost" / "final_model").exists()
    train(grpo_inputs, plan, tmp_path / "lost", judge=Judge())
    assert read_json(tmp_path / "lost" / "final_model" / "config.json")["steps"] == 3


def named(rewards: dict[str, dict[str, Reward]]) -> dict[str, dict[str, float]]:
    return {loop: {name: reward.weight for name, reward in own.items()} for loop, own in rewards.items()}


def test_terms_of_the_loops_with_and_without_captions_and_rewards_by_name() -> None:
    plan = replace(PLAN, weights=RewardWeights(1.0, 0.5, 0.25, 0.125, 0.0, 0.1))
    loop1, loop2 = {"iou": 1.0, "dice": 0.0}, {"iou": 0.125, "confidence": 0.1}
    assert named(loop_rewards(plan, "images", None, None)) == {"loop1": loop1, "loop2": loop2}
    of_regions = {"loop1": {**loop1, "meteor": 0.5}, "loop2": {**loop2, "meteor": 0.25}}
    assert named(loop_rewards(plan, "regions", None, None)) == of_regions
    more = replace(plan, mask_rewards={"loop1": {"dice": 0.5}, "loop2": {"cldice": 2.0}})
    by_name = {"loop1": {"iou": 1.0, "dice": 0.5}, "loop2": {**loop2, "cldice": 2.0}}
    assert named(loop_rewards(more, "images", None, None)) == by_name
    with pytest.raises(ValueError, match=r"cldice is -1"):
        loop_rewards(replace(PLAN, mask_rewards={"loop2": {"cldice": -1.0}}), "images", None, None)


def test_a_judge_takes_meteors_place_and_meteor_is_still_logged() -> None:
    plan = replace(PLAN, weights=RewardWeights(caption=0.5, loop2_caption=0.25, loop2_iou=0.0))
    alone = {"meteor": 0.0, "judge": 0.0}
    first, second, both = (named(judged(plan, *loops)) for loops in (["loop1"], ["loop2"], ["loop1", "loop2"]))
    assert first["loop1"] == {"iou": 1.0, "dice": 0.0, **alone, "caption": 0.5}
    assert first["loop2"] == {"iou": 0.0, "confidence": 0.0, "meteor": 0.25}, "loop 2 stays with METEOR"
    assert second["loop1"] == {"iou": 1.0, "dice": 0.0, "meteor": 0.5}, "loop 1 stays with METEOR"
    assert second["loop2"] == {"iou": 0.0, "confidence": 0.0, **alone, "caption": 0.25}
    assert both == {"loop1": first["loop1"], "loop2": second["loop2"]}
    with pytest.raises(ValueError, match=r"judge is .*plan's judge is"):
        loop_rewards(plan, "regions", Judge(), None)


def judged(plan: GRPOPlan, *loops: str) -> dict[str, dict[str, Reward]]:
    return loop_rewards(replace(plan, judge={"loops": list(loops)}), "regions", Judge(), None)


def test_a_reward_network_is_a_term_of_loop_2() -> None:
    plan = replace(PLAN, weights=RewardWeights(loop2_iou=0.0, learned=2.0))
    rewards = named(loop_rewards(plan, "images", None, ForegroundMaps(network_of())))
    assert rewards["loop2"] == {"iou": 0.0, "confidence": 0.0, "learned": 2.0}
    assert "learned" not in rewards["loop1"]
    with pytest.raises(ValueError, match=r"learned_weight is 2\.0, .*--reward_net"):
        loop_rewards(plan, "images", None, None)


def test_the_trainer_gets_the_settings_and_the_seed(grpo_inputs: GRPOInputs, tmp_path: Path) -> None:
    other = replace(grpo_inputs, config=replace(grpo_inputs.config, seed=5, dtype="bfloat16"))
    args = training_arguments(other, PLAN, tmp_path)
    assert (args.seed, args.data_seed, args.output_dir, args.max_steps) == (5, 5, str(tmp_path), 2)
    assert (args.bf16, args.use_cpu, args.report_to, args.disable_tqdm) == (True, True, [], True)
    assert not training_arguments(grpo_inputs, PLAN, tmp_path).bf16


def test_weights_of_16_bit_train_in_both_loops_and_are_evaluated(tmp_path: Path, grpo_inputs: GRPOInputs) -> None:
    half = replace(grpo_inputs, config=replace(grpo_inputs.config, dtype="bfloat16"))
    tensors = trained(train(half, changed(PLAN, **ONE_STEP), tmp_path / "run"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert any(name.endswith("lora_B.default.weight") and tensor.any() for name, tensor in tensors.items())
    result, _ = run_grpo_evaluation(tmp_path / "run" / "final_model", items=1)
    assert 0 <= result.after.values["dice"][0] <= 1


STEP = {"prompts_per_step": 2, "gradient_accumulation_steps": 3, "world_size": 4, "objective": "grpo"}
STEP |= {"num_generations": 5, "num_mask_generations": 8, "mask_to_caption_weight": 1.0, "caption_to_mask_weight": 1.0}


@pytest.fixture(scope="module")
def model() -> Sa2VAForConditionalGeneration:
    model, _ = load_sa2va_model("sa2va-nano")
    setup_lora(model, 4, 8, 0.0)
    freeze_parameters(model)
    return model


def said(model: Any, questions: int = 1, **other: Any) -> list[str]:
    args = SimpleNamespace(**{**STEP, **other})
    prompts = {"prompts": list(range(4 * questions)), "taken_together": [list(range(questions))] * 4}
    facts = {"sa2va": model, "args": args, "ema": None, "planned_steps": 1, "coarse_steps": 0, **prompts}
    lines = startup_lines(SimpleNamespace(**facts), [], None)  # type: ignore[arg-type]
    return [line for line in lines if line.startswith(("each step", "parameters", "not trained"))]


def test_regions_and_what_is_made_of_each(model: Any) -> None:
    for other, made in (
        ({}, "24 regions x 5 captions and 8 masks (4 processes x 3 forward passes x 2)"),
        ({"mask_to_caption_weight": 0.0}, "24 regions x 8 masks ("),
        ({"caption_to_mask_weight": 0.0}, "24 regions x 5 captions ("),
        ({"objective": "supervised"}, "24 regions x true captions and masks ("),
        ({"objective": "supervised", "caption_to_mask_weight": 0.0}, "24 regions x true captions ("),
    ):
        assert said(model, **other)[0].startswith(f"each step: {made}")
    together = said(model, questions=3, objective="supervised", mask_to_caption_weight=0.0)[0]
    assert together.startswith("each step: 24 images with all their questions x true masks (")


def test_parameters_and_what_does_not_train(model: Any) -> None:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(n for n, _ in counts), sum(n for n, trains in counts if trains)
    lines = said(model)
    assert lines[1] == f"parameters: {total:,}, of which {trained:,} train ({trained / total:.1%})"
    assert lines[2].startswith("not trained: vision tower, lm_head, SAM 2 image encoder (frozen, as in Sa2VA's")
    assert lines[3] == "not trained: language model (LoRA trains in its place)"
    assert not any("mask decoder" in line for line in lines)
    sam = model.grounding_encoder
    for part in (sam.prompt_encoder, sam.mask_decoder):  # two vectors of the first train with the second
        part.requires_grad_(False)
    both = "not trained: SAM 2 prompt encoder, SAM 2 mask decoder (no loss of this run goes past the [SEG] embedding; "
    assert any(line.startswith(both) for line in said(model))
    freeze_parameters(model)


def test_flags_that_mean_something_else_say_so() -> None:
    settings = GRPOSettings(per_device_train_batch_size=4)
    assert meanings(GRPOSettings(), settings) == []
    (line,) = meanings(settings, settings)
    assert line == "batch_size 4 counts captions, not regions: 1 x 4 captions per process and forward pass"
    small = GRPOSettings(per_device_train_batch_size=1, gradient_accumulation_steps=8)
    (line,) = meanings(small, with_preset(small, "quick", True))
    assert line == (
        "batch_size 1 counts captions, not regions: 1 x 4 captions per process and forward pass, since a group stays "
        "whole, and 2 passes per step"
    )
    lines = meanings(GRPOSettings(num_train_epochs=1.0, beta=0.1, epsilon=0.3), settings)
    assert [line.split(" ")[0] for line in lines] == ["num_epochs", "kl_coef", "clip_range"]
    assert lines[-1].endswith("; it acts from --num_iterations 2 on: on fresh rollouts the ratio is 1")
    (line,) = meanings(flags := GRPOSettings(epsilon=0.1, num_iterations=2), flags)
    assert ";" not in line


def test_flash_attention_is_for_the_vision_tower_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_file, "FLASH", "eager")  # any other than the default, where there is no GPU
    model, _ = load_model("sa2va-nano", "cpu", use_flash_attn=True)
    kinds = {part.config._attn_implementation for part in (model.model.language_model, model.grounding_encoder)}
    assert (model.model.vision_tower.config._attn_implementation, kinds) == ("eager", {"sdpa"})
    assert model.dtype == torch.float32
