"""The peak memory of each stage of a run, predicted on the meta device from config.json and the settings.

Axes: P prompts (images) of a batch, G completions of each, L tokens of a packed row, D language width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_reward_network.grpo.image_context import rows_within_limits
from rl_reward_network.grpo.measure import SAMPLED, batch_size
from rl_reward_network.grpo.policy import token_log_probs
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.memory.live import live_memory
from rl_reward_network.memory.settings import MemorySettings
from rl_reward_network.memory.vision import SIDE, encoder, image_tokens
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, weight_dtype
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

GIB = 2**30
PROCESS = 0.55 * GIB  # Python with torch, transformers and the tokenizer, in main memory
TEXT_TOKENS = 112  # of a row besides image, region and completions: the system turn, both questions, an answer
REGION_SHARE = 0.5  # of an image's tokens, which a large region repeats
GUESSED_TOKENS = 12  # of the answer that is verified together with the question
OFFICIAL_DTYPE = torch.bfloat16  # of the weight files, where config.json does not say it

PartsOf = Callable[[Any, MemorySettings], dict[str, float]]


@dataclass(frozen=True)
class Stage:
    """What a stage needs at its peak.

    Args:
        name: of the stage.
        parts: bytes by name, largest first.
    """

    name: str
    parts: dict[str, float]

    @property
    def gib(self) -> float:
        """Sum of the parts, in GiB."""
        return sum(self.parts.values()) / GIB


def load_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """Reading the weights, and keeping them."""
    return _stage("load", config, settings, lambda model, settings: {})


def segment_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """Masks of one image and several prompts: steps 1 and 2, `segment`."""
    return _stage("segment (steps 1, 2)", config, settings, _segment_parts)


def training_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """An optimisation step of `grpo`, from the second one on."""
    name = "GRPO step" if settings.objective == "grpo" else "supervised step"
    return _stage(name, config, settings, _training_parts)


def merge_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """`merge`, which works in main memory."""
    dtype: Dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
    return _stage("merge", config, replace(settings, device="cpu", dtype=dtype), _merge_parts)


def _stage(name: str, config: Sa2VAConfig, settings: MemorySettings, parts_of: PartsOf) -> Stage:
    """A stage of a process that loads the model first: its peak is at least that of loading."""
    model, fixed, pages = meta_model(config, settings), {}, 0.0
    fixed["weights"] = float(sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]))
    if settings.device == "cpu":
        fixed["process"] = PROCESS
        pages = _file_pages(model)
    parts = fixed | parts_of(model, settings)
    rest = max(0.0, sum(fixed.values()) + pages - sum(parts.values()))
    return Stage(name, parts | ({"weight files": rest} if rest else {}))


def _file_pages(model: Any) -> float:
    """Of the weight files: in main memory until the last tensor is read; the system may drop them.

    Weights of the files' own dtype are these pages, read when they are first used.
    """
    stored = model.config.dtype or OFFICIAL_DTYPE
    count = sum(parameter.numel() for parameter in model.parameters())
    return 0.0 if stored == model.dtype else float(count * stored.itemsize)


def meta_model(config: Sa2VAConfig, settings: MemorySettings) -> Any:
    """The model on the meta device, in the dtype that it would have."""
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight_dtype(settings.device or "cpu", settings.dtype))
    try:
        with torch.device("meta"):
            model: Any = Sa2VAForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.model.language_model.rotary_emb.rope_type = "default"  # a dynamic one reads positions, which have no values
    return model


# ---- one stage after the other ----


def _segment_parts(model: Any, settings: MemorySettings) -> dict[str, float]:
    rows = settings.segment_batch
    parts = {"encoders": _encoders(model, settings), "masks": _masks(model, rows)}
    prefill = _prefill(model, 1, image_tokens(model.config, settings))
    return _largest({**parts, "answers": prefill + _decoding(model, rows, settings, 64)})


def _add_lora(model: Any, settings: MemorySettings) -> None:
    r = int(settings.lora_r or 1)
    with torch.device("meta"):
        prepare_model(model, r, 2 * r, freeze_embeddings=settings.freeze_embeddings)


def _merge_parts(model: Any, settings: MemorySettings) -> dict[str, float]:
    _add_lora(model, settings)
    return {"LoRA": float(sum(tensor.nbytes for tensor in trainable_tensors(model).values()))}


def _training_parts(model: Any, settings: MemorySettings) -> dict[str, float]:
    dtype = model.dtype
    before = sum(parameter.nbytes for parameter in model.parameters())
    _add_lora(model, settings)
    trainable = trainable_tensors(model)
    size = float(sum(tensor.nbytes for tensor in trainable.values()))
    others = float(sum(tensor.nbytes for name, tensor in trainable.items() if "lora_" not in name))
    kept = {
        "LoRA": float(sum(parameter.nbytes for parameter in model.parameters()) - before),
        "moments of AdamW": 2 * size,
        "moving average": size if settings.ema_decay and settings.objective == "grpo" else 0.0,
        "reference": others,
        "image features": _kept_features(model, settings),
    }
    model.to(
        dtype
    )  # in which autocast computes; its casts of trainable tensors, and their float32 gradients, are added
    casts = size / 2 if dtype == torch.bfloat16 else 0.0
    phases = {
        "encoders": _encoders(model, settings),
        "loss and gradients": _loss(model, settings) + 2 * casts,
        "AdamW": size,  # gradients
        "validation": _validation(model, settings) + casts,
    }
    if settings.objective == "grpo":
        phases["rollouts"] = _rollouts(model, settings) + casts
    return kept | _largest(phases)


def _kept_features(model: Any, settings: MemorySettings) -> float:
    """Of the images of a step; in main memory these are part of the cache."""
    if settings.device == "cpu":
        return min(settings.feature_cache_gib * GIB, settings.images * _step_features(model, settings))
    return settings.gradient_accumulation_steps * _prompts(settings) * _step_features(model, settings)


def _rollouts(model: Any, settings: MemorySettings) -> float:
    prompts = _prompts(settings)
    return _answers(model, settings, prompts, prompts * max(settings.num_generations, settings.num_mask_generations))


def _validation(model: Any, settings: MemorySettings) -> float:
    """A batch of validation prompts with captions, greedy and sampled, and their masks."""
    prompts = batch_size(model.config, settings.max_dynamic_patch)
    features = prompts * _features(model, settings) if settings.device == "cuda" else 0.0
    return features + _answers(model, settings, prompts, prompts * (SAMPLED + 1))


def _answers(model: Any, settings: MemorySettings, prompts: int, rows: int) -> float:
    """Captions of regions, `rows` of them at once if the limit allows."""
    tokens = image_tokens(model.config, settings)
    rows, region = rows_within_limits(tokens, rows), _region_tokens(model.config)
    return _prefill(model, prompts, tokens + region) + _decoding(
        model, rows, settings, region + int(settings.max_completion_length or 1)
    )


def _region_tokens(config: Sa2VAConfig) -> int:
    return int(REGION_SHARE * config.tokens_per_tile) if config.family.shows_regions else 0


def _largest(phases: dict[str, float]) -> dict[str, float]:
    """The phase that needs most; the others come before or after it."""
    name = max(phases, key=lambda phase: phases[phase])
    return {name: phases[name]}


def _prompts(settings: MemorySettings) -> int:
    return max(1, int(settings.per_device_train_batch_size or 1) // settings.num_generations)


# ---- computations on the meta device, in bytes ----


def _peak(model: Any, work: Callable[[], Any], known: Sequence[Tensor] = (), grad: bool = False) -> float:
    """Of what `work` allocates besides the model and the tensors that are `known`."""
    with live_memory([*model.parameters(), *model.buffers(), *known]) as live, torch.set_grad_enabled(grad):
        work()
    return float(live.peak)


def _meta(model: Any, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=model.dtype, device="meta")


def _maps(model: Any) -> Sam2Features:
    """SAM 2's maps of one image."""
    side = model.config.sam2_image_size
    with torch.no_grad():
        features: Sam2Features = model.get_sam_features(_meta(model, 1, 3, side, side))
    return features


