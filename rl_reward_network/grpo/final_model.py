"""The final_model of a GRPO run: found, loaded onto its base, merged into a full checkpoint, and its model card."""

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.atomic_io import read_json, weights_fingerprint, whole_file, whole_folder
from rl_reward_network.curves import load_checkpoint
from rl_reward_network.data.identity import copy_pictures
from rl_reward_network.grpo.checkpoint import EMA_WEIGHTS, STATE
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.settings import OF_LABELS
from rl_reward_network.grpo.validation import kept_weights, notice
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.lora import PEFT_CONFIG, is_adapter, load_trainable, merge_adapter, merge_lora
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization, bits_config
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED, TRAINABLE, located, open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import (
    LORA_PART,
    TRAINED_PART,
    WHOLE_MODEL,
    Dtype,
    check_device,
    convert_weights,
    weight_dtype,
)
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, check_checkpoint
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.weights import check_finite, read_tensors
from rl_reward_network.report.before_after import label, legend
from rl_reward_network.report.statistics import Estimate, few_patients_note, rounded
from rl_reward_network.run import FINAL, GRPO_RUN, read_model_config


def grpo_model(path: Path) -> Path | None:
    """The folder with the trained weights of a GRPO run, final_model or a checkpoint; None if `path` is of no such run.

    `path` is that folder, its part with the tensors, or the run's; of an interrupted one the last checkpoint counts.
    """
    for folder in (path, path / FINAL, path.parent):
        if (folder / TRAINABLE).is_dir() and trained_config(folder).get("stage") == GRPO_RUN.stage:
            return folder
    checkpoint = get_last_checkpoint(str(path)) if path.is_dir() else None
    if checkpoint is None or trained_config(Path(checkpoint)).get("stage") != GRPO_RUN.stage:
        return None
    print(f"{path}: no {FINAL} here, the run has not ended; its last checkpoint is taken: {checkpoint}")
    return Path(checkpoint)


def trained_config(folder: Path) -> dict[str, Any]:
    """The config.json of a final_model; for a checkpoint that of its run, with steps and minutes; empty if missing."""
    if (folder / "config.json").exists():
        return read_model_config(folder / "config.json")
    if not (folder.parent / "config.json").exists() or not (folder / TRAINER_STATE_NAME).exists():
        return {}
    steps = read_json(folder / TRAINER_STATE_NAME)["global_step"]
    minutes = load_checkpoint(folder / STATE)["seconds"] / 60
    return {**read_model_config(folder.parent / "config.json"), "steps": steps, "minutes": minutes}


def evaluation_folder(trained: Path, items: int | None = None) -> Path:
    """The folder for the evaluation of a final_model or a checkpoint, on all test prompts or on this number."""
    suffix = "" if trained.name == FINAL else f"_{trained.name}"
    return trained.parent / f"evaluation{suffix}{'' if items is None else f'_{items}'}"


def load_base(
    path: str,
    fingerprint: str,
    device: str = "cpu",
    dtype: Dtype = "auto",
    quantization: Quantization | None = None,
) -> tuple[Any, Sa2VAProcessor]:
    """Base model and processor of a run, with the values of training: of a bfloat16 run rounded to that.

    `dtype` "auto" is float32 on the CPU, and on a GPU as in training. A ValueError if the weights have another
    `fingerprint` than in training.
    """
    check_device(device)
    wanted = weight_dtype(device, dtype)
    bits = None if quantization is None else bits_config(quantization)
    for trained in dict.fromkeys((wanted, torch.float32, torch.bfloat16)):
        model: Any = Sa2VAForConditionalGeneration.from_pretrained(
            path, dtype=trained, device_map=device, quantization_config=bits
        )
        if weights_fingerprint(model) == fingerprint:
            if trained != wanted and (device == "cpu" or dtype != "auto"):
                convert_weights(model, wanted)
            return model, Sa2VAProcessor.from_pretrained(path)
        del model  # before the next one is read
    raise ValueError(f"{path}: these are other weights than in training; give --base_model, the model of that run")


