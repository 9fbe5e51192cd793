"""A model prepared as for training, beside the official recipe."""

import re
from pathlib import Path

import pytest

from benchmarks.random_checkpoint import write_random_checkpoint
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


@pytest.mark.parametrize("mask_policy", DECODER)
def test_a_qwen_vl_trains_its_words_with_every_mask_policy(mask_policy: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny-qwen2.5-vl")
    rows = compare_with_sft(str(tmp_path / "model"), 128, 256, mask_policy, device="cpu")  # type: ignore[arg-type]
    assert differing(rows) == []
    trained = {row.item: row.rl for row in rows}
    for part in ("embeddings", "lm_head", "text_hidden_fcs", "LoRA"):
        assert re.fullmatch(r"trainable, [\d,]+", trained[part])
    assert re.fullmatch(DECODER[mask_policy], trained["SAM 2 mask decoder"])
