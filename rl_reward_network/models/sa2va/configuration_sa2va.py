"""Configuration of the native Sa2VA, read from our own layout or from an original `sa2va_chat` folder."""

import copy
from operator import attrgetter
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import InternVLVisionConfig, Sam2Config, Sam2VideoConfig, Sam3TrackerVideoConfig
from transformers.configuration_utils import PreTrainedConfig, SubConfigSpec
from transformers.models.auto import AutoConfig

from rl_reward_network.models.sa2va.families import Family, family_of, original_family, supported
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig, side_network_config
from rl_reward_network.models.sa2va.templates import TEMPLATES

BACKBONE = "vision_config.backbone_config."
OF_BOTH: dict[str, tuple[str, Any]] = {
    "d_model": ("vision_config.fpn_hidden_size", 256),
    "mem_ff": ("memory_attention_feed_forward_hidden_size", 2048),
    "mem_layers": ("memory_attention_num_layers", 4),
    "mem_dim": ("memory_encoder_output_channels", 64),
}
# Fields of `sam2_sizes.json`: where they are in transformers, and those of SAM 2.0 Hiera-L, in every released Sa2VA
# but that with SAM 3, whose fields are below.
SIZES: dict[str, tuple[str, Any]] = {
    "embed_dim": (BACKBONE + "hidden_size", 144),
    "num_heads": (BACKBONE + "num_attention_heads", 2),
    "stages": (BACKBONE + "blocks_per_stage", [2, 6, 36, 4]),
    "global_att_blocks": (BACKBONE + "global_attention_blocks", [23, 33, 43]),
    "bkg": (BACKBONE + "window_positional_embedding_background_size", [7, 7]),
    "window_spec": (BACKBONE + "window_size_per_stage", [8, 4, 16, 8]),
    **OF_BOTH,
    "image_size": ("prompt_encoder_config.image_size", 1024),
}
SAM3_SIZES: dict[str, tuple[str, Any]] = {
    "embed_dim": (BACKBONE + "hidden_size", 1024),
    "num_heads": (BACKBONE + "num_attention_heads", 16),
    "depth": (BACKBONE + "num_hidden_layers", 32),
    "mlp_dim": (BACKBONE + "intermediate_size", 4736),
    "global_att_blocks": (BACKBONE + "global_attn_indexes", [7, 15, 23, 31]),
    "window_size": (BACKBONE + "window_size", 24),
    "pretrain_image_size": (BACKBONE + "pretrain_image_size", 336),
    **OF_BOTH,
    "image_size": ("prompt_encoder_config.image_size", 1008),
}
HIERA_L = {name: value for name, (_, value) in SIZES.items()}
SAM3_L = {name: value for name, (_, value) in SAM3_SIZES.items()}
SAM3 = "sam3_tracker_video"  # `model_type` of a SAM 3 that is prompted as SAM 2 is
VISION_FIELDS = (  # of InternVL's vision tower, under the same name in transformers
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"),
    *("norm_type", "layer_norm_eps", "hidden_act"),
)


