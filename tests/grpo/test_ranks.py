"""Decisions of one process alone; those of two are in test_grpo_distributed.py."""

from accelerate import Accelerator

from rl_reward_network.grpo.ranks import any_rank, first_message, from_first_rank


def test_one_process_decides_by_itself() -> None:
    accelerator = Accelerator(cpu=True)
    assert from_first_rank(accelerator, lambda: {"a": 1}) == {"a": 1}
    assert [any_rank(accelerator, flag) for flag in (True, False)] == [True, False]
    assert [first_message(accelerator, words) for words in ("why", "", None)] == ["why", None, None]
