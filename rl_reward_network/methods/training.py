"""What methods need to be trained: runs of the other commands' stages, found or made in this process."""

import gc
import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_reward_network.atomic_io import read_json, weights_fingerprint, write_json
from rl_reward_network.data.splits import Split, select
from rl_reward_network.grpo.plan import PlanArgs, RewardArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.settings import OF_LABELS, SIDE_STEPS, GRPOPlan, GRPOSettings
from rl_reward_network.inputs.config import RegionConfig
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.default import has_side_network, is_qwen_vl, is_small
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo import prompts
from rl_reward_network.ppo.settings import Mode
from rl_reward_network.reward_training.stage import (
    check_no_leak,
    find_reward_network,
    find_unfinished,
    reward_plan,
    run_reward_stage,
    run_settings,
)
from rl_reward_network.reward_training.train import PRESETS
from rl_reward_network.rewards.table import RewardName
from rl_reward_network.run import (
    AGREEMENT,
    BEST_REWARD_NET,
    FINAL,
    GRPO_RUN,
    POLICY_RUN,
    POST_RUN,
    REWARD_RUN,
    Run,
    reset_peak_memory,
)

if TYPE_CHECKING:
    from rl_reward_network.grpo.inputs import GRPOInputs

REWARD_NET = "reward_net"  # name of the run that trains the reward network
STEPS = {  # by objective, of a model of the embedded one's size without a side network; others train for epochs
    "grpo": {"quick": 60, "full": 140},
    "supervised": {"quick": 200, "full": 300},
    "mean_teacher": {"quick": 100, "full": 700},
    "dpo": {"quick": 60, "full": 130},
}
MERGED = "merged"  # in the folder of a GRPO run: the checkpoint that the comparison segments with
MERGED_FROM = "merged_from.json"  # in `MERGED`: the digest of the final model


@dataclass(frozen=True)
class Job:
    """What the training of a run starts from."""

    mode: Mode
    inputs: RunInputs  # with the seed of the run
    reward_net: Path | None  # reward network that the user names; None finds or trains one
    runs: Mapping[str, Path]  # finished runs of those before
    side_network: bool = False  # whether supervised training adds one; what is trained after it keeps it

    @property
    def network(self) -> Path:
        """Folder of the reward network."""
        return self.runs[REWARD_NET] / BEST_REWARD_NET

    @property
    def labelled(self) -> "Job":
        """The job without unlabelled images, for stages that need true masks."""
        config = replace(self.inputs.config, unlabelled_root=None)
        samples = [sample for sample in self.inputs.samples if not sample.joined]
        inputs = replace(self.inputs, config=config, samples=samples, unlabelled=None)
        return replace(self, inputs=inputs)


Train = Callable[[Job], tuple[Path, bool]]
"""Finds the newest run of these settings, resumes it or trains a new one: (its folder, whether it was finished)."""


def train_reward_net(job: Job) -> tuple[Path, bool]:
    """The reward network that the user named, or one of the preset of the mode."""
    if job.reward_net is not None:
        return named_run(job.reward_net), True
    inputs = job.labelled.inputs
    plan = reward_plan(inputs.config, job.mode)
    if folder := find_reward_network(inputs, plan, inputs.config.seed):
        return folder.parent, True
    new = Run.create(REWARD_RUN, inputs.config.output_dir, run_settings(inputs, plan))
    run = find_unfinished(inputs, plan) or new
    return _completed(job, run, lambda: run_reward_stage(inputs, plan, run))


def train_prompt_policy(job: Job, reward: RewardName = "net") -> tuple[Path, bool]:
    """A prompt policy; unlabelled images join where the reward network alone rewards it."""
    inputs = job.inputs if reward == "net" else job.labelled.inputs
    plan = prompts.policy_plan(job.mode, reward=reward, seed=inputs.config.seed)
    where = inputs.config.output_dir, prompts.run_settings(inputs, plan)
    of_network = prompts.has_network(inputs, reward_plan(inputs.config, job.mode), job.network)
    run = Run.find(POLICY_RUN, *where, also=of_network) or Run.create(plan.kind, *where)
    return _completed(job, run, lambda: prompts.run_policy_stage(inputs, plan, job.network, run))


def train_operations(job: Job) -> tuple[Path, bool]:
    """The post-processing policy of experiment 2, rewarded by labels."""
    inputs = job.labelled.inputs
    plan = prompts.post_plan(job.mode, seed=inputs.config.seed)
    where = inputs.config.output_dir, prompts.run_settings(inputs, plan)
    run = Run.find(POST_RUN, *where) or Run.create(POST_RUN, *where)
    return _completed(job, run, lambda: prompts.run_policy_stage(inputs, plan, None, run))


