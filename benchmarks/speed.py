"""Seconds and memory: of the quick runs, on a GPU, of training at real size, of a GRPO step.

    python -m benchmarks.speed quick                             # each phase of the quick runs
    python -m benchmarks.speed real_size --size 1b               # each stage, random weights; on the CPU, too
    python -m benchmarks.speed gpu_training --sizes 1b 4b

`--help` lists all parts. What fails is printed, the rest goes on, and the exit status is 1.
"""

import gc
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback
from transformers.models.internvl.modeling_internvl import InternVLPreTrainedModel
from transformers.trainer_callback import PrinterCallback

from benchmarks.common import exact_float32, seconds, show
from benchmarks.random_checkpoint import Size, official_config, random_model, write_random_checkpoint
from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.cli.main import main as command
from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded.datasets import embedded_angiograms, embedded_regions
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import ImageContext, encode_image, make_question, seeded_generator
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.losses import caption_loss, count_step, mask_policy_loss
from rl_reward_network.grpo.policy import PolicyOutputs, mixed_precision, prepare_model
from rl_reward_network.grpo.prompts import DESCRIBE, TrainingItem, region_prompt, segment_question
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.rollouts import MicroBatch, Rollouts
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization, bits_config, language_model_in_bits
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.generation_sa2va import Decoding, answer_batch, evaluating
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.rewards.metrics import iou
from rl_reward_network.rewards.table import iou_reward, meteor_reward
from rl_reward_network.run import peak_memory_gib

SIDE = 512  # pixels of rendered scenes
TOKENS = 24  # of a caption or an answer, at most
GIB = 2**30
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def attempt(call: Callable[[], Any]) -> Any:
    """The result of a call; None of one that fails, which is part of the measurement."""
    try:
        return call()
    except (Exception, SystemExit):
        traceback.print_exc()
        return None
    finally:
        gc.collect()  # models hold cycles of references
        torch.cuda.empty_cache()


def in_process(call: Callable[..., Any], *given: Any) -> Any:
    """The result of a call in a process of its own, so that its peak memory is its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def scenes(count: int) -> list[np.ndarray]:
    """Rendered images, uint8 (SIDE, SIDE, 3)."""
    return [scene.image for scene in make_scenes(count, 0, SIDE)]


# ---- the quick runs -------------------------------------------------------------------------------------------------

Run = Literal["step2", "grpo", "experiment2", "compare"]
COMMANDS: dict[Run, str] = {"step2": "prompts", "grpo": "grpo", "experiment2": "operations", "compare": "compare"}
MODELS = {"step2": "sa2va_rl_finetune", "grpo": "sa2va_grpo", "experiment2": "sa2va_post_process"}  # run folders


@dataclass(frozen=True)
class Quick:
    """Seconds and CPU seconds of the commands of the quick runs, from nothing but the packages, and of their phases."""

    runs: tuple[Run, ...] = tuple(COMMANDS)
    """Which: step 2 with its reward network, GRPO, experiment 2, the comparison of all methods."""

    def __call__(self) -> None:
        """A table for each run; CPU seconds count on a machine with other work, too."""
        for name in self.runs:
            with tempfile.TemporaryDirectory() as folder:
                show((name, "s", "CPU s"), quick_rows(name, Path(folder)))


def quick_rows(name: Run, folder: Path) -> Iterator[tuple[str, str, str]]:
    """The commands of a shell file in an empty folder, each with the phases that its results report."""
    regions, seen = name == "grpo", set[Path]()
    inputs = ["--data_root", f"data/{'regions_lamplight' if regions else 'angiograms'}", "--output_dir", "outputs"]
    commands = [["data", "--folder", "data", *["--regions"] * regions], ["doctor", *inputs]]
    commands.append([COMMANDS[name], "quick", *inputs])
    if name in MODELS:
        commands.append(["evaluate", "--model_path", f"outputs/{MODELS[name]}_*/final_model", "--split", "test"])
    for words in commands:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        program = [sys.executable, "-m", "rl_reward_network.cli", *words]
        clock = seconds(lambda: subprocess.run(program, cwd=folder, stdout=subprocess.DEVNULL, check=True))  # noqa: B023
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield words[0], f"{clock:.1f}", f"{cpu:.1f}"
        results = {*folder.glob("outputs/*/agreement.json"), *folder.glob("outputs/*/final_model/config.json")}
        for path in sorted(results - seen):
            kind = path.relative_to(folder).parts[1].partition("_20")[0]
            for phase, spent in json.loads(path.read_text(encoding="utf-8")).get("seconds", {}).items():
                yield f"{kind}: {phase}", f"{spent:.1f}", "-"
        seen |= results


# ---- what only a GPU shows ------------------------------------------------------------------------------------------

LENGTH, ROWS = 128, (1, 8, 64)  # tokens of an answer that cannot end, numbers of such answers


@dataclass(frozen=True)
class Gpu:
    """bfloat16 against float32 on rendered images and the built-in prompts, and the speed of batched decoding."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    device: str = DEVICE
    """cpu, cuda:0, ..."""
    images: int = 4
    """Rendered images."""
    parts: tuple[Literal["formats", "decoding"], ...] = ("formats", "decoding")
    """Which of them, in this order."""

    def __call__(self) -> list[str]:
        """Print both parts; returns those that failed."""
        calls = {"formats": formats, "decoding": decoding}
        return [name for name in self.parts if attempt(partial(calls[name], self)) is None]


