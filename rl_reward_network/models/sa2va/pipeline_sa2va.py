"""A pipeline of transformers for masks by prompt, with results like those of its mask generation.

    segmenter = pipeline("referring-segmentation", model="FOLDER")
    segmenter("image.png", "Please segment the blood vessel.")
    # {"masks": [bool (H, W), ...], "scores": [0.93, ...], "text": "Sure, [SEG].<|im_end|>"}

Several images may be given, and several prompts: the image encoders then run once for each image.
"""

from collections.abc import Sequence
from typing import Any

from transformers import Pipeline
from transformers.image_utils import load_image

from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation

TASK = "referring-segmentation"
PROMPT = "Please segment the blood vessel."


class ReferringSegmentationPipeline(Pipeline):
    """Image and prompts -> masks, with their predicted IoU, and the answers' texts."""

    _load_processor = True  # type: ignore[assignment]
    _load_image_processor = _load_feature_extractor = _load_tokenizer = False  # type: ignore[assignment]

    def _sanitize_parameters(  # type: ignore[override]
        self, prompt: str | Sequence[str] = PROMPT, max_new_tokens: int = 64, segment_batch: int = 16
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        how = {"prompt": prompt, "max_new_tokens": max_new_tokens, "batch_size": segment_batch}
        return {}, how, {"single": isinstance(prompt, str)}

    def __call__(self, images: Any, prompt: str | Sequence[str] = PROMPT, **settings: Any) -> Any:  # type: ignore[override]
        """Masks of one image or several.

        Args:
            images: PIL image, path or address, or a list of them.
            prompt: one, or a list, all of them for each image.
            **settings: max_new_tokens of an answer; segment_batch, the prompts decoded at once.

        Returns:
            For each image and each prompt of a list a dict: `masks`, bool (H, W) arrays, one for each [SEG]; `scores`,
            their IoU as SAM 2 predicts it; `text`, the answer.
        """
        return super().__call__(images, prompt=prompt, **settings)

    def preprocess(self, image: Any) -> dict[str, Any]:  # type: ignore[override]
        """The image."""
        return {"image": load_image(image)}

    def _forward(self, inputs: dict[str, Any], **how: Any) -> dict[str, Any]:  # type: ignore[override]
        prompt = how.pop("prompt")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        (found,) = self.model.segment([inputs["image"]], prompts, self.processor, **how)  # type: ignore[operator]
        return {"found": found}

    def postprocess(self, outputs: dict[str, Any], single: bool = True) -> Any:  # type: ignore[override]
        """Results as `__call__` returns them."""
        results = [self._result(found) for found in outputs["found"]]
        return results[0] if single else results

    @staticmethod
    def _result(found: Segmentation) -> dict[str, Any]:
        return {"masks": list(found.masks()), "scores": found.iou_scores.tolist(), "text": found.answer}
