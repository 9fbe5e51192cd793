"""The table of language-model families that Sa2VA is built on.

A new language model under InternVL's vision tower is one row of `FAMILIES`, and one of `templates.TEMPLATES` where its
checkpoints name a chat template that is not there yet.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2Tokenizer
from transformers.configuration_utils import PreTrainedConfig

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


@dataclass(frozen=True)
class Family:
    """What a language model brings to Sa2VA.

    Args:
        architecture: `llm_config.architectures[0]` in an original `config.json`.
        config_class: the text configuration. Its `model_type` identifies the family in our layout, and selects the text
            model's class (`AutoModel`).
        tokenizer_class: reads a checkpoint's tokenizer. `AutoTokenizer` would ask about an original's remote code.
        fields: fields of `llm_config` to take over besides `COMMON_FIELDS`.
        renames: (original, ours) key names, as in `key_map_sa2va.RENAMES`.
    """

    architecture: str
    config_class: type[PreTrainedConfig]
    tokenizer_class: type[PreTrainedTokenizerBase]
    fields: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = TRANSFORMERS_KEYS

    def text_config(self, original: dict[str, Any]) -> PreTrainedConfig:
        """The text configuration of an original `llm_config`; rope theta is part of `rope_parameters` now."""
        names = (*COMMON_FIELDS, *self.fields)
        values = {name: original[name] for name in names if original.get(name) is not None}
        scaling = original.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))  # `type` is the older name
        rope = {**scaling, "rope_type": kind, "rope_theta": original.get("rope_theta", 10000.0)}
        return self.config_class(**values | {"rope_parameters": rope, "tie_word_embeddings": False})


FAMILIES = (
    Family(  # Qwen2.5, too
        architecture="Qwen2ForCausalLM",
        config_class=Qwen2Config,
        tokenizer_class=Qwen2Tokenizer,
        fields=("use_sliding_window", "sliding_window", "max_window_layers"),
    ),
)


def original_family(llm_config: dict[str, Any]) -> Family:
    """The family of an original `llm_config`.

    Raises:
        ValueError: no family of the table has this architecture.
    """
    architectures, families = llm_config.get("architectures"), {family.architecture: family for family in FAMILIES}
    for name, family in families.items():
        if architectures == [name]:
            return family
    raise ValueError(f"llm_config.architectures is {architectures!r}, expected one of {list(families)}")


def family_of(text_config: Any) -> Family:
    """The family of a text configuration.

    Raises:
        ValueError: no family of the table has this `model_type`.
    """
    families = {family.config_class.model_type: family for family in FAMILIES}
    if text_config.model_type not in families:
        raise ValueError(f"text_config.model_type is {text_config.model_type!r}, expected one of {list(families)}")
    return families[text_config.model_type]
