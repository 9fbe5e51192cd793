"""A GRPO run as a whole: open, begin or check, train, save."""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.atomic_io import (
    NAMES_ALONE,
    PICTURES,
    load_arrays,
    read_json,
    save_arrays,
    weights_fingerprint,
    whole_folder,
    write_json,
)
from rl_reward_network.data.identity import copy_pictures, thumbnail, together
from rl_reward_network.data.splits import Split, save_split, select
from rl_reward_network.flags import changed
from rl_reward_network.grpo.checkpoint import any_rank
from rl_reward_network.grpo.collapse import TeacherWatch
from rl_reward_network.grpo.final_model import card_text
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import (
    GRPOInputs,
    check_foreground,
    check_prompts,
    count_images,
    judged_prompts,
    labelled_prompts,
    validation_prompts,
    within_budget,
)
from rl_reward_network.grpo.logs import GRPOLogs, untaught_line
from rl_reward_network.grpo.losses import PathwiseReward
from rl_reward_network.grpo.policy import check_movement, digests, prepare_model, unmoved_reasons
from rl_reward_network.grpo.preferences import PairMaker
from rl_reward_network.grpo.prompts import TrainingItem, without_masks
from rl_reward_network.grpo.rewards import LoopRewards, loop_rewards
from rl_reward_network.grpo.settings import OF_LABELS, GRPOPlan, GRPOSettings
from rl_reward_network.grpo.trainer import SMALLER_LOSS, TILES, Sa2VAGRPOTrainer, fit_batch, hint_out_of_memory
from rl_reward_network.grpo.validation import LOOKS, Outcome, ValidationCallback
from rl_reward_network.inputs.loading import portable_settings
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.lora import parameter_table, save_trainable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import TRAINABLE
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model, weight_dtype
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.side_network import side_network_config
from rl_reward_network.report.deployment import RunCost
from rl_reward_network.reward_training.stage import named
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.learned import DomainCheck, ForegroundMaps
from rl_reward_network.rewards.metrics import meteor_variant
from rl_reward_network.rewards.table import MASK_REWARDS, own_fingerprint
from rl_reward_network.run import FINAL, GRPO_RUN, REWARD_NET, Run, peak_memory_gib

FLASH = "flash_attention_2"
AS_SUPERVISED = "frozen, as in Sa2VA's supervised fine-tuning"
BEHIND_SEG = (
    "no loss of this run goes past the [SEG] embedding; --mask_policy bernoulli, the gradient of a reward network "
    "(--pathwise_weight) and --objective supervised do"
)
WHY_FROZEN = dict.fromkeys(("SAM 2 prompt encoder", "SAM 2 mask decoder", "side network"), BEHIND_SEG)
WHY_FROZEN |= {"language model": "LoRA trains in its place", "SAM 2 memory": "for video alone"}
ALIKE = {
    "grpo": "the rewards of every group were all alike",
    "dpo": "no two masks of an image differed by more than the noise of --preferred_by; prefer by something else",
}
SHARED = "seed max_dynamic_patch quantization use_flash_attn bit_depth describe_question segment_question"
VALIDATIONS = 4  # at least, in a run of epochs
ONLY_SCORES = "no loss of this run asks the reward network: it scores the validation items alone (val/score)"
PROBED = 4  # prompts on which unreached tensors are found


def run_grpo_stage(
    inputs: GRPOInputs,
    plan: GRPOPlan,
    run: Run,
    judge: Judge | None = None,
    network: RewardNetwork | None = None,
    log_completions: bool = False,
) -> None:
    """Train in `run`: config.json, split.json, metrics.jsonl, timings.jsonl, logs/, checkpoint-*/; then final_model/.

    `judge` and `network` are given if the plan has them; `log_completions` writes the table of completions at each
    line of the log.

    Raises:
        ValueError: settings that do not go together, a run to resume with other settings or of another version, a loss
            that is not finite, or no tensor that moved.
    """
    resume = run.state != "new"
    trainer, settings, domain = _open(inputs, plan, run.path, judge, network)
    writes = trainer.args.should_save  # one of all processes
    with hint_out_of_memory(trainer.place, "a first trial", TILES):
        frozen = trainer.freeze_unreached(trainer.prompts[:PROBED])
    trainer.reset_reference()
    if writes:
        print("\n".join(startup_lines(trainer, frozen, domain)))
        if network is not None and not asks_network(plan):
            print(ONLY_SCORES)
        if captions_of(trainer.args) < captions_of(plan.settings):
            print(f"each step takes fewer than its preset says, since only {len(trainer.taken_together)} train")
    facts = _facts(inputs, run.path, trainer, domain, frozen, network) if writes and not resume else {}
    with run.lock() if writes else nullcontext():  # the first process locks the folder for all
        if resume:
            run.check_same(settings)
        elif writes:
            run.check_new()
            _write_inputs(inputs, run.path, trainer, network)
            run.begin(settings, facts)
        trainer.accelerator.wait_for_everyone()
        before = digests(trainer.sa2va)
        _train(trainer, run.path, resume, log_completions)
        _check_trained(trainer, before)
        _save(inputs, run.path, trainer, resume)
        if writes:
            run.finish()


