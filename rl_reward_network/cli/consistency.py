"""Compare what GRPO does to a model with the supervised fine-tuning that made it, one row for each item.

    sa2va-rl consistency [--model_path MODEL]

Left is the official recipe of Sa2VA, right the loaded model as `sa2va-rl grpo` trains it on captioned regions:
LoRA, what its losses reach and what is frozen, chat format, ids of a conversation, number formats, tensors of the
checkpoint. Differences that are meant stand with their reason; any other is named in the last line, and the exit status
is 1.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.region_sample import make_region
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.consistency import DIFFERS, SAME, Row, consistency_rows, differing
from rl_reward_network.grpo.items import region_item
from rl_reward_network.grpo.rollouts.rewards import Reward
from rl_reward_network.grpo.settings import LORA_R, MaskPolicyName
from rl_reward_network.grpo.setup import freeze_unreached, prepare_model
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL, open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.functions import iou_reward


@dataclass(frozen=True)
class Args:
    """Compare what GRPO does to a model with the supervised fine-tuning that made it."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id (MODEL_PATH); by default the small embedded one."""
    lora_r: int | None = None
    """As in training: 16 on the embedded model, else 128."""
    lora_alpha: int | None = None
    """As in training: twice the rank."""
    mask_policy: MaskPolicyName | None = None
    """As in training on captioned regions: bernoulli on the embedded model, else gaussian."""
    max_dynamic_patch: int = 1
    """As in training."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""


def main(args: Args) -> None:
    """Load, prepare as for training, print the table; leave with 1 if something differs that should not."""
    r = args.lora_r or LORA_R["embedded" if args.model_path == DEFAULT_MODEL else "real"]
    if args.max_dynamic_patch < 1:
        raise ValueError(f"max_dynamic_patch is {args.max_dynamic_patch}, expected 1 or more")
    folder = open_checkpoint(args.model_path)
    model, processor = load_sa2va_model(folder.path, args.device)
    processor.max_tiles = args.max_dynamic_patch
    prepare_model(model, r, args.lora_alpha or 2 * r)
    mask_policy = args.mask_policy or ("bernoulli" if args.model_path == DEFAULT_MODEL else "gaussian")
    freeze_as_in_training(model, processor, mask_policy)
    rows = consistency_rows(model, processor, folder, mask_policy)
    show(rows)
    if wrong := differing(rows):
        print(f"{DIFFERS}: {', '.join(wrong)}")
        sys.exit(1)
    same = sum(row.status == SAME for row in rows)
    print(f"consistent: {same} of {len(rows)} items are the same, {len(rows) - same} differ on purpose")


def freeze_as_in_training(model: Any, processor: Sa2VAProcessor, mask_policy: MaskPolicyName) -> None:
    """Freeze what no loss of the default run on captioned regions reaches, found on one rendered picture."""
    scene = next(iter(make_scenes(1, 0)))
    thing = scene.objects[0]
    item = region_item(make_region(thing.caption, to_rle(thing.mask), "scene", "scene", lambda: scene.image))
    paid = {loop: {"iou": Reward(iou_reward, 1.0)} for loop in ("loop1", "loop2")}
    with TemporaryDirectory() as nowhere:
        settings = Sa2VAGRPOConfig(
            output_dir=nowhere,
            mask_policy=mask_policy,
            use_cpu=model.device.type == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Sa2VAGRPOTrainer(model, processor, settings, [item] * settings.prompts_per_step, paid)
        freeze_unreached(trainer, [item])


def show(rows: Sequence[Row]) -> None:
    """The table on the terminal."""
    table = Table(title="supervised fine-tuning and GRPO", box=box.SIMPLE)
    for name in ("item", "SFT", "RL", "status"):
        table.add_column(name, overflow="fold")
    for row in rows:
        cells = [escape(cell) for cell in (row.item, row.sft, row.rl, row.status)]
        table.add_row(*cells, style="bold red" if row.status == DIFFERS else None)
    Console().print(table)