@torch.no_grad()
def _features(model: Any, settings: MemorySettings) -> float:
    """Of one image, from both encoders."""
    return float(sum(features.nbytes for features in [*encoder(model, settings)(), *_maps(model).maps]))


def _step_features(model: Any, settings: MemorySettings) -> float:
    """Of one image in training; a region that is drawn makes another picture, which SAM 2 does not read."""
    with torch.no_grad():
        drawn = 0 if model.config.family.shows_regions else sum(part.nbytes for part in encoder(model, settings)())
    return _features(model, settings) + drawn


def _encoders(model: Any, settings: MemorySettings) -> float:
    """The larger of SAM 2's image encoder and the vision tower, one image."""
    return max(_peak(model, lambda: _maps(model)), _peak(model, encoder(model, settings)))


def _masks(model: Any, rows: int) -> float:
    """Decoding masks of one image without gradient, and their logits at the size of the image."""
    features, states = _maps(model), _meta(model, rows, model.config.text_config.hidden_size)
    decoding = _peak(model, lambda: model.decode_masks(features, model.text_hidden_fcs(states)), features.maps)
    return sum(level.nbytes for level in features.maps) + decoding + rows * SIDE * SIDE * 4.0


def _prefill(model: Any, rows: int, tokens: int) -> float:
    """Reading images and questions without gradient, the keys and values included."""
    embeds = _meta(model, rows, tokens + TEXT_TOKENS, model.config.text_config.hidden_size)
    return _peak(model, lambda: model.model(inputs_embeds=embeds, use_cache=True), [embeds])


