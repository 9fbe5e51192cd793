"""Merge what a GRPO run has trained into its base model: a full checkpoint that every command here loads.

    python -m scripts.merge_lora --model_path outputs/sa2va_grpo_<time>/final_model --output models/mine
    python -m scripts.segment image.png --model_path models/mine

The folder is in our layout, in float32, with a model card. On the CPU it answers as the run's model does, to rounding.
A GPU rounds the merged weights to bfloat16, where training kept its small steps apart in float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_reward_network.artefacts import read_json, whole_folder
from rl_reward_network.evaluation.before_after import LEGEND, label
from rl_reward_network.evaluation.bootstrap import Estimate
from rl_reward_network.models.lora import load_trainable, merge_lora
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.training.grpo.evaluation import grpo_model, load_base, training_facts
from rl_reward_network.training.grpo.stage import FINAL
from rl_reward_network.training.run_folder import located_model
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Merge what a GRPO run has trained into its base model."""

    model_path: Path
    """The run's final_model folder."""
    output: Path
    """Folder to write; must not exist."""
    base_model: str | None = None
    """Where the run's Sa2VA is now, if not where it was."""


def main(args: Args) -> None:
    """Load the base, add what was trained, merge, write."""
    if args.output.exists():
        raise ValueError(f"output {args.output} exists; give a new folder")
    final = grpo_model(args.model_path)
    if final is None:
        raise ValueError(
            f"{args.model_path}: not what a GRPO run has trained; name outputs/sa2va_grpo_<time>/{FINAL}, which is "
            "there when scripts.train_sa2va_rl has finished"
        )
    config = read_json(final / "config.json")
    path = args.base_model or located_model(final.parent, config, "--base_model")
    model, processor = load_base(path, config["origin"]["model_fingerprint"])
    load_trainable(model, final / "trainable")
    merge_lora(model)
    model.config.max_tiles = config["world"]["max_dynamic_patch"]  # as it was trained and evaluated
    evaluation = final.parent / "evaluation" / "eval.json"
    with whole_folder(args.output) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        check_checkpoint(open_checkpoint(folder))
        card = card_text(config, read_json(evaluation) if evaluation.exists() else None)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"merged model: {args.output}")


def card_text(config: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    """The model card in Markdown.

    Args:
        config: of the run's final_model.
        evaluation: its eval.json, if there is one.
    """
    origin, base = config["origin"], _base_name(config["world"]["model_path"])
    control = "**A control run: its rewards were dealt out at random, so it has learned nothing.**\n\n"
    facts = {"base": f"{base}, weights {origin['model_fingerprint']}", **training_facts(config)}
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    changes = "\n".join(_changes(evaluation)) if evaluation else NOT_EVALUATED
    return f"""---
library_name: transformers
tags: [sa2va, segmentation, grpo]
---
# {base}, fine-tuned by GRPO

{control if origin["shuffle_rewards"] else ""}A full Sa2VA checkpoint: LoRA and all else that reinforcement learning has
trained, merged into {base}.

| | |
|---|---|
{table}

## Before and after

{changes}

## Use

```bash
python -m scripts.segment image.png --model_path <this folder>
```

## Licence

These weights are a work derived from {base} and stay under its licence; the data they were trained on may have
conditions of their own. Read both before you pass them on. Nothing here is fit for diagnosis.
"""


NOT_EVALUATED = """Not evaluated when this was written. To do so:

```bash
python -m scripts.evaluate_rl_finetuned_sa2va --model_path <run>/final_model --split test
```"""


def _base_name(model_path: str) -> str:
    """A hub id or an embedded model's name; of a folder its last part, for no path may leave this machine."""
    return Path(model_path).name if model_path.startswith((".", "/")) else model_path


def _changes(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """The verdict and the table of eval.json."""
    yield f"{evaluation['verdict']['sentence']} Means over groups of {evaluation['items']} test items, 95 % intervals."
    yield "\n| metric | before | after | after - before | |\n|---|---|---|---|---|"
    for row in evaluation["rows"]:
        name = label(row["metric"], evaluation["config"]["METEOR"])
        before, after, gain = (Estimate(**row[name]) for name in ("before", "after", "gain"))
        yield f"| {name} | {before} | {after} | {gain.signed} | {row['word']} |"
    for name, pair in evaluation["totals"].items():
        change = f"{pair['after'] - pair['before']:+.3f}"
        yield f"| {name}, all items together | {pair['before']:.3f} | {pair['after']:.3f} | {change} | |"
    yield f"\n{LEGEND}"


if __name__ == "__main__":
    run(main, Args)
