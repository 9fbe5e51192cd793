"""Make small runs of every kind by the version that is checked out, for the tests of later versions.

    PYTHONPATH=. python tests/old_runs.py tests/fixtures/run_0_6

The folder holds the data, too: encoders of images change, and with them the fingerprints of rendered files.
"""

import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rl_reward_network.cli import grpo as train_sa2va_rl
from rl_reward_network.cli import prompts as finetune_sa2va_with_rl
from rl_reward_network.cli import reward as train_reward_network
from rl_reward_network.cli.grpo_flags import LoRAArgs
from rl_reward_network.embedded.regions import LAMPLIGHT, write_regions
from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.reward_training import stage as reward_stage
from rl_reward_network.reward_training.stage import reward_plan
from tests.conftest import write_tiny_data

GRPO: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_mask_generations": 2,
    "max_steps": 4,
    "save_steps": 2,
    "max_completion_length": 16,
    "mask_policy": "gaussian",  # trains no mask decoder, which would be most of the file
}
STEPS = 8  # of step 1


class Killed(Exception):
    """Stands for a process that is gone."""


def grpo_args(folder: Path, **changed: Any) -> train_sa2va_rl.Args:
    """Of a GRPO run of seconds on `folder`/scenes."""
    inputs = RunConfig(data_root=folder / "scenes", output_dir=folder / "runs", gpu=-1)
    settings, lora = GRPOSettings(**GRPO), LoRAArgs(lora_r=1)
    return train_sa2va_rl.Args(mode="quick", inputs=inputs, grpo=settings, lora=lora, watch_every=0, **changed)


def step_1_args(folder: Path, **changed: Any) -> train_reward_network.Args:
    """Of a run of step 1 on `folder`/tubes."""
    inputs = RunConfig(data_root=folder / "tubes", output_dir=folder / "runs", gpu=-1)
    return train_reward_network.Args(mode="quick", inputs=inputs, steps=STEPS, **changed)


def step_2_args(folder: Path, **changed: Any) -> finetune_sa2va_with_rl.Args:
    """Of a run of step 2 there, on the reward network of a finished step 1."""
    inputs = RunConfig(data_root=folder / "tubes", output_dir=folder / "runs", gpu=-1)
    ppo = PPOSettings(total_timesteps=64)
    return finetune_sa2va_with_rl.Args(mode="quick", inputs=inputs, ppo=ppo, reward_steps=STEPS, **changed)


def small_plan(*args: Any, **kwargs: Any) -> Any:
    """The plan of step 1 with U-Nets of a few kilobytes."""
    plan = reward_plan(*args, **kwargs)
    return plan._replace(network=replace(plan.network, channels=(4, 8), packing=2))


def killed_after(save: Callable[..., None]) -> Callable[..., None]:
    """A way to save a checkpoint that ends the process."""

    def save_and_die(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        raise Killed

    return save_and_die


def cut_off(where: str, call: Callable[[], None]) -> None:
    """Run until `where`, the function of a module that saves checkpoints, has saved its first."""
    module, name = where.rsplit(".", 1)
    with patch(where, killed_after(getattr(sys.modules[module], name))):
        try:
            call()
        except Killed:
            return
    raise AssertionError(f"{where} was never called")


def make(folder: Path) -> None:
    """Data, and in runs/ one finished and one cut-off run of each kind."""
    runs, ours = folder / "runs", "rl_reward_network"
    write_tiny_data(folder / "tubes", images=12, size=48)
    write_regions(folder / "scenes", 6, 3, side=96, light=LAMPLIGHT)
    train_sa2va_rl.main(grpo_args(folder, run_folder=runs / "sa2va_grpo_finished"))
    cut = grpo_args(folder, run_folder=runs / "sa2va_grpo_cut_off")
    cut_off(f"{ours}.grpo.trainer.save_run_state", lambda: train_sa2va_rl.main(cut))
    patch.object(reward_stage, "reward_plan", small_plan).start()
    finetune_sa2va_with_rl.main(step_2_args(folder, run_folder=runs / "sa2va_rl_finetune_finished"))
    cut_2 = step_2_args(folder, run_folder=runs / "sa2va_rl_finetune_cut_off")
    cut_off(f"{ours}.ppo.stage.save_tables", lambda: finetune_sa2va_with_rl.main(cut_2))
    cut_off(f"{ours}.reward_training.train.save_checkpoint", lambda: train_reward_network.main(step_1_args(folder)))
    for path in runs.glob("reward_net_2*"):
        path.rename(runs / f"reward_net_{'finished' if (path / 'agreement.json').exists() else 'cut_off'}")
    make_small(runs)


def make_small(runs: Path) -> None:
    """Drop what nobody reads of a finished run, and of a cut-off one what only the same version goes on with."""
    for pattern in ("mask_bank", "*/logs", "*/sheet.png", "*_finished/checkpoint*", "*/checkpoint-*/optimizer.pt"):
        for path in (*runs.glob(pattern), *runs.glob("*/checkpoint-*/ema.*"), *runs.glob("*finetune*/checkpoint.pt")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in runs.glob("*/final_model/policy.zip"):
        with zipfile.ZipFile(path) as whole:
            kept = {name: whole.read(name) for name in whole.namelist() if "optimizer" not in name}
        with zipfile.ZipFile(path, "w") as small:
            for name, data in kept.items():
                small.writestr(name, data)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