def load_model(
    model_path: str, device: str, use_flash_attn: bool = False, **how: Any
) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """Model and processor of a run, as (and `how`) `load_sa2va_model`; FlashAttention in the vision tower alone.

    The language model is trained on packed rows, whose mask FlashAttention does not take.
    """
    model, processor = load_sa2va_model(model_path, device, **how)
    if use_flash_attn:
        model.vision_model.set_attn_implementation(FLASH)
    return model, processor


def training_arguments(inputs: GRPOInputs, plan: GRPOPlan, folder: Path) -> Sa2VAGRPOConfig:
    """The Trainer's configuration: the one place where the plan's settings become its arguments."""
    return Sa2VAGRPOConfig(
        output_dir=str(folder),
        seed=inputs.config.seed,
        data_seed=inputs.config.seed,
        use_cpu=inputs.device == "cpu",
        bf16=weight_dtype(inputs.device, inputs.config.dtype) == torch.bfloat16,
        feature_cache_gib=inputs.regions.feature_cache_gib,
        report_to="none",
        disable_tqdm=True,
        **{name: value for name, value in asdict(plan.settings).items() if value is not None},
    )


def _open(
    inputs: GRPOInputs, plan: GRPOPlan, folder: Path, judge: Judge | None, network: RewardNetwork | None
) -> tuple[Sa2VAGRPOTrainer, dict[str, Any], DomainCheck | None]:
    """The trainer with its model, the settings that a resumed run must share, and what the reward network can judge."""
    config, regions = inputs.config, inputs.regions
    how: dict[str, Any] = {"dtype": config.dtype, "quantization": regions.quantization}
    model, processor = load_model(config.model_path, inputs.device, regions.use_flash_attn, **how)
    inputs.set_up(processor)
    settings = wanted_settings(inputs, plan, weights_fingerprint(model))
    set_seed(config.seed)  # the initial weights of LoRA are random
    side = None if plan.side_network is None else side_network_config(plan.side_network)
    prepare_model(model, plan.lora_r, plan.lora_alpha, bool(plan.freeze_embeddings), side, plan.encoder)
    args = training_arguments(inputs, plan, folder)
    maps = None if network is None else ForegroundMaps.beside(folder, network.to(inputs.device))
    rewards = loop_rewards(plan, inputs.kind, judge, maps)
    pathwise = None if maps is None else PathwiseReward(maps, processor.sam_image_size)
    asked = network is not None and asks_network(plan)
    prompts = _training_prompts(inputs, plan, rewards, asked)
    prompts, domain = judged_prompts(prompts, maps, by_labels=not asked)
    check_prompts(prompts)
    if not plan.own_batch:
        fit_batch(prompts, args)
    pairs = PairMaker(args.preferred_by, args.dpo_gap, maps)
    trainer = Sa2VAGRPOTrainer(model, processor, args, prompts, rewards, pathwise, plan.shuffle_rewards, pairs)
    trainer.judge = judge
    if every := plan.eval_steps:
        if args.max_steps < 0:  # nobody knew how many steps the epochs have
            every = min(every, -(-trainer.planned_steps // VALIDATIONS))
        chosen, names = validation_prompts(inputs), inputs.captions_are_names and args.mask_to_caption_weight > 0
        trainer.validation = ValidationCallback(trainer, chosen, every, maps, names)
    if args.objective == "mean_teacher":
        trainer.watch = TeacherWatch(trainer)
    return trainer, settings, domain


def captions_of(settings: GRPOSettings) -> int:
    """The batch of a process and an optimisation step, counted as the setting counts it."""
    return (settings.per_device_train_batch_size or 0) * settings.gradient_accumulation_steps


def asks_network(plan: GRPOPlan) -> bool:
    """Whether a loss or a reward asks the reward network; otherwise it only scores the validation items."""
    settings = plan.settings
    if settings.objective == "grpo":
        return bool(settings.pathwise_weight or (plan.weights.learned and settings.caption_to_mask_weight))
    return settings.objective == "dpo" and settings.preferred_by != "truth"


def _training_prompts(inputs: GRPOInputs, plan: GRPOPlan, rewards: LoopRewards, learned: bool) -> list[TrainingItem]:
    """The prompts to train on; a ValueError without a true mask, other than empty, that objective or reward need.

    The reward network was trained on the reward split: a run that asks it (`learned`) must not use these patients.
    """
    prompts = inputs.pick("policy") if learned else inputs.pick("reward", "policy")
    objective = plan.settings.objective
    needed = [f"objective {objective}"]
    if objective == "dpo":
        needed = ["preferred_by truth"] if plan.settings.preferred_by == "truth" else []
    elif objective == "grpo":
        terms = rewards["loop2"].items()
        needed = [f"loop2 reward {name}" for name, term in terms if term.weight and name in MASK_REWARDS]
    if not needed:
        return prompts
    labelled = labelled_prompts(prompts, needed[0])
    if objective in OF_LABELS and plan.max_labelled is not None:
        labelled = within_budget(inputs, labelled, plan.max_labelled)
    check_foreground(labelled, needed[0])
    if objective == "mean_teacher":
        used = {prompt.sample_id for prompt in labelled}
        return labelled + without_masks([prompt for prompt in prompts if prompt.sample_id not in used])
    return prompts if objective == "grpo" else labelled


def _train(trainer: Sa2VAGRPOTrainer, folder: Path, resume: bool, log_completions: bool) -> None:
    """Run the Trainer's loop, from the last checkpoint of a run that is resumed."""
    validation, sampled = trainer.validation, (lambda: trainer.sampled) if log_completions else None
    looks = None if validation is None else (lambda: validation.shown)
    logs = GRPOLogs(folder, lambda: trainer.last_rollouts, trainer.judge, sampled, lambda: trainer.timings, looks)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    for added in filter(None, (logs, trainer.watch, validation)):  # a run that is stopped is validated once more
        trainer.add_callback(added)
    last = get_last_checkpoint(str(folder)) if resume else None
    if last is None or not trainer.load_if_finished(Path(last)):
        with hint_out_of_memory(trainer.place, "training", SMALLER_LOSS):
            trainer.train(resume_from_checkpoint=last)
    step = trainer.state.global_step
    if trainer.judge_failure and step < trainer.planned_steps:
        raise ValueError(f"step {step}: {trainer.judge_failure}; {trainer.place().resume_hint}")
    if validation is not None and validation.over_optimised and trainer.args.should_save:
        print("stopped: the reward network's score still rose, but the metric of the validation items had fallen")
    if trainer.watch is not None and trainer.watch.collapse and trainer.args.should_save:
        print(trainer.watch.collapse)


def _check_trained(trainer: Sa2VAGRPOTrainer, before: dict[str, str]) -> None:
    """Warn of trainable tensors that did not move since their digests were `before`; raise if nothing was trained."""
    tensors, rate = trainable_tensors(trainer.sa2va), trainer.args.learning_rate
    unmoved = check_movement(before, digests(trainer.sa2va), tensors)
    failure = "" if any_rank(trainer.accelerator, trainer.any_spread) else ALIKE[trainer.args.objective]
    if unmoved and not failure:
        reasons = unmoved_reasons(unmoved, trainer.tensors_with_gradient, trainer.state.global_step, rate)
        parts = [f"{len(names)} because {why}, such as {names[0]}" for why, names in reasons.items()]
        message = f"{len(unmoved)} of {len(tensors)} trainable tensors did not move: {'; '.join(parts)}"
        failure = message if len(unmoved) == len(tensors) and rate else ""
        if not failure and trainer.args.should_save:
            warnings.warn(message, stacklevel=2)
    if failure:
        if trainer.optimizer is not None:  # otherwise this state was just read from the checkpoint
            trainer.save_checkpoint()  # hours of training must neither be lost nor look finished
        last = f"{trainer.args.output_dir}/checkpoint-{trainer.state.global_step}"
        raise ValueError(f"nothing was trained: {failure}; the last state is in {last}")


# ---- the output before the first step -------------------------------------------------------------------------------


def startup_lines(trainer: Sa2VAGRPOTrainer, frozen: list[str], domain: DomainCheck | None) -> Iterator[str]:
    """Trained parts and those `frozen` as no loss reaches them, the size of a step, images left out, the teacher."""
    table = parameter_table(trainer.sa2va)
    yield from (f"{part}: {count:,} parameters, {trained:,} train" for part, count, trained in table)
    yield f"each step: {_step(trainer)}"
    if coarse := trainer.coarse_steps:
        yield f"side network: half the resolution in the first {coarse} of {trainer.planned_steps} steps"
    total, trained = sum(row[1] for row in table), sum(row[2] for row in table)
    yield f"parameters: {total:,}, of which {trained:,} train ({trained / total:.1%})"
    parts: dict[str, list[str]] = {}
    for part, count, training in table:
        if count and not training:
            parts.setdefault(WHY_FROZEN.get(part, AS_SUPERVISED), []).append(part)
    yield from (f"not trained: {', '.join(names)} ({reason})" for reason, names in parts.items())
    if domain and domain.outside:
        yield domain.sentence
    if frozen:
        places = sorted({".".join(name.split(".")[:2]) for name in frozen})
        yield f"frozen, since no enabled loss reaches them: {len(frozen)} tensors of {', '.join(places)} (config.json)"
    teacher, ema, steps = "the model itself", trainer.ema, trainer.planned_steps
    if trainer.args.objective == "supervised":
        teacher = "none, supervised training has none"
    elif ema is not None:  # its decay is below the setting if a short run ends in the warm-up
        reached, half_life = ema.decay_after(steps), ema.half_life_after(steps)
        setting = "" if reached == ema.decay else f" (setting {ema.decay:g})"
        teacher = f"moving average, decay {reached:.4g}{setting} after {steps} steps, half-life {half_life:.0f} steps"
    yield f"EMA teacher: {teacher}"


def _step(trainer: Sa2VAGRPOTrainer) -> str:
    """Regions, or images with all their questions, x captions and masks of one optimisation step."""
    args, passes = trainer.args, trainer.args.gradient_accumulation_steps
    enabled = {"captions": args.num_generations} if args.mask_to_caption_weight else {}
    enabled |= {"masks": args.num_mask_generations} if args.caption_to_mask_weight else {}
    made = {
        "grpo": " and ".join(f"{count} {name}" for name, count in enabled.items()) or "their masks",
        "supervised": f"true {' and '.join(enabled)}",
        "mean_teacher": f"true {' and '.join(enabled)} of half of them, the teacher's of the others",
        "dpo": "a pair of masks",
    }[args.objective]
    whole = len(trainer.taken_together) < len(trainer.prompts)
    shares = f"{args.world_size} processes x {passes} forward passes x {args.prompts_per_step}"
    regions = args.prompts_per_step * passes * args.world_size
    return f"{regions} {'images with all their questions' if whole else 'regions'} x {made} ({shares})"


# ---- the run's folder -----------------------------------------------------------------------------------------------


def wanted_settings(inputs: GRPOInputs, plan: GRPOPlan, fingerprint: str | None = None) -> dict[str, Any]:
    """The settings that a resumed run must share, as they are read back from JSON.

    Without the fingerprint of the model, which `run_grpo_stage` compares, those that are known before it is loaded.
    """
    flags = vars(inputs.config) | vars(inputs.regions)
    settings = {
        **asdict(plan),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        **{name: flags[name] for name in SHARED.split()},
        "data_fingerprint": inputs.split.fingerprint,
        **inputs.split.settings,
        "unlabelled": inputs.unlabelled,
        "wordings": inputs.wordings,
        **({} if fingerprint is None else {"model_fingerprint": fingerprint}),
    }
    settings["training"] = settings.pop("settings")
    settings |= own_fingerprint(name for terms in (plan.mask_rewards or {}).values() for name in terms)
    shown = inputs.regions.region_prompt if changed(inputs.regions, "region_prompt") else None
    settings |= {"image_resize": inputs.config.image_resize, "region_prompt": shown}  # None but of some Qwen-VL
    return dict(json.loads(json.dumps(settings)))


def find_grpo_run(inputs: GRPOInputs, plan: GRPOPlan, also: Callable[[Run], bool]) -> Path | None:
    """The newest run under the output folder with these settings and data for which `also` holds."""
    run = Run.find(GRPO_RUN, inputs.config.output_dir, wanted_settings(inputs, plan), also=also)
    return None if run is None else run.path


def _facts(
    inputs: GRPOInputs,
    folder: Path,
    trainer: Sa2VAGRPOTrainer,
    domain: DomainCheck | None,
    frozen: list[str],
    network: RewardNetwork | None,
) -> dict[str, Any]:
    """What config.json says of a run beside the settings that a resumed run must share."""
    return {
        "inputs": portable_settings(folder, inputs.config, inputs.regions),
        "kind": inputs.kind,
        "data": inputs.summary,
        "images": count_images(trainer.prompts),
        "labels": sum(_labels_used(trainer, inputs.split).values()),
        "domain": None if domain is None else asdict(domain),
        "reward_net": None if network is None else named(network, folder),
        "groups": {name: len(ids) for name, ids in inputs.split.groups.items()},
        "parameters": [list(row) for row in parameter_table(trainer.sa2va)],
        "frozen_because_unreached": frozen,
        "trainable": sorted(trainable_tensors(trainer.sa2va)),
        "meteor_variant": meteor_variant() if inputs.kind == "regions" else "",
    }


def _write_inputs(inputs: GRPOInputs, folder: Path, trainer: Sa2VAGRPOTrainer, network: RewardNetwork | None) -> None:
    """Write the reward network, split.json, and thumbnails of the images of the run and of those of its base model."""
    if network is not None:
        network.save_pretrained(folder / REWARD_NET)
    images = {
        "train": [prompt for prompt in trainer.prompts if prompt.labelled],
        "unlabelled": [prompt for prompt in trainer.prompts if not prompt.labelled],
        "val": trainer.validation.prompts if trainer.validation else [],
    }
    loads = {use: {p.image_key: p.load for p in prompts if p.image_key} for use, prompts in images.items()}
    own = {use: np.stack([thumbnail(load()[0]) for load in of.values()]) for use, of in loads.items() if of}
    if pictures := together(load_arrays(Path(inputs.config.model_path) / PICTURES, NAMES_ALONE), own):
        save_arrays(folder / PICTURES, pictures)
    save_split(inputs.split, folder / "split.json")


def _labels_used(trainer: Sa2VAGRPOTrainer, split: Split) -> dict[str, int]:
    """Split -> number of training images (regions) whose true masks the training uses."""
    args = trainer.args
    rewarded = any(term.weight and name in MASK_REWARDS for name, term in trainer.rewards["loop2"].items())
    used = args.objective in OF_LABELS or args.mask_to_caption_weight or rewarded
    if not (args.preferred_by == "truth" if args.objective == "dpo" else used):
        return {}
    labelled = [prompt for prompt in trainer.prompts if prompt.labelled]
    return {name: count_images(select(labelled, split, name)) for name in split.groups}


def _keep_weights(trainer: Sa2VAGRPOTrainer) -> Outcome | None:
    """Give the model what is kept of the run: the best weights, an average, or after its collapse the initial ones."""
    outcome = None if trainer.validation is None else trainer.validation.finish()
    if trainer.validation is None and trainer.args.objective == "mean_teacher":
        trainer.take_teacher()
    if trainer.watch is not None:
        trainer.watch.finish()
    return outcome


def _save(inputs: GRPOInputs, folder: Path, trainer: Sa2VAGRPOTrainer, resumed: bool) -> None:
    """Keep the best weights, and write what the training cost and final_model/: tensors, config.json, model card."""
    validation, args = trainer.validation, trainer.args
    outcome, taught = _keep_weights(trainer), trainer.taught_counts
    if not args.should_save:
        return
    peak = peak_memory_gib(inputs.device)
    validated = count_images([p for p in validation.prompts if p.labelled]) if validation else 0
    labels = {"reward": _labels_used(trainer, inputs.split), "weights": {"val": validated}}
    trained = sum(count for _, _, count in parameter_table(trainer.sa2va))
    RunCost({"training": trainer.seconds}, labels, trained, peak, resumed=False).save(folder)  # of all processes
    learning = trainer.seconds - trainer.earlier_seconds - sum(trainer.phases.values())
    config = read_json(folder / "config.json") | {
        "steps": trainer.state.global_step,
        "minutes": trainer.seconds / 60,
        "resumed": resumed,
        "validation": None if outcome is None else asdict(outcome),
        "peak_memory_gib": peak,
        "seconds": {**trainer.phases, "learning": learning},
        **({"taught": taught} if taught["images"] else {}),
        **({} if trainer.watch is None else {"collapse": trainer.watch.collapse}),
    }
    if validation is not None:
        validation.save_looks(folder / LOOKS)
    with whole_folder(folder / FINAL) as temporary:
        save_trainable(trainer.sa2va, temporary / TRAINABLE)
        write_json(temporary / "config.json", config)
        (temporary / "README.md").write_text(card_text(config), encoding="utf-8")
        copy_pictures(folder, temporary)
    if taught["no_seg"]:
        print(untaught_line(**taught))