def formats(args: Gpu) -> bool:
    """Texts are compared word by word, masks by IoU; random weights tell less, as their logits are close to 0."""
    texts, masks = [], []
    for dtype in ("float32", "bfloat16"):
        with exact_float32() if dtype == "float32" else nullcontext():
            model, processor = load_sa2va_model(args.model_path, args.device, dtype=dtype)
            processor.max_tiles = 1
            rows = model.segment(scenes(args.images), list(PROMPTS), processor, max_new_tokens=32)
        texts.append([answer.answer for row in rows for answer in row])
        masks.append([answer.masks().any(axis=0) for row in rows for answer in row])  # all False without a [SEG]
    same = np.mean([one == other for one, other in zip(*texts, strict=True)])
    overlap = [iou(one[None], other[None])[0] for one, other in zip(*masks, strict=True)]
    print(f"bfloat16 against float32: {same:.1%} of {len(texts[0])} texts equal, ", end="")
    print(f"mask IoU {np.mean(overlap):.4f} (bar 0.85 for trained weights), least {min(overlap):.4f}", flush=True)
    return True


def decoding(args: Gpu) -> bool:
    """Tokens per second of captions that end at their limit alone, for several numbers of them."""
    model, processor = load_sa2va_model(args.model_path, args.device)
    processor.max_tiles = 1
    processor.never_sampled_ids = [*processor.never_sampled_ids, processor.tokenizer.eos_token_id]
    processor.never_sampled_ids.append(processor.seg_token_id)
    processor.template = replace(processor.template, stop_words=())
    question = make_question(processor, 0, processor.tokens_per_tile, "Please describe the image.")
    context = ImageContext(model, processor, [encode_image(model, processor, scenes(1)[0])], [question.prefix_ids])
    rates: list[float] = []
    for count in ROWS:
        context.answer([question] * count, Decoding(4))  # not counted
        answers: list[Any] = []
        taken = seconds(lambda: answers.extend(context.answer([question] * count, Decoding(LENGTH))))  # noqa: B023
        if (found := {len(answer.token_ids) for (answer,) in answers}) != {LENGTH}:
            raise RuntimeError(f"answers have {found} tokens, expected {LENGTH}")
        rates.append(count * LENGTH / taken)
        print(f"rows {count}, {LENGTH} tokens each: {rates[-1]:.0f} tokens/s, {rates[-1] / rates[0]:.1f} x one row")
    return True


# ---- training at real size on one GPU -------------------------------------------------------------------------------

WAYS: dict[str, tuple[dict[str, Any], Quantization | None]] = {  # settings of `Sa2VAGRPOConfig`, the language model's
    "GRPO": ({}, None),
    "GRPO, gradient checkpointing": ({"activation_checkpointing": True}, None),
    "GRPO, 8-bit AdamW": ({"optim": "adamw_8bit"}, None),
    "GRPO, 4 bit": ({}, "4bit"),
    "GRPO, 8 bit": ({}, "8bit"),
    "supervised": ({"objective": "supervised"}, None),
}


@dataclass(frozen=True)
class GpuTraining:
    """Ways to train at real size, in one process, on random weights that are made there.

    Measured is the last of three steps of 8 captions of 24 tokens and 16 masks on 2 images, as the presets of a real
    model. The first line is the time to launch a kernel, which bounds decoding from below.
    """

    sizes: tuple[Size, ...] = ("1b", "4b")
    """Of the released checkpoints that the random ones resemble."""
    device: str = DEVICE
    """cpu, cuda:0, ..."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which of them, in this order."""
    max_seconds: float = 540.0
    """Ways that would begin later are left out."""

    def __call__(self) -> list[str]:
        """A line for each way as it ends, and the table; returns the ways that failed."""
        start, rows, failed = time.perf_counter(), [], []
        number = torch.zeros(1, device=self.device)
        launches = min(seconds(lambda: [number.add_(1) for _ in range(1000)]) for _ in range(3))
        print(f"one operation on one number: {1e3 * launches:.1f} us", flush=True)
        for size, way in ((size, way) for size in self.sizes for way in self.ways):
            if time.perf_counter() - start > self.max_seconds:
                rows.append((size, way, *"----", "left out"))
                continue
            found = attempt(partial(train_at_size, size, self.device, *WAYS[way]))
            failed += [f"{size}, {way}"] * (found is None)
            rows.append((size, way, *((f"{value:.2f}" for value in found) if found else (*"---", "failed, see above"))))
            print(f"{size}, {way}: {', '.join(rows[-1][2:])}; {time.perf_counter() - start:.0f} s", flush=True)
        heads = ("size", "way", "step (s)", "rollouts (s)", "peak (GiB)", "weights (GiB)")
        show(heads, rows, torch.cuda.get_device_name() if self.device.startswith("cuda") else "CPU")
        return failed


