"""`sa2va-rl <command>`: one file of this folder for each command, imported when it is called."""

import os
import sys
from importlib import import_module

from rl_reward_network import __version__

WANTS = {  # what a user wants -> its commands
    "your images": {
        "doctor": "check packages, model, data, GPU and disk; name what is missing",
        "data": "render the embedded images; data import SOURCE: import your own",
        "segment": "segment images with a model, or with what a run has made",
        "serve": "serve a model to other programs over HTTP",
        "suggest": "suggest which images of a folder to annotate next",
    },
    "better masks": {
        "improve": "train what pays on your images, and deploy only what is better",
        "compare": "compare every method, and choose the best and the cheapest",
        "grpo": "train the weights by GRPO, or by supervision for comparison",
        "reward": "step 1: train the reward network",
        "prompts": "step 2: train the prompt policy by PPO",
        "operations": "experiment 2: train a policy that edits masks by operations",
    },
    "what came of it": {
        "evaluate": "measure a model or policy on test patients, or masks of any tool",
        "merge": "merge LoRA weights into a whole checkpoint",
        "convert": "convert a checkpoint between the official layout and ours",
        "env": "versions of packages, system and GPU, for a bug report",
    },
}
COMMANDS = {name: summary for commands in WANTS.values() for name, summary in commands.items()}
SUBCOMMANDS = {"data import": "data_import"}  # two words -> file


def main(words: list[str] | None = None, prog: str = "") -> None:
    """Run the command that the first of `words` names; `prog` in its usage line is `sa2va-rl <command>` by default."""
    try:
        try:
            _call(sys.argv[1:] if words is None else words, prog)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `sa2va-rl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
        sys.exit(1)


def _call(words: list[str], prog: str) -> None:
    if not words or words[0] in ("--help", "-h"):
        print(_overview())
    elif words[0] == "--version":
        print(__version__)
    elif words[0] in COMMANDS:
        name = command_name(words)
        from rl_reward_network.cli.app import run  # not at the top: the overview needs no tyro

        try:
            module = import_module(f"rl_reward_network.cli.{SUBCOMMANDS.get(name, name).replace('-', '_')}")
        except ValueError as error:
            if not os.environ.get("SA2VA_RL_REWARDS"):  # a file of the user, which is run then
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        flags, ignoring = words[len(name.split()) :], getattr(module, "ignore_unknown", None)
        ignored = ignoring is not None and ignoring(flags)
        run(module.main, module.Args, prog or f"sa2va-rl {name}", flags, getattr(module, "check", None), ignored)
    else:
        print(f"error: sa2va-rl {words[0]}: no such command\n\n{_overview()}", file=sys.stderr)
        sys.exit(2)


def command_name(words: list[str]) -> str:
    """The first word, or the first two where they name a command of two words."""
    name = " ".join(words[:2])
    return name if name in SUBCOMMANDS else " ".join(words[:1])


def _overview() -> str:
    parts = ["usage: sa2va-rl COMMAND [flags]"]
    for want, commands in WANTS.items():
        parts.append("\n".join([f"{want}:", *(f"  {name:<12} {summary}" for name, summary in commands.items())]))
    return "\n\n".join([*parts, "sa2va-rl COMMAND --help explains its common flags, --help-all every flag."])
