"""Settings of what a run works on: what is refused, the device of a process, and settings read back from a run."""

from dataclasses import fields
from typing import Any

import pytest

from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.config import PromptConfig, RegionConfig, RunConfig

NAN = float("nan")
WRONG_FRACTIONS = [(0.7, 0.3, 0.0), (0.5, 0.2, 0.2), (1.2, -0.1, -0.1), (NAN, 0.5, 0.5), (0.5, NAN, 0.5)]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (RunConfig, {"seed": -1}, "seed is -1"),
        (RunConfig, {"split_seed": -1}, "split_seed is -1"),
        (RunConfig, {"bit_depth": 3}, "bit_depth.* 3"),
        *((RunConfig, {"fractions": wrong}, r"fractions is \(.*with sum 1") for wrong in WRONG_FRACTIONS),
        (PromptConfig, {"segment_batch": 0}, "segment_batch is 0"),
        (PromptConfig, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (PromptConfig, {"max_tiles": -1}, "max_tiles is -1"),
        (RegionConfig, {"max_dynamic_patch": 0}, "max_dynamic_patch is 0"),
        (RegionConfig, {"max_regions": 3}, "max_regions is 3"),
    ],
)
def test_values_out_of_range_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**settings)


def test_no_setting_is_written_twice() -> None:
    names = [field.name for kind in (RunConfig, PromptConfig, RegionConfig) for field in fields(kind)]
    assert len(names) == len(set(names))


def test_the_default_prompt_is_the_first_one() -> None:
    assert RegionConfig().segment_question == PROMPTS[0]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [RunConfig(gpu=gpu).device for gpu in (None, 0, 2, -1)] == ["cuda:0", "cuda:0", "cuda:2", "cpu"]
    assert RunConfig().rank_device == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [RunConfig(gpu=gpu).rank_device for gpu in (None, 0, -1)] == ["cuda:3", "cuda:3", "cpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (RunConfig().device, RunConfig().rank_device) == ("cpu", "cpu")
