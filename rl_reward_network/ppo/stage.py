"""What the stages of both policies share: the run's folder, what it cost, and how PPO is judged out of fold."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import PPO

from rl_reward_network.inputs.loading import RunInputs, describe_run
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.policy import save_network
from rl_reward_network.report.deployment import FOLDS, Deployment, Labels, RunCost, can_decide, out_of_fold
from rl_reward_network.run import FINAL, REWARD_NET, Run, peak_memory_gib


@dataclass(frozen=True)
class Trained:
    """What a stage has trained.

    Args:
        model: the policy.
        deployment: what is deployed.
        labels: labelled images by use, besides those of the reward network.
        facts: further entries of config.json in final_model/.
    """

    model: PPO
    deployment: Deployment
    labels: Labels
    facts: Mapping[str, Any]


def complete_run(
    run: Run,
    inputs: RunInputs,
    settings: Mapping[str, Any],
    network: RewardNetwork | None,
    facts: Mapping[str, Any],
    train: Callable[[dict[str, float]], Trained],
) -> None:
    """Begin a run or resume an interrupted one, train, and write cost.json and final_model/.

    Args:
        run: new, or interrupted.
        inputs: data, split and frozen model.
        settings: those that a run to resume must share.
        network: the reward network, of which a new run gets a copy.
        facts: further entries of config.json.
        train: is given a dict for the seconds of its phases.

    Raises:
        ValueError: the run is of another version or began with other settings, or another process works in it.
    """
    with run.lock():
        resumed = run.state != "new"
        if resumed:
            run.check_same(settings)
        else:
            if network is not None:
                network.save_pretrained(run / REWARD_NET)
            describe_run(run, inputs, dict(settings), dict(facts))
        seconds: dict[str, float] = {}
        trained = train(seconds)
        peak = peak_memory_gib(inputs.config.device)
        parameters = sum(tensor.numel() for tensor in trained.model.policy.parameters())
        RunCost(seconds, trained.labels, parameters, peak, resumed).save(run.path)
        description = {
            "deployment": asdict(trained.deployment),
            "labels": trained.labels,
            "seconds": seconds,
            "peak_memory_gib": peak,
            "resumed": resumed,
        }
        save_network(trained.model, run / FINAL, {**run.config, **description, **trained.facts})
        run.finish()


def donors(count: int, seed: int) -> list[int]:
    """For the control with shuffled rewards: for each of `count` images the index of another, each once.

    Raises:
        ValueError: there are fewer than 2 images.
    """
    if count < 2:
        raise ValueError(f"--shuffle_rewards: {count} training image, expected 2 or more; give more data")
    order = np.random.default_rng(seed).permutation(count)
    of = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
    return [of[index] for index in range(count)]


def judged_out_of_fold(
    groups: Sequence[str],
    fit: Callable[[frozenset[str], Path], PPO],
    dice: Callable[[PPO, np.ndarray], np.ndarray],
    kind: str,
) -> np.ndarray | None:
    """float64 (N,): Dice of PPO on each labelled image, fitted without its patient; None for too few patients.

    Args:
        groups: the patient of each of N images.
        fit: (patients that are held out, folder for its curves) -> a policy that has not seen them.
        dice: (policy, indices int (n,)) -> float (n,), Dice on these images.
        kind: of the `FOLDS` fits, for the output.
    """
    if not can_decide(groups):
        return None
    print(f"{FOLDS} {kind} fits of PPO decide what is deployed: each is judged on patients that it has not seen")

    def measure(patients: frozenset[str], indices: np.ndarray) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            return dice(fit(patients, Path(folder)), indices)

    return out_of_fold(groups, measure)
