"""The table of families that Sa2VA is built on: InternVL with a language model, or a Qwen-VL.

A new language model under InternVL's vision tower is one row of `FAMILIES`, and one of `templates.TEMPLATES` where its
checkpoints name a chat template that is not there yet.

Source: bytedance/Sa2VA@06912e2.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3VLConfig,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from rl_reward_network.models.sa2va.internlm2 import INTERNLM2_KEYS, InternLM2Tokenizer, join_qkv, split_qkv

# Fields of `llm_config` that every decoder of transformers takes under the same name.
COMMON_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
)
# Key names of a checkpoint whose language model was saved by transformers; the syntax is that of `checkpoint_sa2va`.
TRANSFORMERS_KEYS = (("language_model.lm_head.*", "lm_head.*"), ("language_model.model.*", "model.language_model.*"))
# A Qwen-VL checkpoint wraps transformers' whole model, so one `model.` is removed.
QWEN_VL_KEYS = (("model.lm_head.*", "lm_head.*"), ("model.model.*", "model.*"))
# The head reads the final norm: `[SEG]` states of Qwen3-VL are those before it (`body_sa2va.NormedHead`).
QWEN3_VL_KEYS = (("model.model.language_model.norm.*", "lm_head.norm.*"), *QWEN_VL_KEYS)
EMBEDDINGS = ("lm_head.weight", "model.language_model.embed_tokens.")  # the head included
GROUNDING = (
    *("text_hidden_fcs.", "grounding_encoder.mask_decoder.", "grounding_encoder.prompt_encoder."),
    "side_network.",
)
DECODER = ("grounding_encoder.mask_decoder.", "grounding_encoder.prompt_encoder.")
ENCODER = "grounding_encoder.vision_encoder."
ENCODER_LORA_TARGETS = r"grounding_encoder\.vision_encoder\.backbone\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.proj_\w+)"
LORA_TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


@dataclass(frozen=True)
class Family:
    """What a language model, and the vision model that it was trained with, bring to Sa2VA."""

    name: str  # in messages and documents
    # In an original `config.json`, `llm_config.architectures[0]` of an InternVL, `text_config.model_type` of a Qwen-VL.
    architecture: str
    config_class: type[PreTrainedConfig]  # of the text; its `model_type` tells the family in our layout
    tokenizer_class: type[PreTrainedTokenizerBase]  # `AutoTokenizer` would ask about an original's remote code
    # Decides vision tower, preprocessing and chat template: the folder's in a Qwen-VL, else one of `TEMPLATES`.
    body: Literal["internvl", "qwen_vl"] = "internvl"
    fields: tuple[str, ...] = ()  # of `llm_config`, taken over besides `COMMON_FIELDS`
    renames: tuple[tuple[str, str], ...] = TRANSFORMERS_KEYS  # (original, ours), as in `checkpoint_sa2va.RENAMES`
    lora_targets: str = LORA_TARGETS  # regular expression of the linear layers that get LoRA
    # Beginnings of the names of the other tensors that the family's own fine-tuning trains; the projector is `mlp1`.
    trainable: tuple[str, ...] = ("model.multi_modal_projector.", *GROUNDING)
    seg_before_norm: bool = False  # the `[SEG]` state is the one before the final norm of the language model
    whole_class: type[PreTrainedConfig] | None = None  # transformers' configuration of the whole Qwen-VL
    # What is not a rename, on tensors under the original names before `renames`, and its inverse.
    split: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = lambda tensors, _: dict(tensors)
    join: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = lambda tensors, _: dict(tensors)
    demanded: tuple[tuple[str, Any], ...] = ()  # (field, value) of `llm_config`: no other value can be built
    prompt_prefix: str = ""  # in front of the first turn, if the official tokenizer adds it

    def text_config(self, original: dict[str, Any]) -> PreTrainedConfig:
        """The text configuration of an original `llm_config`; rope theta is part of `rope_parameters` now."""
        names = (*COMMON_FIELDS, *self.fields)
        values = {name: original[name] for name in names if original.get(name) is not None}
        scaling = original.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))  # `type` is the older name
        rope = {**scaling, "rope_type": kind, "rope_theta": original.get("rope_theta", 10000.0)}
        return self.config_class(**values | {"rope_parameters": rope, "tie_word_embeddings": False})


def _qwen_vl(name: str, text: type[PreTrainedConfig], **settings: Any) -> Family:
    """A row for a Qwen-VL; its own fine-tuning trains the token embeddings and the head, and no part of the vision."""
    trainable = (*EMBEDDINGS, *GROUNDING)
    return Family(name, text.model_type, text, Qwen2Tokenizer, "qwen_vl", trainable=trainable, **settings)


FAMILIES = (
    Family(  # Qwen2.5, too
        *("InternVL with Qwen2", "Qwen2ForCausalLM", Qwen2Config, Qwen2Tokenizer),
        fields=("use_sliding_window", "sliding_window", "max_window_layers"),
    ),
    Family(  # of InternVL3.5
        *("InternVL with Qwen3", "Qwen3ForCausalLM", Qwen3Config, Qwen2Tokenizer),
        fields=("head_dim", "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    ),
    Family(  # InternLM2.5, too; transformers has it as Llama
        *("InternVL with InternLM2", "InternLM2ForCausalLM", LlamaConfig, InternLM2Tokenizer),
        renames=INTERNLM2_KEYS,
        split=split_qkv,
        join=join_qkv,
        demanded=(("bias", False),),
        prompt_prefix="<s>",
    ),
    _qwen_vl("Qwen2.5-VL", Qwen2_5_VLTextConfig, whole_class=Qwen2_5_VLConfig, renames=QWEN_VL_KEYS),
    _qwen_vl("Qwen3-VL", Qwen3VLTextConfig, whole_class=Qwen3VLConfig, renames=QWEN3_VL_KEYS, seg_before_norm=True),
)

ARCHITECTURES = "architectures"
# Relatives that are not built: what their config.json's names of classes and files contain, and why.
REFUSED = {
    r"LlavaForConditionalGeneration|Sa2VAChatModelLlava|modeling_sa2va_llava": "Sa2VA on LLaVA",
    r"SaSaSa2VA|sasasa2va": "SaSaSa2VA (several [SEG] for each clip)",
}


def original_family(config: dict[str, Any]) -> Family:
    """The family of an original `config.json`; a ValueError for one that is not in the table, or has another value.

    `architectures` alone does not tell: the official exporter leaves another name there for Qwen2.5-VL.
    """
    named = str([config.get(ARCHITECTURES), config.get("auto_map")])
    if refused := next((reason for names, reason in REFUSED.items() if re.search(names, named)), None):
        raise ValueError(f"{refused} is not supported; {supported()}")
    if "llm_config" not in config and ("text_config" in config or "qwen" in named.lower()):
        body, field, found = "qwen_vl", "text_config.model_type", (config.get("text_config") or {}).get("model_type")
    else:
        body, field, found = "internvl", "llm_config.architectures", (config.get("llm_config") or {}).get(ARCHITECTURES)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
    for family in FAMILIES:
        if (family.body, family.architecture) == (body, found):
            for name, value in family.demanded:
                if (given := config["llm_config"].get(name)) != value:
                    raise ValueError(f"llm_config.{name} is {given!r}, expected {value!r} for {family.name}")
            return family
    raise ValueError(f"{field} is {found!r}; {supported()}")


def supported() -> str:
    """The families of the table, for error messages."""
    names = ", ".join(f"{family.name} ({family.architecture})" for family in FAMILIES)
    return f"supported are Sa2VA checkpoints with SAM 2 and merged LoRA on: {names}"


BY_MODEL_TYPE = {family.config_class.model_type: family for family in FAMILIES}


def family_of(text_config: Any) -> Family:
    """The family of a text configuration; a ValueError if none of the table has this `model_type`."""
    if text_config.model_type not in BY_MODEL_TYPE:
        raise ValueError(f"text_config.model_type is {text_config.model_type!r}, expected one of {list(BY_MODEL_TYPE)}")
    return BY_MODEL_TYPE[text_config.model_type]
