"""Merge what a GRPO run has trained into its base model: a full checkpoint that every command here loads.

    sa2va-rl merge --model_path outputs/sa2va_grpo_<time>/final_model --output models/mine
    sa2va-rl segment image.png --model_path models/mine

The folder is in our layout, in float32, with a model card. On the CPU it answers as the run's model does, to rounding.
A GPU rounds the merged weights to bfloat16, where training kept its small steps apart in float32.
"""

from dataclasses import dataclass
from pathlib import Path

from rl_reward_network.artefacts import read_json, whole_folder
from rl_reward_network.grpo.card import card_text
from rl_reward_network.grpo.evaluate import evaluation_folder, grpo_model, load_base, trained_config
from rl_reward_network.inputs.saved import located_model
from rl_reward_network.models.lora import load_trainable, merge_lora
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint
from rl_reward_network.runs.folder import FINAL


@dataclass(frozen=True)
class Args:
    """Merge what a GRPO run has trained into its base model."""

    model_path: Path
    """The run's final_model folder, the run, or one of its checkpoints."""
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
            "there when sa2va-rl grpo has finished"
        )
    config = trained_config(final)
    path = args.base_model or located_model(final.parent, config, "--base_model")
    model, processor = load_base(path, config["origin"]["model_fingerprint"])
    load_trainable(model, final / "trainable")
    merge_lora(model)
    model.config.max_tiles = config["world"]["max_dynamic_patch"]  # as it was trained and evaluated
    evaluation = evaluation_folder(final) / "eval.json"
    with whole_folder(args.output) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        check_checkpoint(open_checkpoint(folder))
        measured = final.name == FINAL and evaluation.exists()  # not of a checkpoint
        card = card_text(config, read_json(evaluation) if measured else None, merged=True)
        (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"merged model: {args.output}")
