"""Segment images with a model, or with what a run has made: masks, pictures of them, and a table of how sure they are.

    sa2va-rl segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."
    sa2va-rl segment images/ --model_path outputs/improve_<time>/improved --output masks
    sa2va-rl segment images/ --model_path outputs/reward_net_<time> --soft --format coco
    sa2va-rl segment run_1/ run_2.dcm run_3.avi --video
    torchrun --nproc_per_node 4 -m rl_reward_network.cli segment images/ --output masks    # or --shard 1/4, ..., 4/4

MODEL is a Sa2VA, a reward network's folder (a plain segmenter), or the folder of a finished run. Written beside each
image, or to --output: <name>_mask.png (0 / 255), <name>_overlay.png, results.csv and, of several images,
contact_sheet.png; with --prompt its words are part of the masks' names. A trained prompt policy chooses the prompt of
each image. Its reward network, or the one of --reward_net, predicts how good the masks are.

Several processes, or machines with a common disk, share the images (torchrun, --shard); the last one writes
results.csv. The same command goes on after an interruption.

With --video each path is a sequence of frames. Written to <name>_segmented: masks/0001.png ..., strip.png, frames.csv
and sequence.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.flags import Rare, changed, check_at_least
from rl_reward_network.models.default import DEFAULT_MODEL

if TYPE_CHECKING:
    from rl_reward_network.segment.files import Target
    from rl_reward_network.segment.maker import Recognised
    from rl_reward_network.segment.results import Segmented
    from rl_reward_network.segment.sequence import SegmentedSequence

Segment = Callable[[Sequence["Target"]], "list[Segmented]"]  # of the files of an image
ONLY_WITH_VIDEO = ("sam2_memory", "truth")
NOT_WITH_VIDEO = ("policy", "max_tiles", "soft", "threshold", "format", "classes", "shard")
NOT_WITH_CLASSES = ("prompt", "policy", "reward_net")


LOADING = ("reward_net", "device", "max_tiles", "bit_depth", "dtype", "image_resize")
WARNINGS = {  # of images -> what to know
    "no mask": "; no answer has a [SEG], which is not an empty mask",
    "empty mask": "; look at these images: the model has found nothing",
    "outside": "; the segmenter was not trained on such images, see results.csv",
}


ALONE = ("plain segmenter", "method", "policy")  # kinds whose masks do not come from one answer to one prompt


@dataclass(frozen=True)
class Args:
    """Segment images with a model, or with what a run has made."""

    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files, or folders of them; with --video sequences: folders of frames, DICOM, AVI, MP4 or MOV files."""
    model_path: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """What makes the masks: a Sa2VA (folder, hub id), a reward network's folder, or the folder of a finished run; by
    default the small embedded Sa2VA."""
    prompt: str | None = None
    """Prompt; by default that of the model's training, or the first built-in one."""
    classes: Path | None = None
    """classes.json of the training data: each of its classes is asked for in its first wording, and those that exclude
    each other (`never_with`) compete. Each has files of its own, and <name>_classes.png shows all in colour."""
    policy: Rare[Path | None] = None
    """A run of step 2 whose policy chooses the prompt of each image, where --model_path is the place to which its Sa2VA
    was moved; else --model_path RUN does."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["--output-dir"])] = None
    """Folder to write into, or, for one image, name of its mask (.png); by default beside each image."""
    soft: bool = False
    """Also write the soft mask of each image, <name>_soft.png, 16 bit: 0 to 65535 is a probability of 0 to 1."""
    threshold: float = 0.5
    """Probability above which a pixel belongs to the mask, between 0 and 1. Choosing it on validation patients, for all
    images or for each, gained 0.000 to 0.002 Dice on a model that was trained with the Dice loss."""
    format: Literal["png", "coco", "nnunet"] = "png"
    """Also write the masks for the next tool: predictions_coco.json (RLE), or nnU-Net's labelsTs/<name>.png of 0 and
    1."""
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
    shard: Rare[str | None] = None
    """NUMBER/OF, such as 3/16: of several processes of the same command this one segments every 16th image, from the
    third; by default the shares of torchrun, or all."""
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
    if not 0 < args.threshold < 1:
        raise ValueError(f"--threshold {args.threshold}: expected a number between 0 and 1, such as 0.5")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty; name what to segment, or leave it out")
    if args.video:
        return segment_sequences(args)
    if flags := changed(args, *ONLY_WITH_VIDEO):
        raise ValueError(f"{flags[0]}: it is for sequences; add --video, or leave it out")
    if args.classes:
        return segment_by_name(args, args.classes)
    from rl_reward_network.segment import maker
    from rl_reward_network.segment.files import check_free, image_files, targets
    from rl_reward_network.segment.results import check_results_free, segment_image

    files = targets(image_files(args.images), args.output, args.prompt)
    known = None if args.policy else args.prompt or maker.what_is(args.model_path or DEFAULT_MODEL).prompt
    if known is not None:
        for target in files:
            check_free(target, known)
    check_results_free(files, args.format)
    if args.model_path is None and args.policy is None:
        print(f"{DEFAULT_MODEL} knows rendered images alone; for real ones train a model: sa2va-rl improve")
    seen = None if args.policy else maker.trained_on(args.model_path)

    def load() -> Segment:
        loaded = maker.load_maker(args.model_path, args.prompt, args.policy, **loading(args))
        return lambda own: [segment_image(loaded, own[0], args.prompt, args.threshold, args.soft, seen)]

    segment_all(args, {target.image: (target,) for target in files}, load)


def segment_all(args: Args, targets: "Mapping[Path, Sequence[Target]]", load: Callable[[], Segment]) -> None:
    """Segment the images of this share that are not finished yet; the last share writes the results of all."""
    from rl_reward_network.data.images import load_image
    from rl_reward_network.inputs.loading import check_readable
    from rl_reward_network.segment.maker import NO_MASK, what_is
    from rl_reward_network.segment.results import write_results
    from rl_reward_network.segment.shares import Record, own_share, settings_of

    share, images = own_share(args.shard), list(targets)
    folder = next(iter(targets.values()))[0].mask.parent
    flags = replace(args, images=(), output=None, device=None, shard=None, format="png")
    model = what_is(args.model_path).path if args.model_path else None  # its folder, in that of a run
    record = Record(folder, settings_of(flags, model, args.policy, args.reward_net, args.classes), share)
    earlier = record.finished(targets)
    todo = [image for image in images[share.number - 1 :: share.of] if image not in earlier]
    if earlier:
        print(f"{len(earlier)} of {len(images)} images are finished already")
    check_readable([partial(load_image, image) for image in todo])
    if todo:
        segment = load()
        for image in tqdm(todo, "segmenting", unit="image", disable=len(images) == 1):
            record.add(image, segment(targets[image]))
    finished = record.finished(targets)
    if missing := len(images) - len(finished):
        print(f"share {share}: {len(todo)} images; {missing} of other shares are not finished yet")
        return
    results = [result for image in images for result in finished[image]]
    write_results(results, args.format)
    if share.of == 1:  # other shares may still look
        record.remove()
    if len(results) == 1:
        show_image(results[0])
    else:
        show_table(results)
    if all(result.segs == 0 for result in results):
        raise ValueError(f"{results[0].target.image}: no [SEG] in the answer; {NO_MASK}")


def segment_by_name(args: Args, file: Path) -> None:
    """Ask for every class of a file in each image, and write the masks of each."""
    if flags := changed(args, *NOT_WITH_CLASSES):
        raise ValueError(f"--classes and {flags[0]}: the file says what is asked; leave one of them out")
    if args.format == "nnunet" or (args.output and args.output.suffix.lower() == ".png"):
        raise ValueError("--classes: an image has several masks; give a folder as --output, and --format png or coco")
    if not file.is_file():
        raise ValueError(f"--classes {file}: no such file; give the classes.json of the data that trained the model")
    from rl_reward_network.data.names import read_classes
    from rl_reward_network.grpo.prompts import segment_question
    from rl_reward_network.segment import maker
    from rl_reward_network.segment import results as written
    from rl_reward_network.segment.files import Target, check_apart, check_free, image_files, targets

    classes, images = read_classes(file), image_files(args.images)
    of_class = [targets(images, args.output, one.name) for one in classes]
    files = [target for of_images in of_class for target in of_images]
    check_apart(files, [target.mask for target in files])
    for one, of_images in zip(classes, of_class, strict=True):
        for target in of_images:
            check_free(target, segment_question(one.phrases[0]))
    for target in of_class[0]:
        picture = written.classes_picture(target.image, target.mask.parent)
        check_free(Target(target.image, picture, picture, picture), written.ALL_CLASSES)
    written.check_results_free(files, args.format)
    found = maker.what_is(args.model_path or DEFAULT_MODEL)
    if found.kind in ALONE:
        raise ValueError(f"{found.path}: --classes needs a Sa2VA, which is asked by name, and this is a {found.kind}")

    def load() -> Segment:
        loaded = maker.load_maker(args.model_path, **loading(args))
        if not isinstance(loaded, maker.MaskMaker):
            raise ValueError(f"{found.path}: --classes needs one Sa2VA, and this is a {found.kind} of several models")
        how = args.threshold, args.soft, maker.trained_on(args.model_path)
        return lambda own: written.segment_classes(loaded, own, classes, *how)

    segment_all(args, dict(zip(images, zip(*of_class, strict=True), strict=True)), load)


def loading(args: Args) -> dict[str, Any]:
    """The flags of how a model is loaded."""
    return {name: getattr(args, name) for name in LOADING}


def segment_sequences(args: Args) -> None:
    """Segment each path as a sequence, and print its answer and numbers; nothing is written if one is refused."""
    if flags := changed(args, *NOT_WITH_VIDEO):
        raise ValueError(
            f"--video and {flags[0]}: a sequence has one prompt, and a frame is one tile; leave one of them out"
        )
    from rl_reward_network.segment.maker import MaskMaker, load_maker, what_is
    from rl_reward_network.segment.sequence import SequenceMaker, check_sequence, sequence_targets

    targets = sequence_targets(args.images, args.output, args.prompt)
    found, grey = what_is(args.model_path or DEFAULT_MODEL), window_of_bits(args.bit_depth)
    if found.kind in ALONE:
        raise no_sequence(found)
    prompt = args.prompt or str(found.prompt)
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
    maker = load_maker(args.model_path, args.prompt, **loading(args))
    if not isinstance(maker, MaskMaker):  # a fusion of several
        raise no_sequence(found)
    segment = SequenceMaker(maker, args.sam2_memory)
    print(f"prompt: {prompt}")
    results = []
    for sequence in checked:
        results.append(segment(sequence))
        show_sequence(results[-1])
    show_dice([result.dice for result in results if result.dice])
    print("written: " + " ".join(str(target.folder) for target in targets))


def no_sequence(found: "Recognised") -> ValueError:
    """The error for what cannot segment a sequence."""
    return ValueError(
        f"{found.path}: --video needs one Sa2VA with one prompt, and this is a {found.kind}; segment the frames as"
        " images"
    )


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
    print(f"{'prompt' if result.answer else 'masks of'}: {result.prompt}")
    if result.answer:
        print(f"answer: {result.answer}")
    segs = "" if result.segs is None else f", {result.segs} [SEG]"
    print("mask:   none" if result.segs == 0 else f"mask:   {result.share:.1%} of the image{segs}")
    if result.predicted:
        print(f"predicted Dice [90 %]: {result.predicted}")
    if result.segs != 0:
        print(f"confidence: {result.confidence:.3f}{f' ({result.fault})' if result.fault else ''}")
        print(f"\nwritten: {result.target.mask} {result.target.overlay}")


def show_table(results: "Sequence[Segmented]") -> None:
    """Print a row for each image; long names are folded, not cut."""
    same_prompt = len({result.prompt for result in results}) == 1
    has_answer = any(result.answer for result in results)
    columns = {
        "image": [result.target.image.name for result in results],
        "prompt": [] if same_prompt else [result.prompt for result in results],
        "mask": ["none" if one.segs == 0 else "absent" if one.absent else f"{one.share:.1%}" for one in results],
        "[SEG]": ["" if result.segs is None else f"{result.segs}" for result in results] if has_answer else [],
        "confidence": ["" if one.segs == 0 or one.absent else f"{one.confidence:.3f}" for one in results],
        "predicted Dice [90 %]": [str(result.predicted or "") for result in results],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    title = escape(f"{'prompt' if has_answer else 'masks of'}: {results[0].prompt}") if same_prompt else None
    table = Table(title=title, box=box.SIMPLE)
    for head in columns:
        table.add_column(escape(head), no_wrap=head in ("mask", "[SEG]", "confidence"), overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(escape, cells))
    Console().print(table)
    show_end(results)


def show_end(results: "Sequence[Segmented]") -> None:
    """Print where the files are, and name the images whose mask is missing, empty, unsure or of an unknown kind."""
    from rl_reward_network.segment.results import verdicts

    written = [result for result in results if result.segs != 0]
    folders = sorted({str(result.target.mask.parent) for result in results})
    drawn = sum(not result.absent for result in results)
    sheet = " and contact_sheet.png" if drawn and len(results) > len(folders) else ""
    for words, meaning in WARNINGS.items():
        if names := dict.fromkeys(one.target.image.name for one in results if one.fault.startswith(words)):
            print(f"{words}: {', '.join(names)}{meaning}")
    judged = zip(results, verdicts(results), strict=True)
    if unsure := dict.fromkeys(one.target.image.name for one, words in judged if words and not one.fault):
        print(f"low confidence: {', '.join(unsure)}; look at these masks first")
    print(f"written: {len(written)} masks and overlays, results.csv{sheet} in {', '.join(folders)}")
