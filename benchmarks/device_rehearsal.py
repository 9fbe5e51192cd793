"""Every command on a made-up GPU: what would be on two devices at once, and where the host would wait for the GPU.

    python -m benchmarks.device_rehearsal                      # everything, in 15 minutes on two cores
    python -m benchmarks.device_rehearsal --parts grpo         # one part

Data are rendered and the model is the embedded one, in bfloat16 as on a GPU. Each part prints where the host waits,
most often first: on a GPU each wait is a pause in which nothing is computed. What `made_up_device` cannot see is in its
docstring. The exit status is 1 where devices are mixed.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from benchmarks.made_up_device import MadeUpGPU
from rl_reward_network.cli.app import run
from rl_reward_network.cli.main import main as command
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.datasets import write_angiograms
from rl_reward_network.embedded.regions import make_scenes, write_regions
from rl_reward_network.grpo.trainer import StepCallback
from rl_reward_network.models.sa2va.arguments_sa2va import one_device
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

PATIENTS, SCENES = 12, 8
SHOWN = 8  # places of each part
LEARN = "grpo quick --gpu 0 --per_device_train_batch_size 8 --max_steps 3 --save_steps 2 --eval_steps 2"
TRAIN = f"{LEARN} --num_mask_generations 4 --max_completion_length 12"
STOPPED = "stopped "  # in front of a command that is interrupted after its checkpoint
PPO = "--gpu 0 --total_timesteps 96 --n_envs 2 --n_steps 8 --batch_size 16"

# Each command is one line; {regions}, {images}, {out}, {net}, {frames} are folders, made before.
PARTS: dict[str, list[str]] = {
    "segment": ["segment {pictures} --device cuda:0 --output {out}/masks"],
    "video": ["segment {frames} --video --device cuda:0 --output {out}/video"],
    "reward network": ["reward quick --gpu 0 --steps 2 --members 1 --data_root {images} --output_dir {out}"],
    "prompts": [
        f"prompts quick {PPO} --data_root {{images}} --output_dir {{out}} --reward_net {{net}}",
        "evaluate --model_path {run} --images 4",
    ],
    "operations": [
        f"operations quick {PPO} --data_root {{images}} --output_dir {{out}}",
        "evaluate --model_path {run} --images 4",
    ],
    "grpo": [
        f"{TRAIN} --data_root {{regions}} --run_folder {{out}}/gaussian --mask_policy gaussian",
        f"{TRAIN} --data_root {{regions}} --run_folder {{out}}/bernoulli --mask_policy bernoulli "
        "--num_iterations 2 --activation_checkpointing",
        "evaluate --model_path {out}/bernoulli --images 4",
    ],
    "resume": [
        f"{STOPPED}{TRAIN} --data_root {{regions}} --run_folder {{out}}/resumed --num_iterations 1",
        f"{TRAIN} --data_root {{regions}} --run_folder {{out}}/resumed --num_iterations 1 --resume",
    ],
    "grpo on images": [
        f"{LEARN} --num_mask_generations 4 --data_root {{images}} --run_folder {{out}}/learned --reward_net {{net}} "
        "--side_network --mask_policy bernoulli",
    ],
    "supervised": [
        f"{LEARN} --data_root {{regions}} --run_folder {{out}}/regions --objective supervised",
        f"{LEARN} --data_root {{images}} --run_folder {{out}}/images --objective supervised --side_network",
        f"{LEARN} --data_root {{images}} --run_folder {{out}}/encoder --objective supervised --encoder lora",
    ],
    "mean teacher": [
        f"{LEARN} --data_root {{images}} --run_folder {{out}}/teacher --objective mean_teacher --side_network "
        "--max_labelled 4",
    ],
    "dpo": [
        f"{LEARN} --num_mask_generations 4 --data_root {{images}} --run_folder {{out}}/dpo --objective dpo "
        "--mask_policy bernoulli --preferred_by truth",
    ],
}


@dataclass(frozen=True)
class Args:
    """Run every command on a made-up GPU."""

    parts: tuple[str, ...] = tuple(PARTS)
    """Which of them, in this order."""
    shown: int = SHOWN
    """Places of each part that are printed."""


@dataclass
class Rehearsed:
    """What a part did.

    Args:
        gpu: the made-up one, with its counts.
        steps: of each optimisation step of the trainer of weights, from the end of the step before, or from the
            beginning, the waits and where.
    """

    gpu: MadeUpGPU
    steps: list[Counter[tuple[str, str]]]


def main(args: Args) -> None:
    """Run the parts; exit status 1 where devices are mixed."""
    mixes, operations = Counter[tuple[str, str]](), 0
    with TemporaryDirectory() as folder:
        places = prepare(Path(folder))
        for name in args.parts:
            start = time.perf_counter()
            done = rehearse(PARTS[name], places)
            mixes += done.gpu.mixes
            operations += done.gpu.operations
            print("\n".join([f"== {name}, {time.perf_counter() - start:.0f} s", *told(done, args.shown)]), flush=True)
    print("\n".join(f"MIX {count} x {what} at {where}" for (what, where), count in mixes.most_common()))
    print(f"{mixes.total()} device mixes in {operations} operations")
    if mixes:
        sys.exit(1)


def told(done: Rehearsed, shown: int) -> Iterator[str]:
    """The counts of a part, line by line."""
    gpu = done.gpu
    yield f"{gpu.operations} operations, {gpu.syncs.total()} waits for the GPU, {gpu.uploads.total()} copies to it"
    if done.steps:
        yield f"optimisation steps with so many waits: {[step.total() for step in done.steps]}; of the last step:"
    for kind, events in (("wait", done.steps[-1] if done.steps else gpu.syncs), ("copy", gpu.uploads)):
        for (what, where), count in events.most_common(shown):
            yield f"  {count:6} {kind}  {what}  {where}"


def prepare(folder: Path) -> dict[str, Path]:
    """Small rendered data and a reward network, on the CPU."""
    places = {name: folder / name for name in ("regions", "images", "pictures", "frames", "out")}
    write_regions(places["regions"], SCENES, 3)
    write_angiograms(places["images"], PATIENTS, tuple(LOOKS)[:2])
    for name in ("pictures", "frames"):
        places[name].mkdir()
        for number, scene in enumerate(make_scenes(3, 0, 128)):
            Image.fromarray(np.ascontiguousarray(scene.image)).save(places[name] / f"{number}.png")
    words = "reward quick --gpu -1 --steps 2 --members 2 --data_root {images} --output_dir {out}/step1"
    _call(words, places)
    return places | {"net": next((places["out"] / "step1").glob("reward_net_*")) / "best_reward_net"}


def rehearse(lines: list[str], places: dict[str, Path]) -> Rehearsed:
    """Run commands one after the other; {run} is the newest run of the output folder."""
    with MadeUpGPU() as gpu, loaded_on_it(gpu), steps_of(gpu) as steps:
        for line in lines:
            _call(line, places)
    return Rehearsed(gpu, steps)


def _call(line: str, places: dict[str, Path]) -> None:
    if line.startswith(STOPPED):
        with interrupted_after(2), contextlib.suppress(SystemExit):
            return _call(line.removeprefix(STOPPED), places)
        return None
    runs = [path for path in places["out"].glob("sa2va_*_2*") if (path / "config.json").exists()]
    newest = max(runs, key=lambda path: path.stat().st_mtime, default=Path())
    command([word.format(run=newest, **places) for word in line.split()])


@contextmanager
def interrupted_after(step: int) -> Iterator[None]:
    """The trainer of weights fails at the end of the step behind this one."""
    end = StepCallback.on_step_end

    def on_step_end(self: StepCallback, args: Any, state: Any, control: Any, **named: Any) -> Any:
        if state.global_step > step:
            raise ValueError("stopped on purpose, to be resumed")
        return end(self, args, state, control, **named)

    with mock.patch.object(StepCallback, "on_step_end", on_step_end):
        yield


@contextmanager
def loaded_on_it(gpu: MadeUpGPU) -> Iterator[None]:
    """Checkpoints are read on the CPU and moved: transformers reads them in threads, which modes are not seen in."""
    load: Callable[..., Any] = Sa2VAForConditionalGeneration.from_pretrained

    def from_pretrained(*words: Any, device_map: Any = None, **named: Any) -> Any:
        with gpu.left():
            model = load(*words, **named)
        return model.to(one_device(device_map))

    with mock.patch.object(Sa2VAForConditionalGeneration, "from_pretrained", from_pretrained):
        yield


@contextmanager
def steps_of(gpu: MadeUpGPU) -> Iterator[list[Counter[tuple[str, str]]]]:
    """Waits in each optimisation step of the trainer inside the block, by place."""
    steps: list[Counter[tuple[str, str]]] = []
    end, before = StepCallback.on_step_end, Counter[tuple[str, str]]()

    def on_step_end(self: StepCallback, *words: Any, **named: Any) -> Any:
        result = end(self, *words, **named)
        steps.append(gpu.syncs - before)
        before.update(steps[-1])
        return result

    with mock.patch.object(StepCallback, "on_step_end", on_step_end):
        yield steps


if __name__ == "__main__":
    run(main, Args)
