"""Which packages a Python lacks, and the launchers' way into one that has them; runs in any Python from 3.8 on.

    python -I scripts/environment.py [EXTRAS]     # e.g. "[test,docs]": prints what is lacking, one a line

The shell files use an active environment only where nothing is lacking, so that none of its packages changes.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / ".venv"


def lacking(extras: str = "") -> list[str]:
    """What requirements.txt asks for, and what those packages ask for in turn, that is missing or of another version.

    Args:
        extras: of pyproject.toml, as pip takes them: "[test,docs]" or "".
    """
    try:
        from packaging.requirements import Requirement  # comes with a dozen of them
    except ImportError:
        return ["packaging"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for name in filter(None, extras.strip("[]").split(",")):
        import tomllib  # from 3.11 on

        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines += project["optional-dependencies"][name]
    wanted = [Requirement(line) for line in (line.partition(" #")[0].strip() for line in lines) if line[:1] not in "#"]
    found, known = [], set()
    for requirement in wanted:  # which grows
        if str(requirement) in known:
            continue
        known.add(str(requirement))
        try:
            package = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            found.append(str(requirement))
            continue
        if not requirement.specifier.contains(package.version, prereleases=True):
            found.append(f"{requirement} (version {package.version} is there)")
        for inner in map(Requirement, package.requires or ()):
            marker, inner.marker = inner.marker, None
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                wanted.append(inner)
    return found


def launch(command: str) -> None:
    """Run a command of sa2va-rl in this Python, or in that of .venv where this one lacks packages."""
    wrong, own = lacking(), OWN / "bin" / "python"
    if wrong and own.exists() and Path(sys.executable) != own:
        os.execv(own, [str(own), *sys.argv])
    if wrong:
        first = f"{wrong[0]}{f' and {len(wrong) - 1} more' if wrong[1:] else ''}"
        sys.exit(f"error: {sys.executable} lacks {first}; `bash {ROOT}/scripts/install.sh` installs all into {OWN}")
    sys.path[0] = str(ROOT)  # the project, not the folder of the launcher
    from rl_reward_network.cli.main import main

    main([command, *sys.argv[1:]], f"python {sys.argv[0]}")


if __name__ == "__main__":
    print("\n".join(lacking(*sys.argv[1:])))
