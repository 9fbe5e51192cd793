"""`python -m rl_reward_network.cli` is `sa2va-rl`."""

import sys

from rl_reward_network.cli.main import main

main(prog=" ".join(["python -m rl_reward_network.cli", *sys.argv[1:2]]))
