"""Sa2VA without heads: vision tower, language model, and the splice that joins them, on InternVL and on Qwen-VL.

Everything outside this file counts the tokens of a text one by one. Qwen-VL gives each token three positions (time,
row, column), and image tokens take fewer numbers than there are tokens. `position_table` translates a token's index
into its three positions; the generation loop passes the table at every step, so that no state is kept in the model.

Axes: R rows that replace placeholders, N regions or the image tokens of a Qwen-VL, L deepstack levels.

Source: bytedance/Sa2VA@9832e1a; Qwen-VL: bytedance/Sa2VA@06912e2, transformers' Qwen3VLModel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.internvl.modeling_internvl import InternVLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig


class Sa2VAModel(InternVLModel):
    """Vision tower, projector and language model without a head; adds region rows to InternVL's splice."""

    config: Sa2VAConfig  # type: ignore[assignment]

    def get_vision_features(self, pixel_values: Tensor) -> Tensor:
        """(tiles, patches, V) of (tiles, 3, S, S): the frozen vision tower's output without CLS; it may be cached."""
        layer = self.config.vision_feature_layer
        output = self.vision_tower(pixel_values=pixel_values.to(self.dtype), output_hidden_states=layer != -1)
        return (output.last_hidden_state if layer == -1 else output.hidden_states[layer])[:, 1:]

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
        rows, regions = self.project(vision_features), iter(prompt_masks)
        flags = [False] * len(rows) if vp_overall_mask is None else vp_overall_mask.tolist()
        parts: list[Tensor] = []
        for tile, has_regions in zip(rows, flags, strict=True):
            shown = next(regions).to(tile.device) if has_regions else ()
            parts += [tile, *(tile[cells.flatten()] for cells in shown)]
        return torch.cat(parts)

    def splice(
        self, input_ids: Tensor, rows: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """Inputs of `forward`: embeddings of tokens (B, T), placeholders replaced by image and region rows, in order.

        Rows are (R, D) or (tiles, tokens, D), None for texts without an image. The mask is not used: positions do not
        depend on images.
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
            regions = prompt_masks, vp_overall_mask
            rows = None if vision_features is None else self.image_rows(vision_features, *regions)
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


@dataclass(frozen=True)
class QwenVisionFeatures:
    """The frozen vision tower's output for some images; it may be cached, as the merger is frozen, too."""

    tokens: Tensor  # (N, D), after the merger
    deepstack: Tensor  # (L, N, D), added to the states after the first L layers; L is 0 in Qwen2.5-VL
    grids: tuple[tuple[int, int], ...]  # (rows, columns) of patches of each image, before the merger

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> "QwenVisionFeatures":
        """The same features on another device."""
        return QwenVisionFeatures(self.tokens.to(device), self.deepstack.to(device), self.grids)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tokens.nbytes + self.deepstack.nbytes


class NormedHead(nn.Linear):
    """A head on the states before the final norm, which it applies itself; `text_hidden_fcs` reads the same states."""

    def __init__(self, in_features: int, out_features: int, norm: nn.Module) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        """Logits (..., V) of states (..., D)."""
        return super().forward(self.norm(input))


class QwenVLBody(Qwen3VLModel):
    """Vision tower and language model of Qwen3-VL or Qwen2.5-VL, as the configuration says."""

    config: Sa2VAConfig  # type: ignore[assignment]

    def get_vision_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> QwenVisionFeatures:
        """Features of the images whose patches are `pixel_values` (patches, 2*3*p*p); a grid is (1, rows, columns)."""
        output = self.visual(pixel_values.to(self.dtype), grid_thw=image_grid_thw, return_dict=True)
        tokens, levels = output.pooler_output, getattr(output, "deepstack_features", None)  # none in Qwen2.5-VL
        deepstack = torch.stack(levels) if levels else tokens.new_zeros(0, *tokens.shape)
        return QwenVisionFeatures(tokens, deepstack, tuple((rows, cols) for _, rows, cols in image_grid_thw.tolist()))

    @staticmethod
    def join(features: Sequence[QwenVisionFeatures]) -> QwenVisionFeatures:
        """The features of several images as one."""
        return QwenVisionFeatures(
            torch.cat([image.tokens for image in features]),
            torch.cat([image.deepstack for image in features], dim=1),
            tuple(grid for image in features for grid in image.grids),
        )

    @staticmethod
    def project(vision_features: QwenVisionFeatures) -> QwenVisionFeatures:
        """The same: the merger is part of the frozen tower."""
        return vision_features

    @staticmethod
    def image_rows(
        vision_features: QwenVisionFeatures, prompt_masks: Sequence[Tensor] = (), vp_overall_mask: Any = None
    ) -> QwenVisionFeatures:
        """The rows for the placeholders, in order; a ValueError if there are regions."""
        if len(prompt_masks):
            raise ValueError("a Qwen-VL cannot be shown a region of the image; draw it: region_prompt outline or crop")
        return vision_features

    def splice(
        self, input_ids: Tensor, rows: QwenVisionFeatures | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, Any]:
        """As `Sa2VAModel.splice`, with the positions of images, which need the mask, int64 (B, T), 0 on padding."""
        embeds, places = self.get_input_embeddings()(input_ids), input_ids == self.config.image_token_id
        spliced: dict[str, Any] = {"inputs_embeds": fill_places(embeds, places, None if rows is None else rows.tokens)}
        if rows is not None and len(rows):
            spliced["position_table"] = self.position_table(input_ids, rows.grids, attention_mask)
            spliced["visual_pos_masks"] = places
            spliced["deepstack_visual_embeds"] = list(rows.deepstack.to(embeds.dtype))
        return spliced

    def position_table(
        self, input_ids: Tensor, grids: Sequence[tuple[int, int]], attention_mask: Tensor | None = None
    ) -> Tensor:
        """int64 (3, B, T): time, row and column of the tokens 0 to T-1 of each text, counted without padding.

        A text that is shorter than T goes on by one in all three.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        grid_thw = torch.tensor([(1, *grid) for grid in grids], device=input_ids.device)
        kinds = (input_ids == self.config.image_token_id).int()
        inputs: Any = {"input_ids": input_ids, "mm_token_type_ids": kinds, "image_grid_thw": grid_thw}
        positions, _ = self.get_rope_index(**inputs, attention_mask=mask)
        table = torch.arange(input_ids.shape[1], device=input_ids.device).repeat(3, len(input_ids), 1)
        for row, kept in enumerate(mask.bool()):
            known = positions[:, row, kept]
            length = known.shape[1]
            table[:, row] += int(known.max()) + 1 - length
            table[:, row, :length] = known
        return table

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        vision_features: QwenVisionFeatures | None = None,
        prompt_masks: Sequence[Tensor] = (),
        vp_overall_mask: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        position_table: Tensor | None = None,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The language model's output; `last_hidden_state` is (B, T, D), what the heads read.

        Args:
            position_ids: int64 (B, T), indices of the tokens in their texts, counted one by one.
            position_table: see the method; needed at every step after an image. None: a text without image.
            visual_pos_masks: bool (B, t) with t <= T: image tokens among the first t.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            if vision_features is None and pixel_values is not None:
                if image_grid_thw is None:
                    raise ValueError("image_grid_thw is missing; give it beside pixel_values, as the processor does")
                vision_features = self.get_vision_features(pixel_values, image_grid_thw)
            rows = None if vision_features is None else self.image_rows(vision_features, prompt_masks)
            mask = attention_mask  # of the inputs; one over pairs of tokens knows no padding
            mask = None if mask is None or mask.ndim != 2 else mask[:, -input_ids.shape[1] :]
            spliced = {"position_table": position_table} | self.splice(input_ids, rows, mask)
            return self(None, None, attention_mask, position_ids, past_key_values, **spliced, **kwargs)
        length = inputs_embeds.shape[1]
        if deepstack_visual_embeds and visual_pos_masks is not None:
            image = nn.functional.pad(visual_pos_masks, (0, length - visual_pos_masks.shape[1]))
            kwargs |= {"visual_pos_masks": image, "deepstack_visual_embeds": deepstack_visual_embeds}
        if position_ids is None:
            position_ids = positions_of_mask(attention_mask, length)
        if position_ids is None and position_table is not None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(seen, seen + length, device=inputs_embeds.device).repeat(len(inputs_embeds), 1)
        if position_table is not None and position_ids is not None:
            position_ids = three_positions(position_table, position_ids)
        return self.language_model(
            inputs_embeds=inputs_embeds.to(self.visual.dtype),  # trained embeddings are float32
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )


def three_positions(table: Tensor, indices: Tensor) -> Tensor:
    """int64 (3, B, T) positions of token indices (B, T), from a table (3, B, W); beyond W they go on by one."""
    last = table.shape[2] - 1
    known = table.gather(2, indices.clamp(max=last).expand(3, -1, -1))
    return known + (indices - last).clamp(min=0)


def fill_places(embeds: Tensor, places: Tensor, rows: Tensor | None) -> Tensor:
    """Embeddings (B, T, D) with those at `places`, bool (B, T), replaced by as many rows (..., D), in order."""
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
