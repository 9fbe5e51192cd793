"""Fill the mask bank ahead of a run: every prompt's mask on every image, by one process or many.

    sa2va-rl bank --model_path MODEL --data_root DATA
    torchrun --nproc_per_node 8 -m rl_reward_network.cli bank --model_path MODEL --data_root DATA

Each rank takes every N-th image; ranks and machines that share <output_dir> fill one bank. Existing masks are not
computed again, so an interrupted build continues where it stopped. Step 1, step 2 and the evaluation then only read.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import tyro

from rl_reward_network.inputs.config import PromptConfig, RunConfig

if TYPE_CHECKING:
    from rl_reward_network.env.mask_bank import MaskBank


@dataclass(frozen=True)
class Args:
    """Fill the mask bank ahead of a run, with one process or many."""

    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    prompting: Annotated[PromptConfig, tyro.conf.arg(name="")] = field(default_factory=PromptConfig)


def main(args: Args) -> None:
    """Build this rank's share, wait for the other ranks, print the counts of all."""
    import torch
    from torch import distributed

    from rl_reward_network.inputs.loading import check_files, open_inputs

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    config = args.inputs
    if ranks > 1:
        distributed.init_process_group("gloo", timeout=timedelta(days=7))  # ranks may have very uneven work
        if config.gpu != -1 and torch.cuda.is_available():  # one for each process, whichever is named
            config = replace(config, gpu=int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        inputs = open_inputs(config, args.prompting)
        unlabelled = inputs.unlabelled.for_training if inputs.unlabelled else []
        every = [*inputs.samples, *unlabelled]
        samples = every[rank::ranks]
        check_files(samples)
        inputs.bank.build((sample.load_image() for sample in samples), len(samples))
        if ranks > 1:
            _add_counts(inputs.bank)
        if rank == 0:
            print(f"{inputs.bank.counts()}\n\nmask bank of {len(every)} images: {inputs.bank.folder}")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _add_counts(bank: "MaskBank") -> None:
    """Sum the counts over all ranks; returns when the slowest has finished."""
    import torch
    from torch import distributed

    counts = torch.tensor([bank.computed, bank.reused, bank.encoded])
    distributed.all_reduce(counts)
    bank.computed, bank.reused, bank.encoded = counts.tolist()
