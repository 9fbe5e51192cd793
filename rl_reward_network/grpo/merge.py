"""The weights that a GRPO run has trained, merged into its base model."""

from pathlib import Path

from rl_reward_network.artefacts import read_json, whole_folder
from rl_reward_network.grpo.card import card_text
from rl_reward_network.grpo.evaluate import evaluation_folder, grpo_model, load_base, trained_config
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.lora import load_trainable, merge_lora
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import Dtype
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.runs.folder import FINAL


def merge_run(model_path: Path, output: Path, base_model: str | None = None, dtype: Dtype = "float32") -> None:
    """Write a full checkpoint, in our layout, with a model card.

    Args:
        model_path: final_model folder of a GRPO run, the run, or one of its checkpoints.
        output: folder to write.
        base_model: path of the run's Sa2VA, if it was moved.
        dtype: of the weights.

    Raises:
        ValueError: `output` exists, `model_path` is no GRPO run, or the base model has other weights than in training.
    """
    if output.exists():
        raise ValueError(f"output {output} exists; give a new folder")
    final_model = grpo_model(model_path)
    if final_model is None:
        raise ValueError(
            f"{model_path}: not the folder of a GRPO run; name outputs/sa2va_grpo_<time>/{FINAL}, which exists after "
            "sa2va-rl grpo has finished"
        )
    config = trained_config(final_model)
    path = base_model or located_model(final_model.parent, config, "--base_model")
    model, processor = load_base(path, config["origin"]["model_fingerprint"], dtype=dtype)
    load_trainable(model, final_model / "trainable")
    merge_lora(model)
    model.config.image_resize = config["world"].get("image_resize") or model.config.image_resize
    model.config.max_tiles = config["world"]["max_dynamic_patch"]  # as it was trained and evaluated
    with whole_folder(output) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        check_checkpoint(open_checkpoint(folder))
        evaluation = evaluation_folder(final_model) / "eval.json"  # the card shows results of a final_model only
        results = read_json(evaluation) if final_model.name == FINAL and evaluation.exists() else None
        (folder / "README.md").write_text(card_text(config, results, merged=True), encoding="utf-8")
