"""The table of families that Sa2VA is built on: InternVL with a language model, or a Qwen-VL.

A new language model under InternVL's vision tower is one row of `FAMILIES`, and one of `templates.TEMPLATES` where its
checkpoints name a chat template that is not there yet.

Source: bytedance/Sa2VA@06912e2.
"""

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
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)
# Key names of a checkpoint whose language model was saved by transformers; the syntax is that of `key_map_sa2va`.
TRANSFORMERS_KEYS = (("language_model.lm_head.*", "lm_head.*"), ("language_model.model.*", "model.language_model.*"))
# A Qwen-VL checkpoint wraps transformers' whole model, so one `model.` is removed.
QWEN_VL_KEYS = (("model.lm_head.*", "lm_head.*"), ("model.model.*", "model.*"))
# The head reads the final norm: `[SEG]` states of Qwen3-VL are those before it (`body_qwen_vl.NormedHead`).
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


def _unchanged(tensors: Mapping[str, Tensor], text_config: Any) -> dict[str, Tensor]:
    return dict(tensors)


@dataclass(frozen=True)
class Family:
    """What a language model, and the vision model that it was trained with, bring to Sa2VA.

    Args:
        name: in messages and documents.
        architecture: in an original `config.json`, `llm_config.architectures[0]` of an InternVL, and
            `text_config.model_type` of a Qwen-VL.
        config_class: the text configuration. Its `model_type` identifies the family in our layout, and selects the text
            model's class (`AutoModel`).
        tokenizer_class: reads a checkpoint's tokenizer. `AutoTokenizer` would ask about an original's remote code.
        body: the kind of vision-language model; decides vision tower, preprocessing and chat template (that of the
            folder in a Qwen-VL, one of `templates.TEMPLATES` in an InternVL).
        fields: fields of `llm_config` to take over besides `COMMON_FIELDS`.
        renames: (original, ours) key names, as in `key_map_sa2va.RENAMES`.
        lora_targets: regular expression of the linear layers that get LoRA.
        trainable: beginnings of the names of the other tensors that the family's own fine-tuning trains.
        shows_regions: whether the text can refer to a region of the image.
        seg_before_norm: the `[SEG]` state is the one before the final norm of the language model.
        whole_class: transformers' configuration of the whole Qwen-VL; None in an InternVL.
        split, join: what is not a rename, on tensors under the original names before `renames`, and its inverse.
        demanded: (field, value) of `llm_config` that this version cannot build with any other value.
        prompt_prefix: text in front of the first turn, if the official tokenizer adds one.
    """

    name: str
    architecture: str
    config_class: type[PreTrainedConfig]
    tokenizer_class: type[PreTrainedTokenizerBase]
    body: Literal["internvl", "qwen_vl"] = "internvl"
    fields: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = TRANSFORMERS_KEYS
    lora_targets: str = LORA_TARGETS
    trainable: tuple[str, ...] = ("model.multi_modal_projector.", *GROUNDING)  # the projector is `mlp1`
    shows_regions: bool = True
    seg_before_norm: bool = False
    whole_class: type[PreTrainedConfig] | None = None
    split: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = _unchanged
    join: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]] = _unchanged
    demanded: tuple[tuple[str, Any], ...] = ()
    prompt_prefix: str = ""

    def text_config(self, original: dict[str, Any]) -> PreTrainedConfig:
        """The text configuration of an original `llm_config`; rope theta is part of `rope_parameters` now."""
        names = (*COMMON_FIELDS, *self.fields)
        values = {name: original[name] for name in names if original.get(name) is not None}
        scaling = original.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))  # `type` is the older name
        rope = {**scaling, "rope_type": kind, "rope_theta": original.get("rope_theta", 10000.0)}
        return self.config_class(**values | {"rope_parameters": rope, "tie_word_embeddings": False})


def _qwen_vl(name: str, text: type[PreTrainedConfig], whole: type[PreTrainedConfig], **settings: Any) -> Family:
    """A row for a Qwen-VL; its own fine-tuning trains the token embeddings and the head, and no part of the vision."""
    return Family(
        name=name,
        architecture=text.model_type,
        config_class=text,
        tokenizer_class=Qwen2Tokenizer,
        body="qwen_vl",
        trainable=(*EMBEDDINGS, *GROUNDING),
        shows_regions=False,
        whole_class=whole,
        **settings,
    )


