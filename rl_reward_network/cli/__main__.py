"""`python -m rl_reward_network.cli` is `sa2va-rl`."""

import sys

from rl_reward_network.cli.main import command_name, main

main(prog=f"python -m rl_reward_network.cli {command_name(sys.argv[1:])}".strip())