def train_weights(
    job: Job, settings: GRPOSettings | None = None, learned: bool = False, after: str | None = None
) -> tuple[Path, bool]:
    """Fine-tuned weights of Sa2VA.

    Args:
        settings: of the training; one that learns true masks uses as many as the reward network.
        learned: whether the reward network rewards, else labels do; unlabelled images then join, and a mean teacher's.
        after: run whose merged weights are trained further, in place of the base model.
    """
    from rl_reward_network.grpo.inputs import open_grpo_inputs  # here, since a method is deployed without a trainer
    from rl_reward_network.grpo.stage import find_grpo_run, run_grpo_stage, wanted_settings

    settings = settings or GRPOSettings()
    job = job if learned or settings.objective == "mean_teacher" else job.labelled
    config = job.inputs.config
    side = job.side_network or has_side_network(config.model_path)
    if is_small(config.model_path) or side:
        steps = SIDE_STEPS if side and settings.objective == "supervised" else STEPS[settings.objective]
        settings = replace(settings, max_steps=steps[job.mode])
    if after is not None:
        config = replace(config, model_path=str(job.runs[after] / MERGED))
    question, tiles = job.inputs.prompts[0], job.inputs.prompt_config.max_tiles
    tiles = 1 if is_qwen_vl(config.model_path) else tiles  # it has none
    inputs = open_grpo_inputs(config, RegionConfig(segment_question=question, max_dynamic_patch=tiles))
    network = None
    if learned:
        network = RewardNetwork.from_pretrained(job.network)
        check_no_leak(inputs.split, network, job.network, inputs.samples)
    plan = grpo_plan(job, inputs, settings, network)
    weights = job.inputs.segmenter.fingerprint
    if after is not None:  # as they are loaded to be trained
        weights = weights_fingerprint(load_sa2va_model(config.model_path, config.device, dtype=config.dtype)[0])
    found = find_grpo_run(inputs, plan, lambda run: weights.startswith(run.settings["model_fingerprint"]))
    run = Run(found, GRPO_RUN) if found else Run.create(GRPO_RUN, config.output_dir, wanted_settings(inputs, plan))
    return _completed(job, run, lambda: run_grpo_stage(inputs, plan, run, network=network))


def grpo_plan(job: Job, inputs: "GRPOInputs", settings: GRPOSettings, network: RewardNetwork | None) -> GRPOPlan:
    """The plan that `sa2va-rl grpo` makes of these settings; without a reward network labels reward GRPO."""
    by_labels = network is None and settings.objective == "grpo"
    rewards = RewardArgs(loop2_iou_weight=1.0 if by_labels else None)
    labels = _label_budget(job, settings.objective) if settings.objective in OF_LABELS else None
    adapters = TrainablePartsArgs(job.side_network and settings.objective == "supervised")
    args = PlanArgs(
        job.mode, inputs.config, inputs.regions, settings, rewards=rewards, max_labelled=labels, adapters=adapters
    )
    return make_plan(args, inputs, network)


def _label_budget(job: Job, objective: str) -> int:
    """The labelled images that the reward network learned from; a mean teacher must have images without masks left."""
    budget = PRESETS[job.mode].images
    if job.reward_net is not None:
        budget = int(read_json(named_run(job.reward_net) / AGREEMENT)["used"]["reward"]["images"])
    if objective != "mean_teacher":
        return budget
    first = select(job.inputs.samples, job.inputs.split, "reward")
    return max(1, min(budget, sum(sample.labelled for sample in first)))


def _completed(job: Job, run: Run, train: Callable[[], object]) -> tuple[Path, bool]:
    """The folder of a run, which is trained or resumed unless it is finished, and whether it was."""
    if run.finished:
        return run.path, True
    print(f"\n{run.line()}", flush=True)
    reset_peak_memory(job.inputs.config.device)
    train()
    free_memory(job.inputs.config.device)
    return run.path, False


def free_memory(device: str) -> None:
    """Free what nothing refers to any longer."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def named_run(reward_net: Path) -> Path:
    """The run of a reward network that the user names; a ValueError unless it is finished, for split and cost."""
    run = reward_net.resolve().parent
    if not ((run / AGREEMENT).exists() and (run / "split.json").exists()):
        raise ValueError(
            f"--reward_net {reward_net}: name the folder {BEST_REWARD_NET} of a finished run reward_net_<time>; a copy "
            "tells neither the split nor the cost of its training"
        )
    return run


def check_split(name: str, run: Path, split: Split) -> None:
    """Raise a ValueError, which names the run, if it was trained with another split of patients."""
    groups = {part: sorted(ids) for part, ids in read_json(run / "split.json")["groups"].items()}
    if groups != {part: sorted(ids) for part, ids in split.groups.items()}:
        raise ValueError(
            f"{run}: {name} was trained with another split of the patients, so its results cannot stand in one table; "
            "move the run away, or compare with the --split_seed, --fractions and data of that run"
        )


def digest(run: Path) -> str:
    """A digest of what a run has trained: another training, of the same settings too, has another."""
    if (run / BEST_REWARD_NET).exists():
        return RewardNetwork.from_pretrained(run / BEST_REWARD_NET).fingerprint
    return hashlib.sha256((run / FINAL / "config.json").read_bytes()).hexdigest()


def merge(run: Path) -> None:
    """Merge the final model of a GRPO run into `MERGED`, unless the merged one is of these weights."""
    from rl_reward_network.grpo.final_model import merge_run

    note, of = run / MERGED / MERGED_FROM, {"final_model": digest(run)}
    if not note.exists() or read_json(note) != of:
        shutil.rmtree(run / MERGED, ignore_errors=True)
        merge_run(run / FINAL, run / MERGED)
        write_json(note, of)