FAMILIES = (
    Family(  # Qwen2.5, too
        name="InternVL with Qwen2",
        architecture="Qwen2ForCausalLM",
        config_class=Qwen2Config,
        tokenizer_class=Qwen2Tokenizer,
        fields=("use_sliding_window", "sliding_window", "max_window_layers"),
    ),
    Family(  # of InternVL3.5
        name="InternVL with Qwen3",
        architecture="Qwen3ForCausalLM",
        config_class=Qwen3Config,
        tokenizer_class=Qwen2Tokenizer,
        fields=("head_dim", "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    ),
    Family(  # InternLM2.5, too; transformers has it as Llama
        name="InternVL with InternLM2",
        architecture="InternLM2ForCausalLM",
        config_class=LlamaConfig,
        tokenizer_class=InternLM2Tokenizer,
        renames=INTERNLM2_KEYS,
        split=split_qkv,
        join=join_qkv,
        demanded=(("bias", False),),
        prompt_prefix="<s>",
    ),
    _qwen_vl("Qwen2.5-VL", Qwen2_5_VLTextConfig, Qwen2_5_VLConfig, renames=QWEN_VL_KEYS),
    _qwen_vl("Qwen3-VL", Qwen3VLTextConfig, Qwen3VLConfig, renames=QWEN3_VL_KEYS, seg_before_norm=True),
)

# Relatives that are not built: what their config.json's names of classes and files contain, and why.
REFUSED = {
    "LlavaForConditionalGeneration": "Sa2VA on LLaVA",
    "Sa2VAChatModelLlava": "Sa2VA on LLaVA",
    "modeling_sa2va_llava": "Sa2VA on LLaVA",
    "SaSaSa2VA": "SaSaSa2VA (several [SEG] for each clip)",
    "sasasa2va": "SaSaSa2VA (several [SEG] for each clip)",
}


def original_family(config: dict[str, Any]) -> Family:
    """The family of an original `config.json`.

    `architectures` alone does not tell: the official exporter leaves another name there for Qwen2.5-VL.

    Raises:
        ValueError: no family of the table has this language model, or the family's are built with another value.
    """
    body, field, found = _language_model(config)
    for family in FAMILIES:
        if (family.body, family.architecture) == (body, found):
            for name, value in family.demanded:
                if (given := config["llm_config"].get(name)) != value:
                    raise ValueError(f"llm_config.{name} is {given!r}, expected {value!r} for {family.name}")
            return family
    raise ValueError(f"{field} is {found!r}; {supported()}")


def _language_model(config: dict[str, Any]) -> tuple[str, str, Any]:
    """Body, field and value that name the language model of an original `config.json`; relatives are refused."""
    named = str([config.get("architectures"), config.get("auto_map")])
    if refused := next((reason for name, reason in REFUSED.items() if name in named), None):
        raise ValueError(f"{refused} is not supported; {supported()}")
    if "llm_config" not in config and ("text_config" in config or "qwen" in named.lower()):
        return "qwen_vl", "text_config.model_type", (config.get("text_config") or {}).get("model_type")
    found = (config.get("llm_config") or {}).get("architectures")
    if isinstance(found, list) and len(found) == 1:
        (found,) = found
    return "internvl", "llm_config.architectures", found


def supported() -> str:
    """The families of the table, for error messages."""
    names = ", ".join(f"{family.name} ({family.architecture})" for family in FAMILIES)
    return f"supported are Sa2VA checkpoints with SAM 2 and merged LoRA on: {names}"


def family_of(text_config: Any) -> Family:
    """The family of a text configuration.

    Raises:
        ValueError: no family of the table has this `model_type`.
    """
    families = {family.config_class.model_type: family for family in FAMILIES}
    if text_config.model_type not in families:
        raise ValueError(f"text_config.model_type is {text_config.model_type!r}, expected one of {list(families)}")
    return families[text_config.model_type]


def tokenizer_class(model_type: str) -> type[PreTrainedTokenizerBase]:
    """The tokenizer of a family, by the `model_type` of its language model; a ValueError for an unknown one."""
    families = {family.config_class.model_type: family for family in FAMILIES}
    if model_type not in families:
        raise ValueError(f"model_type is {model_type!r}, expected one of {list(families)}")
    return families[model_type].tokenizer_class


def model_type_of(tokenizer: type[PreTrainedTokenizerBase], qwen_vl: bool) -> str:
    """The first `model_type` with this tokenizer and body, which `tokenizer_class` takes."""
    body = "qwen_vl" if qwen_vl else "internvl"
    same = [family for family in FAMILIES if family.body == body and issubclass(tokenizer, family.tokenizer_class)]
    return same[0].config_class.model_type