def train_at_size(size: Size, device: str, settings: Mapping[str, Any], bits: Quantization | None) -> tuple[float, ...]:
    """Seconds of the last step and of its rollouts; GiB at the peak and of the weights."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    model, processor = model_at_size(size, device, bits)
    weights = torch.cuda.memory_allocated() / GIB if device.startswith("cuda") else 0.0
    prepare_model(model, 128, 256)
    items = []
    for number, scene in enumerate(make_scenes(6, 0, SIDE)):
        thing, names = scene.objects[0], (str(number), f"{number}/0")
        load = partial(np.asarray, scene.image)
        items.append(region_prompt(make_region(f"{thing.caption}.", to_rle(thing.mask), *names, load)))
    steps = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": True}
    ends = StepEnds(device)
    with tempfile.TemporaryDirectory() as folder:
        counts = {"per_device_train_batch_size": 8, "num_generations": 4, "num_mask_generations": 8}
        rewards = {loop: {"iou": Reward(iou_reward, 1.0)} for loop in ("loop1", "loop2")}
        given = {"output_dir": folder, **counts, **steps, **settings}
        trainer = make_trainer(model, processor, items, rewards, device, **given)
        trainer.remove_callback(PrinterCallback)
        ends.trainer = trainer
        trainer.add_callback(ends)
        trainer.train()
    (before, rollouts_before), (after, rollouts) = ends.ends[-2:]
    return after - before, rollouts - rollouts_before, peak_memory_gib(device), weights


@dataclass
class StepEnds(TrainerCallback):
    """When optimisation steps end and the GPU is done, and the seconds of all rollouts until then."""

    device: str
    trainer: Any = None
    ends: list[tuple[float, float]] = field(default_factory=list)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        self.ends.append((time.perf_counter(), self.trainer.phases["rollouts"]))


def model_at_size(size: Size, device: str, bits: Quantization | None) -> tuple[Any, Sa2VAProcessor]:
    """The random model on the device, in bfloat16, and its processor."""
    model, tokenizer, _ = random_model(size, device)
    config = model.config
    config._attn_implementation = "sdpa"
    processor = Sa2VAProcessor.from_config(config, tokenizer, max_tiles=1)
    config.image_token_id, config.seg_token_id = processor.image_token_id, processor.seg_token_id
    config.never_sampled_ids = processor.never_sampled_ids
    if bits is not None:
        load: Any = InternVLPreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        state = model.state_dict()
        del model
        how = {"device_map": {"": device}, "quantization_config": language_model_in_bits(bits_config(bits))}
        model = load(Sa2VAForConditionalGeneration, None, config=config, state_dict=state, dtype=torch.bfloat16, **how)
    return model.eval(), processor


def make_trainer(
    model: Any, processor: Any, items: list[TrainingItem], rewards: Any, device: str, **settings: Any
) -> Sa2VAGRPOTrainer:
    """A trainer as a run has it, with the rewards of both loops, and the reference set."""
    settings |= {"max_completion_length": TOKENS, "report_to": "none", "use_cpu": device == "cpu"}
    config = Sa2VAGRPOConfig(**settings)
    trainer = Sa2VAGRPOTrainer(model, processor, config, items, rewards)
    trainer.freeze_unreached(items[:2])
    trainer.reset_reference()
    return trainer


# ---- every stage at real size ---------------------------------------------------------------------------------------

ALL = ("write", "load", "segment", "mask bank", "GRPO step", "supervised step", "merge", "load merged")
WRITTEN = ("model", "bank", "data", "grpo", "supervised", "merged")
MARKER = "written_by_real_size"  # in --folder: what is named above is ours, and may be deleted


@dataclass(frozen=True)
class RealSize:
    """Seconds, memory and disk of each stage, on a checkpoint of random weights of real size.

    Each stage has a process of its own; its peak is that of the process, on a GPU what torch reserved there. Images
    have 512 x 512 pixels and one tile, answers 24 tokens at most: times grow with tiles and tokens, memory hardly does.
    Of training, the second step counts.
    """

    size: Size = "1b"
    """Of the released checkpoint that the random one resembles."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cpu or cuda; writing and merging use main memory alone."""
    dtype: Dtype = "auto"
    """Of the weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    gradient_checkpointing: bool = False
    """In training: compute activations twice, keep few."""
    side_network: bool = False
    """In training: add a side network."""
    encoder: Literal["frozen", "lora", "full"] = "frozen"
    """What trains of SAM 2's image encoder."""
    stages: tuple[str, ...] = ALL
    """Which of them, in this order; `write` is needed once, and `GRPO step` by `merge`."""
    folder: Path = Path("outputs/real_size")
    """What is written goes here, into folders of its own, which are deleted at the end, unless --keep."""
    keep: bool = False
    """Keep the checkpoint and the runs, for a second measurement."""

    def __call__(self) -> list[str]:
        """A line for each stage as it ends, and the table, also after Ctrl-C; returns the stages that failed."""
        if not (self.folder / MARKER).exists():
            if foreign := [name for name in WRITTEN if (self.folder / name).exists()]:
                raise ValueError(f"folder is {self.folder}, which holds {foreign} of others; give a new one")
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / MARKER).touch()
        rows: list[tuple[str, ...]] = []
        try:
            for name in self.stages:
                found = attempt(partial(in_process, measured_stage, self, name))
                rows.append((name, *(found or ("-", "-", "failed, see above"))))
                print(": ".join((name, ", ".join(rows[-1][1:]))), flush=True)
        finally:
            if not self.keep:
                for name in WRITTEN:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / MARKER).unlink()
            card = torch.cuda.get_device_name() if self.device != "cpu" else f"{torch.get_num_threads()} threads"
            extra = ", gradient checkpointing" * self.gradient_checkpointing + ", side network" * self.side_network
            title = f"Sa2VA-{self.size}, {card}, dtype {self.dtype}{extra}, encoder {self.encoder}"
            show(("stage", "seconds", "peak memory (GiB)", ""), rows, title)
        return [row[0] for row in rows if row[1] == "-"]


