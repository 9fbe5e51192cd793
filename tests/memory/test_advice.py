"""The settings of the prediction, what is lowered for a device that is too small, in which order, and its words."""

from dataclasses import fields, replace
from typing import Any

import pytest

from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.inputs.config import RegionConfig
from rl_reward_network.memory import advice
from rl_reward_network.memory.advice import CHANGES, GIB, MemorySettings, Stage, changed_flags, fit, memory_gib

ASKED = MemorySettings(device="cpu").of_model(small=False)
ALL = [field.name for field in fields(MemorySettings)]


def made_up(settings: MemorySettings) -> Stage:
    """10 GiB, of which checkpointing saves 4 and each halving of the batch of 8 captions half of the other 4."""
    batch = settings.per_device_train_batch_size or 0
    return Stage(
        "training",
        {"fixed": 2 * GIB, "batch": batch / 2 * GIB, "kept": 4.0 * GIB * (not settings.activation_checkpointing)},
    )


def test_nothing_is_lowered_where_it_fits() -> None:
    result = fit(made_up, ASKED, 10 * advice.MARGIN, ALL)
    assert (result.fits, result.harm, result.settings, result.asked) == (True, [], ASKED, result.stage)


def test_the_least_harmful_settings_are_lowered_first_and_what_saves_nothing_is_left() -> None:
    result = fit(made_up, ASKED, 6 * advice.MARGIN, ALL)
    assert result.settings == replace(ASKED, activation_checkpointing=True)
    assert result.harm == ["the same result, slower"]
    result = fit(made_up, ASKED, 4 * advice.MARGIN, ALL)
    expected = replace(
        ASKED, activation_checkpointing=True, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    assert (result.settings, result.fits) == (expected, True)
    assert result.asked.gib == 10
    assert result.stage.gib == 4


def test_what_never_fits_is_said() -> None:
    result = fit(made_up, ASKED, 1.0, ALL)
    assert not result.fits
    assert result.settings.per_device_train_batch_size == ASKED.num_generations, "a group is not divided"


@pytest.mark.parametrize(("names", "lower", "harm"), CHANGES, ids=[harm for _, _, harm in CHANGES])
def test_a_change_names_what_it_lowers_and_ends(names: tuple[str, ...], lower: Any, harm: str) -> None:
    device: Any = "cuda" if "quantization" in names else ASKED.device
    settings = replace(ASKED, max_dynamic_patch=12, device=device)
    assert set(lower(settings)) == set(names)
    for _ in range(20):
        settings = replace(settings, **(lower(settings) or {}))
    assert lower(settings) is None


def test_what_a_later_change_makes_needless_is_undone() -> None:
    """Checkpointing saves 1 of 10 GiB, and a smaller batch 5: with the latter alone it fits."""

    def predict(settings: MemorySettings) -> Stage:
        batch = settings.per_device_train_batch_size or 0
        saved = 1.0 * settings.activation_checkpointing + (5.0 if batch < 8 else 0.0)
        return Stage("training", {"all": (10 - saved) * GIB})

    result = fit(predict, ASKED, 5 * advice.MARGIN, ALL)
    assert result.settings == replace(ASKED, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert result.harm == ["the same prompts per step, slower"]
    assert (result.fits, result.stage.gib) == (True, 5)


def test_only_what_the_command_has_is_lowered() -> None:
    result = fit(made_up, ASKED, 4 * advice.MARGIN, ("activation_checkpointing", "per_device_train_batch_size"))
    assert result.settings == replace(ASKED, activation_checkpointing=True)
    assert not result.fits


def test_a_gpu_needs_room_for_its_context() -> None:
    stage = Stage("training", {"weights": 10 * GIB, "answers": 2 * GIB, "process": 1 * GIB})
    assert stage.needed_gib("cuda") == pytest.approx(11 + 2 * advice.MARGIN + advice.CUDA_CONTEXT)
    assert stage.needed_gib("cpu") == pytest.approx(11 + 2 * advice.MARGIN)


def test_flags_are_those_of_the_command_line() -> None:
    after = replace(ASKED, activation_checkpointing=True, per_device_train_batch_size=4, dtype="bfloat16")
    names = ("activation_checkpointing", "per_device_train_batch_size", "dtype", "lora_r")
    assert changed_flags(ASKED, after, names) == "--gradient_checkpointing --batch_size 4 --dtype bfloat16"


def test_memory_is_that_of_the_container(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "LIMIT_FILES", ())
    machine = memory_gib("cpu")
    assert machine > 1
    for text, expected in (("1073741824\n", 1.0), ("max\n", machine)):
        file = tmp_path / "memory.max"  # type: ignore[operator]
        file.write_text(text)
        monkeypatch.setattr(advice, "LIMIT_FILES", (str(file), "/nowhere"))
        assert memory_gib("cpu") == pytest.approx(expected)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU; give its memory: --memory_gib 24"):
        memory_gib("cuda")


# ---- settings ----


def test_presets_are_those_of_grpo() -> None:
    large, small = MemorySettings().of_model(False), MemorySettings().of_model(True)
    assert (large.lora_r, large.per_device_train_batch_size, large.max_completion_length) == (128, 8, 128)
    assert (small.lora_r, small.per_device_train_batch_size, small.max_completion_length) == (16, 64, 24)
    assert MemorySettings(lora_r=5).of_model(False).lora_r == 5
    assert MemorySettings().on_device("cuda").device == "cuda"
    assert MemorySettings(device="cpu").on_device("cuda").device == "cpu"


def test_defaults_are_those_of_grpo() -> None:
    ours, theirs = MemorySettings(), GRPOSettings()
    shared = vars(ours).keys() & vars(theirs).keys()
    assert len(shared) >= 8
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(theirs, name) for name in shared}
    regions = RegionConfig()
    assert (ours.max_dynamic_patch, ours.feature_cache_gib) == (regions.max_dynamic_patch, regions.feature_cache_gib)


def test_a_batch_below_a_group_is_a_whole_one_as_in_training() -> None:
    settings = MemorySettings(per_device_train_batch_size=2, gradient_accumulation_steps=4).of_model(True)
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (4, 2)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"lora_r": 0}, "lora_r is 0, expected 1 or more"),
        ({"segment_batch": -1}, "segment_batch is -1"),
        ({"memory_gib": 0.0}, "memory_gib is 0.0, expected more than 0"),
        ({"memory_gib": float("nan")}, "memory_gib is nan, expected more than 0"),
        ({"feature_cache_gib": -1.0}, "feature_cache_gib is -1.0, expected 0 or more"),
        ({"max_dynamic_patch": 0}, "max_dynamic_patch is 0, expected 1 or more"),
        ({"per_device_train_batch_size": 10}, "not divisible by num_generations 4"),
        ({"num_generations": 1}, "num_generations is 1, expected 2 or more"),
        ({"gradient_accumulation_steps": -3}, "gradient_accumulation_steps is -3, expected 1 or more"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0, expected 0 or more and less than 1"),
    ],
)
def test_what_cannot_be_is_refused(field: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySettings(**field)
