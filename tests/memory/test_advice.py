"""What is lowered for a device that is too small, in which order, and the words for it."""

from dataclasses import fields, replace

import pytest

from rl_reward_network.memory import advice
from rl_reward_network.memory.advice import CHANGES, changed_flags, fit, memory_gib, needed_gib
from rl_reward_network.memory.predict import GIB, Stage
from rl_reward_network.memory.settings import MemorySettings

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


def test_every_change_ends() -> None:
    for change in CHANGES:
        settings: MemorySettings | None = replace(ASKED, max_dynamic_patch=12)
        for _ in range(20):
            settings = change.lower(settings) if settings else None
        assert settings is None


def test_a_change_names_all_that_it_lowers() -> None:
    for change in CHANGES:
        lowered = change.lower(replace(ASKED, max_dynamic_patch=12))
        assert lowered is not None
        assert {name for name in ALL if getattr(lowered, name) != getattr(ASKED, name)} - {"max_dynamic_patch"} == set(
            change.names
        ) - {"max_dynamic_patch"}


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
    assert needed_gib(stage, "cuda") == pytest.approx(11 + 2 * advice.MARGIN + advice.CUDA_CONTEXT)
    assert needed_gib(stage, "cpu") == pytest.approx(11 + 2 * advice.MARGIN)


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
