"""Step 2 as a whole: score the frozen model's masks, train the prompt policy, keep the tables it was trained on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.evaluation.metrics import SampleTable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.training.prompt_ppo import PromptPPOConfig, train_prompt_policy
from rl_reward_network.training.reward_stage import check_no_leak
from rl_reward_network.training.run_folder import describe_run
from rl_reward_network.training.world import PromptTable, World, prompt_tables


@dataclass(frozen=True)
class PolicyPreset:
    """One of the two modes of step 2.

    Args:
        images: training images of the policy.
        val_images: images whose result is logged and that tell whether there is a gap to close.
        ppo: settings of PPO.
    """

    images: int
    val_images: int
    ppo: PromptPPOConfig


PRESETS = {
    "quick": PolicyPreset(images=20, val_images=20, ppo=PromptPPOConfig(total_timesteps=2000, n_envs=2)),
    "full": PolicyPreset(images=100, val_images=100, ppo=PromptPPOConfig(total_timesteps=10000, n_envs=4)),
}


def run_policy_stage(world: World, mode: str, reward_net: Path, ppo: PromptPPOConfig, run: Path) -> None:
    """Train the prompt policy in `run`.

    Writes final_model/, tables.json (what the policy learned from), config.json, split.json, metrics.jsonl and logs/.

    Raises:
        ValueError: the reward network is missing, damaged, or has seen the policy's, val or test patients.
    """
    network = RewardNetwork.from_pretrained(reward_net)
    check_no_leak(world, network, reward_net)
    train_samples = world.pick("policy", PRESETS[mode].images)
    val_samples = world.pick("val", PRESETS[mode].val_images)
    stage = {
        "stage": "prompt policy",
        "mode": mode,
        "reward_net": str(reward_net.resolve()),
        "reward_net_fingerprint": network.fingerprint,
        "reward_net_info": {key: network.training_info.get(key) for key in ("mode", "data_fingerprint", "seed")},
    }
    config = describe_run(run, world, stage)
    train = prompt_tables(world, train_samples, network.to(world.config.device), "policy patients")
    val = prompt_tables(world, val_samples, network, "val patients")
    save_tables(run / "tables.json", {"policy": train, "val": val})
    contexts = [[entry.context for entry in entries] for entries in (train, val)]
    train_prompt_policy(contexts[0], contexts[1], world.prompts, replace(ppo, seed=world.config.seed), run, config)


def save_tables(path: Path, tables: dict[str, list[PromptTable]]) -> None:
    """Scores and metrics of every prompt on every image, by split; ids are hashes."""
    write_json(path, {name: [_table_to_json(entry.table) for entry in entries] for name, entries in tables.items()})


def load_tables(path: Path) -> dict[str, list[SampleTable]]:
    """What `save_tables` wrote.

    Raises:
        ValueError: the file is missing or not of this form.
    """
    try:
        return {name: [_table_from_json(entry) for entry in entries] for name, entries in read_json(path).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of scores ({error!r}); run step 2 again") from error


def _table_to_json(table: SampleTable) -> dict[str, Any]:
    metrics = {name: values.tolist() for name, values in table.metrics.items()} if table.metrics else None
    return {
        "sample_id": table.sample_id,
        "group_id": table.group_id,
        "scores": table.scores.tolist(),
        "metrics": metrics,
    }


def _table_from_json(entry: dict[str, Any]) -> SampleTable:
    metrics = entry["metrics"]
    return SampleTable(
        entry["sample_id"],
        entry["group_id"],
        np.array(entry["scores"], dtype=np.float32),
        {name: np.array(values) for name, values in metrics.items()} if metrics else None,
    )
