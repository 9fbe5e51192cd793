"""The peak memory of each stage of a run, from config.json and the settings, without weights.

Weights and trained tensors are counted exactly, on torch's meta device. The rest is arithmetic, whose factors were
fitted to training steps of Sa2VA-1B to 8B and of two Qwen-VL that were measured tensor by tensor on the meta device.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.auto import AutoModel

from rl_reward_network.grpo.image_context import rows_within_limits
from rl_reward_network.grpo.measure import SAMPLED, batch_size
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.memory.advice import GIB, MemorySettings, Stage
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.arguments_sa2va import BLOCKS, Quantization
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, weight_dtype
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.pixels_sa2va import resized_image
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig

SIDE = 512  # pixels of the images that are assumed; masks have their size
PROCESS = 0.55 * GIB  # Python with torch, transformers and the tokenizer, in main memory
TEXT_TOKENS = 112  # of a row besides image, region and completions: the system turn, both questions, an answer
REGION_SHARE = 0.5  # of an image's tokens, which a large region repeats
GUESSED_TOKENS = 12  # of the answer that is verified together with the question
OFFICIAL_DTYPE = torch.bfloat16  # of the weight files, where config.json does not say it
# Numbers that a layer keeps of a token for the backward pass, in units of its sizes:
OF_WIDTH, OF_UPCASTS, OF_MLP, OF_HEADS = 8.4, 3.0, 3.9, 3.0  # OF_UPCASTS: float32 copies beside bfloat16
OF_LOGITS = 3.4  # bytes for each logit of the completions
OF_SIDE = 34  # float32 numbers that a side network and the loss of one mask keep for each pixel of its input
ENCODER_LORA_R = 16
IN_BFLOAT16 = 0.42  # of the activations of an encoder in float32; 0.39 and 0.40 were measured on a GPU
# Bytes of a weight: NF4 with constants in 8 bit, 0.127 bit each (arXiv:2305.14314); LLM.int8() with a scale of a row.
BYTES_OF_BITS: dict[Quantization, float] = {"4bit": (4 + 0.127) / 8, "8bit": 1.002}
OF_DECODER, OF_SAM, OF_TOWER = 96, 0.8, 13  # for each cell of a mask's grid; of the encoders' first layer; of a layer


def load_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """Reading the weights, and keeping them."""
    return _stage("load", config, settings, lambda model, settings: {})


def segment_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """Masks of one image and several prompts: steps 1 and 2, `segment`."""

    def parts(model: Any, settings: MemorySettings) -> dict[str, float]:
        answers = _answers(model, settings, 1, settings.segment_batch, 0, 64)
        cells = OF_DECODER * (model.config.sam2_image_size // 4) ** 2 * model.dtype.itemsize
        masks = _maps(model) + settings.segment_batch * (4.0 * SIDE**2 + cells)
        return _largest(encoders=_encoders(model, settings), answers=answers, masks=masks)

    return _stage("segment (steps 1, 2)", config, settings, parts)


def training_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """An optimisation step of `grpo`, from the second one on."""
    name = "GRPO step" if settings.objective == "grpo" else f"{settings.objective.replace('_', ' ')} step"
    return _stage(name, config, settings, _training_parts, settings.quantization)


def merge_stage(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
    """`merge`, which works in main memory."""

    def parts(model: Any, settings: MemorySettings) -> dict[str, float]:
        _add_lora(model, settings)
        return {"LoRA": _bytes(trainable_tensors(model).values())}

    dtype: Dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
    return _stage("merge", config, replace(settings, device="cpu", dtype=dtype), parts)


def has_tiles(config: Sa2VAConfig) -> bool:
    """Whether images are cut into tiles, as by an InternVL; the tokens of a Qwen-VL depend on the image's size."""
    return config.family.body == "internvl"


