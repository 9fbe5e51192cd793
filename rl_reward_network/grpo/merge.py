"""What was trained beside a model, by a GRPO run or by peft, merged into it."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.atomic_io import read_json, weights_fingerprint, whole_folder
from rl_reward_network.curves import load_checkpoint
from rl_reward_network.data.identity import copy_pictures
from rl_reward_network.grpo.card import card_text, trained_in_bits
from rl_reward_network.grpo.checkpoint import EMA_WEIGHTS, STATE
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.adapters import is_adapter, merge_adapter
from rl_reward_network.models.lora import PEFT_CONFIG, load_trainable, merge_lora
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization, bits_config
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED, TRAINABLE, located, open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, check_device, convert_weights, weight_dtype
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, check_checkpoint
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.weights import check_finite, read_tensors
from rl_reward_network.run import FINAL, GRPO_RUN, read_model_config


def merge_run(model_path: Path, output: Path, base_model: str | None = None, dtype: Dtype = "float32") -> None:
    """Write a full checkpoint, in our layout: a base model with what was trained beside it.

    Args:
        model_path: final_model folder of a GRPO run, the run, one of its checkpoints, or an adapter of peft.
        output: folder to write.
        base_model: path of the base model, if it was moved; of an adapter that does not name it.
        dtype: of the weights.

    Raises:
        ValueError: `output` exists, `model_path` holds nothing to merge, or the base is another than in training.
    """
    if output.exists():
        raise ValueError(f"output {output} exists; give a new folder")
    if is_adapter(model_path):
        base = _base_of_adapter(model_path, base_model)
        model: Any = Sa2VAForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
        merge_adapter(model, model_path)
        convert_weights(model, weight_dtype("cpu", dtype))
        return _write(model, Sa2VAProcessor.from_pretrained(base), output, located(base))
    final_model = grpo_model(model_path)
    if final_model is None:
        raise ValueError(
            f"{model_path}: neither the folder of a GRPO run nor an adapter of peft (adapter_config.json); name "
            f"outputs/sa2va_grpo_<time>/{FINAL}, which exists after sa2va-rl grpo has finished"
        )
    config = trained_config(final_model)
    path = base_model or located_model(final_model.parent, config, "--base_model")
    model, processor = load_base(path, config["settings"]["model_fingerprint"], dtype=dtype)
    if bits := config["settings"].get("quantization"):
        print(f"note: {trained_in_bits(bits)}")
    load_trained(model, final_model, config)
    merge_lora(model)
    world = config["inputs"]  # as it was trained and evaluated
    processor.max_tiles = model.config.max_tiles = world["max_dynamic_patch"]
    processor.set_image_resize(world.get("image_resize"))
    processor.region_prompt = world.get("region_prompt", processor.region_prompt)
    model.config.image_resize = processor.image_resize
    evaluation = evaluation_folder(final_model) / "eval.json"  # the card shows results of a final_model only
    results = read_json(evaluation) if final_model.name == FINAL and evaluation.exists() else None
    _write(model, processor, output, final_model, card_text(config, results, merged=True))


def _write(model: Any, processor: Sa2VAProcessor, output: Path, trained: Path, card: str = "") -> None:
    """Write the merged model, its card, and the further files of a final_model, such as notes on its training.

    Args:
        model, processor: what is written.
        output: folder to write.
        trained: final_model or checkpoint that was merged, or the base of an adapter: it names the training's images.
        card: of the model.
    """
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
    """The base model of an adapter of peft.

    Raises:
        ValueError: the adapter does not name its base model, or is of another one.
    """
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


def load_trained(model: Any, trained: Path, config: dict[str, Any]) -> None:
    """Load what a run has trained into its base model; of a mean teacher's checkpoint what the run would have kept.

    Args:
        model: the base model.
        trained: a final_model, or a checkpoint.
        config: of the run.

    Raises:
        ValueError: as `load_trainable`.
    """
    load_trainable(model, trained / TRAINABLE)
    if config["settings"]["training"]["objective"] != "mean_teacher" or not (trained / STATE).exists():
        return
    validation = load_checkpoint(trained / STATE)["validation"]
    kept, of_teacher = validation.get("peak", {}), validation.get("peak_is_teacher", False)
    if not validation.get("gold") and (trained / EMA_WEIGHTS).exists():  # nothing has been compared
        kept, of_teacher = read_tensors(trained / EMA_WEIGHTS), True
    check_finite(kept, trained / STATE)
    with torch.no_grad():
        for name, tensor in kept.items():
            model.get_parameter(name).copy_(tensor)
    print(f"{trained.name}: the weights of the {'moving average' if of_teacher else 'model'}, as in a final_model")


def grpo_model(path: Path) -> Path | None:
    """The folder with the trained weights of a GRPO run: its final_model or a checkpoint.

    Args:
        path: that folder, its part with the tensors, or the run's. For a run that was interrupted its last checkpoint
            is used, with a message.

    Returns:
        None if the path does not belong to a GRPO run.
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
    return {**read_json(folder.parent / "config.json"), "steps": steps, "minutes": minutes}


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

    Args:
        path: of the model.
        fingerprint: of the weights in training.
        device: of the model.
        dtype: of the weights; "auto" is float32 on the CPU, and on a GPU as in training.
        quantization: of the language model; None loads the unquantized weights.

    Raises:
        ValueError: the weights differ from those in training.
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