def measured_stage(args: RealSize, name: str) -> tuple[str, str, str]:
    """Seconds, GiB at the peak, and further numbers of a stage, by this process."""
    stages: tuple[Callable[[RealSize], tuple[float, str]], ...]
    stages = (write_stage, load_stage, partial(bank_stage, single=True), bank_stage)
    stages += (grpo_stage, supervised_stage, merge_stage, partial(load_stage, name="merged"))
    spent, note = stages[ALL.index(name)](args)
    device = "cpu" if name in ("write", "merge") else args.device
    if device != "cpu":
        note = f"{note}; allocated {torch.cuda.max_memory_allocated() / GIB:.2f} GiB".removeprefix("; ")
    return f"{spent:.1f}", f"{peak_memory_gib(device):.2f}", note


def write_stage(args: RealSize) -> tuple[float, str]:
    """The checkpoint."""
    folder, counts = args.folder / "model", list[int]()
    shutil.rmtree(folder, ignore_errors=True)
    spent = seconds(lambda: counts.append(write_random_checkpoint(folder, args.size)))
    return spent, f"{counts[0]:,} parameters, {_gib(folder):.2f} GiB on disk"


def load_stage(args: RealSize, name: str = "model") -> tuple[float, str]:
    """All weights are read: on the CPU those of the file's own dtype are mapped, not copied."""
    folder = args.folder / name
    return seconds(lambda: weights_fingerprint(load_sa2va_model(folder, args.device, dtype=args.dtype)[0])), ""


def bank_stage(args: RealSize, single: bool = False) -> tuple[float, str]:
    """All prompts on a single image, or an empty mask bank of several."""
    folder, images = args.folder / "bank", scenes(1 if single else 4 if args.device == "cpu" else 20)
    shutil.rmtree(folder, ignore_errors=True)
    segmenter = load_segmenter(args.folder / "model", args.device, max_new_tokens=TOKENS, dtype=args.dtype)
    bank = MaskBank(folder, segmenter.segment, segmenter.fingerprint, list(PROMPTS))
    answer = segmenter.segment(images[0], list(PROMPTS))  # the first call loads the GPU's kernels
    if single:
        spent = seconds(lambda: segmenter.segment(images[0], list(PROMPTS)))
        return spent, f"{len(answer.mask_logits)} prompts, 1 image"
    spent = seconds(lambda: [bank.answer(image) for image in images])
    disk = _gib(folder) * 2**20 / len(images)
    return spent, f"{len(images)} images, {disk:.0f} KiB on disk each, {len(images) / spent:.2f} images/s"


