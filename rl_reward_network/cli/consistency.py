"""Compare what GRPO does to a model with the supervised fine-tuning that made it, one row for each item.

    sa2va-rl consistency [--model_path MODEL]

Left is the official recipe of Sa2VA, right the loaded model as `sa2va-rl grpo` trains it on captioned regions:
LoRA, trainable and frozen parts, chat format, ids of a conversation, number formats, tensors of the checkpoint.
Intended differences are listed with their reason; any other is named in the last line, and the exit status is 1.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_reward_network.flags import check_counts
from rl_reward_network.grpo.settings import LORA_R, MaskPolicyName, default_mask_policy
from rl_reward_network.models.default import DEFAULT_MODEL, is_small

if TYPE_CHECKING:
    from rl_reward_network.grpo.consistency import ConsistencyRow


@dataclass(frozen=True)
class Args:
    """Compare what GRPO does to a model with the supervised fine-tuning that made it."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    lora_r: int | None = None
    """As in training: 16 on a model of the embedded one's size, else 128."""
    lora_alpha: int | None = None
    """As in training: twice the rank."""
    mask_policy: MaskPolicyName | None = None
    """As in training on captioned regions: bernoulli on a model of the embedded one's size, else
    gaussian."""
    max_dynamic_patch: int = 1
    """As in training; without effect on a Qwen-VL."""
    device: str | None = None
    """cpu, cuda:0, ...; by default the first GPU if there is one, else the CPU."""


def main(args: Args) -> None:
    """Print the table; the exit status is 1 if an item differs unintentionally."""
    from rl_reward_network.grpo.consistency import DIFFERS, SAME, differing
    from rl_reward_network.grpo.consistency_check import compare_with_sft

    check_counts(args, "lora_r", "lora_alpha", "max_dynamic_patch")
    small = is_small(args.model_path)
    lora_r = args.lora_r or LORA_R["small" if small else "large"]
    mask_policy = args.mask_policy or default_mask_policy(small, captions=True)
    lora_alpha = args.lora_alpha or 2 * lora_r
    rows = compare_with_sft(args.model_path, lora_r, lora_alpha, mask_policy, args.max_dynamic_patch, args.device)
    show_rows(rows, DIFFERS)
    if different := differing(rows):
        print(f"{DIFFERS}: {', '.join(different)}")
        sys.exit(1)
    same = sum(row.status == SAME for row in rows)
    print(f"consistent: {same} of {len(rows)} items are the same, {len(rows) - same} differ on purpose")


def show_rows(rows: "Sequence[ConsistencyRow]", highlighted: str) -> None:
    """Print the table, rows of one status highlighted."""
    table = Table(title="supervised fine-tuning and GRPO", box=box.SIMPLE)
    for name in ("item", "SFT", "RL", "status"):
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = [escape(cell) for cell in (row.item, row.sft, row.rl, row.status)]
        table.add_row(*cells, style="bold red" if row.status == highlighted else None)
    Console().print(table)
