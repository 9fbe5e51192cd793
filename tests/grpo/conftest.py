"""One finished GRPO run of a session, and the same run interrupted and resumed."""

import shutil
from pathlib import Path

import pytest

from rl_reward_network.grpo.inputs import GRPOInputs
from tests.grpo.nano import PLAN, scenes, train


@pytest.fixture(scope="session")
def grpo_inputs(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    """Eight scenes; do not write into their folder."""
    return scenes(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="session")
def grpo_run(grpo_inputs: GRPOInputs) -> Path:
    """A finished run of two large steps, so that the model differs from its base."""
    return train(grpo_inputs, PLAN, grpo_inputs.config.output_dir / "sa2va_grpo_1")


@pytest.fixture(scope="session")
def resumed_run(grpo_inputs: GRPOInputs, grpo_run: Path) -> Path:
    """That run, interrupted in a line of its second step, and resumed from its first."""
    again = grpo_inputs.config.output_dir / "sa2va_grpo_2"
    shutil.copytree(grpo_run, again, ignore=shutil.ignore_patterns("checkpoint-2", "final_model", "done.json", "eval*"))
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loop1/reward')
    return train(grpo_inputs, PLAN, again)
