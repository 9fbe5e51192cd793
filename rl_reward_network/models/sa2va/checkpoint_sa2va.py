"""Checkpoints on disk: layout, configuration, tokenizer, tensors and shapes of a folder."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import read_json, write_json, write_remedy
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.families import family_of, supported
from rl_reward_network.models.sa2va.internlm2 import MODEL_FILE
from rl_reward_network.models.sa2va.key_map_sa2va import first_few
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
    """A model folder with a known layout.

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
        """Sizes of SAM 2 from the folder's `sam2_sizes.json`, Hiera-L's if there is none.

        Raises:
            ValueError: a field of the file is missing.
        """
        file = self.path / "sam2_sizes.json"
        if not file.exists():
            return HIERA_L
        sizes = read_json(file)
        if missing := [name for name in HIERA_L if name not in sizes]:
            raise ValueError(f"{file}: fields {missing} are missing; expected {list(HIERA_L)}")
        return sizes

    def model_config(self) -> Sa2VAConfig:
        """The configuration as a `Sa2VAConfig`, from either layout.

        Raises:
            ValueError: a model that this version cannot build, or a damaged file.
        """
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
        """The folder's tokenizer, in the class of its language-model family; remote code is neither run nor requested.

        Raises:
            ValueError: a language model that this version cannot build.
        """
        tokenizer = family_of(config.text_config).tokenizer_class.from_pretrained(self.path)
        older = self.path / "chat_template.json"  # of a Qwen-VL's processor, before chat_template.jinja
        if tokenizer.chat_template is None and older.exists():
            tokenizer.chat_template = read_json(older).get("chat_template")
        return tokenizer

    def image_processor(self, config: Sa2VAConfig) -> Qwen2VLImageProcessorPil | None:
        """The image processor of a Qwen-VL: patch size and normalisation; None in an InternVL.

        Raises:
            ValueError: its file is missing or damaged, or its patches are not the model's.
        """
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
        """All tensors by their names in the files, memory-mapped, after a check of their values.

        Args:
            dtype: that the values will be converted to.

        Raises:
            ValueError: a tensor holds NaN or infinity, or would in `dtype`, or a file cannot be read.
        """
        tensors: dict[str, torch.Tensor] = {}
        for file in weight_files(self.path):
            tensors |= read_tensors(file, dtype)
        return tensors


def open_checkpoint(path: str | Path, weights: bool = True, **hub: Any) -> CheckpointFolder:
    """The folder behind a local path, an embedded model's name or a hub id, with its layout recognised.

    Code in the folder is never run.

    Args:
        weights: download the weights of a hub id, too.
        **hub: arguments of the download, see `arguments_sa2va.HUB`.

    Raises:
        ValueError: no such folder or hub id, no config.json, a model that is not Sa2VA, or only a part of one.
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
    return Path(path) if Path(path).is_dir() else EMBEDDED.get(str(path)) or _download(str(path), weights, hub)


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
    """Name our processor to `AutoProcessor`: the other files of a Qwen-VL name the base model's.

    Args:
        folder: of a model, or of a processor alone, which needs its settings.
        settings: of the processor.
    """
    named = {"processor_class": "Sa2VAProcessor"}
    write_json(folder / PROCESSOR_FILE, named | ({OWN_SETTINGS: dict(settings)} if settings else {}))


def _download(name: str, weights: bool, hub: Mapping[str, Any]) -> Path:
    remedy = (
        f"{name}: no such folder, and not a hub id that can be fetched; give a model folder, an id like owner/name, or "
        f"{DEFAULT_MODEL}"
    )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(remedy)
    try:
        patterns = [*FILES, *["*.safetensors"] * weights]
        return Path(snapshot_download(name, allow_patterns=patterns, **hub))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if full := write_remedy(error):
            raise ValueError(f"{name}: cannot be downloaded ({error}); {full}") from error
        raise ValueError(f"{remedy} ({type(error).__name__})") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: all of them, which an index, if there is one, must list.

    Raises:
        ValueError: no safetensors file, one that the index names is missing, or one that it does not name is there.
    """
    index, files = folder / INDEX, sorted(folder.glob("*.safetensors"))
    if index.exists():
        listed, present = set(_weight_map(index).values()), {file.name for file in files}
        if missing := sorted(listed - present):
            raise ValueError(f"{index}: lists missing files: {first_few(missing)}; download the model again")
        if surplus := sorted(present - listed):
            raise ValueError(
                f"{index}: lists {first_few(sorted(listed))}, but {first_few(surplus)} is there, too; one of them is "
                "old: delete the index with its files, or the other file"
            )
    if not files:
        raise ValueError(f"{folder}: no .safetensors file; pickled weights are not read, convert them first")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Names of tensors -> names of files."""
    try:
        return dict(read_json(index)["weight_map"].items())
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: field weight_map is missing or not a table; download the model again") from None


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model folder, read from the file headers.

    Raises:
        ValueError: a tensor is in two files, or in another file than the index says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for file in weight_files(folder):
        with open_safetensors(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in places:
                    raise ValueError(f"{folder}: {name} is in {places[name]} and in {file.name}; delete the old file")
                places[name], shapes[name] = file.name, tuple(handle.get_slice(name).get_shape())
    listed = _weight_map(folder / INDEX) if (folder / INDEX).exists() else places
    if wrong := [name for name in {**listed, **places} if listed.get(name) != places.get(name)]:
        there, here = (table.get(wrong[0], "no file") for table in (listed, places))
        raise ValueError(
            f"{folder / INDEX}: says that {wrong[0]} is in {there}, but it is in {here} ({len(wrong)} such tensors); "
            "index and files are of two models, download or copy them again"
        )
    return shapes


def check_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase, rows: int, kept: Mapping[str, int]) -> None:
    """Refuse a tokenizer that is not the model's: with a token that has no embedding, was lost, or has another id.

    Args:
        folder: of the model.
        tokenizer: as it was loaded from there.
        rows: of the model's embedding.
        kept: ids by token in the model's config.json.

    Raises:
        ValueError: names the file, the token, its id, and the one that was expected.
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
    "grounding_encoder.sam2_model.backbone.vision_backbone.": "Sa2VA with SAM 3",
    "grounding_encoder.sam2_model.sam_mask_decoder_modified.": "Sa2VA-i",
}


def refuse_relatives(names: Collection[str], where: Path) -> None:
    """Raise for a relative of Sa2VA with another grounding part, which only the names of its tensors tell.

    Raises:
        ValueError: names the relative.
    """
    for part, relative in RELATIVES.items():
        if any(name.startswith(part) for name in names):
            raise ValueError(f"{where}: this is {relative}, which is not supported; {supported()}")


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    actual: Mapping[str, tuple[int, ...]],
    where: Path,
    what: str = "its config.json",
) -> None:
    """Refuse a folder unless its tensors are exactly those that are expected by `what`.

    Raises:
        ValueError: missing keys, surplus keys or other shapes, all named in one message.
    """
    missing = [key for key in expected if key not in actual]
    surplus = [key for key in actual if key not in expected]
    wrong = [key for key in expected if actual.get(key, expected[key]) != expected[key]]
    other = [f"{key} {actual[key]} instead of {expected[key]}" for key in wrong]
    lines = [
        f"{len(names)} {what}: {first_few(names)}"
        for what, names in (("missing", missing), ("not expected", surplus), ("of another shape", other))
        if names
    ]
    if lines:
        raise ValueError(f"{where}: the weights do not fit {what}; tensors " + "; ".join(lines))
