"""Sa2VA from transformers' parts: the vision tower and language model of a family of `families.FAMILIES`, and SAM 2.

This package adds only what transformers does not have: image and region rows spliced into the text, the `[SEG]` state
projected into a prompt for SAM 2, and the differentiable mask path.

Source: bytedance/Sa2VA@9832e1a. Unlike the reference, the SAM 2 image encoder runs once per image, not per `[SEG]`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.models.auto import AutoModel
from transformers.models.internvl.modeling_internvl import InternVLCausalLMOutputWithPast, InternVLPreTrainedModel

from rl_reward_network.atomic_io import state_fingerprint
from rl_reward_network.models.sa2va import generation_sa2va, video_sa2va
from rl_reward_network.models.sa2va.arguments_sa2va import check_fits, read_arguments
from rl_reward_network.models.sa2va.body_sa2va import NormedHead, QwenVLBody, Sa2VAModel
from rl_reward_network.models.sa2va.checkpoint_sa2va import (
    RELATIVES,
    UNREAD3,
    CheckpointFolder,
    check_shapes,
    check_tokens,
    open_checkpoint,
    tensor_shapes,
    to_original,
    to_ours,
)
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.families import supported
from rl_reward_network.models.sa2va.grounding_sa2va import DecodedMasks, Sam2Features, decode_masks, sam_features
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.side_network import SideNetwork, SideNetworkConfig
from rl_reward_network.models.sa2va.templates import TEMPLATES, kept_ids


@dataclass
class Sa2VAOutput(InternVLCausalLMOutputWithPast):
    """With the input (B, T, D) of `lm_head` and, at `[SEG]`, `text_hidden_fcs`: in Qwen3-VL before the final norm."""

    last_hidden_state: Tensor | None = None


NO_OBJECT = -1024.0  # logit of an empty mask, as in SAM 3
FIRST_STEP = (
    *("pixel_values", "image_grid_thw", "vision_features"),
    *("prompt_masks", "vp_overall_mask", "sam_pixel_values"),
)
BODIES = {"internvl": Sa2VAModel, "qwen_vl": QwenVLBody}


class Sa2VAForConditionalGeneration(InternVLPreTrainedModel, GenerationMixin):
    """Sa2VA: generates text, and a mask for each generated `[SEG]`.

    `model` is the vision-language body, `lm_head` its head, `text_hidden_fcs` projects a `[SEG]` state into SAM 2's
    prompt space, `grounding_encoder` is SAM 2 (with the memory of an original checkpoint, for sequences),
    `side_network` refines its masks, or is None.
    """

    config: Sa2VAConfig  # type: ignore[assignment]
    unquantized_fingerprint: str | None = None  # of a quantized model
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Sa2VAConfig) -> None:
        super().__init__(config)
        width, sam_width = config.text_config.hidden_size, config.sam2_config.vision_config.fpn_hidden_size
        self.model: Any = BODIES[config.family.body](config)
        self.lm_head = nn.Linear(width, config.text_config.vocab_size, bias=False)
        if config.family.seg_before_norm:
            norm, self.model.language_model.norm = self.model.language_model.norm, nn.Identity()
            self.lm_head = NormedHead(width, config.text_config.vocab_size, norm)
        self.text_hidden_fcs = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, sam_width), nn.Dropout(0.0)
        )
        self.grounding_encoder = AutoModel.from_config(config.sam2_config)
        # its name in the original; past __setattr__, so that it is no second set of parameters
        vars(self.grounding_encoder)["image_encoder"] = self.grounding_encoder.vision_encoder
        self.side_network = None if config.side is None else SideNetwork(config.side, sam_width)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: str | Path, *, config: Sa2VAConfig | None = None, **arguments: Any
    ) -> "Sa2VAForConditionalGeneration":
        """The model of a folder or hub id, in our layout or the original one, in eval mode.

        Arguments are those of transformers that `arguments_sa2va` lists, by default float32 on the CPU. `config` is not
        used: transformers' Auto classes pass that of the same folder. A ValueError for an argument that is not
        supported, an unknown layout, or missing, surplus or wrongly shaped tensors, all named.
        """
        how = read_arguments(**arguments)
        folder = open_checkpoint(path, **how.hub)
        config = check_checkpoint(folder)
        if how.device.type == "cuda":
            check_fits(how, expected_shapes(config, original=False))
        config._attn_implementation = how.attn_implementation
        tensors = to_ours(folder.tensors(how.dtype), config) if folder.original else folder.tensors(how.dtype)
        loaded = super().from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=how.dtype or "auto",
            device_map=None if how.device.type == "cpu" and how.quantization is None else {"": how.device},
            quantization_config=how.quantization,
        )
        if how.quantization is not None:
            tied = {"lm_head.weight": tensors.get("model.language_model.embed_tokens.weight")}
            state: Any = {**tensors, **tied} if config.tie_word_embeddings else tensors
            loaded.unquantized_fingerprint = state_fingerprint(state, how.dtype)
        # Defaults of transformers' `generate`. It does not apply stop words that are no token (phi3_chat): pass
        # `stop_strings` there.
        tokenizer, defaults = folder.tokenizer(config), loaded.generation_config
        vocabulary, words = tokenizer.get_vocab(), TEMPLATES[config.template].stop_words
        ends = [tokenizer.eos_token_id, *(vocabulary[word] for word in words if word in vocabulary)]
        defaults.eos_token_id, defaults.pad_token_id = list(dict.fromkeys(ends)), tokenizer.pad_token_id
        defaults.suppress_tokens = config.never_sampled_ids
        return loaded.eval()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; a ValueError for a quantized model, or LoRA layers: only these would be written."""
        if getattr(self, "is_quantized", False):
            raise ValueError(
                "the language model is quantized: load the model without quantization_config and save that"
            )
        if getattr(self, "_hf_peft_config_loaded", False):
            raise ValueError("the model has LoRA layers: merge_lora(model) first, or save_trainable(model, folder)")
        super().save_pretrained(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        vision_features: Any = None,
        prompt_masks: Sequence[Tensor] = (),
        vp_overall_mask: Tensor | None = None,
        sam_pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        position_table: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Sa2VAOutput:
        """Next-token logits, and the mean cross-entropy over `labels` where given (-100 is ignored).

        Args:
            input_ids, attention_mask: int64 (B, T).
            pixel_values: (tiles, 3, S, S), in a Qwen-VL (patches, 2*3*p*p) with `image_grid_thw` (images, 3); or
                `vision_features` from `get_vision_features`, computed before.
            prompt_masks, vp_overall_mask: regions, as `Sa2VAProcessor` gives them.
            position_table: see `body_sa2va`; only where text goes on after an image in the cache.
            sam_pixel_values: unused; accepted so that a processor's whole output can be passed.
            logits_to_keep: number of last positions to compute logits for; 0 is all.
            num_items_in_batch: labelled tokens over all accumulated batches, from transformers' Trainer.
        """
        of_text = (attention_mask, position_ids, past_key_values, inputs_embeds)
        of_qwen = {"image_grid_thw": image_grid_thw, "position_table": position_table}
        kwargs |= {name: value for name, value in of_qwen.items() if value is not None}
        regions = (prompt_masks, vp_overall_mask)
        outputs = self.model(input_ids, pixel_values, *of_text, vision_features, *regions, **kwargs)
        states = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(states[:, keep]), None
        if labels is not None:
            vocabulary = self.config.text_config.vocab_size
            loss = self.loss_function(logits, labels, vocabulary, num_items_in_batch=num_items_in_batch)
        kept = {name: getattr(outputs, name) for name in ("past_key_values", "hidden_states", "attentions")}
        return Sa2VAOutput(loss=loss, logits=logits, last_hidden_state=states, **kept)

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers; a Qwen-VL gets the positions of the whole prompt for every step."""
        features: Any = kwargs.get("vision_features")
        grid_thw: Any = kwargs.get("image_grid_thw")
        if self.config.family.body == "qwen_vl" and (features is not None or grid_thw is not None):
            grids = [grid[1:] for grid in grid_thw.tolist()] if features is None else features.grids
            ids = kwargs.get("input_ids", inputs)
            kwargs["position_table"] = self.model.position_table(ids, grids, kwargs.get("attention_mask"))
        return super().generate(inputs, **kwargs)  # type: ignore[misc]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """As in transformers, which gives a plain head to `resize_token_embeddings`; that of a Qwen3-VL has a norm."""
        if isinstance(self.lm_head, NormedHead) and not isinstance(new_embeddings, NormedHead):
            weight: Any = new_embeddings.weight
            norm: Any = self.lm_head.norm
            with torch.device("meta"):  # its weight is replaced
                new_embeddings = NormedHead(weight.shape[1], weight.shape[0], norm)
            new_embeddings.weight = weight
        self.lm_head = new_embeddings

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Images and regions are inputs of the first step only; later steps find them in the cache."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if not kwargs.get("is_first_iteration") and kwargs.get("use_cache", True):
            for name in FIRST_STEP:
                inputs.pop(name, None)
        return inputs

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Refuse several sequences per image: transformers would repeat single tiles and mix up the images."""
        if expand_size > 1 and any(kwargs.get(name) is not None for name in ("pixel_values", "vision_features")):
            raise ValueError("beams and num_return_sequences are not supported with images; repeat the samples instead")
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]

    @property
    def vision_model(self) -> Any:
        """The vision tower, under its name in the original; so are `language_model` and `mlp1`."""
        return self.model.visual if self.config.family.body == "qwen_vl" else self.model.vision_tower

    @property
    def language_model(self) -> nn.Module:
        """The language model, without its head."""
        return self.model.language_model

    @property
    def mlp1(self) -> nn.Module:
        """The projector of an InternVL. A Qwen-VL has none, here as in the original: its merger is in the tower."""
        return self.model.multi_modal_projector

    # Methods: their first argument `model` is this model.
    predict_forward = generation_sa2va.predict_forward
    segment = generation_sa2va.segment
    predict_video = video_sa2va.predict_video

    def get_sam_features(self, sam_pixel_values: Tensor) -> Sam2Features:
        """SAM 2's maps of (B, 3, S, S) images; `generation_sa2va.image_features` adds a side network's pixels."""
        return sam_features(self.grounding_encoder, sam_pixel_values)

    def add_side_network(self, config: SideNetworkConfig) -> None:
        """Put an untrained side network beside SAM 2, in float32; a ValueError where there is one of other sizes.

        One that is there keeps its `candidate`, and where its weights come from.
        """
        side = self.config.side
        if side is not None and side != replace(config, candidate=side.candidate, from_seg=side.from_seg):
            raise ValueError(
                f"side_network: the model has one of {side}; leave out --side_network, or give "
                f"--side_pixels {side.pixels}"
            )
        if self.side_network is None:
            self.config.side_network = json.loads(json.dumps(asdict(config)))  # as it is read back
            width = self.config.sam2_config.vision_config.fpn_hidden_size
            self.side_network = SideNetwork(config, width).to(self.device).train(self.training)

    def seg_embeddings(self, last_hidden_state: Tensor, input_ids: Tensor) -> list[Tensor]:
        """Per sample (K, C): the projected state AT each `[SEG]` token, in order."""
        pairs = zip(last_hidden_state, input_ids == self.config.seg_token_id, strict=True)
        return [self.text_hidden_fcs(states[places]) for states, places in pairs]

    def decode_masks(self, features: Sam2Features, seg_embeddings: Tensor) -> DecodedMasks:
        """Masks of K `[SEG]` embeddings (K, C) on one image; see `grounding_sa2va.decode_masks`."""
        return decode_masks(self.grounding_encoder, features, seg_embeddings, self.side_network)

    def answer_masks(self, decoded: DecodedMasks) -> Tensor:
        """float32 (K, h, w): the logits of masks as an answer has them, empty where SAM 3 sees no object.

        SAM 2 has such a score, too, but Sa2VA was not trained with it.
        """
        seen = decoded.object_score_logits[:, None, None] > 0
        return decoded.mask_logits.where(seen, NO_OBJECT) if self.config.has_sam3 else decoded.mask_logits