@strict
class Sa2VAConfig(PreTrainedConfig):
    """Vision tower + language model + SAM 2, and the few numbers that join them.

    Args:
        vision_config: InternVLVisionConfig by default.
        text_config: of a family in `families.FAMILIES`, Qwen2Config by default (`generate` expects this name).
        sam2_config: Sam2VideoConfig (all of an original checkpoint) or Sam2Config (images only, fewer weights), or
            Sam3TrackerVideoConfig: SAM 3 in the place of SAM 2.
        template: a key of `templates.TEMPLATES`; unused in a Qwen-VL, which has a chat template.
        downsample_ratio: pixel shuffle; 0.5 joins 2x2 patches into one image token.
        vision_feature_layer: -1 is the last hidden state; others index the list (0 = embeddings).
        max_tiles: largest number of tiles of one image, without the thumbnail.
        image_resize: of a Qwen-VL; see `pixels_sa2va.resized_image`.
        image_token_id, seg_token_id: of the image placeholder and `[SEG]`, looked up in a checkpoint's tokenizer.
        never_sampled_ids: placeholder ids that generation must not produce.
        added_token_ids: ids of the tokenizer's added tokens by text, which a folder's tokenizer must have.
        original_config: the official `config.json` of this model, for conversion back to that layout.
        side_network: fields of `SideNetworkConfig`; None without a side network, as in every official model.

    Source: bytedance/Sa2VA@9832e1a (names follow transformers' InternVLConfig).
    """

    model_type = "sa2va"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="internvl_vision"),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="qwen2"),
        "sam2_config": SubConfigSpec(config_class=AutoConfig, model_type="sam2_video"),
    }

    vision_config: Any = None  # dict, configuration or None before __init__, configuration after
    text_config: Any = None
    sam2_config: Any = None
    template: str = "qwen_chat"
    downsample_ratio: float = 0.5
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "default"
    max_tiles: int = 12
    image_resize: str = "prediction"
    image_token_id: int = 151667
    seg_token_id: int = 151674
    never_sampled_ids: list[int] | None = None
    added_token_ids: dict[str, int] | None = None
    original_config: dict[str, Any] | None = None
    side_network: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    @property
    def family(self) -> Family:
        """The row of `families.FAMILIES`."""
        return family_of(self.text_config)

    @property
    def side(self) -> SideNetworkConfig | None:
        """Sizes of the side network, None without one; a ValueError for sizes that this version cannot build."""
        return None if self.side_network is None else side_network_config(self.side_network)

    @property
    def side_pixels(self) -> int | None:
        """Side in pixels of the side network's input."""
        return None if self.side is None else self.side.pixels

    @property
    def tokens_per_tile(self) -> int:
        """Image tokens of one InternVL tile: 256 for a 448 px tile with 14 px patches."""
        side = self.vision_config.image_size[0] // self.vision_config.patch_size[0]
        return int(side * self.downsample_ratio) ** 2

    @property
    def sam2_image_size(self) -> int:
        """Side in pixels of SAM 2's square input."""
        return self.sam2_config.prompt_encoder_config.image_size

    @property
    def mask_size(self) -> int:
        """Side in pixels of the square masks: the side network's, or four for each cell of SAM's coarsest grid."""
        return self.side_pixels or self.sam2_image_size // (14 if self.has_sam3 else 16) * 4

    @property
    def has_sam3(self) -> bool:
        """Whether SAM 3 makes the masks, which are empty where it sees no object."""
        return bool(self.sam2_config.model_type == SAM3)