def _decoding(model: Any, rows: int, settings: MemorySettings, length: int) -> float:
    """Keys and values of all answers, and the logits of a step over the vocabulary."""
    text = model.config.text_config
    width = text.num_key_value_heads * (getattr(text, "head_dim", 0) or text.hidden_size // text.num_attention_heads)
    tokens = image_tokens(model.config, settings) + TEXT_TOKENS + length
    kept = 2.0 * text.num_hidden_layers * width * tokens * rows * model.dtype.itemsize
    logits = rows * GUESSED_TOKENS * text.vocab_size * (model.dtype.itemsize + 4.0 + 4.0)
    return kept + logits


def _loss(model: Any, settings: MemorySettings) -> float:
    """Forward and backward pass of the loss, gradients included."""
    prompts, hidden_size = _prompts(settings), model.config.text_config.hidden_size
    rows = prompts if model.config.family.shows_regions else 2 * prompts  # one more for the drawn region
    completions = settings.num_generations * int(settings.max_completion_length or 1)
    if settings.objective == "supervised":
        completions = TEXT_TOKENS // 2
    tokens = image_tokens(model.config, settings) + _region_tokens(model.config) + TEXT_TOKENS + completions
    features = _maps(model)
    embeds, words = _meta(model, rows, tokens, hidden_size), model.get_input_embeddings()
    mask = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool, device="meta")
    positions = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    ids = torch.zeros(prompts * completions, dtype=torch.long, device="meta")

    def work() -> None:
        inputs = words(positions) if words.weight.requires_grad else embeds  # a Qwen-VL trains them
        states = model.model(
            inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        scored = states.flatten(0, 1)[: len(ids)]
        log_probs, _ = token_log_probs(model.lm_head, scored, ids, 1.0, [1])
        loss = log_probs.sum()
        for embedding in model.text_hidden_fcs(states[:prompts, -1]):
            loss = loss + model.decode_masks(features, embedding[None]).mask_logits.float().sum()
        loss.backward()

    model.train()
    if settings.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    peak = _peak(model, work, [*features.maps, embeds, mask, positions, ids], grad=True)
    for parameter in model.parameters():
        parameter.grad = None
    model.eval()
    return peak
