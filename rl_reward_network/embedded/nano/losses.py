"""The training losses of `sa2va-nano`, and the auxiliary parameters that only its training uses.

Trained from scratch with the mask losses alone, the language model gives all prompts the same `[SEG]` embedding, and so
the same mask, for hundreds of steps. Two auxiliary losses prevent this:

- Codes: each prompt, and each word of a phrase, has a learned embedding. In the first stage SAM 2 is prompted with the
  codes, and the `[SEG]` embeddings are regressed onto them; in later stages SAM 2 is prompted with the `[SEG]`
  embeddings.
- Regions: from the second stage on, a linear layer classifies colour, shape, size and place from the mean vision
  feature of each region, since captions alone train the vision tower too slowly.

Codes and linear layer are not part of the released model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.embedded.nano.conversations import CODED
from rl_reward_network.embedded.nano.pictures import ATTRIBUTES
from rl_reward_network.models.sa2va.grounding_sa2va import iou_head_loss, mask_losses
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, Sa2VAOutput

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
    embeddings = torch.cat([_seg_embeddings(model, out, text) for out, text in zip(outputs, texts, strict=True)])
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


def _seg_embeddings(model: Sa2VAForConditionalGeneration, output: Sa2VAOutput, text: dict[str, Any]) -> Tensor:
    """(K, C): the `[SEG]` embeddings of a batch of texts, in order."""
    assert output.last_hidden_state is not None
    return torch.cat(model.seg_embeddings(output.last_hidden_state, text["input_ids"]))


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
