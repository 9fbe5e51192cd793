"""What the reports repeat about imported data."""

from pathlib import Path

from rl_reward_network.artefacts import read_json
from rl_reward_network.data_import.groups import NONE

IMPORT_FILE = "import.json"  # beside the annotations of imported data
FORMAT_VERSION = 2  # 2: names of patients are hashed in one spelling


def import_notes(data_root: Path) -> tuple[str, ...]:
    """A warning where the groups of imported data are not known; () for all other data.

    Raises:
        ValueError: import.json is damaged or of another version.
    """
    path = data_root / IMPORT_FILE
    if not path.is_file():
        return ()
    origin = read_json(path)
    if not isinstance(origin, dict) or origin.get("format_version") not in (1, FORMAT_VERSION):
        raise ValueError(f"{path}: expected format_version 1 or {FORMAT_VERSION}; import the data again")
    if origin["groups"] != NONE:
        return ()
    pairs = f", and {origin['suspected_leaks']} pairs look nearly identical" * bool(origin["suspected_leaks"])
    return (
        f"Possible leak: the data were imported with --groups none, so each image is a group of its own{pairs}; images"
        " of one patient may be in training and test, and intervals may be too narrow.",
    )
