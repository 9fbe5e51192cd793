"""Segment images by one prompt: print the answers, write each mask and a picture of it over its image.

    sa2va-rl segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."
    sa2va-rl segment images/ --policy outputs/RUN --output masks
    sa2va-rl segment images/ --run outputs/compare_<time>/best
    sa2va-rl segment run_1/ run_2.dcm run_3.avi --video

Written beside each image, or to --output: <name>_mask.png (0 / 255) and <name>_overlay.png; with --prompt its words are
part of the names. A trained prompt policy chooses the prompt of each image; its reward network, or the one of
--reward_net, predicts how good the masks are.

With --video each path is a sequence of frames. Written to <name>_segmented: masks/0001.png ..., strip.png, frames.csv
and sequence.json.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.flags import changed, check_at_least

if TYPE_CHECKING:
    from rl_reward_network.segment.maker import Segmented, Target
    from rl_reward_network.segment.sequence import SegmentedSequence

ONLY_WITH_VIDEO = ("sam2_memory", "truth")
NOT_WITH_VIDEO = ("policy", "run", "max_tiles")
NOT_WITH_RUN = ("model_path", "prompt", "policy", "reward_net", "dtype", "max_tiles", "image_resize")


@dataclass(frozen=True)
class Args:
    """Segment images by one prompt."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, or folders of them; with --video sequences: folders of frames, DICOM, AVI, MP4 or MOV files."""
    model_path: str | None = None
    """Sa2VA folder or hub id; by default the one the policy was trained on, without a policy the small embedded one."""
    prompt: str | None = None
    """Prompt; by default the first built-in one."""
    policy: Path | None = None
    """A run of step 2, or its final_model folder, whose policy then chooses the prompt of each image."""
    run: Path | None = None
    """The folder best or cheapest of a comparison, whose method then makes the masks."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["--output-dir"])] = None
    """Folder to write into, or, for one image, name of its mask (.png); by default beside each image."""
    reward_net: Path | None = None
    """Reward network that predicts how good the masks are; by default the policy's own."""
    device: str | None = None
    """cpu, cuda:0, ...; by default the first GPU if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Number format of Sa2VA's weights: auto is bfloat16 on a GPU and float32 on the CPU; by default as in the policy's
    training, or auto."""
    max_tiles: int | None = None
    """Maximum number of tiles of an image; by default as in the policy's training, or as in the model's config. Without
    effect on a Qwen-VL."""
    image_resize: Literal["prediction", "training"] | None = None
    """How images become patches of a Qwen-VL: resized twice, as in its official prediction, or once, as in its
    training; by default as in the policy's training, or as in the model's config."""
    bit_depth: int | None = None
    """Bits of a grey image above 8 bit, 8 to 16. With a policy, the grey window of its data is used; without either,
    percentiles of the image."""
    video: bool = False
    """Each path is a sequence of frames, with one answer. Its masks, a strip of frames and numbers are written."""
    sam2_memory: bool = False
    """With --video: an answer about the first five frames, and masks by SAM 2's memory of the frames before, as in the
    official prediction. By default an answer about up to five frames that are spread over the sequence, from which each
    frame is segmented by itself: Sa2VA is trained so, a frame without contrast agent leaves no trace in those after it,
    and an interrupted run goes on with the missing frames."""
    truth: Path | None = None
    """With --video: folder of true masks named like the frames, some of which may lack one; for several sequences, a
    folder with a folder of the sequence's name for each."""


def main(args: Args) -> None:
    """Find the images, load the models once, segment, write."""
    check_at_least(args, 1, "max_tiles")
    window_of_bits(args.bit_depth)
    if args.video:
        return segment_sequences(args)
    if flags := changed(args, *ONLY_WITH_VIDEO):
        raise ValueError(f"{flags[0]}: it is for sequences; add --video, or leave it out")
    from rl_reward_network.env.prompts import PROMPTS
    from rl_reward_network.segment import maker

    if args.policy is not None and args.prompt is not None:
        raise ValueError(
            f"--prompt {args.prompt!r} and --policy {args.policy}: the policy chooses the prompt; give one"
        )
    if args.run is not None and (flags := changed(args, *NOT_WITH_RUN)):
        raise ValueError(f"--run {args.run}: the comparison has settled {flags[0]}; leave it out")
    files = maker.targets(maker.image_files(args.images), args.output, args.prompt)
    prompt = args.prompt or PROMPTS[0]
    segment: Callable[[Target], Segmented]
    if args.run is not None:
        segment = maker.load_method_maker(args.run, args.device, args.bit_depth)
    else:
        if args.policy is None:
            for target in files:
                maker.check_free(target, prompt)
        limits = args.max_tiles, args.bit_depth, args.dtype, args.image_resize
        segment = maker.load_mask_maker(args.model_path, prompt, args.policy, args.reward_net, args.device, *limits)
    bar = tqdm(files, "segmenting", unit="image", disable=len(files) == 1)
    results = [segment(target) for target in bar]
    if len(results) == 1:
        show_image(results[0])
    else:
        show_table(results)
    if all(result.segs == 0 for result in results):
        raise ValueError(f"{results[0].target.image}: no [SEG] in the answer; {maker.NO_MASK}")


