"""A conversation about one image, which is read once: its features, and the keys and values of all earlier turns, stay.

talk = Conversation(model, processor, image)
first = talk.ask("Please segment the blood vessel.")   # as `predict_forward`
second = talk.ask("Is it narrowed?")
"""

from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.sa2va.generation_sa2va import STOP_TAIL_TOKENS, Decoding, decode, evaluating
from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, to_rgb
from rl_reward_network.models.sa2va.prediction_sa2va import answer_text, image_features, mask_result, segmentations
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER


class Conversation:
    """Questions about one image, each with the answers before it.

    Args:
        model: Sa2VAForConditionalGeneration; its weights must stay as they are.
        processor: of the model.
        image: PIL image or uint8 (H, W, 3).

    Attributes:
        ids: token ids of all turns so far, the last answer included.
    """

    def __init__(self, model: Any, processor: Sa2VAProcessor, image: ImageLike) -> None:
        """Read the image."""
        self.model, self.processor = model, processor
        self.ids: list[int] = []
        self.size = to_rgb(image).size[::-1]
        self._cache = DynamicCache(config=model.config.text_config)
        self._positions: dict[str, Any] = {}
        pixels, (self._image_tokens,) = processor.vision_inputs([image])
        with torch.no_grad(), evaluating(model):
            features = model.model.get_vision_features(**send_to_device(pixels, model.device))
            self._rows: Any = model.model.image_rows(features)
            self._features = image_features(model, processor, [image])

    @torch.no_grad()
    def ask(self, text: str, max_new_tokens: int = 2048) -> dict[str, Any]:
        """Answer and masks of the next turn, as `predict_forward` gives them.

        Args:
            text: the user's turn; `<image>` may mark the image's place in the first one.
            max_new_tokens: of the answer, at most.

        Raises:
            ValueError: `<image>` after the first turn.
        """
        processor, model = self.processor, self.model
        self.ids += processor.token_ids(self._turn(text))
        # The last token of an answer, or a few of them, are not in the cache yet.
        new = torch.tensor([self.ids[self._cache.get_seq_length() :]], device=model.device)
        mask = torch.ones(1, len(self.ids), dtype=torch.long, device=model.device)
        with evaluating(model):
            inputs = model.model.splice(new, self._rows, mask[:, -new.shape[1] :])
            if self._rows is not None and "position_table" in inputs:
                self._positions = {"position_table": inputs["position_table"]}
            self._rows = None  # in the cache from now on
            how = Decoding(max_new_tokens=max_new_tokens)
            (answer,) = decode(model, processor, inputs | self._positions, mask, how, self._cache)
            (found,) = segmentations(model, processor, self._features, [answer], self.size)
        self.ids += answer.token_ids
        return {"prediction": answer_text(processor, answer)} | mask_result(found)

    def _turn(self, text: str) -> str:
        """The text after the last answer, up to the beginning of the next one."""
        if not self.ids:
            marked = text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER + text
            return self.processor.prompt_text(marked, self._image_tokens)
        end = self.processor.answer_end
        ended = self.processor.text(self.ids[-STOP_TAIL_TOKENS:]).endswith(end)
        return ("" if ended else end) + self.processor.later_turn(text)
