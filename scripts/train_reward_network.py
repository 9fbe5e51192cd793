"""Step 1, `sa2va-rl reward`, under the name of the original specification; works from any folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project, not this folder

from rl_reward_network.cli.main import main

if __name__ == "__main__":
    main(["reward", *sys.argv[1:]], f"python {sys.argv[0]}")
