"""What the GRPO tests train: the embedded model with LoRA, a few rendered regions it was not trained on, tiny runs."""

import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded.regions import LAMPLIGHT, make_scenes, write_regions
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import FeatureCache, ImageFeatures, Question, open_batch
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, make_plan
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.prompts import TrainingItem, region_prompt
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.rollouts import CaptionRollout, PromptImage, Rollouts
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.grpo.stage import run_grpo_stage
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.lora import WEIGHTS
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.rewards.table import iou_reward, meteor_reward
from rl_reward_network.run import GRPO_RUN, Run
from tests.conftest import write_tiny_data

SETTINGS: dict[str, Any] = {
    "objective": "grpo",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "num_mask_generations": 4,
    "max_completion_length": 16,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "warmup_steps": 0,
}
ONE_STEP = {"max_steps": 1, "per_device_train_batch_size": 4}
PLAN = GRPOPlan("quick", RewardWeights(), 4, 8, settings=GRPOSettings(**SETTINGS))
NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))


def image_of(row: int = 0, pixels: np.ndarray | None = None, truth: np.ndarray | None = None) -> PromptImage:
    """The image of a prompt, for losses that need no features."""
    return PromptImage(row, str(row), NOTHING, [1], np.zeros((1, 1, 3), np.uint8) if pixels is None else pixels, truth)


def captions_of(row: int, lengths: Sequence[int], counted: Sequence[bool] | None = None) -> CaptionRollout:
    flags = torch.tensor([True] * len(lengths) if counted is None else list(counted))
    return CaptionRollout(image_of(row), Question(row, [1], [2]), [[3] * length for length in lengths], flags)


def some(rollouts: Rollouts, *rows: int) -> Rollouts:
    captions = [caption for caption in rollouts.captions if caption.image.row in rows]
    return replace(rollouts, captions=captions, answers=[a for a in rollouts.answers if a.image.row in rows])


def changed(plan: GRPOPlan, **settings: Any) -> GRPOPlan:
    return replace(plan, settings=replace(plan.settings, **settings))


def scenes(project: Path) -> GRPOInputs:
    """Eight pictures under the lamp; runs go to `<project>/out`."""
    write_regions(project / "scenes", 8, 3, light=LAMPLIGHT)
    return open_grpo_inputs(RunConfig(data_root=project / "scenes", output_dir=project / "out", gpu=-1))


def annotated(project: Path) -> GRPOInputs:
    """A few images with masks; runs go to `<project>/out`."""
    data = write_tiny_data(project / "data")
    return open_grpo_inputs(RunConfig(data_root=data, output_dir=project / "out", gpu=-1))


def train(inputs: GRPOInputs, plan: GRPOPlan, folder: Path, **more: Any) -> Path:
    """Train, or resume, a run in this folder."""
    run_grpo_stage(inputs, plan, Run(folder, GRPO_RUN), **more)
    return folder


def assert_resumes(inputs: GRPOInputs, plan: GRPOPlan, run: Path) -> None:
    """That a finished run of two steps, resumed at its first checkpoint, ends in the same weights and log."""
    again = inputs.config.output_dir / "sa2va_grpo_2"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoint-2", "final_model", "done.json", "eval*"))
    train(inputs, plan, again)
    for file in (Path("final_model") / "trainable" / WEIGHTS, Path("metrics.jsonl")):
        assert (run / file).read_bytes() == (again / file).read_bytes(), file


def planned(objective: Any, inputs: GRPOInputs, network: Any = None, **flags: Any) -> GRPOPlan:
    """The plan of a command with these flags."""
    own = {name: flags.pop(name) for name in list(flags) if name in ("max_labelled", "shuffle_rewards", "rewards")}
    args = PlanArgs("quick", inputs.config, grpo=GRPOSettings(objective=objective, **flags), **own)
    return make_plan(args, inputs, network)


@cache
def regions(scenes: int = 3) -> tuple[TrainingItem, ...]:
    """Prompts about regions of scenes under the lamp, several of each image."""
    prompts = []
    for scene_index, scene in enumerate(make_scenes(scenes, 99)):
        image = (scene.image * np.array(LAMPLIGHT)).round().astype(np.uint8)
        for index, thing in enumerate(scene.objects):
            image_id, name = f"{scene_index:012x}", f"{scene_index}/{index}"
            region = make_region(f"{thing.caption}.", to_rle(thing.mask), image_id, name, lambda i=image: i)
            prompts.append(region_prompt(region))
    return tuple(prompts)


def nano(r: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The embedded model with LoRA as it begins; `shake` makes it differ from the model without."""
    torch.manual_seed(0)
    return deepcopy(_nano(r, dtype))


@cache
def _nano(r: int, dtype: torch.dtype) -> tuple[Any, Any]:
    model, processor = load_sa2va_model("sa2va-nano")
    model.to(dtype)
    prepare_model(model, r, 2 * r)
    return model, processor


def shake(model: Any, scale: float = 0.02, seed: int = 1) -> None:
    """Move everything that trains a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def config(folder: Any, **changed: Any) -> Sa2VAGRPOConfig:
    """Settings of a run of seconds."""
    settings = SETTINGS | {"learning_rate": 1e-3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return Sa2VAGRPOConfig(output_dir=str(folder), **settings | {"use_cpu": True, "max_grad_norm": 1.0} | changed)


def rewards(**weights: float) -> dict[str, dict[str, Reward]]:
    """IoU in loop 1 and METEOR in loop 2; other terms by weight."""
    return {
        "loop1": {"iou": Reward(iou_reward, 1.0), "meteor": Reward(meteor_reward, weights.get("caption", 0.0))},
        "loop2": {"meteor": Reward(meteor_reward, 1.0), "iou": Reward(iou_reward, weights.get("loop2_iou", 0.0))},
    }


def make_trainer(folder: Any, prompts: Any = None, **changed: Any) -> Sa2VAGRPOTrainer:
    model, processor = nano(dtype=changed.pop("dtype", torch.float32))
    weights = {name: changed.pop(name) for name in ("caption", "loop2_iou") if name in changed}
    trainer = Sa2VAGRPOTrainer(model, processor, config(folder, **changed), prompts or regions(), rewards(**weights))
    for name, parameter in model.named_parameters():
        if "mask_decoder" in name or "prompt_encoder" in name:
            parameter.requires_grad_(trainer.args.needs_masks)
    trainer.reset_reference()
    return trainer


@cache
def prompts_by_candidate() -> tuple[TrainingItem, ...]:
    """For each candidate mask that SAM 2 selects for some of these prompts the first such prompt."""
    model, processor = nano()
    prompts = regions()
    batch = open_batch(prompts, FeatureCache(model, processor))
    questions = [batch.question(row, prompt.question) for row, prompt in enumerate(prompts)]
    by_candidate: dict[int, TrainingItem] = {}
    answers = batch.context(model).segment(questions)
    for prompt, question, (_, embedding) in zip(prompts, questions, answers, strict=True):
        assert embedding is not None
        with torch.no_grad():
            decoded = model.decode_masks(batch.features[question.image_index].sam, embedding[None])
        by_candidate.setdefault(int(decoded.selected[0]), prompt)
    return tuple(by_candidate[candidate] for candidate in sorted(by_candidate))
