"""Numbers that no flag takes are refused by name, by every command, before data or models are looked for."""

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.cli.main import COMMANDS, main
from rl_reward_network.flags import check_at_least, check_finite, check_range

ROOT = ("--data_root", "nowhere")
GRPO, PROMPTS, OPERATIONS, REWARD = (
    (command, "quick", *ROOT) for command in ("grpo", "prompts", "operations", "reward")
)
SUPERVISED = (*GRPO, "--objective", "supervised")
NOT_FINITE = [
    (*GRPO, "--loop2_iou_weight", "nan"),
    (*GRPO, "--max_grad_norm", "nan"),
    (*GRPO, "--learning_rate", "inf"),
    (*GRPO, "--kl_coef", "nan"),
    (*GRPO, "--temperature", "inf"),
    (*GRPO, "--mask_rewards", "dice", "nan"),
    (*GRPO, "--max_minutes", "inf"),
    (*GRPO, "--feature_cache_gib", "inf"),
    (*SUPERVISED, "--dice_weight", "-inf"),
    (*PROMPTS, "--learning_rate", "nan"),
    (*PROMPTS, "--gae_lambda", "nan"),
    (*PROMPTS, "--vf_coef", "inf"),
    (*OPERATIONS, "--clip_range", "inf"),
    (*REWARD, "--score_weights", "nan", "0", "0", "1"),
    ("doctor", "--memory", "--memory_gib", "nan", *ROOT),
]
OUT_OF_RANGE = [
    (*GRPO, "--max_grad_norm", "-1"),
    (*GRPO, "--learning_rate", "-1e-3"),
    (*GRPO, "--caption_weight", "-1"),
    (*GRPO, "--confidence_weight", "-0.5"),
    (*GRPO, "--loop2_mask_rewards", "dice", "-1"),
    (*GRPO, "--eval_steps", "-1"),
    (*GRPO, "--save_steps", "0"),
    (*GRPO, "--warmup_steps", "-2"),
    (*GRPO, "--max_steps", "-7"),
    (*GRPO, "--lora_r", "0"),
    (*GRPO, "--pathwise_weight", "1"),
    (*GRPO, "--gpu", "-3"),
    (*GRPO, "--group_regex", "(.+)"),
    (*GRPO, "--max_tiles", "0"),
    (*SUPERVISED, "--max_labelled", "0"),
    (*PROMPTS, "--group_regex", "("),
    (*PROMPTS, "--segment_batch", "-4"),
    (*PROMPTS, "--ent_coef", "-0.1"),
    (*OPERATIONS, "--n_envs", "0"),
    ("evaluate", "--model_path", "nowhere", "--images", "-3"),
    ("evaluate", "--model_path", "nowhere", "--segment_batch", "0"),
    ("segment", "nowhere.png", "--max_tiles", "-3"),
    ("segment", "nowhere.png", "--bit_depth", "99"),
    ("doctor", "--split_seed", "-1", *ROOT),
    ("doctor", "--fractions", "0.5", "0.5", "0", *ROOT),
    (*REWARD, "--fractions", "0.5", "0.2", "0.2"),
    (*REWARD, "--max_new_tokens", "0"),
]
FIELDS = {"kl_coef": "beta", "max_tiles": "max_dynamic_patch"}  # names of the settings behind two of the flags


@pytest.mark.parametrize("words", NOT_FINITE + OUT_OF_RANGE, ids=" ".join)
def test_the_flag_is_named_although_the_data_are_missing_too(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    said, flags = capsys.readouterr().err, [word[2:] for word in words if word.startswith("--")]
    assert any(name in said for flag in flags for name in (flag, FIELDS.get(flag, flag)) if flag != "data_root"), said
    assert said.startswith("error: ")
    assert "nowhere" not in said, "nothing is looked for"
    assert not list(tmp_path.iterdir())


def numbers_of(settings: Any) -> dict[str, tuple[Any, str]]:
    """Flags whose default is a float -> their settings and field."""
    found = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            found |= numbers_of(value)
        elif isinstance(value, float):
            found[field.name] = settings, field.name
    return found


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_number_of_every_command_is_looked_at(command: str, value: float) -> None:
    args_type = import_module(f"rl_reward_network.cli.{command.replace('-', '_')}").Args
    required = [f.name for f in fields(args_type) if f.default is MISSING and f.default_factory is MISSING]
    args = args_type(**dict.fromkeys(required, "quick"))
    check_finite(args)
    for flag, (settings, field) in numbers_of(args).items():
        before = getattr(settings, field)
        object.__setattr__(settings, field, value)
        with pytest.raises(ValueError, match=f"--{flag} is {value}, expected a finite number"):
            check_finite(args)
        object.__setattr__(settings, field, before)


def test_ranges_leave_out_none() -> None:
    class Settings:
        none, zero, low, some = None, 0.0, -1, {"a": 1.0, "b": -2.0}

    check_range(Settings, "none", "zero")
    check_at_least(Settings, -1, "none", "zero", "low")
    for names, above, message in (("zero", True, "zero is 0.0, expected more than 0"), ("some", False, "some is -2.0")):
        with pytest.raises(ValueError, match=message):
            check_range(Settings, names, above=above)
    with pytest.raises(ValueError, match="low is -1, expected 0 or more"):
        check_at_least(Settings, 0, "low")
