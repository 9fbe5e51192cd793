"""A small part of the golden reference, for machines without it: `tests/fixtures/golden`, under 1 MB.

It holds the image, the tokenizer, the weights of the language model and of `text_hidden_fcs`, and the official model's
numbers around them. The weights of the two image encoders and of the mask decoder are too large; their outputs (image
rows, mask logits in float16) are stored instead.

    python -m tests.golden_extract      # writes it again from the reference
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rl_reward_network.models.sa2va.checkpoint_sa2va import to_ours
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.grounding_sa2va import DecodedMasks, Sam2Features
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

EXTRACT = Path(__file__).parent / "fixtures" / "golden"
COPIED = ("config.json", "sam2_sizes.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = ("language_model.", "text_hidden_fcs.")
EMBEDDINGS = "language_model.model.embed_tokens.weight"
LOGITS = "sam_low_res_mask_logits"
MASKS = ("pred_masks", "train_gt_masks")
EXPECTED = (
    *("pixel_values_every7th", "sam_pixel_values_fp32_stride16"),
    *("input_ids", "response_ids", "full_ids", "labels", "inputs_embeds"),
    *("response_logits", "response_logprobs", "loss_llm", "last_hidden_state_from_prompt_end"),
    *("seg_positions", "seg_hidden_states", "seg_embeddings"),
    *("train_conversation_input_ids", "train_conversation_labels", "train_loss_mask_full", "train_loss_dice_full"),
)
HASHED = ("pixel_values_u8", "sam_pixel_values_u8")


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def write_extract(reference: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    expected = load_file(reference / "expected.safetensors")
    weights = load_file(reference / "checkpoint" / "model.safetensors")
    meta, talk = (json.loads((reference / name).read_text()) for name in ("meta.json", "train_conversation.json"))
    for name in COPIED:
        shutil.copyfile(reference / "checkpoint" / name, folder / name)
    Image.open(reference / "image.png").save(folder / "image.png", optimize=True)
    case = {
        "text": meta["text"],
        "prediction": meta["prediction"],
        "turns": [[turn["input"], turn["output"]] for turn in talk["conversation"]],
        "sha256": {name: sha256(expected[name]) for name in HASHED},
    }
    (folder / "case.json").write_text(json.dumps(case, indent=2) + "\n")
    arrays = {f"weights/{name}": tensor for name, tensor in weights.items() if name.startswith(WEIGHTS)}
    used = torch.cat([expected["full_ids"], torch.tensor([0])]).unique()  # rows of other tokens are never read
    arrays |= {"used_ids": used, f"weights/{EMBEDDINGS}": weights[EMBEDDINGS][used]}
    arrays |= {name: expected[name] for name in EXPECTED} | {LOGITS: expected[LOGITS].half()}
    packed = {name: np.packbits(expected[name].numpy().astype(bool), axis=-1) for name in MASKS}
    numbers = {name: tensor.numpy() for name, tensor in arrays.items()} | packed
    np.savez_compressed(folder / "tensors.npz", **numbers)


def read_extract(folder: Path = EXTRACT) -> dict[str, Any]:
    """The model with its stand-ins, the processor, the image, the expected tensors and the words of `case.json`."""
    case = json.loads((folder / "case.json").read_text())
    with np.load(folder / "tensors.npz") as file:
        tensors = {name: torch.from_numpy(file[name]) for name in file.files}
    image = Image.open(folder / "image.png")
    for name in MASKS:
        tensors[name] = torch.from_numpy(np.unpackbits(tensors[name].numpy(), axis=-1)[..., : image.width])
    tensors[LOGITS] = tensors[LOGITS].float()
    processor = Sa2VAProcessor.from_pretrained(folder)
    model = _model(folder, tensors, processor)
    return case | {"model": model, "processor": processor, "image": image, "expected": tensors}


def _model(folder: Path, tensors: dict[str, Tensor], processor: Sa2VAProcessor) -> Any:
    original, sizes = (json.loads((folder / name).read_text()) for name in ("config.json", "sam2_sizes.json"))
    config = config_from_original(original, sizes, "config.json")
    config.image_token_id, config.seg_token_id = processor.image_token_id, processor.seg_token_id
    model: Any = Sa2VAForConditionalGeneration(config).eval()
    weights = {name.removeprefix("weights/"): tensor for name, tensor in tensors.items() if name.startswith("weights/")}
    embeddings = torch.zeros(config.text_config.vocab_size, config.text_config.hidden_size)
    embeddings[tensors["used_ids"]] = weights[EMBEDDINGS]
    report = model.load_state_dict(to_ours(weights | {EMBEDDINGS: embeddings}, config), strict=False)
    assert not report.unexpected_keys
    rows = tensors["inputs_embeds"][tensors["input_ids"] == processor.image_token_id]
    model.model.project = lambda features: rows[None].to(features.dtype)
    width, side = sizes["d_model"], sizes["image_size"]
    maps = tuple(torch.zeros(1, width, side // stride, side // stride) for stride in (4, 8, 16))
    model.get_sam_features = lambda pixels: Sam2Features(maps)
    model.decode_masks = lambda features, embeddings: _stored_masks(tensors[LOGITS][:, 0], embeddings)
    return model


def _stored_masks(logits: Tensor, embeddings: Tensor) -> DecodedMasks:
    """The stored mask logits (1, h, w) for one `[SEG]`; what else a decoder gives is 0."""
    assert len(embeddings) == len(logits) == 1
    zeros = torch.zeros(1)
    return DecodedMasks(logits, zeros, zeros.long(), logits[:, None].expand(-1, 4, -1, -1), zeros[:, None], zeros)


if __name__ == "__main__":
    from tests.conftest import GOLDEN

    write_extract(GOLDEN, EXTRACT)
