"""Settings of GRPO: each refusal names the field, what came and the remedy."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from rl_reward_network.grpo.grpo_config import LossSettings, Sa2VAGRPOConfig
from tests.grpo.nano import config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1"),
        ({"num_mask_generations": 1}, "num_mask_generations is 1"),
        (
            {"per_device_train_batch_size": 10, "num_generations": 4},
            r"per_device_train_batch_size is 10\b.*num_generations 4.*multiple",
        ),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0.*num_generations 4.*multiple"),
        ({"num_iterations": 0}, "num_iterations is 0"),
        ({"max_completion_length": 0}, "max_completion_length is 0"),
        ({"objective": "supervised", "num_iterations": 2}, "num_iterations is 2.*supervised.*num_train_epochs"),
        ({"objective": "supervised", "curriculum": True}, "curriculum is True.*supervised"),
        ({"objective": "supervised", "adaptive_loop_weights": True}, "adaptive_loop_weights is True"),
        ({"caption_to_mask_weight": 0.0, "adaptive_loop_weights": True}, "adaptive_loop_weights is True"),
        ({"rows_at_once": -2}, "rows_at_once is -2"),
        ({"max_minutes": 0.0}, r"max_minutes is 0\.0"),
        ({"temperature": 0.0}, r"temperature is 0\.0"),
        ({"epsilon": 0.0}, r"epsilon is 0\.0"),
        ({"mask_epsilon": -1.0}, r"mask_epsilon is -1\.0"),
        ({"reward_floor": 0.0}, r"reward_floor is 0\.0"),
        ({"epsilon_high": -0.1}, r"epsilon_high is -0\.1"),
        ({"num_train_epochs": 0.0}, r"num_train_epochs is 0\.0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"learning_rate": -1e-3}, r"learning_rate is -0\.001"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"entropy_coef": -0.1}, r"entropy_coef is -0\.1"),
        ({"beta": -0.1}, r"beta is -0\.1"),
        ({"mask_beta": -0.1}, r"mask_beta is -0\.1"),
        ({"mask_to_caption_weight": -1.0}, r"mask_to_caption_weight is -1\.0"),
        ({"caption_to_mask_weight": -1.0}, r"caption_to_mask_weight is -1\.0"),
        ({"pathwise_weight": -1.0}, r"pathwise_weight is -1\.0"),
        ({"supervised_mask_weight": -1.0}, r"supervised_mask_weight is -1\.0"),
        ({"save_strategy": "steps", "save_steps": 5, "num_iterations": 2}, "save_steps is 5.*num_iterations 2"),
        (
            {"mask_to_caption_weight": 0.0, "caption_to_mask_weight": 0.0},
            "mask_to_caption_weight and caption_to_mask_weight are both 0",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
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


def test_defaults_fit_each_other_and_keep_trls_names(tmp_path: Path) -> None:
    made = Sa2VAGRPOConfig(output_dir=str(tmp_path))
    assert isinstance(made, TrainingArguments)
    assert (made.beta, made.epsilon, made.num_generations, made.loss_type) == (0.04, 0.2, 4, "dapo")
    assert (made.ema_decay, made.mask_policy, made.pathwise_weight) == (0.999, "gaussian", 0.0)
    assert not made.remove_unused_columns, "the Trainer would drop the fields of the prompts"
    assert not made.logging_nan_inf_filter, "and hide a loss that is not finite"


def test_a_batch_is_counted_in_generations(tmp_path: Path) -> None:
    assert config(tmp_path, per_device_train_batch_size=24, num_generations=6).prompts_per_step == 4


def test_the_losses_get_the_settings_of_this_run(tmp_path: Path) -> None:
    own = {"loss_type": "bnpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "beta": 0.5}
    made = config(tmp_path, **own, entropy_coef=0.01, max_completion_length=9)
    assert made.loss_settings == LossSettings("bnpo", "sequence", 0.1, 0.1, 0.5, 0.01, 9)
    assert config(tmp_path, **own, epsilon_high=0.28).loss_settings.epsilon_high == 0.28
    supervised = config(tmp_path, **own, objective="supervised", entropy_coef=0.01).loss_settings
    assert (supervised.beta, supervised.entropy_coef) == (0.0, 0.0), "references have no reference model"
