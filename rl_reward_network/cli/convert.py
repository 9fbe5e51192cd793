"""Convert a Sa2VA checkpoint between the official layout and ours, in either direction, bit for bit.

    sa2va-rl convert ByteDance/Sa2VA-4B models/sa2va-4b     # official -> ours
    sa2va-rl convert models/sa2va-4b models/sa2va-4b-back   # ours -> official

Converting is optional: every command reads both layouts. No remote code is run, dtypes are kept tensor by tensor.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Args:
    """Convert a Sa2VA checkpoint between the official layout and ours."""

    source: tyro.conf.Positional[str]
    """Model folder or hub id; its layout is recognised."""
    target: tyro.conf.Positional[Path]
    """Folder to write; must not exist."""


def main(args: Args) -> None:
    """Convert and print what was written."""
    from rl_reward_network.data.identity import copy_pictures
    from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint

    layout, tensors = convert_checkpoint(args.source, args.target)
    copy_pictures(Path(args.source), args.target)
    print(f"{layout}: {tensors} tensors in {args.target}")
