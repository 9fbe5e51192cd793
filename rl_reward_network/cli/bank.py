"""Fill the mask bank ahead of a run: every prompt's mask on every image, by as many processes as you like.

    sa2va-rl bank --model_path MODEL --data_root DATA
    torchrun --nproc_per_node 8 -m sa2va-rl bank --model_path MODEL --data_root DATA

Each rank takes every N-th image; ranks and machines that share <output_dir> fill one bank. What is there already is not
computed again, so a build that was cut off goes on where it was. Step 1, step 2 and the evaluation then only read.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated

import torch
import tyro
from torch import distributed

from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.inputs.loading import RunInputs, check_files, open_inputs


@dataclass(frozen=True)
class Args:
    """Fill the mask bank ahead of a run, with one process or many."""

    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)


def main(args: Args) -> None:
    """Build this rank's share, wait for the others, say what was done."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = args.inputs
    if ranks > 1:
        distributed.init_process_group("gloo", timeout=timedelta(days=7))  # ranks may have very uneven work
        if config.gpu is None and torch.cuda.is_available():
            config = replace(config, gpu=int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        world = open_inputs(config, args.prompting)
        share = world.samples[rank::ranks]
        check_files(share)
        world.bank.build((sample.load_image() for sample in share), len(share))
        counts = _summed(world, ranks)
        if rank == 0:
            print(counts)
            print(f"\nmask bank of {len(world.samples)} images: {world.bank.folder}")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _summed(world: RunInputs, ranks: int) -> str:
    """The counts of all ranks together; returns when the slowest has finished."""
    bank = world.bank
    if ranks > 1:
        counts = torch.tensor([bank.computed, bank.reused, bank.encoded])
        distributed.all_reduce(counts)
        bank.computed, bank.reused, bank.encoded = counts.tolist()
    return bank.counts()
