"""One process of the distributed tests: trains two steps, and writes what it ended with.

    python -m torch.distributed.run --standalone --nproc_per_node 2 tests/grpo_rank.py FOLDER '{"learning_rate": 1e-3}'
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from grpo_nano import regions, trainer
from safetensors.torch import save_file

from rl_reward_network.models.ema import copied


def train(folder: Path, **settings: Any) -> None:
    """Weights, partner and logs of this rank; checkpoints of all ranks go to one folder."""
    rank = os.environ.get("RANK", "0")
    own = trainer(folder / "run", regions(4), save_strategy="steps", save_steps=1, **settings)
    own.train()
    assert own.ema is not None
    save_file(copied(own.sa2va), folder / f"weights_{rank}.safetensors")
    save_file(own.ema.weights, folder / f"ema_{rank}.safetensors")
    seen = {"ranks": own.args.world_size, "wrapped": type(own.model_wrapped).__name__, "saves": own.args.should_save}
    logs = [line for line in own.state.log_history if "total_loss" in line]
    (folder / f"logs_{rank}.json").write_text(json.dumps({**seen, "logs": logs, "spread": own.maker.controller.spread}))


if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
