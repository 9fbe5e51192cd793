"""The table of completions (`--log_completions`): what was sampled, with its rewards and advantages.

A part of it is printed; the whole is written as `<run>/completions/completions_<step>.parquet`, as TRL does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.table import Table

from rl_reward_network.atomic_io import whole_file
from rl_reward_network.grpo.rewards import Terms
from rl_reward_network.rewards.combine import Advantages

FOLDER = "completions"
PRINTED = 8  # completions of each loop
LONGEST = 60  # characters of a printed text


@dataclass
class SampledBatch:
    """The last micro-batch of this process whose completions were scored.

    Args:
        columns: loop -> the columns of its reward functions.
        terms: loop -> its reward terms.
        advantages: loop -> its advantages; empty until they are known.
    """

    columns: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    terms: Mapping[str, Terms] = field(default_factory=dict)
    advantages: Mapping[str, Advantages] = field(default_factory=dict)

    def rows(self, step: int) -> list[dict[str, Any]]:
        """One row for each completion: loop, prompt, completion, reference, each reward term, advantage."""
        rows: list[dict[str, Any]] = []
        for loop, columns in self.columns.items():
            terms = {name: values.reshape(-1).tolist() for name, values in self.terms[loop].values.items()}
            advantages = self.advantages[loop].values.reshape(-1).tolist()
            for index, completion in enumerate(columns["completions"]):
                rows.append(
                    {
                        **{"step": step, "loop": loop, "prompt": columns["prompts"][index], "completion": completion},
                        "reference": columns["captions"][index],
                        **{f"reward/{name}": values[index] for name, values in terms.items()},
                        "advantage": advantages[index],
                    }
                )
        return rows


def write_completions(run: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the rows to a parquet file of this step; reward terms of the other loop are null."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = run / FOLDER / f"completions_{step:05}.parquet"
    file.parent.mkdir(exist_ok=True)
    with whole_file(file) as temporary:
        Dataset.from_dict({name: [row.get(name) for row in rows] for name in names}).to_parquet(temporary)
    return file


def print_completions(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the first completions of each loop."""
    for loop in dict.fromkeys(row["loop"] for row in rows):
        own = [row for row in rows if row["loop"] == loop]
        rewards = [name for name in own[0] if name.startswith("reward/")]
        table = Table("prompt", "completion", *(name.removeprefix("reward/") for name in rewards), "advantage")
        table.title = f"step {own[0]['step']}, {loop}: {len(own)} completions"
        for row in own[:PRINTED]:
            numbers = [f"{row[name]:.3f}" for name in rewards]
            table.add_row(row["prompt"][-LONGEST:], row["completion"][:LONGEST], *numbers, f"{row['advantage']:+.2f}")
        (console or Console()).print(table)
