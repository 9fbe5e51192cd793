"""Model cards of GRPO and of supervised runs: base model, training, results, and how to load the folder."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from rl_reward_network.atomic_io import read_json, whole_file
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.settings import OF_LABELS
from rl_reward_network.grpo.validation import kept_weights, notice
from rl_reward_network.models.sa2va.loading_sa2va import LORA_PART, TRAINED_PART, WHOLE_MODEL
from rl_reward_network.report.before_after import label, legend
from rl_reward_network.report.statistics import Estimate, few_patients_note

NOT_EVALUATED = """Not evaluated when this was written. To do so:

```bash
sa2va-rl evaluate --model_path <run>/final_model --split test
```"""
ADAPTER = (
    "LoRA weights and the other trained tensors, in `trainable/`, for {base}.",
    "sa2va-rl merge --model_path <this folder> --output merged    # a full checkpoint",
    TRAINED_PART,
)
MERGED = (
    "A full Sa2VA checkpoint: {base} with merged LoRA and the other trained tensors.",
    "sa2va-rl segment image.png --model_path <this folder>",
    WHOLE_MODEL,
)
HOW = {
    "grpo": "by GRPO, reinforcement learning",
    "supervised": "on true masks, supervised",
    "mean_teacher": "on true masks and a mean teacher's",
    "dpo": "by DPO, preferences between masks",
}
OF_QWEN_VL = ("image_resize", "region_prompt")  # settings, recorded where they are not the default
CONTROL = "A control run: its rewards were shuffled at random, so it cannot have learned the task."


def card_text(config: Mapping[str, Any], evaluation: Mapping[str, Any] | None = None, merged: bool = False) -> str:
    """The card in Markdown.

    Args:
        config: of the run's final_model.
        evaluation: its eval.json, if there is one.
        merged: True for a full checkpoint, False for the trained tensors alone.
    """
    base = config["inputs"]["model_path"]  # a hub id, an embedded model's name, or a folder
    base = Path(base).name if base.startswith((".", "/")) else base  # a card must not contain local paths
    objective = config["settings"]["training"]["objective"]
    what, command, python = MERGED if merged else ADAPTER
    if not merged:
        python = f"{python}\n\n{LORA_PART}"
    resize = config["inputs"].get("image_resize")  # of a Qwen-VL; a merged model has it in its config.json
    python = python.format(
        base=base,
        max_tiles=config["inputs"]["max_dynamic_patch"],
        resize=f'processor.set_image_resize("{resize}")\n' if resize else "",
    )
    facts = {"base": f"{base}, weights {config['settings']['model_fingerprint']}", **training_facts(config)}
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
{metadata(config, evaluation, merged)}
---
# {base}, fine-tuned {HOW[objective]}

{_first_lines(config, merged)}
{what.format(base=base)}

| | |
|---|---|
{table}

## Before and after

{chr(10).join(_changes(evaluation)) if evaluation else NOT_EVALUATED}

## Use

```bash
{command}
```

{python}

## Licence

These weights are derived from {base} and remain under its licence; the training data may have conditions of its own.
Read both before you share the weights. This model is not fit for diagnosis.
"""


def metadata(config: Mapping[str, Any], evaluation: Mapping[str, Any] | None, merged: bool) -> str:
    """The Hub's metadata of a card as YAML: base model, library, task, tags, and the metrics of eval.json.

    A base model or data that are no hub ids are left out: their names would be links to nothing.
    """
    world, objective = config["inputs"], config["settings"]["training"]["objective"]
    base, data = str(world["model_path"]), str(world.get("data_root"))
    name = f"{Path(base).name}, fine-tuned {HOW[objective]}"
    results = list(_eval_results(config, evaluation)) if evaluation else None
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="image-segmentation",
        base_model=base if _is_hub_id(base) else None,
        base_model_relation=("finetune" if merged else "adapter") if _is_hub_id(base) else None,
        datasets=[data] if _is_hub_id(data) else None,
        tags=["sa2va", "segmentation", objective],
        metrics=sorted({result.metric_type for result in results}) if results else None,
        model_name=name if results else None,
        eval_results=results,
    ).to_yaml()