def load_trained(model: Any, trained: Path, config: dict[str, Any]) -> None:
    """Load what a run has trained into its base model; of a mean teacher's checkpoint what the run would have kept."""
    load_trainable(model, trained / TRAINABLE)
    if config["settings"]["training"]["objective"] != "mean_teacher" or not (trained / STATE).exists():
        return
    state = load_checkpoint(trained / STATE)
    if state.get("watch", {}).get("collapse"):
        print(f"{trained.name}: {state['watch']['collapse']}; --resume ends the run with those")
    validation = state["validation"]
    kept, of_teacher = validation.get("peak", {}), validation.get("peak_is_teacher", False)
    if not validation.get("gold") and (trained / EMA_WEIGHTS).exists():  # nothing has been compared
        kept, of_teacher = read_tensors(trained / EMA_WEIGHTS), True
    check_finite(kept, trained / STATE)
    with torch.no_grad():
        for name, tensor in kept.items():
            model.get_parameter(name).copy_(tensor)
    print(f"{trained.name}: the weights of the {'moving average' if of_teacher else 'model'}, as in a final_model")


def load_merged(
    model_path: Path, base_model: str | None = None, device: str = "cpu", dtype: Dtype = "auto"
) -> tuple[Any, Sa2VAProcessor, Path]:
    """A base model with what was trained beside it merged into it, and its processor, with the tiles of training.

    Also the folder whose files belong to it: of what was trained, or of the base of an adapter. Arguments and errors as
    `merge_run`.
    """
    if is_adapter(model_path):
        base = _base_of_adapter(model_path, base_model)
        model: Any = Sa2VAForConditionalGeneration.from_pretrained(base, dtype=torch.float32, device_map=device)
        merge_adapter(model, model_path)
        convert_weights(model, weight_dtype(device, dtype))
        return model, Sa2VAProcessor.from_pretrained(base), located(base)
    final_model = grpo_model(model_path)
    if final_model is None:
        raise ValueError(
            f"{model_path}: neither the folder of a GRPO run nor an adapter of peft (adapter_config.json); name "
            f"outputs/sa2va_grpo_<time>/{FINAL}, which exists after sa2va-rl grpo has finished"
        )
    config = trained_config(final_model)
    path = base_model or located_model(final_model.parent, config, "--base_model")
    model, processor = load_base(path, config["settings"]["model_fingerprint"], device, dtype)
    if bits := config["settings"].get("quantization"):
        print(f"note: {IN_BITS.format(bits=bits.removesuffix('bit'))}")
    load_trained(model, final_model, config)
    merge_lora(model)
    trained = config["inputs"]  # as it was trained and evaluated
    processor.max_tiles = model.config.max_tiles = trained["max_dynamic_patch"]
    processor.set_image_resize(trained.get("image_resize"))
    processor.region_prompt = trained.get("region_prompt", processor.region_prompt)
    model.config.image_resize = processor.image_resize
    return model, processor, final_model


def merge_run(model_path: Path, output: Path, base_model: str | None = None, dtype: Dtype = "float32") -> None:
    """Write a full checkpoint, in our layout: a base model with what was trained beside it.

    Args:
        model_path: final_model folder of a GRPO run, the run, one of its checkpoints, or an adapter of peft.
        base_model: path of the base model, if it was moved; of an adapter that does not name it.

    Raises:
        ValueError: `output` exists, `model_path` holds nothing to merge, or the base is another than in training.
    """
    if output.exists():
        raise ValueError(f"output {output} exists; give a new folder")
    model, processor, trained = load_merged(model_path, base_model, dtype=dtype)
    card = ""
    if not is_adapter(model_path):
        evaluation = evaluation_folder(trained) / "eval.json"  # the card shows results of a final_model only
        results = read_json(evaluation) if trained.name == FINAL and evaluation.exists() else None
        card = card_text(trained_config(trained), results, merged=True)
    _write(model, processor, output, trained, card)


def _write(model: Any, processor: Sa2VAProcessor, output: Path, trained: Path, card: str = "") -> None:
    """Write the merged model, its card, and the files of what was merged (or is the base of an adapter): `trained`."""
    with whole_folder(output) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        copy_pictures(trained, folder)
        check_checkpoint(open_checkpoint(folder))
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
        if trained.name == FINAL:  # the files of a checkpoint are its state
            for file in trained.iterdir():
                if file.is_file() and not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)


