"""Sa2VA without heads: InternVL's vision tower and projector, the language model, and the splice that joins them.

Axes: B samples, T tokens, D language width, V vision width, R rows that replace placeholders, N regions, g grid side.

Source: bytedance/Sa2VA@9832e1a.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.internvl.modeling_internvl import InternVLModel

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig


class Sa2VAModel(InternVLModel):
    """Vision tower, projector and language model without a head; adds region rows to InternVL's splice."""

    config: Sa2VAConfig  # type: ignore[assignment]

    @property
    def vision_encoder(self) -> Any:
        """The frozen vision tower."""
        return self.vision_tower

    def get_vision_features(self, pixel_values: Tensor) -> Tensor:
        """(tiles, patches, V) of (tiles, 3, S, S): the frozen vision tower's output without CLS; it may be cached."""
        pixel_values = pixel_values.to(self.dtype)
        layer = self.config.vision_feature_layer
        output = self.vision_tower(pixel_values=pixel_values, output_hidden_states=layer != -1)
        states = output.last_hidden_state if layer == -1 else output.hidden_states[layer]
        return states[:, 1:]

    @staticmethod
    def join(features: Sequence[Tensor]) -> Tensor:
        """Tiles of several images as one batch: features (tiles, patches, V) or projected rows (tiles, tokens, D)."""
        return torch.cat(list(features))

    def project(self, vision_features: Tensor) -> Tensor:
        """(tiles, tokens per tile, D): 2x2 patches joined, then the trainable projector `mlp1`."""
        tiles, patches, width = vision_features.shape
        side = int(patches**0.5)
        joined = self.pixel_shuffle(vision_features.reshape(tiles, side, side, width), self.config.downsample_ratio)
        return self.multi_modal_projector(joined.reshape(tiles, -1, joined.shape[-1]))

    def image_rows(
        self, vision_features: Tensor, prompt_masks: Sequence[Tensor] = (), vp_overall_mask: Tensor | None = None
    ) -> Tensor:
        """(R, D) rows for the placeholders, in order: those of each tile, followed by those of its regions.

        Args:
            vision_features: (tiles, patches, V).
            prompt_masks: bool (N, g, g) for each tile that has regions.
            vp_overall_mask: bool (tiles,), True on tiles with regions.
        """
        rows = self.project(vision_features)
        flags = [False] * len(rows) if vp_overall_mask is None else vp_overall_mask.tolist()
        regions = iter(prompt_masks)
        parts: list[Tensor] = []
        for tile, has_regions in zip(rows, flags, strict=True):
            parts.append(tile)
            if has_regions:
                parts += [tile[cells.flatten()] for cells in next(regions).to(tile.device)]
        return torch.cat(parts)

    def splice(
        self, input_ids: Tensor, rows: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Inputs of `forward`: token embeddings, with the placeholders replaced by image and region rows.

        Args:
            input_ids: int64 (B, T).
            rows: (R, D) or (tiles, tokens, D), in order; None for texts without an image.
            attention_mask: unused, as positions do not depend on images.

        Raises:
            ValueError: the number of placeholders differs from the number of rows.
        """
        embeds, places = self.get_input_embeddings()(input_ids), input_ids == self.config.image_token_id
        return {"inputs_embeds": fill_places(embeds, places, rows)}

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        vision_features: Tensor | None = None,
        prompt_masks: Sequence[Tensor] = (),
        vp_overall_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The language model's output; `last_hidden_state` is (B, T, D), after the final norm."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            if vision_features is None and pixel_values is not None:
                vision_features = self.get_vision_features(pixel_values)
            rows = None
            if vision_features is not None:
                rows = self.image_rows(vision_features, prompt_masks, vp_overall_mask)
            inputs_embeds = self.splice(input_ids, rows)["inputs_embeds"]
        if position_ids is None:
            position_ids = positions_of_mask(attention_mask, inputs_embeds.shape[1])
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


def fill_places(embeds: Tensor, places: Tensor, rows: Tensor | None) -> Tensor:
    """Token embeddings (B, T, D) with those at `places`, bool (B, T), replaced by rows (..., D), in order.

    Raises:
        ValueError: the number of places differs from the number of rows.
    """
    flat = embeds.new_empty(0, embeds.shape[-1]) if rows is None else rows.reshape(-1, rows.shape[-1])
    if int(places.sum()) != len(flat):
        raise ValueError(f"the text has {int(places.sum())} image placeholders, the image has {len(flat)} feature rows")
    return embeds.masked_scatter(places[..., None], flat.to(embeds.dtype)) if len(flat) else embeds


def positions_of_mask(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """int64 (B, length): index of each input in its text; None without a mask of shape (B, T).

    Padding on the left, or between a shared prefix and its suffixes, does not count.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