def _read_config(folder: CheckpointFolder) -> Sa2VAConfig:
    """The configuration, with the ids of special tokens looked up by text in the folder's tokenizer."""
    try:
        config = folder.model_config()
        tokenizer = folder.tokenizer(config)
        processor = Sa2VAProcessor.from_config(config, tokenizer, None, folder.image_processor(config))
        kept = {} if folder.original else kept_ids(folder.config, processor.image_tokens)
        check_tokens(folder.path, tokenizer, config.text_config.vocab_size, kept)
    except (KeyError, TypeError, AttributeError, OSError) as error:  # raised by transformers for damaged files
        raise ValueError(
            f"{folder.path}: config.json or the tokenizer's files are damaged ({error!r}); download or copy them again"
        ) from error
    except ValueError as error:
        if str(folder.path) in str(error):
            raise
        raise ValueError(f"{folder.path}: {error}") from error
    config.image_token_id, config.seg_token_id = processor.image_token_id, processor.seg_token_id
    config.never_sampled_ids, config.added_token_ids = processor.never_sampled_ids, tokenizer.get_added_vocab()
    return config


def check_checkpoint(folder: CheckpointFolder) -> Sa2VAConfig:
    """The folder's configuration, after a check that the weights fit it; only headers of weight files are read."""
    config = _read_config(folder)
    shapes = tensor_shapes(folder.path)
    for part, relative in RELATIVES.items():
        if any(name.startswith(part) for name in shapes):
            raise ValueError(f"{folder.path}: this is {relative}, which is not supported; {supported()}")
    expected, found = (
        {name: shape for name, shape in names.items() if not UNREAD3.fullmatch(name)}
        for names in (expected_shapes(config, folder.original), shapes)
    )
    check_shapes(expected, found, folder.path)
    return config


def expected_shapes(config: Sa2VAConfig, original: bool) -> dict[str, tuple[int, ...]]:
    """Names (of the official layout, or ours) and shapes of all tensors, from a model on the meta device."""
    with torch.device("meta"):
        state = Sa2VAForConditionalGeneration(config).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return {key: tuple(tensor.shape) for key, tensor in (to_original(state, config) if original else state).items()}
