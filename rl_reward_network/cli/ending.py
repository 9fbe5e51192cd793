"""The last lines of a command that trains or evaluates."""

import shlex
import sys
from pathlib import Path

UNCHANGED = (
    "No weight of Sa2VA was changed. What trains weights: bash run_rl_train.sh full (GRPO; with "
    "--objective supervised --side_network on masks), or sa2va-rl adapt full where few images have masks"
)


def show_ending(line: str, output_dir: Path, frozen: bool = False) -> None:
    """Print where the result is, and the command that shows the curves of all runs, in a fresh shell, too.

    Args:
        line: what was made, and its path.
        output_dir: parent of the run folders.
        frozen: also say that Sa2VA itself is as it was.
    """
    tensorboard = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(output_dir), "--port", "6009"])
    print("\n" + "\n".join([*([UNCHANGED] if frozen else []), f"curves of all runs: {tensorboard}", line]))
