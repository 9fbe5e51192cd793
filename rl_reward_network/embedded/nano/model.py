"""`sa2va-nano`: Sa2VA's classes and mask decoding at under four million parameters; it needs no download.

This file defines the sizes; `sa2va-rl nano` trains the weights. One tile of 256 pixels gives the usual 16 x 16 image
tokens (patches of 16, no pixel shuffle). SAM 2 encodes 256 pixels and decodes masks on a 64 x 64 grid.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from transformers import InternVLVisionConfig, Qwen2Config, Qwen2Tokenizer

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig, sam2_config
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

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
