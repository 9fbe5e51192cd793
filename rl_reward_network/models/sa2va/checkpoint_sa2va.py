"""Checkpoints on disk: which layout a folder holds, its tensors, and the two-way map between key names.

One table serves both directions. Four things are not a plain rename: the fused qkv of the vision tower (three tensors
here), the four point embeddings (one table here), and SAM 2's Gaussian matrix (kept twice by transformers).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from rl_reward_network.artefacts import read_json
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original

DEFAULT_MODEL = "sa2va-nano"
EMBEDDED = {DEFAULT_MODEL: Path(__file__).parents[2] / "assets" / DEFAULT_MODEL}  # models that come with the project

SAM, OURS = "grounding_encoder.sam2_model.", "grounding_encoder."
VIT, OUR_VIT = "vision_model.encoder.layers.#.", "model.vision_tower.encoder.layer.#."
MEMORY = SAM + "memory_attention.layers.#."
OUR_MEMORY = OURS + "memory_attention.layers.#."

# (original, ours): `#` stands for a number, `*` for the rest of the name. The first row that matches wins.
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
    ("language_model.lm_head.*", "lm_head.*"),
    ("language_model.model.*", "model.language_model.*"),
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
    (
        SAM + "sam_mask_decoder.transformer.layers.#.norm#.*",
        OURS + "mask_decoder.transformer.layers.#.layer_norm#.*",
    ),
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
    (
        SAM + "memory_encoder.mask_downsampler.encoder.12.*",
        OURS + "memory_encoder.mask_downsampler.final_conv.*",
    ),
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


_TO_OURS = [_compile(original, ours) for original, ours in RENAMES]
_TO_ORIGINAL = [_compile(ours, original) for original, ours in RENAMES]


def _rename(key: str, table: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in table:
        if match := pattern.match(key):
            return match.expand(target)
    return None


def to_ours(original: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under our names from tensors under the original names; values are untouched.

    Raises:
        ValueError: keys that no Sa2VA of the InternVL family has, named in the message.
    """
    ours: dict[str, torch.Tensor] = {}
    unknown = []
    for key, tensor in original.items():
        if match := re.match(QKV.format(r"(\d+)", r"(\w+)") + "$", key):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                ours[OUR_QKV.format(match[1], part, match[2])] = rows.clone()
        elif key == GAUSSIAN:
            ours.update({name: tensor.clone() for name in OUR_GAUSSIANS})  # clones: files refuse shared memory
        elif key not in POINTS:
            name = _rename(key, _TO_OURS)
            ours[name or key] = tensor
            unknown += [] if name else [key]
    if unknown:
        raise ValueError(f"the checkpoint has {len(unknown)} keys that are not Sa2VA's: {_some(unknown)}")
    if all(key in original for key in POINTS):
        ours[OUR_POINTS] = torch.cat([original[key] for key in POINTS])
    return ours


def to_original(ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`, bit for bit.

    Raises:
        ValueError: keys that our model does not have.
    """
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
        elif (name := _rename(key, _TO_ORIGINAL)) is None:
            raise ValueError(f"no original name for {key}")
        else:
            original[name] = tensor
    return original


@dataclass(frozen=True)
class CheckpointFolder:
    """A model folder whose layout is known.

    Args:
        path: local folder.
        original: True for the official `sa2va_chat` layout, False for ours.
        config: the parsed config.json.
    """

    path: Path
    original: bool
    config: dict[str, Any]

    @property
    def sam2_sizes(self) -> dict[str, Any]:
        """Sizes of SAM 2: the folder's own `sam2_sizes.json`, else Hiera-L.

        Raises:
            ValueError: the file lacks a field.
        """
        file = self.path / "sam2_sizes.json"
        if not file.exists():
            return HIERA_L
        sizes = read_json(file)
        if missing := [name for name in HIERA_L if name not in sizes]:
            raise ValueError(f"{file}: fields {missing} are missing; expected {list(HIERA_L)}")
        return sizes

    def model_config(self) -> Sa2VAConfig:
        """The configuration, in our terms whatever the layout.

        Raises:
            ValueError: a model that this version cannot build.
        """
        if not self.original:
            return Sa2VAConfig.from_dict(self.config)
        return config_from_original(self.config, self.sam2_sizes, str(self.path / "config.json"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by the names in the files; memory-mapped, so nothing is read before it is used."""
        tensors: dict[str, torch.Tensor] = {}
        for file in weight_files(self.path):
            with _open_safetensors(file) as handle:
                tensors.update({key: handle.get_tensor(key) for key in handle.keys()})  # noqa: SIM118
        return tensors


def open_checkpoint(path: str | Path) -> CheckpointFolder:
    """The folder behind a local path, an embedded model's name or a hub id, with its layout recognised.

    No code of it is ever run.

    Raises:
        ValueError: no such folder or hub id, no config.json, or a model that is not Sa2VA.
    """
    folder = Path(path) if Path(path).is_dir() else EMBEDDED.get(str(path)) or _download(str(path))
    config = read_json(folder / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in ("sa2va", "sa2va_chat"):
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {kind!r}, expected 'sa2va_chat' (an original Sa2VA) or 'sa2va' "
            "(written by scripts.convert_sa2va_checkpoint)"
        )
    return CheckpointFolder(folder, kind == "sa2va_chat", config)


def _download(name: str) -> Path:
    remedy = (
        f"{name}: no such folder, and not a hub id that can be fetched; give a model folder, an id like owner/name, or "
        f"{DEFAULT_MODEL}"
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(remedy)
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{remedy} ({type(error).__name__})") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index when it has one.

    Raises:
        ValueError: no safetensors file, or one named in the index is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{index}: names files that are not there: {_some(missing)}; download the model again")
    if not files:
        raise ValueError(f"{folder}: no .safetensors file; pickled weights are not read, convert them first")
    return files


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model folder, from the file headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with _open_safetensors(file) as handle:
            shapes.update({key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()})  # noqa: SIM118
    return shapes


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); download or copy it again") from error


def check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Refuse a folder whose tensors are not exactly the model's.

    Raises:
        ValueError: missing keys, surplus keys or other shapes, all named in one message.
    """
    missing = [key for key in expected if key not in found]
    surplus = [key for key in found if key not in expected]
    other = [
        f"{key} {found[key]} instead of {expected[key]}"
        for key in expected
        if found.get(key, expected[key]) != expected[key]
    ]
    lines = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("not expected", surplus), ("of another shape", other))
        if names
    ]
    if lines:
        raise ValueError(f"{where}: the weights do not fit its config.json; tensors " + "; ".join(lines))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
