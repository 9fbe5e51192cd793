"""What `sa2va-nano` is trained on: the losses of a batch, and the helpers that teach it and are then left behind.

From scratch, masks alone teach words too slowly: all questions get the same embedding, and the same mask, for hundreds
of steps. So every prompt, and every word of a phrase, has a learned code. In the first stage SAM 2 is prompted with the
codes, and the language model learns to say them; from the second on it is prompted with what the language model says.
In the same way captions alone teach the vision tower too slowly to see: from the second stage on a linear layer reads
colour, shape, size and place from the features of each region. Codes and linear layer are not part of the model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.embedded.nano.pictures import ATTRIBUTES, CODED
from rl_reward_network.models.sa2va.losses_sa2va import iou_head_loss, mask_losses
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, Sa2VAOutput

CODE_SCALE = 0.3  # standard deviation of the codes at the start
LOSS_GRID = 128  # masks are compared at twice the decoder's grid, where the thinnest vessel is four cells wide


class Helpers(torch.nn.Module):
    """What teaches nano and is then left behind.

    Args:
        width: D, of the language model.
        sam_width: C, of SAM 2.
    """

    def __init__(self, width: int, sam_width: int) -> None:
        super().__init__()
        self.codes = torch.nn.Parameter(torch.randn(len(CODED), sam_width) * CODE_SCALE)
        self.reader = torch.nn.Linear(width, sum(map(len, ATTRIBUTES)))


def nano_losses(
    model: Sa2VAForConditionalGeneration, helpers: Helpers, batch: dict[str, Any], by_codes: bool
) -> dict[str, Tensor]:
    """`text`, `code`, `mask`, `dice`, `iou`, and `region` unless `by_codes`: scalars whose sum is trained.

    All three candidate masks learn the truth.

    Args:
        model: nano.
        helpers: of its widths.
        batch: of `collate`.
        by_codes: see `Stage`.
    """
    features = model.model.get_vision_features(batch["seen"]["pixel_values"])
    seen = batch["seen"] | {"vision_features": features}  # they go before pixels
    texts = [seen, *([batch["blind"]] if batch["blind"] else [])]
    outputs = [model(**text) for text in texts]
    spoken = torch.cat([_said(model, output, text) for output, text in zip(outputs, texts, strict=True)])
    coded = batch["said"] @ helpers.codes
    logits, scores = _candidates(model, batch, coded if by_codes else spoken)
    truth = torch.cat(batch["masks"]).repeat_interleave(3, dim=0)
    losses = {} if by_codes else {"region": _region_loss(model, helpers.reader, features, batch)}
    return losses | {
        "text": torch.stack([output.loss for output in outputs]).sum(),
        "code": F.mse_loss(spoken, coded.detach()) / coded.detach().var(),
        **mask_losses(logits, truth),
        "iou": iou_head_loss(scores, logits, truth),
    }


def _said(model: Sa2VAForConditionalGeneration, output: Sa2VAOutput, text: dict[str, Any]) -> Tensor:
    """(K, C): the `[SEG]` embeddings of a batch of texts, in order."""
    assert output.last_hidden_state is not None
    return torch.cat(model.seg_embeddings(output.last_hidden_state, text["input_ids"]))


def _region_loss(
    model: Sa2VAForConditionalGeneration, reader: torch.nn.Linear, features: Tensor, batch: dict[str, Any]
) -> Tensor:
    """Cross-entropy of each attribute, read from the mean of a region's rows, summed over the four attributes."""
    means = [_region_means(model, features[batch["seen"]["vp_overall_mask"]], batch["seen"]["prompt_masks"])]
    truth = [batch["attributes"]]
    if watched := batch.get("watched"):
        means.append(_region_means(model, model.model.get_vision_features(watched["pixel_values"]), watched["cells"]))
        truth.append(watched["attributes"])
    read = reader(torch.cat(means)).split(list(map(len, ATTRIBUTES)), dim=1)
    words = torch.cat(truth).unbind(dim=1)
    return torch.stack([F.cross_entropy(one, word) for one, word in zip(read, words, strict=True)]).sum()


def _region_means(model: Sa2VAForConditionalGeneration, features: Tensor, cells: list[Tensor]) -> Tensor:
    """(regions, D): mean over each region's rows, as the language model gets them; features (B, patches, V)."""
    pairs = zip(model.model.project(features), cells, strict=True)
    return torch.stack([rows[region.flatten()].mean(dim=0) for rows, regions in pairs for region in regions])


def _candidates(model: Sa2VAForConditionalGeneration, batch: dict[str, Any], prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (3 K, LOSS_GRID, LOSS_GRID) and predicted IoU (3 K,) of the three candidates of each prompt (K, C)."""
    features = model.get_sam_features(batch["sam_pixel_values"])
    logits, scores = [], []
    for place, own in enumerate(prompts.split([len(masks) for masks in batch["masks"]])):
        decoded = model.decode_masks(features[place], own)
        logits.append(decoded.candidates[:, 1:])  # (K, 3, h, w); 0 is the token that Sa2VA never uses
        scores.append(decoded.candidate_scores[:, 1:])
    fine = F.interpolate(torch.cat(logits), size=(LOSS_GRID, LOSS_GRID), mode="bilinear")
    return fine.flatten(0, 1), torch.cat(scores).flatten()
