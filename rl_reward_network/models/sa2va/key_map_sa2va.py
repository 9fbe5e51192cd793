"""The two-way map between key names of the official layout and ours.

One table serves both directions; the language model's rows come from its family, which may split tensors, too. Three
things are not a plain rename: the fused qkv of the vision tower (three tensors here), the four point embeddings (one
table here), and SAM 2's Gaussian matrix (kept twice by transformers).
"""

import re
from collections.abc import Mapping, Sequence

import torch

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.families import family_of

SAM, OURS = "grounding_encoder.sam2_model.", "grounding_encoder."
VIT, OUR_VIT = "vision_model.encoder.layers.#.", "model.vision_tower.encoder.layer.#."
MEMORY = SAM + "memory_attention.layers.#."
OUR_MEMORY = OURS + "memory_attention.layers.#."

# (original, ours): `#` stands for a number, `*` for the rest of the name. The first matching row applies.
RENAMES = [
    ("vision_model.embeddings.class_embedding", "model.vision_tower.embeddings.cls_token"),
    ("vision_model.embeddings.position_embedding", "model.vision_tower.embeddings.position_embeddings"),
    ("vision_model.embeddings.patch_embedding.*", "model.vision_tower.embeddings.patch_embeddings.projection.*"),
    (VIT + "attn.proj.*", OUR_VIT + "attention.projection_layer.*"),
    (VIT + "attn.q_norm.*", OUR_VIT + "attention.q_norm.*"),
    (VIT + "attn.k_norm.*", OUR_VIT + "attention.k_norm.*"),
    (VIT + "norm1.*", OUR_VIT + "layernorm_before.*"),
    (VIT + "norm2.*", OUR_VIT + "layernorm_after.*"),
    (VIT + "ls#", OUR_VIT + "lambda_#"),
    (VIT + "mlp.*", OUR_VIT + "mlp.*"),
    ("mlp1.0.*", "model.multi_modal_projector.layer_norm.*"),
    ("mlp1.1.*", "model.multi_modal_projector.linear_1.*"),
    ("mlp1.3.*", "model.multi_modal_projector.linear_2.*"),
    ("text_hidden_fcs.*", "text_hidden_fcs.*"),
    (SAM + "image_encoder.trunk.patch_embed.proj.*", OURS + "vision_encoder.backbone.patch_embed.projection.*"),
    (SAM + "image_encoder.trunk.blocks.#.norm#.*", OURS + "vision_encoder.backbone.blocks.#.layer_norm#.*"),
    (SAM + "image_encoder.trunk.blocks.#.mlp.layers.0.*", OURS + "vision_encoder.backbone.blocks.#.mlp.proj_in.*"),
    (SAM + "image_encoder.trunk.blocks.#.mlp.layers.1.*", OURS + "vision_encoder.backbone.blocks.#.mlp.proj_out.*"),
    (SAM + "image_encoder.trunk.*", OURS + "vision_encoder.backbone.*"),
    (SAM + "image_encoder.neck.convs.#.conv.*", OURS + "vision_encoder.neck.convs.#.*"),
    (SAM + "sam_prompt_encoder.mask_downscaling.0.*", OURS + "prompt_encoder.mask_embed.conv1.*"),
    (SAM + "sam_prompt_encoder.mask_downscaling.1.*", OURS + "prompt_encoder.mask_embed.layer_norm1.*"),
    (SAM + "sam_prompt_encoder.mask_downscaling.3.*", OURS + "prompt_encoder.mask_embed.conv2.*"),
    (SAM + "sam_prompt_encoder.mask_downscaling.4.*", OURS + "prompt_encoder.mask_embed.layer_norm2.*"),
    (SAM + "sam_prompt_encoder.mask_downscaling.6.*", OURS + "prompt_encoder.mask_embed.conv3.*"),
    (SAM + "sam_prompt_encoder.not_a_point_embed.*", OURS + "prompt_encoder.not_a_point_embed.*"),
    (SAM + "sam_prompt_encoder.no_mask_embed.*", OURS + "prompt_encoder.no_mask_embed.*"),
    (SAM + "sam_mask_decoder.output_upscaling.0.*", OURS + "mask_decoder.upscale_conv1.*"),
    (SAM + "sam_mask_decoder.output_upscaling.1.*", OURS + "mask_decoder.upscale_layer_norm.*"),
    (SAM + "sam_mask_decoder.output_upscaling.3.*", OURS + "mask_decoder.upscale_conv2.*"),
    (SAM + "sam_mask_decoder.transformer.norm_final_attn.*", OURS + "mask_decoder.transformer.layer_norm_final_attn.*"),
    (SAM + "sam_mask_decoder.transformer.layers.#.norm#.*", OURS + "mask_decoder.transformer.layers.#.layer_norm#.*"),
    (
        SAM + "sam_mask_decoder.transformer.layers.#.mlp.layers.0.*",
        OURS + "mask_decoder.transformer.layers.#.mlp.proj_in.*",
    ),
    (
        SAM + "sam_mask_decoder.transformer.layers.#.mlp.layers.1.*",
        OURS + "mask_decoder.transformer.layers.#.mlp.proj_out.*",
    ),
    (SAM + "sam_mask_decoder.transformer.*.out_proj.*", OURS + "mask_decoder.transformer.*.o_proj.*"),
    *(
        (SAM + f"sam_mask_decoder.{head}.layers.{i}.*", OURS + f"mask_decoder.{head}.{name}.*")
        for head in ("output_hypernetworks_mlps.#", "iou_prediction_head", "pred_obj_score_head")
        for i, name in enumerate(("proj_in", "layers.0", "proj_out"))
    ),
    (SAM + "sam_mask_decoder.*", OURS + "mask_decoder.*"),
    (SAM + "no_mem_embed", OURS + "no_memory_embedding"),
    (SAM + "no_mem_pos_enc", OURS + "no_memory_positional_encoding"),
    (SAM + "maskmem_tpos_enc", OURS + "memory_temporal_positional_encoding"),
    (SAM + "no_obj_ptr", OURS + "no_object_pointer"),
    (SAM + "mask_downsample.*", OURS + "mask_downsample.*"),
    (SAM + "obj_ptr_proj.layers.0.*", OURS + "object_pointer_proj.proj_in.*"),
    (SAM + "obj_ptr_proj.layers.1.*", OURS + "object_pointer_proj.layers.0.*"),
    (SAM + "obj_ptr_proj.layers.2.*", OURS + "object_pointer_proj.proj_out.*"),
    (SAM + "memory_attention.norm.*", OURS + "memory_attention.layer_norm.*"),
    (MEMORY + "norm#.*", OUR_MEMORY + "layer_norm#.*"),
    (MEMORY + "*.out_proj.*", OUR_MEMORY + "*.o_proj.*"),
    (MEMORY + "*", OUR_MEMORY + "*"),
    (SAM + "memory_encoder.pix_feat_proj.*", OURS + "memory_encoder.feature_projection.*"),
    (SAM + "memory_encoder.out_proj.*", OURS + "memory_encoder.projection.*"),
    *(
        (
            SAM + f"memory_encoder.mask_downsampler.encoder.{3 * i + j}.*",
            OURS + f"memory_encoder.mask_downsampler.layers.{i}.{name}.*",
        )
        for i in range(4)
        for j, name in enumerate(("conv", "layer_norm"))
    ),
    (SAM + "memory_encoder.mask_downsampler.encoder.12.*", OURS + "memory_encoder.mask_downsampler.final_conv.*"),
    *(
        (SAM + f"memory_encoder.fuser.layers.#.{old}", OURS + f"memory_encoder.memory_fuser.layers.#.{new}")
        for old, new in (
            ("dwconv.*", "depthwise_conv.*"),
            ("norm.*", "layer_norm.*"),
            ("pwconv1.*", "pointwise_conv1.*"),
            ("pwconv2.*", "pointwise_conv2.*"),
            ("g_weight", "scale"),
        )
    ),
]

