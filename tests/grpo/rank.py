"""One process of the distributed tests: trains, is resumed, sees other candidates than the other, splits a model.

Started by test_distributed.py: python -m torch.distributed.run --nproc_per_node 2 -m tests.grpo.rank FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_reward_network.grpo.loss.policy import Group, GRPOPolicy
from rl_reward_network.grpo.ranks import by_any, by_first, told_by_any
from rl_reward_network.grpo.setup import freeze_unreached
from rl_reward_network.grpo.validation import GOLD, PROXY, Watch
from rl_reward_network.models.ema import copied
from tests.grpo.nano import chosen_by, regions, shake, trainer

# Plain SGD, since Adam blows up the rounding of gradients near 0; entropy and KL, or fresh rollouts have a loss near 0.
SETTINGS: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3, "entropy_coef": 0.1, "beta": 1.0, "mask_beta": 1.0}
RANKS = 2


def train(folder: Path, accumulation: int = 1) -> None:
    """Two steps; weights, partner, rollouts and logs of this process go to `folder`, its checkpoints to a folder in it.

    One process with `accumulation` 2 sees the batches of two processes without.
    """
    rank = int(os.environ.get("RANK", "0"))
    more = {"gradient_accumulation_steps": accumulation, "save_strategy": "steps", "save_steps": 1, **SETTINGS}
    own = trainer(folder / f"run_{rank}", regions(4), caption=1.0, loop2_iou=1.0, **more)
    rollouts = noted_rollouts(own)
    own.train()
    assert own.ema is not None
    save_file(copied(own.sa2va), folder / f"weights_{rank}.safetensors")
    save_file(own.ema.weights, folder / f"ema_{rank}.safetensors")
    logs = [line for line in own.state.log_history if "total_loss" in line]
    seen = {"wrapped": type(own.model_wrapped).__name__, "spread": own.maker.controller.spread}
    (folder / f"said_{rank}.json").write_text(json.dumps({"logs": logs, "rollouts": rollouts, **seen}))


def resume(folder: Path, curriculum: bool) -> None:
    """Four steps of two epochs, and the last of them once more from the checkpoint inside the second epoch."""
    rank = int(os.environ.get("RANK", "0"))
    # Eight prompts, two of each rank a step: two steps are an epoch.
    more = {"per_device_train_batch_size": 8, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    more |= {"curriculum": curriculum, "adaptive_loop_weights": curriculum}
    for name, start in (("whole", None), ("resumed", folder / f"whole_{curriculum}_0" / "checkpoint-3")):
        run = folder / f"{name}_{curriculum}_{rank}"
        own = trainer(run, regions(4)[:8], caption=1.0, loop2_iou=1.0, **more)
        rollouts = noted_rollouts(own)
        own.train(resume_from_checkpoint=None if start is None else str(start))
        save_file(copied(own.sa2va), f"{run}.safetensors")
        logs = [line for line in own.state.log_history if "total_loss" in line]
        said = {"logs": logs, "items": [rollout["items"] for rollout in rollouts]}
        Path(f"{run}.json").write_text(json.dumps(said))


def watch(folder: Path) -> None:
    """Eight steps, watched: the first process sees a Dice that falls while the score rises; the other must not look."""
    rank = int(os.environ["RANK"])
    own = trainer(folder / f"watched_{rank}", regions(4), max_steps=8)
    own.watch = Watch(own, regions()[:1], 1)
    own.watch.network = True
    looks: list[int] = []

    def points() -> dict[str, float]:
        assert rank == 0, "only the first process measures"
        looks.append(own.state.global_step)
        return {PROXY: 0.5 + len(looks) / 10, GOLD: 0.6 if len(looks) == 2 else 0.5}

    own.watch._points = points
    own.add_callback(own.watch)
    own.train()
    back = own.watch.finish(own.state)
    accelerator = own.accelerator
    said = {
        "steps": own.state.global_step,
        "back": back,
        "gold": own.watch.gold,
        "first": by_first(accelerator, lambda: rank),
        "any": [by_any(accelerator, rank == 1), by_any(accelerator, False)],
        "told": [told_by_any(accelerator, "the second" if rank else None), told_by_any(accelerator, None)],
    }
    save_file(copied(own.sa2va), folder / f"watched_{rank}.safetensors")
    (folder / f"watched_{rank}.json").write_text(json.dumps(said))


def candidates(folder: Path, accumulation: int = 1) -> None:
    """One supervised step in which the processes see items whose masks are of different candidates."""
    rank = int(os.environ.get("RANK", "0"))
    more = {"objective": "supervised", "per_device_train_batch_size": 4, "max_steps": 1, "optim": "sgd"}
    more |= {"learning_rate": 0.3, "gradient_accumulation_steps": accumulation}
    own = trainer(folder / f"candidates_{rank}", chosen_by(regions(9))[:RANKS], **more)
    frozen = freeze_unreached(own, own.train_dataset[:1])
    own.begin()
    start, chosen = copied(own.sa2va), []
    decode = own.sa2va.decode_masks
    own.sa2va.decode_masks = lambda *args: noted(decode(*args), chosen)
    own.train()
    moved = sorted(name for name, tensor in copied(own.sa2va).items() if not torch.equal(tensor, start[name]))
    save_file(copied(own.sa2va), folder / f"candidates_{rank}.safetensors")
    said = {"chosen": chosen, "moved": moved, "frozen": frozen, "trains": sorted(start)}
    (folder / f"candidates_{rank}.json").write_text(json.dumps(said))


def noted(decoded: Any, chosen: list[int]) -> Any:
    """The masks as they are; which candidates they are is added to `chosen`."""
    chosen += decoded.selected.tolist()
    return decoded


def noted_rollouts(own: Any) -> list[dict[str, Any]]:
    """A list that grows as rollouts are made."""
    rollouts: list[dict[str, Any]] = []
    make = own.maker.make

    def noted(items: Any, seed: Any) -> Any:
        groups, samples = make(items, seed)
        actions = [None if group.actions is None else group.actions.tolist() for group in groups]
        said = {"items": [item.sample_id for item in items], "completions": [group.completions for group in groups]}
        rollouts.append({"seed": list(seed), **said, "actions": actions})
        return groups, samples

    own.maker.make = noted
    return rollouts


def shard(folder: Path) -> None:
    """Outputs and gradients of the policy, whole and split over all processes, on other groups in each."""
    rank = int(os.environ["RANK"])
    own = trainer(folder / f"sharded_{rank}", objective="supervised")
    shake(own.sa2va)
    policy, groups = own._policy, own.maker.supervise(regions()[: 2 * RANKS])
    parameters = sum(p.numel() for p in policy.parameters())
    whole = {name: grad / RANKS for name, grad in gradients(policy, groups).items()}
    expected = outputs(policy, groups[rank::RANKS])
    split(policy)
    gap = [float((a - b).abs().max()) for a, b in zip(outputs(policy, groups[rank::RANKS]), expected, strict=True)]
    found = gradients(policy, groups[rank::RANKS])
    scale = max(float(grad.abs().max()) for grad in whole.values())
    said = {
        "held": sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor)) / parameters,
        "gap": gap,
        "same": sorted(found) == sorted(whole),
        "gradients": max(float((grad - whole[name]).abs().max()) for name, grad in found.items()) / scale,
    }
    (folder / f"sharded_{rank}.json").write_text(json.dumps(said))


def split(policy: GRPOPolicy) -> None:
    """FSDP2: each block of the language model by itself, then the rest."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in policy.sa2va.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


@torch.no_grad()
def outputs(policy: Any, groups: list[Group]) -> list[Tensor]:
    """Log-probabilities, parameters and mask of each group."""
    found, _ = policy(groups, True)
    return [part for output in found for part in output.differentiable(True)]


def gradients(policy: Any, groups: list[Group]) -> dict[str, Tensor]:
    """Of a number that everything a loss is made of has part in; whole tensors, also of a split model."""
    found, _ = policy(groups, True)
    torch.stack([part.float().mean() for output in found for part in output.differentiable(True)]).sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


if __name__ == "__main__":
    train(Path(sys.argv[1]))
    resume(Path(sys.argv[1]), curriculum=False)
    resume(Path(sys.argv[1]), curriculum=True)
    watch(Path(sys.argv[1]))
    candidates(Path(sys.argv[1]))
    shard(Path(sys.argv[1]))
