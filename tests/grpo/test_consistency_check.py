"""A model prepared as for training, beside the official recipe."""

import re
from pathlib import Path

import pytest

from rl_reward_network.grpo.consistency import differing
from rl_reward_network.grpo.consistency_check import compare_with_sft

DECODER = {"gaussian": r"frozen, [\d,]+", "bernoulli": r"[\d,]+ trainable, [\d,]+"}


@pytest.mark.parametrize("mask_policy", DECODER)
def test_what_the_mask_policy_does_not_reach_is_frozen_and_meant(tiny_checkpoint: Path, mask_policy: str) -> None:
    rows = compare_with_sft(str(tiny_checkpoint), 128, 256, mask_policy, device="cpu")  # type: ignore[arg-type]
    assert differing(rows) == []
    (decoder,) = (row for row in rows if row.item == "SAM 2 mask decoder")
    assert re.fullmatch(DECODER[mask_policy], decoder.rl)
    assert decoder.status.startswith(f"meant: the gradient of {mask_policy} masks ")
