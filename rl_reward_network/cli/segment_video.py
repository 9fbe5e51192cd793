"""`sa2va-rl segment --video`: check every frame, load the model once, segment the sequences, print their numbers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from rl_reward_network.depth import levels_of_bits
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.report.statistics import few_patients_note, mean_interval
from rl_reward_network.segment.sequence_check import CheckedSequence, check_sequence
from rl_reward_network.segment.sequence_files import SequenceTarget, sequence_targets
from rl_reward_network.segment.sequence_maker import SegmentedSequence, load_sequence_maker

if TYPE_CHECKING:
    from rl_reward_network.cli.segment import Args


def segment_sequences(args: "Args") -> None:
    """Segment each path of the flags as a sequence.

    Raises:
        ValueError: a sequence, a true mask, the place to write to, or a model is refused; nothing is written then.
    """
    targets = sequence_targets(args.images, args.output, args.prompt)
    prompt, levels = args.prompt or PROMPTS[0], levels_of_bits(args.bit_depth)
    key_frames = args.key_frames or ("first" if args.memory else "uniform")
    truths = truth_folders(args.truth, targets)
    checked = [
        check_sequence(target, prompt, levels, truth, contrast=key_frames == "contrast")
        for target, truth in zip(targets, truths, strict=True)
    ]
    for sequence in checked:
        show_levels(sequence, measured=levels is None)
    limits = args.device, args.bit_depth, args.dtype, args.image_resize
    segment = load_sequence_maker(args.model_path, prompt, args.reward_net, *limits, args.memory, key_frames)
    print(f"prompt: {prompt}")
    results = []
    for sequence in checked:
        results.append(segment(sequence))
        show_sequence(results[-1])
    show_dice(results)
    print("written: " + " ".join(str(target.folder) for target in targets))


def truth_folders(truth: Path | None, targets: Sequence[SequenceTarget]) -> list[Path | None]:
    """The folder of each sequence's true masks: `truth` for a single sequence, else the folder of its name in it.

    Raises:
        ValueError: two sequences have the same name.
    """
    if truth is None or len(targets) == 1:
        return [truth] * len(targets)
    name, count = Counter(target.name for target in targets).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"--truth {truth}: {count} sequences are named {name}; segment each by itself, with its --truth"
        )
    return [truth / target.name for target in targets]


def show_levels(checked: CheckedSequence, measured: bool) -> None:
    """Print the levels of a sequence of more than 8 bit."""
    if (levels := checked.frames.levels) is not None:
        source = ", beyond each are 0.1 % of the pixels of some frames; --bit_depth sets them" if measured else ""
        tqdm.write(f"{checked.target.name}: grey of more than 8 bit, {levels}{source}")


def show_sequence(result: SegmentedSequence) -> None:
    """Print the answer and the numbers of a sequence."""
    numbers = result.summary
    print(f"\n{result.target.name}: {numbers['frames']} frames; the model saw {numbers['key_frames']}")
    print(f"answer: {numbers['answer']}")
    stability = "" if numbers["stability"] is None else f", IoU of consecutive masks {numbers['stability']:.3f}"
    print(f"masks:  {numbers['share']:.1%} of the frame on average, {numbers['segs']} [SEG]{stability}")
    if numbers["annotated"]:
        print(f"truth:  Dice {numbers['dice']:.3f} on {numbers['annotated']} frames{_true_stability(numbers)}")
    if "predicted_dice" in numbers:
        print(f"predicted Dice {numbers['predicted_dice']:.3f}, score {numbers['predicted_score']:.3f}")


def _true_stability(numbers: dict[str, float]) -> str:
    if numbers["true_stability"] is None:
        return ""
    return (
        f"; IoU of consecutive true masks {numbers['true_stability']:.3f}, of the masks there"
        f" {numbers['stability_there']:.3f}"
    )


def show_dice(results: Sequence[SegmentedSequence]) -> None:
    """Print the mean Dice over several sequences, each with the same weight, with its interval."""
    annotated = [result for result in results if result.dice]
    if len(annotated) > 1:
        groups = [str(number) for number, result in enumerate(annotated) for _ in result.dice]
        dice = mean_interval(np.array([value for result in annotated for value in result.dice]), groups)
        print(f"\nDice over {len(annotated)} sequences: {dice} (95 % interval)")
        for note in few_patients_note(len(annotated), "sequences"):
            print(note)