def _base_of_adapter(adapter: Path, base_model: str | None) -> str:
    """The base model of an adapter of peft; a ValueError if it names none, or another one than the user."""
    file = adapter / PEFT_CONFIG
    named = dict(read_json(file)).get("base_model_name_or_path")
    path = base_model or named
    if path is None:
        raise ValueError(f"{file}: base_model_name_or_path is not set; name the model that it is of by --base_model")
    if base_model and named and named != base_model:
        if (Path(named).is_dir() or named in EMBEDDED) and located(named).resolve() != located(base_model).resolve():
            raise ValueError(f"{file}: is of {named}, but --base_model is {base_model}; leave it out")
        print(f"note: the adapter is of {named}; names and shapes of its layers are compared with {base_model}")
    return str(path)


# ---- the model card --------------------------------------------------------------------------------------------------

NOT_EVALUATED = """Not evaluated when this was written. To do so:

```bash
sa2va-rl evaluate --model_path <run>/final_model --split test
```"""
ADAPTER = (
    "LoRA weights and the other trained tensors, in `trainable/`, for {base}.",
    "sa2va-rl merge --model_path <this folder> --output merged    # a full checkpoint",
    f"{TRAINED_PART}\n\n{LORA_PART}",
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
IN_BITS = (  # what a merged model of QLoRA loses
    "LoRA was trained beside a language model in {bits} bit, and is merged here into the weights that were not "
    "quantized: texts and masks are near those that were evaluated, not equal to them."
)
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
    what, command, python = MERGED if merged else ADAPTER
    resize = config["inputs"].get("image_resize")  # of a Qwen-VL; a merged model has it in its config.json
    python = python.format(
        base=base,
        max_tiles=config["inputs"]["max_dynamic_patch"],
        resize=f'processor.set_image_resize("{resize}")\n' if resize else "",
    )
    bits = config["settings"].get("quantization")
    control = CONTROL * config["settings"]["shuffle_rewards"]
    said = (
        config.get("collapse"),
        notice(config),
        control,
        IN_BITS.format(bits=bits.removesuffix("bit")) if merged and bits else "",
    )
    first = "".join(f"**{line}**\n\n" for line in said if line)  # what must be known before anything else
    facts = {"base": f"{base}, weights {config['settings']['model_fingerprint']}", **training_facts(config)}
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
{_metadata(config, evaluation or {"rows": ()}, merged)}
---
# {base}, fine-tuned {HOW[config["settings"]["training"]["objective"]]}

{first}
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


def _metadata(config: Mapping[str, Any], evaluation: Mapping[str, Any], merged: bool) -> str:
    """The Hub's metadata of a card as YAML: base model, library, task, tags, and the metrics of eval.json.

    A base model or data that are no hub ids are left out: their names would be links to nothing.
    """
    trained, objective = config["inputs"], config["settings"]["training"]["objective"]
    base, data = str(trained["model_path"]), str(trained.get("data_root"))
    results = [
        EvalResult(
            task_type="image-segmentation",
            dataset_type="custom",
            dataset_name=config["data"],
            dataset_split="test",
            metric_type=row["metric"],
            metric_name=label(row["metric"], evaluation["config"]["METEOR"]),
            metric_value=round(row["after"]["mean"], 4),
        )
        for row in evaluation["rows"]
        if math.isfinite(row["after"]["mean"])  # else nothing was measured by this metric
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="image-segmentation",
        base_model=base if _is_hub_id(base) else None,
        base_model_relation=("finetune" if merged else "adapter") if _is_hub_id(base) else None,
        datasets=[data] if _is_hub_id(data) else None,
        tags=["sa2va", "segmentation", objective],
        metrics=sorted({result.metric_type for result in results}) or None,
        model_name=f"{Path(base).name}, fine-tuned {HOW[objective]}" if results else None,
        eval_results=results or None,
    ).to_yaml()


def _is_hub_id(name: str) -> bool:
    """Whether a model's or data set's name is `owner/name`, and no folder."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def write_results(final_model: Path, evaluation: Path) -> None:
    """Rewrite the card of a final_model with the results in its eval.json."""
    card = card_text(trained_config(final_model), read_json(evaluation))
    with whole_file(final_model / "README.md") as temporary:
        temporary.write_text(card, encoding="utf-8")


def training_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the training that a reader of results needs, from the config.json of a final_model."""
    origin, settings = config["settings"], config["settings"]["training"]
    judge = f"none: METEOR ({config['meteor_variant']})" if config["meteor_variant"] else "none: no captions"
    not_validated = "validation" in config and config["validation"] is None
    of_teacher = not_validated and settings["objective"] == "mean_teacher"  # else validation has said it
    of_teacher = of_teacher and not config.get("collapse")
    return {
        "mode": origin["mode"],
        "objective": settings["objective"],
        "data": config["data"],
        "data fingerprint": origin["data_fingerprint"][:16],
        "rewards": _rewards(origin),
        "mask policy": "none: masks are not sampled"
        if settings["objective"] in OF_LABELS
        else settings.get("mask_policy", Sa2VAGRPOConfig.mask_policy),
        "reward network": config.get("reward_net") or "none",
        "weight of the reward network's gradient": settings.get("pathwise_weight", Sa2VAGRPOConfig.pathwise_weight),
        "caption judge": origin["judge"]["model"] if origin["judge"] else judge,
        "shuffled rewards (control)": origin["shuffle_rewards"],
        "training images or regions": config.get("images", "not recorded"),
        "true masks used in training": config.get("labels", "not recorded"),
        "steps": config["steps"],
        "weights": "the moving average, " * of_teacher + kept_weights(config),
        "learning rate": f"{settings['learning_rate']:g}",
        "LoRA": f"rank {origin['lora_r']}, alpha {origin['lora_alpha']}",
        **({"language model in training": f"in {bits}"} if (bits := origin.get("quantization")) else {}),
        "seed": origin["seed"],
        "tiles of an image": f"up to {config['inputs']['max_dynamic_patch']}",
        **{name.replace("_", " "): origin[name] for name in ("image_resize", "region_prompt") if origin.get(name)},
        "commit": config["commit"],
    }


def _rewards(origin: Mapping[str, Any]) -> str:
    """The reward terms of the trained loops with their weights."""
    settings = origin["training"]
    match settings["objective"]:
        case "dpo":
            return f"none: preferences between masks, by {settings['preferred_by']}"
        case "mean_teacher":
            return "none: true masks are learned, and those of a moving average of the model"
        case "supervised":
            return "none: true masks are learned, and reference captions where there are any"
    untrained = () if settings.get("mask_to_caption_weight", 1.0) else ("iou", "caption")  # those of loop 1
    weights = {name: value for name, value in origin["weights"].items() if value and name not in untrained}
    return ", ".join(f"{name} {value:g}" for name, value in weights.items())


def _changes(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """The verdict and the table of eval.json."""
    yield f"{evaluation['verdict']['sentence']} Means over groups of {evaluation['items']} test items, 95 % intervals."
    groups = min(row["gain"]["groups"] for row in evaluation["rows"])
    yield from few_patients_note(groups, "test groups")
    yield "\n| metric | before | after | after - before | |\n|---|---|---|---|---|"
    for row in evaluation["rows"]:
        name = label(row["metric"], evaluation["config"]["METEOR"])
        before, after, gain = (Estimate(**row[name]) for name in ("before", "after", "gain"))
        said = row.get("verdict", row.get("word"))  # the latter up to version 1.0.0rc1
        yield f"| {name} | {before} | {after} | {gain.signed} | {said} |"
    for name, pair in evaluation["totals"].items():
        old, new = (rounded(pair[when], groups) for when in ("before", "after"))
        change = rounded(pair["after"] - pair["before"], groups, "+")
        yield f"| {name}, all items together | {old} | {new} | {change} | |"
    yield f"\n{legend([row['metric'] for row in evaluation['rows']])}"
