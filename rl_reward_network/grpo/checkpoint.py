"""Checkpoints of a GRPO run: all that a resumed run needs to go on as if it had not stopped, whole or not at all."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

from rl_reward_network.artefacts import whole_folder
from rl_reward_network.grpo.ranks import by_any
from rl_reward_network.models.lora import load_trainable, save_trainable
from rl_reward_network.runs.checkpoints import load_checkpoint, save_checkpoint

EMA_WEIGHTS, STATE = "ema.safetensors", "grpo_state.pt"
KEPT = 2  # checkpoints


def save_run_state(trainer: Any) -> None:
    """Write `checkpoint-<step>` with trained tensors, partner, optimiser, schedule, controller and minutes.

    Rollouts and random states are not in it: a checkpoint lies between rollouts, and all chance follows from seed and
    step.
    """
    folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
    any_spread = by_any(trainer.accelerator, trainer.any_spread)
    if trainer.args.should_save:
        with whole_folder(folder) as temporary:
            save_trainable(trainer.sa2va, temporary / "trainable")
            state: dict[str, Any] = {
                "spread": trainer.maker.controller.spread,
                "seconds": trainer.seconds,
                "reached": sorted(trainer.reached),
                "any_spread": any_spread,
                "ended": trainer.ended,
                "loop_weights": trainer.loop_weights.state_dict(),
            }
            if trainer.args.curriculum:
                state["curriculum"] = trainer.order.state_dict()
            if trainer.ema is not None:
                save_file(trainer.ema.weights, temporary / EMA_WEIGHTS)
                state["ema_steps"] = trainer.ema.steps
            if trainer.watch is not None:
                state |= {"proxy": trainer.watch.proxy, "gold": trainer.watch.gold, "peak": trainer.watch.peak}
                state["seen"] = trainer.watch.seen
            save_checkpoint(temporary / STATE, state)
            if not trainer.is_deepspeed_enabled:  # its own saving is one of all processes; see `way_back`
                trainer._save_optimizer_and_scheduler(str(temporary))
            trainer.state.save_to_json(str(temporary / TRAINER_STATE_NAME))
        rotate_checkpoints(output_dir=str(folder.parent), save_total_limit=KEPT)
    trainer.accelerator.wait_for_everyone()


def trained_to_its_end(trainer: Any, folder: Path) -> bool:
    """Whether the checkpoint is of the last step; then its state is taken, and there is nothing more to train.

    The Trainer's own loop looks for the end only behind a step: it would train one too many.
    """
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if state.global_step < trainer.planned_steps and not load_checkpoint(folder / STATE)["ended"]:
        return False
    load_run_state(trainer, folder)
    trainer.state = state
    return True


def load_run_state(trainer: Any, folder: Path) -> None:
    """Put everything back but what the Trainer itself reads (optimiser, schedule, step)."""
    load_trainable(trainer.sa2va, folder / "trainable")
    state = load_checkpoint(folder / STATE)
    needed = [STATE, SCHEDULER_NAME, OPTIMIZER_NAME, *([EMA_WEIGHTS] if trainer.ema is not None else [])]
    if missing := [name for name in needed if not (folder / name).exists()]:
        raise ValueError(f"{folder}: {missing[0]} is missing; delete this checkpoint, and the one before it is taken")
    trainer.maker.controller.spread, trainer.earlier_s = state["spread"], state["seconds"]
    trainer.loop_weights.load_state_dict(state["loop_weights"])
    if trainer.args.curriculum:
        trainer.order.load_state_dict(state["curriculum"])
    trainer.reached, trainer.any_spread = set(state["reached"]), state["any_spread"]
    if trainer.watch is not None:
        trainer.watch.proxy, trainer.watch.gold, trainer.watch.peak = state["proxy"], state["gold"], state["peak"]
        trainer.watch.seen = state["seen"]
    if trainer.ema is not None:
        saved = load_file(folder / EMA_WEIGHTS)
        with torch.no_grad():
            for name, tensor in trainer.ema.weights.items():
                tensor.copy_(saved[name])
        trainer.ema.steps = state["ema_steps"]
