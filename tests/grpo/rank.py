"""One process of the distributed tests: trains, resumes, gets masks of other candidates than the other, shards a model.

Started by test_distributed.py: `python -m tests.grpo.rank FOLDER PROCESSES [train]` forks the processes, so that all
of them share one import of the libraries.
"""

import json
import multiprocessing
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_reward_network.grpo import measure as measure_file
from rl_reward_network.grpo.checkpoint import any_rank, connect, first_message, from_first_rank
from rl_reward_network.grpo.measure import Measured
from rl_reward_network.grpo.policy import GRPOPolicy
from rl_reward_network.grpo.rollouts import Rollouts
from rl_reward_network.grpo.validation import EMPTY, PROXY, SILENT, TAGS, ValidationCallback
from rl_reward_network.models.ema import copied
from tests.grpo.nano import make_trainer, prompts_by_candidate, regions, shake, some

# Plain SGD, since Adam amplifies rounding of gradients near 0; entropy and KL, or the loss of fresh rollouts is near 0.
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3}
SETTINGS: dict[str, Any] = {**SGD, "entropy_coef": 0.1, "beta": 1.0, "mask_beta": 1.0}
SMALL: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2, "num_mask_generations": 2}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
RANKS = 2


def rank_of() -> int:
    return int(os.environ.get("RANK", "0"))


def write(folder: Path, name: str, record: dict[str, Any], trainer: Any = None) -> None:
    (folder / f"{name}_{rank_of()}.json").write_text(json.dumps(record))
    if trainer is not None:
        save_file(copied(trainer.sa2va), folder / f"{name}_{rank_of()}.safetensors")


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "total_loss" in line]