def image_tokens(config: Sa2VAConfig, settings: MemorySettings) -> int:
    """Tokens of one image in the language model."""
    if has_tiles(config):
        return int(config.tokens_per_tile) * _tiles(settings)
    cell = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    _, height, width = resized_image(np.zeros((SIDE, SIDE, 3), dtype=np.uint8), cell, "prediction").shape
    return int(height // cell) * int(width // cell)


def _tiles(settings: MemorySettings) -> int:
    """Tiles of one image, a thumbnail counted."""
    return settings.max_dynamic_patch + (settings.max_dynamic_patch > 1)


def _stage(
    name: str,
    config: Sa2VAConfig,
    settings: MemorySettings,
    parts_of: Callable[[Any, MemorySettings], dict[str, float]],
    quantization: Quantization | None = None,
) -> Stage:
    """A stage of a process that loads the model first: its peak is at least that of loading."""
    model = meta_model(config, settings)
    saved = 0.0 if quantization is None else _saved_by_bits(model, quantization)
    fixed, pages = {"weights": _bytes([*model.parameters(), *model.buffers()]) - saved}, 0.0
    if settings.device == "cpu":
        fixed["process"] = PROCESS
        stored = model.config.dtype or OFFICIAL_DTYPE  # the files' pages count until the last tensor is read
        pages = 0.0 if stored == model.dtype else float(sum(p.numel() for p in model.parameters()) * stored.itemsize)
    parts = fixed | parts_of(model, settings)
    rest = max(0.0, sum(fixed.values()) + pages - sum(parts.values()))
    return Stage(name, parts | ({"weight files": rest} if rest else {}))


def _saved_by_bits(model: Any, quantization: Quantization) -> float:
    """Bytes that the linear layers of the language model's blocks take less when they are quantized."""
    layers = [p for name, p in model.named_parameters() if name.startswith(BLOCKS) and p.dim() == 2]
    return sum(p.numel() * (p.dtype.itemsize - BYTES_OF_BITS[quantization]) for p in layers)


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


def _add_lora(model: Any, settings: MemorySettings) -> None:
    r = int(settings.lora_r or 1)
    side = SideNetworkConfig(settings.side_pixels) if settings.side_network else None
    encoder: dict[str, Any] | None = None if settings.encoder == "frozen" else {"train": settings.encoder}
    if settings.encoder == "lora":
        encoder = {"train": "lora", "lora_r": ENCODER_LORA_R}
    with torch.device("meta"):
        prepare_model(model, r, 2 * r, 0.0, settings.freeze_embeddings, side, encoder)


def _training_parts(model: Any, settings: MemorySettings) -> dict[str, float]:
    dtype, before = model.dtype, _bytes(model.parameters())
    _add_lora(model, settings)
    trainable = trainable_tensors(model)
    size, added = _bytes(trainable.values()), _bytes(model.parameters()) - before
    reference = _bytes(tensor for name, tensor in trainable.items() if "lora_" not in name)
    gradients = sum(tensor.numel() for tensor in trainable.values()) * float(dtype.itemsize)
    casts = size / 2 if dtype == torch.bfloat16 else 0.0  # by autocast; the float32 gradients are added
    features = _maps(model) + _vision_features(model, settings)
    prompts = max(1, int(settings.per_device_train_batch_size or 1) // settings.num_generations)
    region = int(REGION_SHARE * model.config.tokens_per_tile) if model.config.family.shows_regions else 0
    phases = {
        "encoders": _encoders(model, settings),
        "loss and gradients": _loss(model, settings, prompts, region, gradients)
        + 2 * casts
        + prompts * _kept_of_masks(model),
        "AdamW": size,  # gradients
        "validation": _validation(model, settings, region, features) + casts,
    }
    if settings.objective == "grpo":
        rows = prompts * max(settings.num_generations, settings.num_mask_generations)
        longest = int(settings.max_completion_length or 1)
        phases["rollouts"] = _answers(model, settings, prompts, rows, region, longest) + casts
    kept = settings.gradient_accumulation_steps * prompts * features
    if settings.device == "cpu":  # images of the whole run are cached
        kept = min(settings.feature_cache_gib * GIB, settings.images * features)
    return {
        "LoRA": added,
        "moments of AdamW": 2 * size,
        "moving average": size if settings.ema_decay and settings.objective != "supervised" else 0.0,
        "reference": reference,
        "image features": kept,
    } | _largest(**phases)


def _validation(model: Any, settings: MemorySettings, region: int, features: float) -> float:
    """A batch of validation prompts with captions, greedy and sampled; a GPU keeps their features."""
    prompts, longest = batch_size(model.config, settings.max_dynamic_patch), int(settings.max_completion_length or 1)
    answers = _answers(model, settings, prompts, prompts * (SAMPLED + 1), region, longest)
    return answers + (prompts * features if settings.device == "cuda" else 0.0)


def _largest(**phases: float) -> dict[str, float]:
    """The phase that needs most; the others come before or after it."""
    name = max(phases, key=lambda phase: phases[phase])
    return {name: phases[name]}


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


# ---- arithmetic ----


def _answers(model: Any, settings: MemorySettings, prompts: int, rows: int, region: int, longest: int) -> float:
    """Reading images and questions, and decoding `rows` answers of `longest` tokens, at once if the limit allows.

    Keys and values of all tokens, those of a layer's MLP while the prompt is read, and the logits of a step.
    """
    text, itemsize = model.config.text_config, model.dtype.itemsize
    width = text.num_key_value_heads * (getattr(text, "head_dim", 0) or text.hidden_size // text.num_attention_heads)
    image = image_tokens(model.config, settings)
    prompt, rows = image + region + TEXT_TOKENS, rows_within_limits(image, rows)
    keys = 2.0 * text.num_hidden_layers * width * itemsize * (prompts * prompt + rows * (prompt + longest))
    layer = prompts * prompt * itemsize * (3.0 * text.intermediate_size + 4.0 * text.hidden_size)
    return keys + layer + rows * GUESSED_TOKENS * text.vocab_size * (itemsize + 4.0 + 4.0)


def _vision_features(model: Any, settings: MemorySettings) -> float:
    """What training keeps of the vision tower's output for one image; of a Qwen-VL a drawn region is another image."""
    config, vision = model.config, model.config.vision_config
    if has_tiles(config):
        patches = (vision.image_size[0] // vision.patch_size[0]) ** 2
        return float(_tiles(settings) * patches * vision.hidden_size * model.dtype.itemsize)
    layers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    return 2.0 * layers * image_tokens(config, settings) * config.text_config.hidden_size * model.dtype.itemsize


def _maps(model: Any) -> float:
    """SAM 2's maps of one image."""
    side, width = model.config.sam2_image_size, model.config.sam2_config.vision_config.fpn_hidden_size
    return float(sum((side // stride) ** 2 for stride in (4, 8, 16)) * width * model.dtype.itemsize)


def _encoders(model: Any, settings: MemorySettings) -> float:
    """The larger of SAM 2's image encoder and an InternVL's vision tower, one image; a Qwen-VL's is smaller."""
    width = model.config.sam2_config.vision_config.backbone_config.hidden_size
    sam = OF_SAM * model.config.sam2_image_size**2 * width * model.dtype.itemsize
    return max(sam, OF_TOWER * _vision_features(model, settings)) if has_tiles(model.config) else sam


def _kept_of_masks(model: Any) -> float:
    """What a side network and a trained image encoder keep of one image for the backward pass."""
    side = 0.0 if model.config.side_pixels is None else 4.0 * OF_SIDE * model.config.side_pixels**2
    if not any(parameter.requires_grad for parameter in model.grounding_encoder.vision_encoder.parameters()):
        return side
    return side + _kept_by_encoder(model.config.sam2_config) * (IN_BFLOAT16 if model.dtype == torch.bfloat16 else 1.0)


def _kept_by_encoder(sam2_config: Any) -> float:
    """Bytes that SAM 2's image encoder keeps of one image in float32: a forward pass on the meta device counts them."""
    with torch.device("meta"):
        encoder = AutoModel.from_config(sam2_config).vision_encoder
        pixels = torch.zeros(1, 3, *[sam2_config.prompt_encoder_config.image_size] * 2)
    weights = {parameter.untyped_storage()._cdata for parameter in encoder.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors stay, as the number of a freed storage could be used again

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(pixels, return_dict=True)
    return float(sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights))


def _loss(model: Any, settings: MemorySettings, prompts: int, region: int, gradients: float) -> float:
    """Forward and backward pass of the loss, with the gradients of trained tensors."""
    text, itemsize = model.config.text_config, model.dtype.itemsize
    rows = prompts if model.config.family.shows_regions else 2 * prompts  # one more for the drawn region
    completions = settings.num_generations * int(settings.max_completion_length or 1)
    completions = completions if settings.objective == "grpo" else TEXT_TOKENS // 2
    tokens = image_tokens(model.config, settings) + region + TEXT_TOKENS + completions
    head = getattr(text, "head_dim", 0) or text.hidden_size // text.num_attention_heads
    normed = head * (text.num_attention_heads + text.num_key_value_heads) if "qwen3" in text.model_type else 0
    kept = (OF_WIDTH + OF_UPCASTS * (itemsize == 2)) * text.hidden_size + OF_MLP * text.intermediate_size
    kept += OF_HEADS * normed + tokens + 7 * int(settings.lora_r or 1)  # a mask's row; LoRA of seven layers
    layer, inputs = rows * tokens * kept * itemsize, rows * tokens * float(text.hidden_size * itemsize)
    layers = text.num_hidden_layers * (inputs if settings.activation_checkpointing else layer)
    logits = prompts * completions * text.vocab_size * OF_LOGITS
    return layers + max(logits, gradients + layer * settings.activation_checkpointing)