def grpo_stage(args: RealSize) -> tuple[float, str]:
    """A step with 8 captions and 16 masks."""
    data = ["--data_root", str(embedded_regions(args.folder / "data")), "--max_completion_length", str(TOKENS)]
    if args.side_network or args.encoder != "frozen":
        data += ["--mask_policy", "bernoulli"]  # the gradient of the other one ends at the [SEG] embedding
    spent, folder = train_stage(args, "grpo", data), args.folder / "grpo"
    final, checkpoint = _gib(folder / "final_model"), _gib(next(folder.glob("checkpoint-*")))
    sizes = f"final_model {final:.2f} GiB, checkpoint {checkpoint:.2f} GiB"
    return spent, f"both loops, 8 captions, 16 masks; {sizes}"


def supervised_stage(args: RealSize) -> tuple[float, str]:
    """A step on true masks."""
    data = str(embedded_angiograms(args.folder / "data"))
    return train_stage(args, "supervised", ["--data_root", data, "--objective", "supervised"]), ""


def train_stage(args: RealSize, name: str, words: list[str]) -> float:
    """Seconds of the second step of a run: from then on the moments of AdamW exist."""
    folder = args.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    words += ["--model_path", str(args.folder / "model"), "--run_folder", str(folder), "--encoder", args.encoder]
    words += ["--max_steps", "2", "--save_steps", "2", "--eval_steps", "0"]
    words += ["--dtype", args.dtype, "--gpu", "-1" if args.device == "cpu" else "0"]
    words += ["--gradient_checkpointing"] * args.gradient_checkpointing + ["--side_network"] * args.side_network
    command(["grpo", "quick", *words])
    lines = [json.loads(line) for line in (folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()]
    (line,) = (line for line in lines if line["step"] == 2)
    return sum(value for key, value in line.items() if key.startswith("seconds/"))


def merge_stage(args: RealSize) -> tuple[float, str]:
    """The trained model into whole weights."""
    merged, dtype = args.folder / "merged", "bfloat16" if args.dtype == "bfloat16" else "float32"
    shutil.rmtree(merged, ignore_errors=True)
    words = ["merge", "--model_path", str(args.folder / "grpo"), "--output", str(merged), "--dtype", dtype]
    return seconds(lambda: command(words)), f"{_gib(merged):.2f} GiB on disk"


def _gib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GIB


# ---- FLOP of a GRPO group -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrpoFlops:
    """FLOP of one GRPO group at the size of Sa2VA-4B, ours and in the usual layout, counted on the meta device.

    Counted: both image encoders, the language model's blocks and head, SAM 2's mask decoder. A backward pass counts as
    two forward passes. A group has 4 captions of 50 tokens and 8 masks with answers of 10, behind an image of one tile.
    """

    def __call__(self) -> None:
        """Count and print."""
        captions, masks, caption, answer = 4, 8, 50, 10
        image, describe, phrase = 262, 262 + 90, 262 + 30  # tokens up to the end of the image, region, phrase
        vision, sam, decoder, head, text = part_costs()

        def after(before: int, new: int) -> float:
            """Cost of the last tokens of a text whose first tokens are in the cache."""
            return text(before + new) - text(before)

        tokens = captions * (describe + caption) + masks * (phrase + answer)
        ours_scored = text(describe + captions * caption + 30 + answer) + captions * caption * head
        repeated = captions * text(describe + caption) + masks * text(phrase + answer)
        usual_scored = repeated + tokens * head
        sampling = after(image, 90) + captions * after(describe, caption) + after(image, 30 + answer)
        teacher = captions * after(image, 30 + answer) + masks * after(image, 90 + caption)
        usual_teacher = captions * text(phrase + answer) + masks * text(describe + caption)
        calls = 2 * (captions + masks)  # captions and their masks, masks and their captions
        rows = {
            "image encoders": (vision + sam, calls * (vision + sam) + calls * vision),
            "sampling": (2 * text(image) + sampling + masks * decoder, repeated + masks * decoder),
            "teacher": (teacher + captions * decoder, usual_teacher + captions * decoder),
            "reference": (ours_scored, usual_scored),
            "loss and gradients": (3 * ours_scored, 3 * usual_scored),
        }
        ours, usual = (sum(pair[side] for pair in rows.values()) for side in (0, 1))
        lines = [
            (name, *(f"{value:.1f}" for value in pair)) for name, pair in (rows | {"together": (ours, usual)}).items()
        ]
        show(("part of one group, TFLOP", "ours", "usual layout"), lines)
        later = usual / (ours - rows["image encoders"][0])
        print(f"ratio: {usual / ours:.1f}x; with cached image features (every epoch but the first): {later:.1f}x")


def part_costs() -> tuple[float, float, float, float, Callable[[int], float]]:
    """TFLOP of vision tower, SAM 2's encoder, mask decoder, head per token; and the blocks' by tokens of a text."""
    with torch.device("meta"):
        original = official_config("4b")
        model: Any = Sa2VAForConditionalGeneration(config_from_original(original, HIERA_L, "config.json")).eval()
        tile, square = torch.empty(1, 3, 448, 448), torch.empty(1, 3, 1024, 1024)
        maps, prompt, state = model.get_sam_features(square), torch.empty(1, 256), torch.empty(1, 2048)

    def flop(call: Callable[[], Any]) -> float:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        return counter.get_total_flops() / 1e12

    def blocks(length: int) -> float:
        with torch.device("meta"):
            inputs = {"inputs_embeds": torch.empty(1, length, 2048), "position_ids": torch.arange(length)[None]}
            inputs["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool)
        return flop(lambda: model.model.language_model(**inputs, use_cache=False))

    return (
        flop(lambda: model.model.project(model.model.get_vision_features(tile))),
        flop(lambda: model.get_sam_features(square)),
        flop(lambda: model.decode_masks(maps, prompt)),
        flop(lambda: model.lm_head(state)),
        blocks,
    )


# ---- a GRPO step in the usual layout --------------------------------------------------------------------------------

BAR = 1e-3  # of gradients: sums in another order differ by 1e-5, a wrong layout by 1
Step = tuple[Sa2VAGRPOTrainer, list[TrainingItem], MicroBatch]


@dataclass(frozen=True)
class GrpoStep:
    """One GRPO step against the usual layout: seconds, and equality of the gradients.

    The usual layout, as in trainers for text: both image encoders for every generation, prompts repeated, logits of the
    whole text over the whole vocabulary; generations are batched there, too. Both get the same samples for the loss.
    Rewards, optimiser and the teacher's update are left out. Gradients are compared in float32; times are those of the
    device's own dtype: on a GPU bfloat16 with float32 trainable tensors, under autocast.
    """

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    data_root: Path | None = None
    """Regions; by default the embedded ones."""
    prompts: int = 8
    """Regions in a step."""
    num_generations: int = 4
    """Captions per region."""
    num_mask_generations: int = 8
    """Masks per phrase."""
    repeats: int = 3
    """Pairs of measurements, in turn, after one that is not counted."""
    device: str = DEVICE
    """cpu, cuda:0, ..."""

    def __call__(self) -> None:
        """The times first, which need less memory."""
        with tempfile.TemporaryDirectory() as folder:
            step = self.step(folder)
            layouts = (partial(ours, *step), partial(usual, *step))
            pairs = [tuple(map(seconds, layouts)) for _ in range(self.repeats + 1)][1:]
            own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = [theirs / mine for mine, theirs in pairs]
            print(f"one step: {own:.3f} s, in the usual layout {other:.3f} s")
            print(f"ratio: {statistics.median(ratios):.2f}x (pairs {min(ratios):.2f} to {max(ratios):.2f})")
            del step, layouts
            with exact_float32():
                worst = gradient_difference(*self.step(folder, "float32"))
        print(f"largest difference of a float32 gradient, relative to its tensor's largest: {worst:.1e} (bar {BAR:g})")

    def step(self, folder: str, dtype: Dtype = "auto") -> Step:
        """A trainer, the items of one step, all about different images, and samples with the reference's outputs."""
        inputs = open_grpo_inputs(RunConfig(data_root=self.data_root or embedded_regions()))
        items = list({item.group_id: item for item in inputs.pick("policy")}.values())[: self.prompts]
        model, processor = load_sa2va_model(self.model_path, self.device, dtype=dtype)
        prepare_model(model, 16, 32)
        counts = {"num_generations": self.num_generations, "num_mask_generations": self.num_mask_generations}
        counts["per_device_train_batch_size"] = self.prompts * self.num_generations
        rewards = {"loop1": {"iou": Reward(iou_reward, 1.0)}, "loop2": {"meteor": Reward(meteor_reward, 1.0)}}
        trainer = make_trainer(model, processor, items, rewards, self.device, output_dir=folder, **counts)
        with mixed_precision(trainer.sa2va):
            rollouts = trainer.rollout_generator.generate(items, (0, 0, 0))
        with torch.no_grad(), trainer.reference_weights(), mixed_precision(trainer.sa2va):
            reference = trainer.policy(rollouts)[0].stored()
        captions = [torch.linspace(-1, 1, len(caption.completion_ids)) for caption in rollouts.captions]  # both signs
        masks = [torch.linspace(-1, 1, len(mask.actions)) for mask in rollouts.masks]
        return trainer, items, MicroBatch(rollouts, captions, masks, reference)


def ours(trainer: Sa2VAGRPOTrainer, items: list[TrainingItem], batch: MicroBatch) -> None:
    """One step as in the trainer, with image features computed anew."""
    trainer.rollout_generator.cache.entries.clear()
    with mixed_precision(trainer.sa2va):
        trainer.rollout_generator.generate(items, (0, 0, 0))
    learn(trainer, batch, lambda: trainer.policy(batch.rollouts)[0])


def usual(trainer: Sa2VAGRPOTrainer, items: list[TrainingItem], batch: MicroBatch) -> None:
    """The same step, each generation from its whole text and image."""
    loaded, processor, config = [item.load() for item in items], trainer.rollout_generator.processor, trainer.args
    with mixed_precision(trainer.sa2va):
        regions = [(image, DESCRIBE, mask) for image, mask in loaded for _ in range(config.num_generations)]
        texts = [processor.text(a.token_ids).removesuffix("<|im_end|>") for a in answered(trainer, regions, 1.0)[0]]
        asked = zip(regions, texts, strict=True)
        segmented(trainer, [(image, segment_question(text), None) for (image, _, _), text in asked])
        pairs = zip(items, loaded, strict=True)
        questions = [(i, item.question, None) for item, (i, _) in pairs for _ in range(config.num_mask_generations)]
        drawn = zip(questions, segmented(trainer, questions), strict=True)
        answered(trainer, [(image, DESCRIBE, mask) for (image, _, _), mask in drawn if mask.any()], 0.0)
    learn(trainer, batch, lambda: repeated(trainer, items, batch))


def learn(trainer: Sa2VAGRPOTrainer, batch: MicroBatch, outputs: Callable[[], PolicyOutputs]) -> None:
    """The reference's outputs, then loss and gradients; as in the trainer, autocast covers the forward passes alone."""
    with torch.no_grad(), trainer.reference_weights(), mixed_precision(trainer.sa2va):
        outputs()
    backward(trainer, batch, outputs)


def backward(trainer: Sa2VAGRPOTrainer, batch: MicroBatch, outputs: Callable[[], PolicyOutputs]) -> None:
    """New gradients of both loops' loss."""
    trainer.sa2va.zero_grad()
    with mixed_precision(trainer.sa2va):
        found = outputs()
    counts, policy = count_step([batch.rollouts]), trainer.policy.mask_policy
    loss = caption_loss(batch, found, trainer.args, counts.tokens).value
    (loss + mask_policy_loss(batch, found, trainer.args, len(batch.rollouts.masks), policy).value).backward()


def answered(
    trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]], temperature: float
) -> tuple[list[Any], Any]:
    """Answers to (image, question, region) in one batch, in which the image is repeated, and the model's inputs."""
    model, processor = trainer.sa2va, trainer.rollout_generator.processor
    regions = None if asked[0][2] is None else [mask[None] for _, _, mask in asked]
    inputs = processor(["<image>" + text for _, text, _ in asked], [image for image, _, _ in asked], regions)
    inputs = send_to_device(inputs, model.device)
    with evaluating(model), torch.no_grad():
        how = Decoding(TOKENS, temperature, generator=seeded_generator((0,)) if temperature else None)
        return answer_batch(model, processor, inputs, how), inputs