def train(folder: Path, accumulation: int = 1) -> None:
    """Two steps; weights, teacher, rollouts and logs of this process go to `folder`, its checkpoints to a folder in it.

    One process with `accumulation` 2 gets the batches of two processes without.
    """
    more = {**SETTINGS, **SAVING, "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(folder / f"run_{rank_of()}", regions(), caption=1.0, loop2_iou=1.0, **more)
    rollouts = noted_rollouts(trainer)
    trainer.train()
    assert trainer.ema is not None
    save_file(trainer.ema.weights, folder / f"ema_{rank_of()}.safetensors")
    record = {
        "logs": logs_of(trainer),
        "rollouts": rollouts,
        "wrapped": type(trainer.model_wrapped).__name__,
        "longest_wait": longest_wait(),
        "sigma": trainer.rollout_generator.sigma_controller.sigma,
    }
    write(folder, "trained", record, trainer)


def longest_wait() -> float | None:
    """Seconds after which a process gives up waiting for another; None without another."""
    if not distributed.is_initialized():
        return None
    backend = distributed.group.WORLD._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def resume(folder: Path) -> None:
    """Four steps of two epochs, and the last once more from the checkpoint inside the second epoch.

    With the curriculum the weights of the loops follow the gradients as well: all the state that there is.
    """
    more = {**SMALL, **SAVING, "max_steps": 4, "curriculum": True, "adaptive_loop_weights": True}
    for name, start in (("whole", None), ("resumed", folder / "whole_0" / "checkpoint-3")):
        trainer = make_trainer(folder / f"{name}_{rank_of()}", regions()[:4], caption=1.0, loop2_iou=1.0, **more)
        rollouts = noted_rollouts(trainer)
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
        record = {"logs": logs_of(trainer), "prompts": [rollout["prompts"] for rollout in rollouts]}
        write(folder, name, record, trainer)


def validate(folder: Path) -> None:
    """Eight steps with validation: on rank 0 Dice falls while the score rises; the other rank must not decide."""
    rank, more = rank_of(), {**SMALL, "objective": "supervised", "max_steps": 8}
    trainer = make_trainer(folder / "validated", regions(), **more)
    trainer.validation = ValidationCallback(trainer, regions()[:1], 1)
    trainer.validation.maps = True
    steps: list[int] = []

    def points(measured: Measured) -> dict[str, float]:
        assert rank == 0, "only the first process decides"
        steps.append(trainer.state.global_step)
        gold = 0.6 if len(steps) == 2 else 0.5
        return {PROXY: 0.5 + len(steps) / 10, TAGS["dice"]: gold, EMPTY: 0.0 if len(steps) < 3 else 1.0, SILENT: 0.0}

    trainer.validation._means = points
    trainer.add_callback(trainer.validation)
    trainer.train()
    outcome = trainer.validation.finish()
    accelerator = trainer.accelerator
    record = {
        "steps": trainer.state.global_step,
        "outcome": asdict(outcome),
        "has_warned": trainer.validation.has_warned,
        "gold": trainer.validation.gold,
        "first": from_first_rank(accelerator, lambda: rank),
        "any": [any_rank(accelerator, rank == 1), any_rank(accelerator, False)],
        "messages": [first_message(accelerator, "the second" if rank else None), first_message(accelerator, None)],
        "shared": shared_measure(trainer),
    }
    write(folder, "validated", record, trainer)


def shared_measure(trainer: Any) -> bool:
    """Whether the ranks together measure, batch by batch, what one process measures, each of them a part of it."""
    prompts, cache, batches = regions()[:3], trainer.rollout_generator.cache, []
    measure_batch, measure_file.BATCH_SIZE = measure_file._measure_batch, {"small": 1, "large": 1}
    alone = measure_file.measure(trainer.sa2va, prompts, cache, 8, expected=False, quiet=True)
    measure_file._measure_batch = lambda *args: batches.append(1) or measure_batch(*args)  # type: ignore[func-returns-value]
    shared = measure_file.measure(
        trainer.sa2va, prompts, cache, 8, expected=False, quiet=True, accelerator=trainer.accelerator
    )
    own = len(range(trainer.accelerator.process_index, 3, RANKS))
    same = all((shared.values[name] == values).all() for name, values in alone.values.items())
    return same and (shared.captions, len(batches)) == (alone.captions, own)


def candidates(folder: Path, accumulation: int = 1) -> None:
    """One supervised step in which the processes get prompts whose masks are of different candidates."""
    more = {**SGD, **SMALL, "objective": "supervised", "max_steps": 1, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(folder / f"candidates_{rank_of()}", prompts_by_candidate()[:RANKS], **more)
    frozen = trainer.freeze_unreached(trainer.prompts[:1])
    trainer.reset_reference()
    start, chosen = copied(trainer.sa2va), []
    decode = trainer.sa2va.decode_masks

    def noted(*args: Any) -> Any:
        decoded = decode(*args)
        chosen.extend(decoded.selected.tolist())
        return decoded

    trainer.sa2va.decode_masks = noted
    trainer.train()
    moved = sorted(name for name, tensor in copied(trainer.sa2va).items() if not torch.equal(tensor, start[name]))
    record = {"chosen": chosen, "moved": moved, "frozen": frozen, "trains": sorted(start)}
    write(folder, "candidates", record, trainer)


def noted_rollouts(trainer: Any) -> list[dict[str, Any]]:
    rollouts: list[dict[str, Any]] = []
    generate = trainer.rollout_generator.generate

    def noted(prompts: Any, seed: Any) -> Any:
        sampled = generate(prompts, seed)
        record = {"seed": list(seed), "prompts": [prompt.sample_id for prompt in prompts]}
        record["completions"] = [caption.completion_ids for caption in sampled.captions]
        rollouts.append(record | {"actions": [mask.actions.tolist() for mask in sampled.masks]})
        return sampled

    trainer.rollout_generator.generate = noted
    return rollouts


def shard(folder: Path) -> None:
    """Outputs and gradients of the policy, whole and split over all processes, on other groups in each."""
    trainer = make_trainer(folder / "sharded", objective="supervised")
    shake(trainer.sa2va)
    policy, rollouts = trainer.policy, trainer.rollout_generator.references(regions()[: 2 * RANKS]).rollouts
    own = some(rollouts, *range(rank_of(), 2 * RANKS, RANKS))
    parameters = sum(p.numel() for p in policy.parameters())
    whole = {name: grad / RANKS for name, grad in gradients(policy, rollouts).items()}
    expected = outputs(policy, own)
    split(policy)
    gap = [float((a - b).abs().max()) for a, b in zip(outputs(policy, own), expected, strict=True)]
    sharded = gradients(policy, own)
    scale = max(float(grad.abs().max()) for grad in whole.values())
    record = {
        "held": sum(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor)) / parameters,
        "gap": gap,
        "same": sorted(sharded) == sorted(whole),
        "gradients": max(float((grad - whole[name]).abs().max()) for name, grad in sharded.items()) / scale,
    }
    write(folder, "sharded", record)


def split(policy: GRPOPolicy) -> None:
    """FSDP2: each block of the language model by itself, then the rest."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in policy.sa2va.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def parts(policy: Any, rollouts: Rollouts) -> list[Tensor]:
    """Everything a loss is made of."""
    outputs, _ = policy(rollouts, with_masks=True, with_parameters=True)
    return [*outputs.log_probs, *outputs.parameters, *outputs.mask_logits, *outputs.answer_log_probs]


@torch.no_grad()
def outputs(policy: Any, rollouts: Rollouts) -> list[Tensor]:
    return parts(policy, rollouts)


def gradients(policy: Any, rollouts: Rollouts) -> dict[str, Tensor]:
    """Of a number that everything a loss is made of has part in; whole tensors, also of a split model."""
    torch.stack([part.float().mean() for part in parts(policy, rollouts)]).sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def work(rank: int, processes: int, port: int, folder: Path, checks: list[str]) -> None:
    """All checks, or the named ones, in this process."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()})
    connect(cpu=True)
    for check in (train, resume, validate, candidates, shard):
        if not checks or check.__name__ in checks:
            check(folder)


if __name__ == "__main__":
    prompts_by_candidate()  # found once, for all processes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count, fork = int(sys.argv[2]), multiprocessing.get_context("fork")
    arguments = (count, port, Path(sys.argv[1]), sys.argv[3:])
    ranks = [fork.Process(target=work, args=(rank, *arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