QKV = "vision_model.encoder.layers.{}.attn.qkv.{}"
OUR_QKV = "model.vision_tower.encoder.layer.{}.attention.{}_proj.{}"
GAUSSIAN = SAM + "sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"
OUR_GAUSSIANS = (
    OURS + "shared_image_embedding.positional_embedding",
    OURS + "prompt_encoder.shared_embedding.positional_embedding",
)
POINTS = [SAM + f"sam_prompt_encoder.point_embeddings.{i}.weight" for i in range(4)]
OUR_POINTS = OURS + "prompt_encoder.point_embed.weight"


def _compile(pattern: str, target: str) -> tuple[re.Pattern[str], str]:
    """`a.#.*` -> a regular expression with groups, and the target with the groups put back in order."""
    regex = re.escape(pattern).replace(r"\#", r"(\d+)").replace("#", r"(\d+)").replace(r"\*", "(.+)")
    groups = iter(range(1, 10))
    return re.compile(regex + "$"), re.sub(r"[#*]", lambda _: rf"\g<{next(groups)}>", target)


Table = list[tuple[re.Pattern[str], str]]
_TO_OURS: Table = [_compile(*names) for names in RENAMES]
_TO_ORIGINAL: Table = [_compile(*names[::-1]) for names in RENAMES]