def _eval_results(config: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Iterator[EvalResult]:
    """The means after training on the test split."""
    for row in evaluation["rows"]:
        if not math.isfinite(row["after"]["mean"]):  # of a metric that nothing was measured by
            continue
        name = label(row["metric"], evaluation["config"]["METEOR"])
        yield EvalResult(
            task_type="image-segmentation",
            dataset_type="custom",
            dataset_name=config["data"],
            dataset_split="test",
            metric_type=row["metric"],
            metric_name=name,
            metric_value=round(row["after"]["mean"], 4),
        )


def _is_hub_id(name: str) -> bool:
    """Whether a model's or data set's name is `owner/name`, and no folder."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def trained_in_bits(quantization: str) -> str:
    """What a merged model of QLoRA loses."""
    return (
        f"LoRA was trained beside a language model in {quantization.removesuffix('bit')} bit, and is merged here into "
        "the weights that were not quantized: texts and masks are near those that were evaluated, not equal to them."
    )


def _first_lines(config: Mapping[str, Any], merged: bool) -> str:
    """What must be known before anything else, in bold; empty for most runs."""
    bits = config["settings"].get("quantization")
    lines = (
        notice(config),
        CONTROL if config["settings"]["shuffle_rewards"] else "",
        trained_in_bits(bits) if merged and bits else "",
    )
    return "".join(f"**{line}**\n\n" for line in lines if line)


def write_results(final_model: Path, evaluation: Path) -> None:
    """Rewrite the card of a final_model with the results in its eval.json."""
    card = card_text(read_json(final_model / "config.json"), read_json(evaluation))
    with whole_file(final_model / "README.md") as temporary:
        temporary.write_text(card, encoding="utf-8")


def training_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the training that a reader of results needs, from the config.json of a final_model."""
    origin, settings = config["settings"], config["settings"]["training"]
    judge = f"none: METEOR ({config['meteor_variant']})" if config["meteor_variant"] else "none: no captions"
    return {
        "mode": origin["mode"],
        "objective": settings["objective"],
        "data": config["data"],
        "data fingerprint": origin["data_fingerprint"][:16],
        "rewards": _rewards(origin),
        "mask policy": _mask_policy(settings),
        "reward network": config.get("reward_net") or "none",
        "weight of the reward network's gradient": settings.get("pathwise_weight", Sa2VAGRPOConfig.pathwise_weight),
        "caption judge": origin["judge"]["model"] if origin["judge"] else judge,
        "shuffled rewards (control)": origin["shuffle_rewards"],
        "training images or regions": config.get("images", "not recorded"),
        "true masks used in training": config.get("labels", "not recorded"),
        "steps": config["steps"],
        "weights": _whose(config) + kept_weights(config),
        "learning rate": f"{settings['learning_rate']:g}",
        "LoRA": f"rank {origin['lora_r']}, alpha {origin['lora_alpha']}",
        **({"language model in training": f"in {bits}"} if (bits := origin.get("quantization")) else {}),
        "seed": origin["seed"],
        "tiles of an image": f"up to {config['inputs']['max_dynamic_patch']}",
        **{name.replace("_", " "): origin[name] for name in OF_QWEN_VL if origin.get(name)},
        "commit": config["commit"],
    }


def _whose(config: Mapping[str, Any]) -> str:
    """Whose weights they are where validation has not said: a mean teacher's."""
    not_validated = "validation" in config and config["validation"] is None
    return "the moving average, " * (not_validated and config["settings"]["training"]["objective"] == "mean_teacher")


def _mask_policy(settings: Mapping[str, Any]) -> str:
    """What loop 2 samples."""
    if settings["objective"] in OF_LABELS:
        return "none: masks are not sampled"
    return str(settings.get("mask_policy", Sa2VAGRPOConfig.mask_policy))


def _rewards(origin: Mapping[str, Any]) -> str:
    """The reward terms of the trained loops with their weights."""
    settings = origin["training"]
    if settings["objective"] == "dpo":
        return f"none: preferences between masks, by {settings['preferred_by']}"
    if settings["objective"] == "mean_teacher":
        return "none: true masks are learned, and those of a moving average of the model"
    if settings["objective"] == "supervised":
        return "none: true masks are learned, and reference captions where there are any"
    untrained = () if settings.get("mask_to_caption_weight", 1.0) else ("iou", "caption")  # those of loop 1
    weights = {name: value for name, value in origin["weights"].items() if value and name not in untrained}
    return ", ".join(f"{name} {value:g}" for name, value in weights.items())


def _changes(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """The verdict and the table of eval.json."""
    yield f"{evaluation['verdict']['sentence']} Means over groups of {evaluation['items']} test items, 95 % intervals."
    yield from few_patients_note(min(row["gain"]["groups"] for row in evaluation["rows"]), "test groups")
    yield "\n| metric | before | after | after - before | |\n|---|---|---|---|---|"
    for row in evaluation["rows"]:
        name = label(row["metric"], evaluation["config"]["METEOR"])
        before, after, gain = (Estimate(**row[name]) for name in ("before", "after", "gain"))
        yield f"| {name} | {before} | {after} | {gain.signed} | {row['verdict']} |"
    for name, pair in evaluation["totals"].items():
        change = f"{pair['after'] - pair['before']:+.3f}"
        yield f"| {name}, all items together | {pair['before']:.3f} | {pair['after']:.3f} | {change} | |"
    yield f"\n{legend([row['metric'] for row in evaluation['rows']])}"
