"""Settings: presets, whole groups, refusals, the Trainer's configuration."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import tyro
from transformers import TrainingArguments

from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.settings import GRPOSettings, check_settings, with_preset
from tests.grpo.nano import config

DATA_DEPEND = {"mask_policy", "pathwise_weight", "bce_weight", "dice_weight", "augment"}
MAY_BE_NONE = {"max_minutes", "epsilon_high", "deepspeed", "early_stopping_patience", "optim", "scale_rewards"}
ORIGINAL = {  # flags of the original specification -> fields
    "--batch_size": "per_device_train_batch_size",
    "--per_device_batch_size": "per_device_train_batch_size",
    "--num_epochs": "num_train_epochs",
    "--kl_coef": "beta",
    "--clip_range": "epsilon",
    "--gradient_checkpointing": "activation_checkpointing",
}


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def test_every_flag_is_a_field_of_the_trainers_configuration() -> None:
    assert names(GRPOSettings) <= names(Sa2VAGRPOConfig)
    ours = names(Sa2VAGRPOConfig) - names(TrainingArguments)
    assert {"beta", "epsilon", "num_generations", "mask_policy"} <= ours & names(GRPOSettings)


def test_the_trainers_own_defaults_stay(tmp_path: Path) -> None:
    config, plain = Sa2VAGRPOConfig(output_dir=str(tmp_path)), TrainingArguments(output_dir=str(tmp_path))
    changed_by_us = {"remove_unused_columns", "ddp_find_unused_parameters", "logging_nan_inf_filter"}
    changed_by_us |= {"average_tokens_across_devices", "logging_dir", "ddp_timeout", "learning_rate"}
    for name in names(TrainingArguments) - changed_by_us:
        if not name.startswith("_"):
            assert getattr(config, name, None) == getattr(plain, name, None), name
    assert (config.learning_rate, config.beta, config.epsilon, config.num_generations) == (1e-5, 0.04, 0.2, 4)
    assert (config.ema_decay, config.mask_policy, config.pathwise_weight) == (0.999, "gaussian", 0.0)
    assert not config.remove_unused_columns, "the Trainer would drop the fields of the prompts"
    assert not config.logging_nan_inf_filter, "and hide a loss that is not finite"


def test_flags_of_the_specification_set_the_fields_of_the_libraries() -> None:
    for flag, name in ORIGINAL.items():
        value = [] if name == "activation_checkpointing" else ["2"]
        given = tyro.cli(GRPOSettings, args=[flag, *value])
        assert given == GRPOSettings(**{name: True if not value else 2})  # type: ignore[arg-type]
    for hidden in ("loss_type", "epsilon_high", "dpo_beta", "seg_learning_rate"):  # for Python alone
        with pytest.raises(SystemExit):
            tyro.cli(GRPOSettings, args=[f"--{hidden}", "1"], console_outputs=False)


@pytest.mark.parametrize(
    ("mode", "small", "given", "expected"),
    [
        ("quick", True, {}, (64, 1e-3, 24, 140, 1.0, 1)),
        ("full", True, {}, (64, 1e-3, 24, 400, 1.0, 5)),
        ("quick", False, {}, (8, 1e-5, 128, -1, 1.0, 1)),
        ("full", False, {}, (8, 1e-5, 128, -1, 1.0, 5)),
        ("full", False, {"objective": "supervised"}, (8, 1e-5, 128, -1, 3.0, 5)),
        ("quick", True, {"num_train_epochs": 2.0}, (64, 1e-3, 24, -1, 2.0, 1)),
        ("full", False, {"max_steps": 7, "learning_rate": 0.0}, (8, 0.0, 128, 7, 1.0, 5)),
        ("quick", True, {"per_device_train_batch_size": 4, "beta": 0.5}, (4, 1e-3, 24, 140, 1.0, 1)),
    ],
)
def test_presets_are_overridden_by_the_user(
    mode: Any, small: bool, given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    settings = with_preset(GRPOSettings(**given), mode, small)
    result = (
        *(settings.per_device_train_batch_size, settings.learning_rate, settings.max_completion_length),
        *(settings.max_steps, settings.num_train_epochs, settings.logging_steps),
    )
    assert result == expected
    assert {name for name, value in asdict(settings).items() if value is None} == DATA_DEPEND | MAY_BE_NONE
    assert settings.mask_beta == settings.beta, "the KL weight is that of both loops"


def test_flags_are_checked_before_data_and_model_are_known() -> None:
    check_settings(GRPOSettings())
    check_settings(GRPOSettings(mask_to_caption_weight=0.0, caption_to_mask_weight=0.0))  # a reward network may train
    with pytest.raises(ValueError, match="epsilon is -1"):
        check_settings(GRPOSettings(epsilon=-1.0))


NAN = float("nan")
REFUSED: dict[str, tuple[Any, ...]] = {  # field -> values, each named by the message
    "num_generations": (1,),
    "num_mask_generations": (1,),
    "per_device_train_batch_size": (0, 10),
    "num_iterations": (0,),
    "max_completion_length": (0,),
    "rows_at_once": (-2,),
    "max_minutes": (0.0,),
    "temperature": (0.0, NAN),
    "epsilon": (0.0,),
    "mask_epsilon": (-1.0,),
    "reward_floor": (0.0,),
    "epsilon_high": (-0.1,),
    "num_train_epochs": (0.0,),
    "max_steps": (0,),
    "learning_rate": (-1e-3,),
    "side_learning_rate": (-1.0,),
    "encoder_learning_rate": (-1.0,),
    "beta": (NAN, -0.1),
    "mask_beta": (-0.1,),
    "entropy_coef": (-0.1,),
    "dpo_gap": (-0.1,),
    "sft_weight": (-0.1,),
    "mask_to_caption_weight": (-1.0,),
    "caption_to_mask_weight": (-1.0,),
    "pathwise_weight": (-1.0,),
    "ema_decay": (1.0,),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_out_of_range_is_refused_by_field_and_value(tmp_path: Path, name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=f"^{name} is {value}\\b"):
            config(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"objective": "supervised", "num_iterations": 2}, "num_iterations is 2.*supervised.*num_epochs"),
        ({"objective": "supervised", "curriculum": True}, "curriculum is True.*supervised"),
        ({"objective": "supervised", "adaptive_loop_weights": True}, "adaptive_loop_weights is True"),
        ({"caption_to_mask_weight": 0.0, "adaptive_loop_weights": True}, "adaptive_loop_weights is True"),
        ({"save_strategy": "steps", "save_steps": 5, "num_iterations": 2}, "save_steps is 5.*num_iterations 2"),
        ({"mask_to_caption_weight": 0.0, "caption_to_mask_weight": 0.0}, "mask_to_caption_weight and .* are both 0"),
    ],
)
def test_what_cannot_be_trained_together_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        config(tmp_path, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"save_strategy": "steps", "save_steps": 4, "num_iterations": 2},
        {"save_strategy": "no", "save_steps": 5, "num_iterations": 2},
        {"mask_to_caption_weight": 0.0},
        {"caption_to_mask_weight": 0.0},
        {"mask_to_caption_weight": 0.0, "caption_to_mask_weight": 0.0, "pathwise_weight": 0.1},
        {"beta": 0.0, "mask_beta": 0.0},
        {"max_minutes": 0.1},
        {"num_generations": 2, "num_mask_generations": 2},
    ],
)
def test_what_is_just_allowed(tmp_path: Path, changed: dict[str, Any]) -> None:
    made = config(tmp_path, **changed)
    assert {name: getattr(made, name) for name in changed} == changed


def test_a_batch_is_counted_in_generations(tmp_path: Path) -> None:
    assert config(tmp_path, per_device_train_batch_size=24, num_generations=6).prompts_per_step == 4