def segmented(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]]) -> list[np.ndarray]:
    """The mask of each (image, question): answers in one batch, SAM 2's encoder in one batch, one decoding each."""
    model, processor, masks = trainer.sa2va, trainer.rollout_generator.processor, []
    answers, inputs = answered(trainer, asked, 0.0)
    with evaluating(model), torch.no_grad():
        features = model.get_sam_features(inputs["sam_pixel_values"])
        for number, ((image, _, _), answer) in enumerate(zip(asked, answers, strict=True)):
            states, size = answer.states_at(processor.seg_token_id), image.shape[:2]
            if not states:
                masks.append(np.zeros(size, dtype=bool))
                continue
            logits = model.decode_masks(features[number], model.text_hidden_fcs(states[0][None])).mask_logits
            masks.append((upsample_mask_logits(logits, size, processor.sam_image_size)[0] > 0).cpu().numpy())
    return masks


def repeated(trainer: Sa2VAGRPOTrainer, items: list[TrainingItem], batch: MicroBatch) -> PolicyOutputs:
    """The outputs of `GRPOPolicy`, from each whole text with its image, and all logits of all tokens."""
    pairs = [repeated_item(trainer, item, batch.rollouts, row) for row, item in enumerate(items)]
    longest = max(rows.shape[1] for rows, _ in pairs)
    log_probs = [torch.nn.functional.pad(rows, (0, longest - rows.shape[1])) for rows, _ in pairs]
    entropies = [torch.zeros_like(rows) for rows in log_probs]
    return PolicyOutputs(log_probs, entropies, [], [parameters for _, parameters in pairs], [])


