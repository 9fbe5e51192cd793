"""Checkpoints on disk: layout, configuration, tokenizer, tensors and shapes of a folder, and names of both layouts.

One table of key names serves both directions; the language model's rows come from its family, which may split tensors,
too. Three things are not a plain rename: the fused qkv of a vision tower (three tensors here), the four point
embeddings (one table here), and SAM 2's Gaussian matrix (kept twice by transformers). What SAM 3 keeps and Sa2VA does
not read is not kept here: the detector's neck, the class token's position, and the rotations of its attention.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import read_json, write_json, write_remedy
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, SAM3_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.families import family_of
from rl_reward_network.models.sa2va.internlm2 import MODEL_FILE
from rl_reward_network.models.weights import open_safetensors, read_tensors, refuse_pointer

EMBEDDED = {DEFAULT_MODEL: Path(__file__).parents[2] / "assets" / DEFAULT_MODEL}  # models that come with the project
PROCESSOR_FILE = "processor_config.json"  # where `AutoProcessor` looks first
TRAINABLE = "trainable"  # folder of the trained tensors, in a checkpoint of a run and in its final model
FINAL_MODEL = "final_model"  # of a run
INDEX = "model.safetensors.index.json"  # of weights in several files
FILES = ("*.json", "*.txt", "*.jinja", MODEL_FILE)  # that are read, besides the weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
OWN_SETTINGS = "sa2va"  # in that file: what a processor without its model's config.json needs


@dataclass(frozen=True)
class CheckpointFolder:
    """A model folder with a known layout."""

    path: Path
    original: bool  # the official `sa2va_chat` layout, not ours
    config: dict[str, Any]  # the parsed config.json

    @property
    def sam2_sizes(self) -> dict[str, Any]:
        """Sizes of SAM 2, or SAM 3, from the folder's `sam2_sizes.json` or `sam3_sizes.json`; else the released ones.

        Which of the two it is, only the names of the tensors tell.
        """
        has_sam3 = any(name.startswith(TOWER3) for name in tensor_names(self.path))
        file, released = self.path / f"sam{3 if has_sam3 else 2}_sizes.json", SAM3_L if has_sam3 else HIERA_L
        if not file.exists():
            return released
        sizes = read_json(file)
        if missing := [name for name in released if name not in sizes]:
            raise ValueError(f"{file}: fields {missing} are missing; expected {list(released)}")
        return sizes

    def model_config(self) -> Sa2VAConfig:
        """The configuration, from either layout; a ValueError for one that cannot be built, or a damaged file."""
        file = self.path / "config.json"
        try:
            if self.original:
                return config_from_original(self.config, self.sam2_sizes, str(file))
            if missing := [name for name in Sa2VAConfig.sub_configs_defaults if name not in self.config]:
                raise ValueError(f"{file}: {missing[0]} is missing; download or copy the folder again")
            return Sa2VAConfig.from_dict(self.config)
        except (KeyError, TypeError, AttributeError, StrictDataclassError) as error:  # of transformers
            raise ValueError(f"{file}: damaged ({error!r}); download or copy it again") from error

    def tokenizer(self, config: Sa2VAConfig) -> PreTrainedTokenizerBase:
        """The folder's tokenizer, in the class of its language-model family; remote code is not asked about."""
        tokenizer = family_of(config.text_config).tokenizer_class.from_pretrained(self.path)
        older = self.path / "chat_template.json"  # of a Qwen-VL's processor, before chat_template.jinja
        if tokenizer.chat_template is None and older.exists():
            tokenizer.chat_template = read_json(older).get("chat_template")
        return tokenizer

    def image_processor(self, config: Sa2VAConfig) -> Qwen2VLImageProcessorPil | None:
        """The image processor of a Qwen-VL, None in an InternVL; a ValueError if it is missing, or not the model's."""
        if config.family.body != "qwen_vl":
            return None
        processor, file = read_image_processor(self.path)
        if processor is None:
            raise ValueError(f"{file}: is missing; a Qwen-VL needs it, download or copy the folder again")
        for field, expected in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
            found, needed = getattr(processor, field), getattr(config.vision_config, expected)
            if found != needed:
                raise ValueError(f"{file}: {field} is {found!r}, the model's is {needed!r}; copy the right file")
        return processor

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All tensors by their names in the files; errors as `read_tensors`."""
        files = weight_files(self.path)
        return {name: tensor for file in files for name, tensor in read_tensors(file, dtype).items()}


def open_checkpoint(path: str | Path, weights: bool = True, **hub: Any) -> CheckpointFolder:
    """The folder behind a local path, an embedded model's name or a hub id, with its layout recognised.

    Code in the folder is never run. `weights`: those of a hub id are downloaded, too; `hub`: see `arguments_sa2va.HUB`.
    A ValueError for no such folder or hub id, no config.json, a model that is not Sa2VA, or only a part of one.
    """
    folder = located(path, weights, **hub)
    refuse_unmerged(folder)
    for pattern in [*FILES, "*.safetensors"]:
        for file in folder.glob(pattern):
            refuse_pointer(file)
    config = read_json(folder / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in ("sa2va", "sa2va_chat"):
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {kind!r}, expected 'sa2va_chat' (an original Sa2VA) or 'sa2va' "
            "(written by sa2va-rl convert)"
        )
    return CheckpointFolder(folder, kind == "sa2va_chat", config)


def located(path: str | Path, weights: bool = True, **hub: Any) -> Path:
    """The folder behind a local path, an embedded model's name or a hub id. Arguments as `open_checkpoint`."""
    name = str(path)
    if Path(path).is_dir() or name in EMBEDDED:
        return Path(path) if Path(path).is_dir() else EMBEDDED[name]
    remedy = (
        f"{name}: no such folder, and not a hub id that can be fetched; give a model folder, an id like owner/name, or "
        f"{DEFAULT_MODEL}"
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(remedy)
    try:
        return Path(snapshot_download(name, allow_patterns=[*FILES, *["*.safetensors"] * weights], **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if full := write_remedy(error):
            raise ValueError(f"{name}: cannot be downloaded ({error}); {full}") from error
        raise ValueError(f"{remedy} ({type(error).__name__})") from error


def read_image_processor(folder: Path) -> tuple[Qwen2VLImageProcessorPil | None, Path]:
    """A Qwen-VL's image processor and its file: one of its own, or the processor's, where transformers 5 writes it."""
    file, whole = folder / "preprocessor_config.json", folder / PROCESSOR_FILE
    if file.exists():
        read_json(file)
        return Qwen2VLImageProcessorPil.from_pretrained(folder), file
    if whole.exists() and (fields := read_json(whole).get("image_processor")):
        return Qwen2VLImageProcessorPil(**fields), whole
    return None, file


def refuse_unmerged(folder: Path) -> None:
    """Raise for a GRPO run, its final_model or a checkpoint: they hold trained tensors, not a whole model."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    for candidate in (folder, folder / FINAL_MODEL, *checkpoints):
        if (candidate / TRAINABLE).is_dir():
            raise ValueError(
                f"{folder}: holds the tensors trained by a GRPO run, not a whole model; merge them first, and give "
                f"the result as --model_path: sa2va-rl merge --model_path {candidate} --output merged"
            )


def name_processor(folder: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Name our processor to `AutoProcessor` (other files of a Qwen-VL name the base model's), and keep its settings."""
    named = {"processor_class": "Sa2VAProcessor"}
    write_json(folder / PROCESSOR_FILE, named | ({OWN_SETTINGS: dict(settings)} if settings else {}))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; a ValueError if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no .safetensors file; pickled weights are not read, convert them first")
    return files


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors of a model folder, from its index, or the headers of its files; [] without weights."""
    index = folder / INDEX
    if index.exists() and isinstance(listed := read_json(index), dict) and isinstance(listed.get("weight_map"), dict):
        return list(listed["weight_map"])
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with open_safetensors(file) as handle:
            names += handle.keys()
    return names


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model folder, from the file headers; a ValueError where files and index disagree."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for file in weight_files(folder):
        with open_safetensors(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in places:
                    raise ValueError(f"{folder}: {name} is in {places[name]} and in {file.name}; delete the old file")
                places[name], shapes[name] = file.name, tuple(handle.get_slice(name).get_shape())
    index = folder / INDEX
    try:
        listed = dict(read_json(index)["weight_map"].items()) if index.exists() else places
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: field weight_map is missing or not a table; download the model again") from None
    if wrong := [name for name in {**listed, **places} if listed.get(name) != places.get(name)]:
        there, here = (table.get(wrong[0], "no file") for table in (listed, places))
        raise ValueError(
            f"{index}: says that {wrong[0]} is in {there}, but it is in {here} ({len(wrong)} such tensors); index and "
            "files are of two models, or one is missing; download or copy them again"
        )
    return shapes


def check_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, rows: int, kept: Mapping[str, int]) -> None:
    """Raise a ValueError for a tokenizer that is not the model's; it names file, token, id and the expected one.

    A token has no embedding among `rows`, was lost, or has another id than in a file, or in config.json (`kept`).
    """
    vocabulary, remedy = tokenizer.get_vocab(), "copy the files of this model's tokenizer again"
    whole, settings, added = (_object(folder / name) for name in TOKENIZER_FILES)
    files = {
        TOKENIZER_FILES[0]: {token["content"]: token["id"] for token in whole.get("added_tokens", ())},
        TOKENIZER_FILES[1]: {t["content"]: int(i) for i, t in settings.get("added_tokens_decoder", {}).items()},
        TOKENIZER_FILES[2]: added,
    }
    words = whole.get("model", {}).get("vocab") or _object(folder / "vocab.json")
    known = {word if isinstance(word, str) else word[0] for word in words}.union(*files.values())
    if words and (new := sorted(set(tokenizer.get_added_vocab()) - known)):
        raise ValueError(f"{folder}: no file of the tokenizer has an id for {new[0]!r}; {remedy}")
    for token, number in vocabulary.items():
        if number >= rows:
            raise ValueError(f"{folder}: {token!r} has the id {number}, but the model has {rows} tokens; {remedy}")
    for name, ids in (files | {"config.json": kept}).items():
        for token, number in ids.items():
            if (loaded := vocabulary.get(token)) != number:
                other = "is no token" if loaded is None else f"has the id {loaded}"
                raise ValueError(f"{folder / name}: {token!r} has the id {number}, but {other} when loaded; {remedy}")


def _object(file: Path) -> dict[str, Any]:
    return dict(read_json(file)) if file.exists() else {}


RELATIVES = {  # parts of tensor names, as their config.json does not tell them apart
    "grounding_encoder.sam2_model.sam_mask_decoder_modified.": "Sa2VA-i",
}


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, tuple[int, ...]],
    where: Path,
    what: str = "its config.json",
) -> None:
    """Raise a ValueError unless the tensors of a folder are exactly those that `what` expects; all others are named."""
    both = [key for key in expected if key in actual]
    differences = {
        "missing": [key for key in expected if key not in actual],
        "not expected": [key for key in actual if key not in expected],
        "of another shape": [f"{k} {actual[k]} instead of {expected[k]}" for k in both if actual[k] != expected[k]],
    }
    if lines := [f"{len(names)} {kind}: {first_few(names)}" for kind, names in differences.items() if names]:
        raise ValueError(f"{where}: the weights do not fit {what}; tensors " + "; ".join(lines))


def first_few(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ---- names of tensors in both layouts ----

SAM, OURS = "grounding_encoder.sam2_model.", "grounding_encoder."
VIT, OUR_VIT = "vision_model.encoder.layers.#.", "model.vision_tower.encoder.layer.#."
TRUNK, OUR_TRUNK = SAM + "image_encoder.trunk.", OURS + "vision_encoder.backbone."
PROMPTS, OUR_PROMPTS = SAM + "sam_prompt_encoder.", OURS + "prompt_encoder."
DECODER, OUR_DECODER = SAM + "sam_mask_decoder.", OURS + "mask_decoder."
LAYERS = "transformer.layers.#."
MEMORY, OUR_MEMORY = SAM + "memory_attention.layers.#.", OURS + "memory_attention.layers.#."

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
    (TRUNK + "patch_embed.proj.*", OUR_TRUNK + "patch_embed.projection.*"),
    (TRUNK + "blocks.#.norm#.*", OUR_TRUNK + "blocks.#.layer_norm#.*"),
    (TRUNK + "blocks.#.mlp.layers.0.*", OUR_TRUNK + "blocks.#.mlp.proj_in.*"),
    (TRUNK + "blocks.#.mlp.layers.1.*", OUR_TRUNK + "blocks.#.mlp.proj_out.*"),
    (TRUNK + "*", OUR_TRUNK + "*"),
    (SAM + "image_encoder.neck.convs.#.conv.*", OURS + "vision_encoder.neck.convs.#.*"),
    (PROMPTS + "mask_downscaling.0.*", OUR_PROMPTS + "mask_embed.conv1.*"),
    (PROMPTS + "mask_downscaling.1.*", OUR_PROMPTS + "mask_embed.layer_norm1.*"),
    (PROMPTS + "mask_downscaling.3.*", OUR_PROMPTS + "mask_embed.conv2.*"),
    (PROMPTS + "mask_downscaling.4.*", OUR_PROMPTS + "mask_embed.layer_norm2.*"),
    (PROMPTS + "mask_downscaling.6.*", OUR_PROMPTS + "mask_embed.conv3.*"),
    (PROMPTS + "not_a_point_embed.*", OUR_PROMPTS + "not_a_point_embed.*"),
    (PROMPTS + "no_mask_embed.*", OUR_PROMPTS + "no_mask_embed.*"),
    (DECODER + "output_upscaling.0.*", OUR_DECODER + "upscale_conv1.*"),
    (DECODER + "output_upscaling.1.*", OUR_DECODER + "upscale_layer_norm.*"),
    (DECODER + "output_upscaling.3.*", OUR_DECODER + "upscale_conv2.*"),
    (DECODER + "transformer.norm_final_attn.*", OUR_DECODER + "transformer.layer_norm_final_attn.*"),
    (DECODER + LAYERS + "norm#.*", OUR_DECODER + LAYERS + "layer_norm#.*"),
    (DECODER + LAYERS + "mlp.layers.0.*", OUR_DECODER + LAYERS + "mlp.proj_in.*"),
    (DECODER + LAYERS + "mlp.layers.1.*", OUR_DECODER + LAYERS + "mlp.proj_out.*"),
    (DECODER + "transformer.*.out_proj.*", OUR_DECODER + "transformer.*.o_proj.*"),
    *(
        (DECODER + f"{head}.layers.{i}.*", OUR_DECODER + f"{head}.{name}.*")
        for head in ("output_hypernetworks_mlps.#", "iou_prediction_head", "pred_obj_score_head")
        for i, name in enumerate(("proj_in", "layers.0", "proj_out"))
    ),
    (DECODER + "*", OUR_DECODER + "*"),
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

# SAM 3 in the place of SAM 2. The rows stand before those above, which fit the rest.
TOWER3 = SAM + "backbone.vision_backbone."
TRUNK3, NECK3, MEMORY3 = TOWER3 + "trunk.", TOWER3 + "sam2_convs.", SAM + "transformer.encoder."
OUR_NECK3, CLASSES3 = OURS + "vision_encoder.neck.fpn_layers.", TRUNK3 + "pos_embed"
UNREAD3 = re.compile(re.escape(TOWER3) + r"(convs\..+|trunk\.blocks\.\d+\.attn\.freqs_cis(_real|_imag)?)")
SAM3_RENAMES = [
    (CLASSES3, OUR_TRUNK + "embeddings.position_embeddings"),
    (TRUNK3 + "patch_embed.proj.*", OUR_TRUNK + "embeddings.patch_embeddings.projection.*"),
    (TRUNK3 + "ln_pre.*", OUR_TRUNK + "layer_norm.*"),
    (TRUNK3 + "blocks.#.norm#.*", OUR_TRUNK + "layers.#.layer_norm#.*"),
    (TRUNK3 + "blocks.#.attn.proj.*", OUR_TRUNK + "layers.#.attention.o_proj.*"),
    (TRUNK3 + "blocks.#.mlp.*", OUR_TRUNK + "layers.#.mlp.*"),
    (NECK3 + "0.dconv_2x2_0.*", OUR_NECK3 + "0.scale_layers.0.*"),
    (NECK3 + "0.dconv_2x2_1.*", OUR_NECK3 + "0.scale_layers.2.*"),
    (NECK3 + "1.dconv_2x2.*", OUR_NECK3 + "1.scale_layers.0.*"),
    (NECK3 + "#.conv_1x1.*", OUR_NECK3 + "#.proj1.*"),
    (NECK3 + "#.conv_3x3.*", OUR_NECK3 + "#.proj2.*"),
    (DECODER + LAYERS + "mlp.lin1.*", OUR_DECODER + LAYERS + "mlp.proj_in.*"),
    (DECODER + LAYERS + "mlp.lin2.*", OUR_DECODER + LAYERS + "mlp.proj_out.*"),
    (MEMORY3 + "norm.*", OURS + "memory_attention.layer_norm.*"),
    *(
        (old.replace(MEMORY, MEMORY3 + "layers.#."), new)
        for old, new in RENAMES
        if old.startswith(MEMORY) and new.startswith(OUR_MEMORY)
    ),
    *(
        (old.replace(SAM + "memory_encoder.", SAM + "maskmem_backbone."), new)
        for old, new in RENAMES
        if old.startswith(SAM + "memory_encoder.")
    ),
    (SAM + "obj_ptr_tpos_proj.*", OURS + "temporal_positional_encoding_projection_layer.*"),
    (SAM + "no_obj_embed_spatial", OURS + "occlusion_spatial_embedding_parameter"),
]

# (fused, in three parts): places for the number of the layer, the part, and weight or bias
FUSED = (
    ("vision_model.encoder.layers.{}.attn.qkv.{}", "model.vision_tower.encoder.layer.{}.attention.{}_proj.{}"),
    (TRUNK3 + "blocks.{}.attn.qkv.{}", OUR_TRUNK + "layers.{}.attention.{}_proj.{}"),
)
GAUSSIAN = PROMPTS + "pe_layer.positional_encoding_gaussian_matrix"
OUR_GAUSSIANS = (
    OURS + "shared_image_embedding.positional_embedding",
    OUR_PROMPTS + "shared_embedding.positional_embedding",
)
POINTS = [PROMPTS + f"point_embeddings.{i}.weight" for i in range(4)]
OUR_POINTS = OUR_PROMPTS + "point_embed.weight"


def _compile(pattern: str, target: str) -> tuple[re.Pattern[str], str]:
    """`a.#.*` -> a regular expression with groups, and the target with the groups put back in order."""
    regex = re.escape(pattern).replace(r"\#", r"(\d+)").replace("#", r"(\d+)").replace(r"\*", "(.+)")
    groups = iter(range(1, 10))
    return re.compile(regex + "$"), re.sub(r"[#*]", lambda _: rf"\g<{next(groups)}>", target)


def _rename(key: str, table: Iterable[tuple[re.Pattern[str], str]]) -> str | None:
    """The name of the first matching row; None without one."""
    matches = ((pattern.match(key), target) for pattern, target in table)
    return next((match.expand(target) for match, target in matches if match), None)


def to_ours(original: Mapping[str, torch.Tensor], config: Sa2VAConfig) -> dict[str, torch.Tensor]:
    """Tensors under our names from those under the original names; a ValueError for keys that no such Sa2VA has."""
    family = family_of(config.text_config)
    table = [_compile(*names) for names in _renames(config)]
    original = family.split(original, config.text_config)
    tensors: dict[str, torch.Tensor] = {}
    unknown = []
    for key, tensor in original.items():
        if fused := _matched(key, ((old, (r"(\d+)", r"(\w+)"), new) for old, new in FUSED)):
            new, (layer, kind) = fused
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                tensors[new.format(layer, part, kind)] = rows.clone()
        elif key == GAUSSIAN:
            tensors |= {name: tensor.clone() for name in OUR_GAUSSIANS}  # safetensors refuses shared memory
        elif key not in POINTS and not (config.has_sam3 and UNREAD3.fullmatch(key)):
            name = _rename(key, table)
            tensors[name or key] = tensor[:, 1:].clone() if key == CLASSES3 else tensor
            unknown += [] if name else [key]
    if unknown:
        raise ValueError(f"the checkpoint has {len(unknown)} keys that Sa2VA does not have: {first_few(unknown)}")
    if all(key in original for key in POINTS):
        tensors[OUR_POINTS] = torch.cat([original[key] for key in POINTS])
    return tensors


def to_original(ours: Mapping[str, torch.Tensor], config: Sa2VAConfig) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`, bit for bit; a ValueError for a key that is not ours, or a side network.

    What SAM 3 keeps and nobody reads is 0 there.
    """
    if config.side_network is not None:
        raise ValueError(
            "the official layout cannot hold a side network; keep our layout, which "
            "Sa2VAForConditionalGeneration loads, or train without --side_network"
        )
    family = family_of(config.text_config)
    table = [_compile(*names[::-1]) for names in _renames(config)]
    original: dict[str, torch.Tensor] = {}
    for key, tensor in ours.items():
        if fused := _matched(key, ((new, (r"(\d+)", "([qkv])", r"(\w+)"), (old, new)) for old, new in FUSED)):
            (old, new), (layer, part, kind) = fused
            if part == "q":
                original[old.format(layer, kind)] = torch.cat([ours[new.format(layer, one, kind)] for one in "qkv"])
        elif key in OUR_GAUSSIANS:
            original[GAUSSIAN] = tensor
        elif key == OUR_POINTS:
            original.update({point: row.clone() for point, row in zip(POINTS, tensor.split(1), strict=True)})
        elif (name := _rename(key, table)) is None:
            raise ValueError(f"no original name for {key}")
        else:
            original[name] = tensor
    if config.has_sam3:
        original |= _unread_of_sam3(original, config)
    return family.join(original, config.text_config)


def _renames(config: Sa2VAConfig) -> list[tuple[str, str]]:
    return [*family_of(config.text_config).renames, *(SAM3_RENAMES if config.has_sam3 else []), *RENAMES]


def _matched(key: str, patterns: Iterable[tuple[str, tuple[str, ...], Any]]) -> tuple[Any, tuple[str, ...]] | None:
    """The third of the first row whose pattern, with its places filled, is `key`, and what stands at its places."""
    for pattern, places, result in patterns:
        if match := re.fullmatch(re.escape(pattern).replace(r"\{\}", "{}").format(*places), key):
            return result, match.groups()
    return None


def _unread_of_sam3(original: Mapping[str, torch.Tensor], config: Sa2VAConfig) -> dict[str, torch.Tensor]:
    """What the official class expects besides: a neck, a position of the class token, rotations of each layer."""
    neck = {key.replace(NECK3, TOWER3 + "convs."): torch.zeros_like(original[key]) for key in original if NECK3 in key}
    positions = original[CLASSES3]
    tower = config.sam2_config.vision_config.backbone_config
    layers = range(tower.num_hidden_layers)
    windows = [0 if layer in tower.global_attn_indexes else tower.window_size for layer in layers]
    rotations = {
        f"{TRUNK3}blocks.{i}.attn.freqs_cis": _rotations(tower, windows[i]).to(positions.device) for i in layers
    }
    return {**neck, **rotations, CLASSES3: torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)}


def _rotations(tower: Any, window: int) -> torch.Tensor:
    """complex64 (cells, head size / 2): the angles of a cell's column, then those of its row."""
    side, size = window or tower.image_size // tower.patch_size, tower.hidden_size // tower.num_attention_heads
    rates = tower.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 4, device="cpu") / size)
    places = torch.arange(side, device="cpu") * (tower.window_size / side)
    angles = places[:, None] * rates
    both = torch.cat([angles.repeat(side, 1), angles.repeat_interleave(side, dim=0)], dim=1)
    return torch.polar(torch.ones_like(both), both)
