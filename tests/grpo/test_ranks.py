"""Decisions of one process alone; those of two are in test_grpo_distributed.py."""

from accelerate import Accelerator

from rl_reward_network.grpo.ranks import by_any, by_first, told_by_any


def test_one_process_decides_by_itself() -> None:
    accelerator = Accelerator(cpu=True)
    assert by_first(accelerator, lambda: {"a": 1}) == {"a": 1}
    assert [by_any(accelerator, flag) for flag in (True, False)] == [True, False]
    assert [told_by_any(accelerator, words) for words in ("why", "", None)] == ["why", None, None]
