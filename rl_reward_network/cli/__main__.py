"""`python -m rl_reward_network.cli` is `sa2va-rl`."""

from rl_reward_network.cli.main import main

main()