def sam2_config(sizes: dict[str, Any], video: bool = True) -> Sam2VideoConfig | Sam2Config | Sam3TrackerVideoConfig:
    """The transformers configuration of SAM 2.0, or SAM 3, from the short list of sizes.

    That is `HIERA_L` or a `sam2_sizes.json`, or `SAM3_L` or a `sam3_sizes.json`.
    """
    if sizes.keys() == SAM3_SIZES.keys():
        return _sam3_config(sizes)
    widths = [sizes["embed_dim"] * 2**stage for stage in range(4)]
    side, d_model = sizes["image_size"], sizes["d_model"]
    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": sizes["embed_dim"],
        "num_attention_heads": sizes["num_heads"],
        "image_size": [side, side],
        "blocks_per_stage": sizes["stages"],
        "embed_dim_per_stage": widths,
        "num_attention_heads_per_stage": [sizes["num_heads"] * 2**stage for stage in range(4)],
        "window_size_per_stage": sizes["window_spec"],
        "global_attention_blocks": sizes["global_att_blocks"],
        "window_positional_embedding_background_size": sizes["bkg"],
    }
    parts: dict[str, Any] = {
        "vision_config": {
            "model_type": "sam2_vision_model",
            "backbone_config": backbone,
            "backbone_channel_list": widths[::-1],
            "backbone_feature_sizes": [[side // stride] * 2 for stride in (4, 8, 16)],
            "fpn_hidden_size": d_model,
        },
        "prompt_encoder_config": {"hidden_size": d_model, "image_size": side},
        "mask_decoder_config": {"hidden_size": d_model},
    }
    if not video:
        return Sam2Config(**parts)
    parts |= _memory(sizes) | {
        "image_size": side,  # the two that are False belong to SAM 2.1
        "enable_occlusion_spatial_embedding": False,
        "enable_temporal_pos_encoding_for_object_pointers": False,
        "memory_attention_rope_feat_sizes": [side // 16, side // 16],
    }
    return Sam2VideoConfig(**parts)


def _sam3_config(sizes: dict[str, Any]) -> Sam3TrackerVideoConfig:
    """As in `sam2_config`; grids follow from the image size, and the patches have 14 pixels a side."""
    backbone = {"model_type": "sam3_vit_model", "image_size": sizes["image_size"], "patch_size": 14}
    backbone |= {path.removeprefix(BACKBONE): sizes[n] for n, (path, _) in SAM3_SIZES.items() if BACKBONE in path}
    vision = {"model_type": "sam3_vision_model", "backbone_config": backbone, "fpn_hidden_size": sizes["d_model"]}
    return Sam3TrackerVideoConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": sizes["d_model"], "image_size": sizes["image_size"]},
        mask_decoder_config={"hidden_size": sizes["d_model"]},
        **_memory(sizes),
        image_size=sizes["image_size"],  # type: ignore[call-arg]
    )


def _memory(sizes: dict[str, Any]) -> dict[str, Any]:
    d_model = sizes["d_model"]
    return {
        "memory_attention_hidden_size": d_model,
        "memory_attention_num_layers": sizes["mem_layers"],
        "memory_attention_feed_forward_hidden_size": sizes["mem_ff"],
        "memory_encoder_hidden_size": d_model,
        "memory_encoder_output_channels": sizes["mem_dim"],
        "mask_downsampler_embed_dim": d_model,
        "memory_fuser_embed_dim": d_model,
        "memory_fuser_intermediate_dim": 4 * d_model,
    }


def sam2_sizes(config: Any) -> dict[str, Any]:
    """The short list of sizes behind the configuration of a SAM 2 or 3: the inverse of `sam2_config`."""
    table = SAM3_SIZES if config.model_type == SAM3 else SIZES
    return {name: attrgetter(path)(config) for name, (path, _) in table.items()}


def config_from_original(original: dict[str, Any], sizes: dict[str, Any], where: str) -> Sa2VAConfig:
    """Our configuration from an official `config.json` at `where`; a ValueError for what this version cannot build."""
    try:
        family = original_family(original)
        parts = (_internvl_config if family.body == "internvl" else _qwen_vl_config)(original, family)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Sa2VAConfig(**parts, sam2_config=sam2_config(sizes), original_config=original)


def _internvl_config(original: dict[str, Any], family: Family) -> dict[str, Any]:
    vision = original.get("vision_config") or {}
    _demand("architectures", original.get("architectures"), ["Sa2VAChatModel"])
    _demand("vision_config.architectures", vision.get("architectures"), ["InternVisionModel"])
    _demand("ps_version", original.get("ps_version", "v1"), "v2")
    for field in ("use_backbone_lora", "use_llm_lora"):  # unmerged adapters have other key names
        _demand(field, original.get(field, 0), 0)
    if vision.get("qk_normalization"):  # transformers has this constant in the norms of queries and keys
        _demand("vision_config.layer_norm_eps", vision.get("layer_norm_eps"), 1e-6)
    template = (original.get("template") or "").replace("-", "_")  # as in the reference
    if template not in TEMPLATES:
        raise ValueError(f"template is {original.get('template')!r}, known are {sorted(TEMPLATES)}")
    return {
        "vision_config": InternVLVisionConfig(
            **{name: vision[name] for name in VISION_FIELDS},
            image_size=original.get("force_image_size") or vision["image_size"],
            attention_bias=vision["qkv_bias"],
            use_qk_norm=vision["qk_normalization"],
            hidden_dropout_prob=vision.get("dropout", 0.0),
            attention_dropout=vision.get("attention_dropout", 0.0),
            layer_scale_init_value=vision.get("initializer_factor", 0.1),
            use_mean_pooling=True,  # makes the final norm an identity: the reference has none
        ),
        "text_config": family.text_config(original["llm_config"]),
        "template": template,
        "downsample_ratio": original.get("downsample_ratio", 0.5),
        "vision_feature_layer": original.get("select_layer", -1),
    }


def _qwen_vl_config(original: dict[str, Any], family: Family) -> dict[str, Any]:
    """Fields outside the two parts are token ids, or stale copies that Qwen2.5-VL's exporter leaves."""
    assert family.whole_class is not None
    kind, vision = family.whole_class.model_type, original.get("vision_config") or {}
    _demand("vision_config.model_type", vision.get("model_type"), kind, f"{kind}_vision")  # released, ours
    # Copied, as transformers changes them and `original_config` has to stay the file's.
    parts: dict[str, Any] = copy.deepcopy({name: original[name] for name in ("vision_config", "text_config")})
    whole: Any = family.whole_class(**parts, tie_word_embeddings=False)  # type: ignore[call-arg]
    whole.text_config.tie_word_embeddings = False  # the released head is a tensor of its own
    return {"vision_config": whole.vision_config, "text_config": whole.text_config}


def _demand(field: str, value: Any, *expected: Any) -> None:
    if value not in expected:
        raise ValueError(f"{field} is {value!r}, expected {expected[0]!r}; {supported()}")