def segment_sequences(args: Args) -> None:
    """Segment each path as a sequence, and print its answer and numbers; nothing is written if one is refused."""
    if flags := changed(args, *NOT_WITH_VIDEO):
        raise ValueError(
            f"--video and {flags[0]}: a sequence has one prompt, and a frame is one tile; leave one of them out"
        )
    from rl_reward_network.env.prompts import PROMPTS
    from rl_reward_network.segment.maker import load_mask_maker
    from rl_reward_network.segment.sequence import SequenceMaker, check_sequence, sequence_targets

    targets = sequence_targets(args.images, args.output, args.prompt)
    prompt, grey = args.prompt or PROMPTS[0], window_of_bits(args.bit_depth)
    names = [target.name for target in targets]
    if args.truth is not None and len(set(names)) < len(names):
        raise ValueError(
            f"--truth {args.truth}: sequences of one name, {names}; segment each by itself, with its --truth"
        )
    checked = []
    for target in targets:
        truth = args.truth and (args.truth / target.name if len(targets) > 1 else args.truth)
        checked.append(check_sequence(target, prompt, grey, truth))
        if (used := checked[-1].frames.grey) is not None:
            measured = ", beyond each are 0.1 % of the pixels of some frames; --bit_depth sets them"
            print(f"{target.name}: grey of more than 8 bit, {used}{'' if grey else measured}")
    limits = args.device, None, args.bit_depth, args.dtype, args.image_resize
    maker = load_mask_maker(args.model_path, prompt, None, args.reward_net, *limits)
    segment = SequenceMaker(maker, args.sam2_memory)
    print(f"prompt: {prompt}")
    results = []
    for sequence in checked:
        results.append(segment(sequence))
        show_sequence(results[-1])
    show_dice([result.dice for result in results if result.dice])
    print("written: " + " ".join(str(target.folder) for target in targets))


def show_sequence(result: "SegmentedSequence") -> None:
    """Print the answer and the numbers of a sequence."""
    numbers = result.summary
    print(f"\n{result.target.name}: {numbers['frames']} frames; the model saw {numbers['key_frames']}")
    print(f"answer: {numbers['answer']}")
    stability = "" if numbers["stability"] is None else f", IoU of consecutive masks {numbers['stability']:.3f}"
    print(f"masks:  {numbers['share']:.1%} of the frame on average, {numbers['segs']} [SEG]{stability}")
    if numbers["annotated"]:
        more, true = "", numbers["true_stability"]
        if true is not None:
            more = f"; IoU of consecutive true masks {true:.3f}, of the masks there {numbers['stability_there']:.3f}"
        print(f"truth:  Dice {numbers['dice']:.3f} on {numbers['annotated']} frames{more}")
    if "predicted_dice" in numbers:
        print(f"predicted Dice {numbers['predicted_dice']:.3f}, score {numbers['predicted_score']:.3f}")


def show_dice(annotated: Sequence[Sequence[float]]) -> None:
    """Print the mean Dice over several sequences, each with the same weight, with its interval."""
    if len(annotated) > 1:
        from rl_reward_network.report.statistics import UNIT, few_patients_note, mean_interval

        groups = [str(number) for number, dice in enumerate(annotated) for _ in dice]
        interval = mean_interval(np.array([value for dice in annotated for value in dice]), groups, bounds=UNIT)
        print(f"\nDice over {len(annotated)} sequences: {interval}")
        for note in few_patients_note(len(annotated), "sequences"):
            print(note)


def show_image(result: "Segmented") -> None:
    """Print the answer, the share of the mask and the files of a single image."""
    if result.segs is None:
        print(f"mask:   {result.share:.1%} of the image")
    else:
        print(f"prompt: {result.prompt}\nanswer: {result.answer}")
        print(f"mask:   {result.share:.1%} of the image, {result.segs} [SEG]" if result.segs else "mask:   none")
    if result.quality:
        print(f"predicted Dice [90 %]: {result.quality}")
    if result.segs != 0:
        print(f"\nwritten: {result.target.mask} {result.target.overlay}")


def show_table(results: "Sequence[Segmented]") -> None:
    """Print a row for each image."""
    same_prompt = len({result.prompt for result in results}) == 1
    has_answer = any(result.answer for result in results)  # not where several answers make a mask
    columns = {
        "image": [result.target.image.name for result in results],
        "prompt": [] if same_prompt else [result.prompt for result in results],
        "mask": ["none" if result.segs == 0 else f"{result.share:.1%}" for result in results],
        "[SEG]": [f"{result.segs}" for result in results] if has_answer else [],
        "predicted Dice [90 %]": [result.quality for result in results],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    title = escape(f"{'prompt' if has_answer else 'method'}: {results[0].prompt}") if same_prompt else None
    table = Table(title=title, box=box.SIMPLE)
    for head in columns:
        table.add_column(escape(head), no_wrap=head in ("mask", "[SEG]"))
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    Console().print(table)
    written = [result for result in results if result.segs != 0]
    folders = sorted({str(result.target.mask.parent) for result in written})
    print(f"written: {len(written)} masks and overlays in {', '.join(folders)}")
    if none := [result.target.image.name for result in results if result.segs == 0]:
        print(f"no mask: {', '.join(none)}; no answer has a [SEG], which is not an empty mask")
