"""The names that users of the original specification import, in its argument order; the docs compare both.

Names of the package are loaded when they are asked for, so that importing one is fast.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from rl_reward_network.rewards.metrics import iou, meteor

OURS = {  # name there -> where it is here
    "EMAModel": "models.ema.EMAModel",
    "GraspAnyRegionDataset": "data.grasp_any_region.GraspAnyRegionDataset",
    "RewardNetwork": "models.reward_network.RewardNetwork",
    "Sa2VADataPreprocessor": "models.sa2va.processing_sa2va.Sa2VAProcessor",
    "Sa2VAFinetuneEnv": "env.sa2va_finetune_env.Sa2VAFinetuneEnv",
    "Sa2VAGRPOConfig": "grpo.grpo_config.Sa2VAGRPOConfig",
    "Sa2VAGRPOTrainer": "grpo.trainer.Sa2VAGRPOTrainer",
    "create_model_card": "grpo.final_model.card_text",
    "freeze_parameters": "models.lora.freeze_parameters",
    "setup_lora": "models.lora.setup_lora",
    "wrap_llm_lora": "models.lora.setup_lora",
}


def __getattr__(name: str) -> Any:
    if name not in OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, ours = OURS[name].rpartition(".")
    return getattr(import_module(f"rl_reward_network.{module}"), ours)


def load_sa2va_model(model_path: Any, device: str = "cuda", use_flash_attn: bool = True) -> Any:
    """The model alone; `models.sa2va.loading_sa2va.load_sa2va_model` returns its processor, too.

    As in the original, FlashAttention is left out on a CPU and where its package is missing.
    """
    from rl_reward_network.models.sa2va import loading_sa2va

    flash = use_flash_attn and device != "cpu" and find_spec("flash_attn") is not None
    return loading_sa2va.load_sa2va_model(model_path, device, flash)[0]


def compute_iou(mask1: Any, mask2: Any) -> float:
    """IoU of two masks (H, W), bool, 0 and 1, or probabilities (cut at 0.5); two empty masks have IoU 1."""
    return float(iou(*(np.asarray(mask)[None] > 0.5 for mask in (mask1, mask2)))[0])


def iou_reward_batch(pred_masks: Sequence[Any], gt_masks: Sequence[Any]) -> list[float]:
    """`compute_iou` of each pair."""
    return [compute_iou(*pair) for pair in zip(pred_masks, gt_masks, strict=True)]


def compute_meteor(reference: str, hypothesis: str) -> float:
    """METEOR of one caption, in [0, 1]."""
    return float(meteor([hypothesis], [reference])[0])


def meteor_reward_batch(references: Sequence[str], hypotheses: Sequence[str]) -> list[float]:
    """`compute_meteor` of each pair."""
    return [float(score) for score in meteor(hypotheses, references)]


def evaluate_caption_similarity(gt_caption: str, pred_caption: str, llm_judge: Any) -> float | None:
    """The score of one caption by a `rewards.judge.Judge`, in [-1, 1]; None if its reply cannot be read."""
    return llm_judge.scores([pred_caption], [gt_caption])[0]


def combined_caption_reward(
    gt_captions: Sequence[str],
    pred_captions: Sequence[str],
    llm_judge: Any = None,
    use_llm_judge: bool = False,
    meteor_weight: float = 0.25,
    llm_judge_weight: float = 0.75,
) -> list[float]:
    """The weighted sum, with a judge in [-1, 1]; METEOR alone without one, or where its score is missing."""
    words = meteor_reward_batch(gt_captions, pred_captions)
    if not use_llm_judge or llm_judge is None:
        return words
    pairs = zip(words, llm_judge.scores(pred_captions, gt_captions), strict=True)
    return [word if score is None else meteor_weight * word + llm_judge_weight * score for word, score in pairs]


def compute_caption_reward(gt_caption: str, pred_caption: str, llm_judge: Any = None, **weights: float) -> float:
    """`combined_caption_reward` of one caption, by the judge where there is one."""
    return combined_caption_reward([gt_caption], [pred_caption], llm_judge, use_llm_judge=True, **weights)[0]


def loop1_caption_reward(prompts: Any, completions: Sequence[str], **kwargs: Any) -> list[float]:
    """As TRL calls it: captions against `gt_captions`, by `llm_judge`, too, if there is one."""
    return combined_caption_reward(kwargs["gt_captions"], completions, kwargs.get("llm_judge"), use_llm_judge=True)


def loop2_caption_reward(prompts: Any, completions: Sequence[str], **kwargs: Any) -> list[float]:
    """As `loop1_caption_reward`, but the judge is asked only with `use_llm_judge_loop2`."""
    judged = bool(kwargs.get("use_llm_judge_loop2"))
    return combined_caption_reward(kwargs["gt_captions"], completions, kwargs.get("llm_judge"), judged)


def collate_fn_sa2va_rl(batch: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """{images, masks, captions} of items of a `GraspAnyRegionDataset`, as lists: sizes differ."""
    return {f"{name}s": [item[name] for item in batch] for name in ("image", "mask", "caption")}


def get_bos_eos_token_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of a tokenizer's first and last token, each a list, which is empty where it has none."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    bos, eos = (list(one) if isinstance(one, Sequence) else [] if one is None else [one] for one in ids)
    return bos, eos


def video_lisa_encode_fn(example: Any, preprocessor: Any, max_length: int = 8192, **inputs: Any) -> dict[str, Any]:
    """Ids and labels of an example with its `conversation` of {input, output} turns.

    Args:
        preprocessor: a `Sa2VADataPreprocessor`, in place of the tokenizer: it knows the template and the image tokens.
        inputs: of `Sa2VAProcessor.tokenize_conversation`, such as `image_tokens`.
    """
    turns = [(turn["input"], turn["output"]) for turn in example["conversation"]]
    return {**preprocessor.tokenize_conversation(turns, max_length=max_length, **inputs)}