def repeated_item(
    trainer: Sa2VAGRPOTrainer, item: TrainingItem, rollouts: Rollouts, number: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the captions of an item, and the parameters of its mask policy."""
    model, processor, (image, _) = trainer.sa2va, trainer.rollout_generator.processor, item.load()
    caption, answer = rollouts.captions[number], rollouts.answers[number]
    count, question, masks = len(caption.completion_ids), caption.question, trainer.args.num_mask_generations
    pixels = processor.pixel_values(processor.tiles(image)).to(model.device)
    texts = [question.prefix_ids + question.suffix_ids + ids for ids in caption.completion_ids]
    padded = {name: tensor.to(model.device) for name, tensor in processor.pad(texts).items()}
    assert question.region_cells is not None
    logits = model(
        **padded,
        pixel_values=pixels.repeat(count, 1, 1, 1),
        prompt_masks=[question.region_cells] * count,
        vp_overall_mask=torch.tensor([False] * (len(pixels) - 1) + [True]).repeat(count),
    ).logits.float()
    logits[..., processor.never_sampled_ids] = float("-inf")
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, padded["input_ids"][:, 1:, None])[..., 0]
    rows = [log_probs[row, -len(ids) :] for row, ids in enumerate(caption.completion_ids)]
    ids = torch.tensor([answer.image.prefix_ids + answer.token_ids], device=model.device).repeat(masks, 1)
    states = model(input_ids=ids, pixel_values=pixels.repeat(masks, 1, 1, 1)).last_hidden_state
    embeddings = torch.stack([row[0] for row in model.seg_embeddings(states, ids)])
    return pad_sequence(rows, batch_first=True), embeddings.mean(dim=0)


def gradient_difference(trainer: Sa2VAGRPOTrainer, items: list[TrainingItem], batch: MicroBatch) -> float:
    """Largest difference between the two layouts' gradients, relative to the largest number of each tensor."""
    gradients = []
    for layout in (lambda: trainer.policy(batch.rollouts)[0], lambda: repeated(trainer, items, batch)):
        backward(trainer, batch, layout)
        named = trainer.sa2va.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.requires_grad and p.grad is not None})
    one, other = gradients
    return max(float((one[key] - other[key]).abs().max() / one[key].abs().max().clamp(min=1e-6)) for key in one)


