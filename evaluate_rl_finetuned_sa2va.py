"""The evaluation, `sa2va-rl evaluate`, under the name of the original specification; works from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    from environment import launch

    launch("evaluate")
