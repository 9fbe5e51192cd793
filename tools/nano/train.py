"""Training of `sa2va-nano` from scratch, in stages; each stage leaves a usable model and can be resumed.

The losses are those of Sa2VA (cross-entropy of the answers, binary cross-entropy and Dice of the masks, error of SAM
2's IoU head) and two auxiliary ones, see `model`. A batch holds angiograms with several prompts, scenes with phrases,
and scenes with regions to describe. It depends on seed, stage and step alone, so a resumed run gives equal weights.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, whole_file, whole_folder, write_json
from rl_reward_network.curves import Curves, load_checkpoint, save_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.run import provenance
from tools.nano.conversations import (
    collate,
    corpus,
    describing_conversation,
    phrase_conversation,
    region_scenes,
    vessel_conversation,
)
from tools.nano.model import Helpers, nano_losses, nano_tokenizer, new_nano
from tools.nano.pictures import Pictures


@dataclass(frozen=True)
class Stage:
    """A stage of the training with its own learning-rate schedule.

    Args:
        steps: optimiser steps.
        learning_rate: peak value; linear warm-up for `WARMUP` steps, then cosine decay to 2 % of the peak.
        vessels, phrases, descriptions: conversations of each kind per step.
        watched: additional scenes per step for the region loss alone, see `region_scenes`; shapes need many more
            examples than words.
        by_codes: prompt SAM 2 with codes in place of the `[SEG]` embeddings, and leave out the region loss.
        blind: number of the vessel and of the phrase conversations in which the language model gets the text alone.
            Without 256 image tokens between question and `[SEG]`, words are learned faster and at far less cost.
        prompts: prompts per angiogram.
        louder_places: factor on the vision tower's position embeddings, applied once, before the first step. The patch
            embeddings grow in training until the place of a region can no longer be predicted from its features.
    """

    steps: int
    learning_rate: float
    vessels: int
    phrases: int
    descriptions: int
    by_codes: bool = False
    blind: tuple[int, int] = (0, 0)
    watched: int = 0
    prompts: int = 4
    louder_places: float = 1.0


STAGES = (
    Stage(steps=700, learning_rate=1.5e-3, vessels=8, phrases=3, descriptions=8, by_codes=True, blind=(6, 2)),
    Stage(steps=1200, learning_rate=1.0e-3, vessels=4, phrases=2, descriptions=8, watched=64, louder_places=4.0),
    Stage(steps=650, learning_rate=1.0e-3, vessels=6, phrases=2, descriptions=6, blind=(4, 1), watched=64, prompts=6),
)
WARMUP = 100  # steps
WEIGHT_DECAY, CLIP_NORM = 0.02, 1.0
CHECKPOINT_EVERY, LOG_EVERY = 100, 20  # steps


def batch_of(stage: Stage, pictures: Pictures, processor: Sa2VAProcessor, key: list[int]) -> dict[str, Any]:
    """The batch that belongs to `key` (seed, stage, step)."""
    rng = np.random.default_rng(key)
    vessels, phrases = stage.blind
    conversations = [vessel_conversation(pictures, rng, stage.prompts, n < vessels) for n in range(stage.vessels)]
    conversations += [phrase_conversation(pictures, rng, n < phrases) for n in range(stage.phrases)]
    conversations += [describing_conversation(pictures, rng) for _ in range(stage.descriptions)]
    batch = collate(conversations, processor)
    if stage.watched:
        batch["region_scenes"] = region_scenes(pictures, rng, stage.watched, processor)
    return batch


@dataclass
class NanoTrainer:
    """Trains one model through the stages; `folder` holds checkpoints, logs and the model of each."""

    folder: Path
    pictures: Pictures
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Create an untrained model; `train` loads the last checkpoint, if any."""
        self.model, self.processor = new_nano(nano_tokenizer(corpus()), self.seed)
        self.model.to(self.device)  # type: ignore[arg-type]
        config = self.model.config
        self.helpers = Helpers(config.text_config.hidden_size, config.sam2_config.vision_config.fpn_hidden_size)
        self.helpers.to(self.device)
        self.parameters = [*self.model.parameters(), *self.helpers.parameters()]
        self.settings: dict[str, Any] = {"pictures": self.pictures.name, "seed": self.seed, "stages": []}

    def train(self, number: int, stage: Stage) -> Path:
        """Train stage `number` (from 0), from its last checkpoint if there is one; returns the folder of its model.

        ValueError: the stage or its checkpoint was trained with other settings.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings["stages"].append(asdict(stage))
        result = self.folder / f"stage_{number + 1}"
        if result.exists():
            self._check_settings(beside(result, "made.json"))
            # Weights are copied into the existing parameters: in a memory-mapped file they would be aligned in another
            # way, matrix products would round differently, and a resumed run would end in other weights.
            self.model.load_state_dict(Sa2VAForConditionalGeneration.from_pretrained(result).state_dict())
            self.helpers.load_state_dict(load_file(beside(result, "helpers.safetensors"), self.device))
            return result
        rate, betas = stage.learning_rate, (0.9, 0.98)
        optimiser = torch.optim.AdamW(self.parameters, lr=rate, betas=betas, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, stage.steps))
        self.model.model.vision_tower.embeddings.position_embeddings.data.mul_(stage.louder_places)
        parts: dict[str, Any] = {"model": self.model, "helpers": self.helpers}
        parts |= {"optimiser": optimiser, "schedule": schedule}
        first, seconds = self._resume(number, parts)
        curves = Curves(self.folder, {"stage": number + 1, "step": first})
        started = time.monotonic() - seconds
        self.model.train()
        bar = tqdm(range(first, stage.steps), f"stage {number + 1}", initial=first, total=stage.steps, unit="step")
        for step in bar:
            losses = self._step(stage, [self.seed, number, step], optimiser)
            schedule.step()
            seconds, done = time.monotonic() - started, step + 1
            if done % LOG_EVERY == 0 or done == stage.steps:
                row = {"stage": number + 1, "step": done, "seconds": seconds, **losses}
                curves.add_row({name: round(float(value), 5) for name, value in row.items()})
            if done % CHECKPOINT_EVERY == 0 and done < stage.steps:
                state = {name: part.state_dict() for name, part in parts.items()}
                progress = {"stage": number, "step": done, "seconds": seconds, "settings": self.settings}
                with whole_folder(self.folder / "checkpoint") as temporary:
                    save_checkpoint(temporary / "state.pt", state)
                    write_json(temporary / "state.json", progress)
        return self._finish(result, seconds)

    def _step(self, stage: Stage, key: list[int], optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
        batch = batch_of(stage, self.pictures, self.processor, key)
        losses = nano_losses(self.model, self.helpers, send_to_device(batch, self.device), stage.by_codes)
        optimiser.zero_grad(set_to_none=True)
        total = torch.stack(list(losses.values())).sum()
        if not torch.isfinite(total):
            raise RuntimeError(f"seed, stage, step {key}: the loss is {total.item()}; lower the stage's learning_rate")
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        optimiser.step()
        return {name: loss.detach() for name, loss in losses.items()}

    def _finish(self, result: Path, seconds: float) -> Path:
        """Write the stage's model, for `from_pretrained`; the folder is written last and marks the stage complete."""
        self.model.eval()
        with whole_file(beside(result, "helpers.safetensors")) as temporary:
            save_file(self.helpers.state_dict(), temporary)
        machine = f"{os.cpu_count()} CPU cores" if self.device == "cpu" else torch.cuda.get_device_name(self.device)
        made = {"settings": self.settings, "seconds": seconds, "machine": machine} | provenance()
        write_json(beside(result, "made.json"), made)
        with whole_folder(result) as temporary:
            self.model.save_pretrained(temporary)
            self.processor.save_pretrained(temporary)
        return result

    def _check_settings(self, file: Path) -> dict[str, Any]:
        """The content of `file`; ValueError unless its settings are those of this run."""
        content = read_json(file)
        if content["settings"] != json.loads(json.dumps(self.settings)):
            raise ValueError(
                f"{file}: settings are {content['settings']}, expected {self.settings}; give another --output_dir, or "
                "delete this one"
            )
        return dict(content)

    def _resume(self, number: int, parts: dict[str, Any]) -> tuple[int, float]:
        """The step to continue with, and the seconds already spent on this stage."""
        checkpoint_dir = self.folder / "checkpoint"
        if not checkpoint_dir.exists() or read_json(checkpoint_dir / "state.json")["stage"] != number:
            return 0, 0.0
        progress = self._check_settings(checkpoint_dir / "state.json")
        state = load_checkpoint(checkpoint_dir / "state.pt", self.device)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return int(progress["step"]), float(progress["seconds"])


def beside(result: Path, kind: str) -> Path:
    """A file beside the folder of a stage's model, such as made.json: its settings, machine, versions and seconds."""
    return result.with_name(f"{result.name}_{kind}")


def _rate(step: int, steps: int) -> float:
    """Learning rate of a step as a share of the peak, [0, 1]."""
    progress = min(1.0, max(0, step - WARMUP) / max(1, steps - WARMUP))
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.98 * 0.5 * (1 + float(np.cos(np.pi * progress))))