# ---- a reward network -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardSpeed:
    """Speed of a reward network of random weights on a picture of 256 x 256 pixels."""

    threads: int = 2
    """CPU threads."""
    device: str = DEVICE
    """cpu, cuda:0, ..."""
    repeats: int = 9
    """Measurements of each, in turn, after one that is not counted."""

    def __call__(self) -> None:
        """Medians."""
        torch.set_num_threads(self.threads)
        ensemble = RewardNetwork().eval().requires_grad_(False).to(self.device)
        member, rng = ensemble.member(0).requires_grad_(False), np.random.default_rng(0)
        image = rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)
        masks = (rng.random((256, 256, 256), dtype=np.float32) > 0.9).astype(np.float32)
        calls: dict[str, Callable[[], object]] = {
            "one mask, one member": lambda: score_masks(member, image, masks[:1]),
            "one mask, ensemble": lambda: score_masks(ensemble, image, masks[:1]),
            "11 masks together, ensemble": lambda: score_masks(ensemble, image, masks[:11]),
            "11 masks one by one, ensemble": lambda: [score_masks(ensemble, image, mask[None]) for mask in masks[:11]],
            "256 masks, ensemble": lambda: score_masks(ensemble, image, masks),
        }
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(self.repeats + 1)][1:]
        medians = ((name, f"{1e3 * statistics.median(one[name] for one in rounds):.1f}") for name in calls)
        show(("256 x 256 pixels", "ms"), medians)


# ---- the command ----------------------------------------------------------------------------------------------------

Args = (
    Annotated[Quick, tyro.conf.subcommand("quick")]
    | Annotated[Gpu, tyro.conf.subcommand("gpu")]
    | Annotated[GpuTraining, tyro.conf.subcommand("gpu_training")]
    | Annotated[GrpoFlops, tyro.conf.subcommand("grpo_flops")]
    | Annotated[GrpoStep, tyro.conf.subcommand("grpo_step")]
    | Annotated[RealSize, tyro.conf.subcommand("real_size")]
    | Annotated[RewardSpeed, tyro.conf.subcommand("reward_network")]
)


def main(args: Callable[[], list[str] | None]) -> None:
    """Call the part that the flags are of; exit status 1 if something failed."""
    if failed := args():
        sys.exit(f"failed, see above: {'; '.join(failed)}")


if __name__ == "__main__":
    main(tyro.cli(Args, config=(tyro.conf.FlagCreatePairsOff,)))