def _rename(key: str, table: Table) -> str | None:
    """The name of the first matching row; None without one."""
    for pattern, target in table:
        if match := pattern.match(key):
            return match.expand(target)
    return None


def to_ours(original: Mapping[str, torch.Tensor], config: Sa2VAConfig) -> dict[str, torch.Tensor]:
    """Tensors under our names from tensors under the original names; values are untouched.

    Args:
        config: of the same checkpoint; its text configuration selects the family.

    Raises:
        ValueError: keys that no Sa2VA of the family has, named in the message.
    """
    family = family_of(config.text_config)
    language: Table = [_compile(*names) for names in family.renames]
    original = family.split(original, config.text_config)
    tensors: dict[str, torch.Tensor] = {}
    unknown = []
    for key, tensor in original.items():
        if match := re.match(QKV.format(r"(\d+)", r"(\w+)") + "$", key):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                tensors[OUR_QKV.format(match[1], part, match[2])] = rows.clone()
        elif key == GAUSSIAN:
            tensors |= {name: tensor.clone() for name in OUR_GAUSSIANS}  # safetensors refuses shared memory
        elif key not in POINTS:
            name = _rename(key, [*language, *_TO_OURS])
            tensors[name or key] = tensor
            unknown += [] if name else [key]
    if unknown:
        raise ValueError(f"the checkpoint has {len(unknown)} keys that Sa2VA does not have: {first_few(unknown)}")
    if all(key in original for key in POINTS):
        tensors[OUR_POINTS] = torch.cat([original[key] for key in POINTS])
    return tensors


def to_original(ours: Mapping[str, torch.Tensor], config: Sa2VAConfig) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`, bit for bit.

    Raises:
        ValueError: a key that our model does not have, or a side network.
    """
    if config.side_network is not None:
        raise ValueError(
            "the official layout cannot hold a side network; keep our layout, which "
            "Sa2VAForConditionalGeneration loads, or train without --side_network"
        )
    family = family_of(config.text_config)
    language: Table = [_compile(*names[::-1]) for names in family.renames]
    original: dict[str, torch.Tensor] = {}
    for key, tensor in ours.items():
        if match := re.match(OUR_QKV.format(r"(\d+)", "([qkv])", r"(\w+)") + "$", key):
            if match[2] == "q":
                parts = [ours[OUR_QKV.format(match[1], part, match[3])] for part in "qkv"]
                original[QKV.format(match[1], match[3])] = torch.cat(parts)
        elif key in OUR_GAUSSIANS:
            original[GAUSSIAN] = tensor
        elif key == OUR_POINTS:
            original.update({point: row.clone() for point, row in zip(POINTS, tensor.split(1), strict=True)})
        elif (name := _rename(key, [*language, *_TO_ORIGINAL])) is None:
            raise ValueError(f"no original name for {key}")
        else:
            original[name] = tensor
    return family.join(original, config.text_config)


def first_few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
