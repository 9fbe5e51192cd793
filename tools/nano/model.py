"""The architecture of `sa2va-nano` and its training losses: Sa2VA's classes at under four million parameters.

One tile of 256 pixels gives the usual 16 x 16 image tokens (patches of 16, no pixel shuffle). SAM 2 encodes 256 pixels
and decodes masks on a 64 x 64 grid.

Trained from scratch with the mask losses alone, the language model gives all prompts the same `[SEG]` embedding, and so
the same mask, for hundreds of steps. Two auxiliary losses prevent this:

- Codes: each prompt, and each word of a phrase, has a learned embedding. In the first stage SAM 2 is prompted with the
  codes, and the `[SEG]` embeddings are regressed onto them; in later stages SAM 2 is prompted with the `[SEG]`
  embeddings.
- Regions: from the second stage on, a linear layer classifies colour, shape, size and place from the mean vision
  feature of each region, since captions alone train the vision tower too slowly.

Codes and linear layer are not part of the released model.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import InternVLVisionConfig, Qwen2Config, Qwen2Tokenizer

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig, sam2_config
from rl_reward_network.models.sa2va.grounding_sa2va import iou_head_loss, mask_losses
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tools.nano.conversations import CODED
from tools.nano.pictures import ATTRIBUTES

IMAGE_SIZE = 256  # pixels, of both image encoders
SPECIAL_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("[SEG]", "<p>", "</p>", "<vp>", "</vp>"),
)
NANO_SAM = {
    "embed_dim": 32,
    "num_heads": 1,
    "stages": [1, 2, 3, 1],
    "global_att_blocks": [4],
    "bkg": [7, 7],
    "window_spec": [8, 4, 16, 8],
    "d_model": 128,
    "image_size": IMAGE_SIZE,
}


def nano_tokenizer(corpus: Iterable[str]) -> Qwen2Tokenizer:
    """Byte-level BPE learned from `corpus`, whose words become single tokens; any other text falls back to bytes."""
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(corpus, trainer)
    # the merges are only public in the file format
    parts = json.loads(learner.to_str())["model"]
    merges: Any = [tuple(pair) for pair in parts["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=parts["vocab"], merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    return tokenizer


def nano_config(tokenizer: Qwen2Tokenizer) -> Sa2VAConfig:
    """The model's sizes; ids of special tokens are looked up in the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    sam = sam2_config(NANO_SAM, video=False)
    decoder: Any = sam.mask_decoder_config
    decoder.mlp_dim, decoder.iou_head_hidden_dim = 512, 128
    vision = InternVLVisionConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        image_size=IMAGE_SIZE,
        patch_size=16,
        attention_bias=True,
        layer_scale_init_value=1.0,  # four layers train without damping
        use_mean_pooling=True,  # as in the released models: no final norm
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Sa2VAConfig(
        vision_config=vision,
        text_config=text,
        sam2_config=sam,
        downsample_ratio=1.0,
        max_tiles=1,
        image_token_id=vocabulary["<IMG_CONTEXT>"],
        seg_token_id=vocabulary["[SEG]"],
    )


