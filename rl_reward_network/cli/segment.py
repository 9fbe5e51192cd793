"""Segment images by one prompt: print the answers, write each mask and a picture of it over its image.

    sa2va-rl segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."
    sa2va-rl segment images/ --policy outputs/RUN --output masks

Written beside each image, or to --output: <name>_mask.png (0 / 255) and <name>_overlay.png; with --prompt its words
stand in the names, too. A trained prompt policy chooses the prompt of each image; its reward network, or the one of
--reward_net, predicts how good the masks are.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from rl_reward_network.data.grey_levels import DATA_SET, given_levels
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.saved import located_model
from rl_reward_network.models.fingerprint import weights_fingerprint
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.prompt_policy.policy import load_policy, policy_folder, read_policy_config
from rl_reward_network.runs.folder import REWARD_NET
from rl_reward_network.segment.files import check_free, image_files, targets
from rl_reward_network.segment.maker import MaskMaker, Segmented


@dataclass(frozen=True)
class Args:
    """Segment images by one prompt."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, or folders of them."""
    model_path: str | None = None
    """Sa2VA folder or hub id; by default the one the policy was trained on, without a policy the small embedded one."""
    prompt: str | None = None
    """What to ask; by default the first built-in prompt."""
    policy: Path | None = None
    """A run of step 2, or its final_model folder, whose policy then chooses the prompt of each image."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["--output-dir"])] = None
    """Folder to write into, or, for one image, name of its mask (.png); by default beside each image."""
    reward_net: Path | None = None
    """Reward network that predicts how good the masks are; by default the policy's own."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    max_tiles: int | None = None
    """Most tiles an image is cut into: as in the policy's training, without a policy as the model says."""
    bit_depth: int | None = None
    """Bits of a grey image above 8 bit, 8 to 16; with a policy white is as in its data, else a point of its own."""


def main(args: Args) -> None:
    """Find the images, load what is needed once, segment, write."""
    if args.policy is not None and args.prompt is not None:
        raise ValueError(
            f"--prompt {args.prompt!r} and --policy {args.policy}: the policy chooses the prompt; give one"
        )
    places = targets(image_files(args.images), args.output, args.prompt)
    if args.policy is None:
        for place in places:
            check_free(place, args.prompt or PROMPTS[0])
    make = load(args)
    bar = tqdm(places, "segmenting", unit="image", disable=len(places) == 1)
    results = [make(place) for place in bar]
    (show_one if len(results) == 1 else show_many)(results)


def load(args: Args) -> MaskMaker:
    """Policy, judge and model; the cheapest to mend first."""
    folder = None if args.policy is None else policy_folder(args.policy)
    trained = {} if folder is None else read_policy_config(folder)
    prompt, policy = args.prompt or PROMPTS[0], None
    if folder is not None and trained["deployment"]["policy"]:
        policy = load_policy(folder)
    elif trained:
        prompt = str(trained["prompts"][trained["deployment"]["best_fixed"]])
        print(f"the run deploys its best fixed prompt, because {trained['deployment']['reason']}")
    network = reward_network(args.reward_net, folder, args.device)
    own = trained.get("world", {"max_tiles": None, "max_new_tokens": 64})
    model_path = args.model_path or (
        DEFAULT_MODEL if folder is None else located_model(folder.parent, trained, "--model_path")
    )
    model, processor = load_sa2va_model(model_path, args.device)
    tiles = own["max_tiles"] if args.max_tiles is None else max(1, args.max_tiles)
    processor.max_tiles = tiles or processor.max_tiles
    if trained and not trained["model_fingerprint"].startswith(weights_fingerprint(model)):
        warnings.warn(f"{folder}: trained on other weights, or on another kind of device, than these", stacklevel=2)
    white = white_level(args, own.get("white_levels"))
    return MaskMaker(model, processor, own["max_new_tokens"], prompt, trained, policy, network, white)


def white_level(args: Args, trained: dict[str, int] | None) -> int | None:
    """What is white in a grey image above 8 bit: as in the policy's data, else by --bit_depth; None: nobody says.

    Raises:
        ValueError: both say, or --bit_depth is not 8 to 16.
    """
    if trained and args.bit_depth is not None:
        raise ValueError(
            f"--bit_depth {args.bit_depth}: the policy was trained with white at {trained[DATA_SET]}; leave it out"
        )
    levels = given_levels(args.bit_depth, trained)
    return levels[DATA_SET] if levels else None


def reward_network(named: Path | None, policy: Path | None, device: str) -> RewardNetwork | None:
    """The reward network that was named, else the one in the policy's run, if it is there."""
    beside = None if policy is None else policy.parent / REWARD_NET
    path = named or (beside if beside is not None and beside.exists() else None)
    return None if path is None else RewardNetwork.from_pretrained(path).to(device)


def show_one(results: list[Segmented]) -> None:
    """The answer and the mask of a single image in words."""
    (found,) = results
    print(f"prompt: {found.prompt}\nanswer: {found.answer}")
    print(f"mask:   {found.share:.1%} of the image, {found.segs} [SEG]")
    if found.quality:
        print(f"predicted Dice [90 %]: {found.quality}")
    print(f"\nwritten: {found.target.mask} {found.target.overlay}")


def show_many(results: list[Segmented]) -> None:
    """A row for each image."""
    same = len({found.prompt for found in results}) == 1
    table = Table(title=escape(f"prompt: {results[0].prompt}") if same else None, box=box.SIMPLE)
    judged = any(found.quality for found in results)
    heads = ("image", *(["prompt"] * (not same)), "mask", "[SEG]", *(["predicted Dice [90 %]"] * judged))
    for head in heads:
        table.add_column(escape(head), no_wrap=head not in ("image", "prompt"))
    for found in results:
        cells = [found.target.image.name, f"{found.share:.1%}", f"{found.segs}"]
        cells[1:1] = [] if same else [found.prompt]
        table.add_row(*map(escape, [*cells, *([found.quality] * judged)]))
    Console().print(table)
    folders = sorted({str(found.target.mask.parent) for found in results})
    print(f"written: {len(results)} masks and overlays in {', '.join(folders)}")
