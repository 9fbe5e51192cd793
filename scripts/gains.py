"""The table of `run_real.sh`: what each training gained on the same test items, its minutes and its memory."""

import sys
from pathlib import Path

from rl_reward_network.atomic_io import read_json
from rl_reward_network.report.statistics import Estimate
from rl_reward_network.report.table import Table

WAYS = {  # folder -> what it begins with, and what it is
    "supervised": "the model, supervised",
    "side_network": "the model, supervised with a side network",
    "mean_teacher": "side network, then mean teacher",
    "grpo": "side network, then GRPO rewarded by labels",
}
HEAD = ("training", "Dice before", "after", "gain [95 %]", "verdict", "minutes", "GiB")


def line(folder: Path) -> tuple[str, ...]:
    """The row of one training, from its evaluation."""
    report, cost = read_json(folder / "eval.json"), read_json(folder / "cost.json")
    (dice,) = (row for row in report["rows"] if row["metric"] == "dice")
    before, after, gain = (Estimate(**dice[name]) for name in ("before", "after", "gain"))
    minutes, memory = report["config"]["training: minutes"], cost["peak_memory_gib"]
    cells = str(before), str(after), gain.signed, dice["verdict"], minutes, "" if memory is None else f"{memory:.1f}"
    return WAYS[folder.name], *cells


def main(share: Path) -> None:
    """Write README.md into the folder that is shared, and print the table."""
    folders = [share / name for name in WAYS if (share / name / "eval.json").is_file()]
    table = Table(HEAD, tuple(map(line, folders)))
    facts = read_json(folders[0] / "eval.json")["config"]
    about = f"{facts['Sa2VA']} on {facts['data']}. Each row is tested on the same patients against what it began with."
    kept = "Numbers of items stand under pseudonyms of a public salt; there is no image, no path and no name."
    rows = [f"| {' | '.join(map(str, row))} |" for row in (table.head, ["---"] * len(HEAD), *table.lines)]
    text = "\n".join(["# What training gained", "", about, "", *rows, "", kept, ""])
    (share / "README.md").write_text(text, encoding="utf-8")
    table.show("what training gained")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