def plane_waves(side: int, width: int) -> Tensor:
    """float32 (side * side, width): position embeddings of sines and cosines of column and row, in row-major order.

    From the usual zeros, a small vision tower learns no positions for thousands of steps.

    Args:
        side: patches along an image's edge.
        width: a multiple of 4.

    Source: the fixed embeddings of masked autoencoders, He et al., CVPR 2022.
    """
    waves = 10000.0 ** -(torch.arange(width // 4) / (width // 4))
    phase = torch.arange(side)[:, None] * waves  # (side, width / 4)
    line = torch.cat([phase.sin(), phase.cos()], dim=1)
    columns, rows = line.repeat(side, 1), line.repeat_interleave(side, dim=0)
    return torch.cat([columns, rows], dim=1)


def new_nano(tokenizer: Qwen2Tokenizer, seed: int) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """An untrained nano with its processor; equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = nano_config(tokenizer)
    model = Sa2VAForConditionalGeneration(config)
    places = model.model.vision_tower.embeddings.position_embeddings  # (1, 1 + patches, width), the first is CLS
    places.data[0, 1:] = plane_waves(int((places.shape[1] - 1) ** 0.5), places.shape[2])
    for part in (model.model, model.lm_head, model.text_hidden_fcs):
        for module in part.modules():
            if isinstance(module, nn.Linear):  # 0.02 would be too small at width 128: positions would dominate words
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model, Sa2VAProcessor.from_config(config, tokenizer)


CODE_SCALE = 0.3  # standard deviation of the codes at initialisation
LOSS_GRID = 128  # side of the grid of the mask losses: twice the decoder's, so the thinnest vessel is 4 cells wide


class Helpers(torch.nn.Module):
    """The codes (`codes`) and the linear layer of the region loss (`reader`); see the module text.

    Args:
        width: D, the hidden size of the language model.
        sam_width: C, the embedding size of SAM 2's prompts.
    """

    def __init__(self, width: int, sam_width: int) -> None:
        super().__init__()
        self.codes = torch.nn.Parameter(torch.randn(len(CODED), sam_width) * CODE_SCALE)
        self.reader = torch.nn.Linear(width, sum(map(len, ATTRIBUTES)))


def nano_losses(
    model: Sa2VAForConditionalGeneration, helpers: Helpers, batch: dict[str, Any], by_codes: bool
) -> dict[str, Tensor]:
    """Scalar losses `text`, `code`, `mask`, `dice`, `iou`, and `region` unless `by_codes`; their sum is minimised.

    The mask losses are averaged over SAM 2's three candidate masks.

    Args:
        model: nano.
        helpers: auxiliary parameters of the model's sizes.
        batch: from `collate`; with `region_scenes`, if any.
        by_codes: prompt SAM 2 with the codes, see `Stage`.
    """
    features = model.model.get_vision_features(batch["with_image"]["pixel_values"])
    with_image = batch["with_image"] | {"vision_features": features}  # used in place of `pixel_values`
    texts = [with_image, *([batch["text_only"]] if batch["text_only"] else [])]
    outputs = [model(**text) for text in texts]
    states = [output.last_hidden_state for output in outputs]
    found = [model.seg_embeddings(one, text["input_ids"]) for one, text in zip(states, texts, strict=True)]
    embeddings = torch.cat([one for of_text in found for one in of_text])  # (K, C), in order
    codes = batch["code_words"] @ helpers.codes
    logits, scores = _candidates(model, batch, codes if by_codes else embeddings)
    truth = torch.cat(batch["masks"]).repeat_interleave(3, dim=0)
    losses = {} if by_codes else {"region": _region_loss(model, helpers.reader, features, batch)}
    return losses | {
        "text": torch.stack([output.loss for output in outputs]).sum(),
        "code": F.mse_loss(embeddings, codes.detach()) / codes.detach().var(),
        **mask_losses(logits, truth),
        "iou": iou_head_loss(scores, logits, truth),
    }


def _region_loss(
    model: Sa2VAForConditionalGeneration, reader: torch.nn.Linear, features: Tensor, batch: dict[str, Any]
) -> Tensor:
    """Cross-entropy of each attribute from the mean feature of a region, summed over the four attributes."""
    with_image = batch["with_image"]
    means = [_region_means(model, features[with_image["vp_overall_mask"]], with_image["prompt_masks"])]
    truth = [batch["attributes"]]
    if scenes := batch.get("region_scenes"):
        means.append(_region_means(model, model.model.get_vision_features(scenes["pixel_values"]), scenes["cells"]))
        truth.append(scenes["attributes"])
    logits = reader(torch.cat(means)).split(list(map(len, ATTRIBUTES)), dim=1)
    words = torch.cat(truth).unbind(dim=1)
    return torch.stack([F.cross_entropy(*pair) for pair in zip(logits, words, strict=True)]).sum()


def _region_means(model: Sa2VAForConditionalGeneration, features: Tensor, cells: list[Tensor]) -> Tensor:
    """(regions, D): mean projected feature of each region; vision features are (B, patches, V)."""
    pairs = zip(model.model.project(features), cells, strict=True)
    return torch.stack([projected[region.flatten()].mean(dim=0) for projected, regions in pairs for region in regions])


def _candidates(model: Sa2VAForConditionalGeneration, batch: dict[str, Any], prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (3 K, LOSS_GRID, LOSS_GRID) and predicted IoU (3 K,) of the three candidates of each prompt (K, C)."""
    features = model.get_sam_features(batch["sam_pixel_values"])
    logits, scores = [], []
    for index, image_prompts in enumerate(prompts.split([len(masks) for masks in batch["masks"]])):
        decoded = model.decode_masks(features[index], image_prompts)
        logits.append(decoded.candidates[:, 1:])  # (K, 3, h, w); 0 is the token that Sa2VA never uses
        scores.append(decoded.candidate_scores[:, 1:])
    fine = F.interpolate(torch.cat(logits), size=(LOSS_GRID, LOSS_GRID), mode="bilinear")
    return fine.flatten(0, 1), torch.cat(scores).flatten()
