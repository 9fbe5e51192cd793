"""What the page shows, from the image and the words of the user; nothing here knows of the browser.

Images are read from the folder of the server alone, and shrunk to what a model can use.
"""

from collections import namedtuple
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from matplotlib import colormaps
from PIL import Image

from rl_reward_network.data.images import decode_grid, image_size, load_for_model
from rl_reward_network.embedded.angiograms import render_series
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.prompts import DESCRIBE, DESCRIBE_REAL
from rl_reward_network.methods.methods import fusion
from rl_reward_network.models.default import is_small
from rl_reward_network.models.reward_network import error_map
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, RegionPrompt, draw_region
from rl_reward_network.report.overlays import AFTER, paint_mask
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.segment.files import save_mask
from rl_reward_network.segment.maker import (
    Answered,
    MaskMaker,
    default_model,
    load_mask_maker,
    predicted_quality,
    scorer_of,
)

LONGEST_PROMPT = 2000  # characters; the time of an answer grows with the prompt
DRAWN: dict[RegionPrompt, str] = {  # said with a caption of a Qwen-VL
    "outline": " (This model cannot be shown a region: it was asked about a picture with a red outline around it.)",
    "crop": " (This model cannot be shown a region: it was asked about a picture cropped to it.)",
}
LOOKS = ("plain", "bright", "faint")  # of the example angiograms
LONGEST_SIDE = 1024  # pixels; SAM 2 sees no more, and a larger mask holds the server for minutes
MOST_PIXELS = 50_000_000  # larger files are not decoded; cameras of phones give 48 million


Pictures = namedtuple("Pictures", "file overlay soft errors fused words")


@dataclass(frozen=True)
class Answers:
    """The model behind the page; no file outside of `folder`, of uploads and examples, is read for a user."""

    maker: MaskMaker
    prompts: tuple[str, ...]
    model_path: str
    folder: Path

    def open(self, path: str | None) -> tuple[np.ndarray, str]:
        """An upload or an example, uint8 (H, W, 3), at most `LONGEST_SIDE` pixels long; and how it was shrunk.

        ValueError: no image, a file elsewhere, a file that is no image, or one that is too large.
        """
        if not path:
            raise ValueError("there is no image yet: upload one, or pick an example")
        file = check_upload(path, self.folder)
        try:
            image, _ = load_for_model(file, self.maker.grey, MOST_PIXELS)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), file.name)) from None
        height, width = image.shape[:2]
        if max(height, width) <= LONGEST_SIDE:
            return image, ""
        small = Image.fromarray(image)
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        return np.array(small), f"Image: {width} x {height} pixels, shrunk to {small.width} x {small.height}\n"

    def segment(self, path: str | None, prompt: str | None, by_policy: bool, weight: float) -> Pictures:
        """The answer to a prompt, or to the one that the policy chooses; ValueError: as `open`, or a wrong prompt.

        `file` is the mask (0 and 255, of the upload's size; None without a `[SEG]`). Pictures are uint8 (H, W, 3): the
        mask on the image; the soft mask, black 0 to white 1; where the reward network expects errors, black 0 to yellow
        1; the mask fused with its map, whose weight is in [0, 1]. Without a network the last two are None.
        """
        image, note = self.open(path)
        words = (prompt or "").strip()
        if by_policy and self.maker.policy is None:
            raise ValueError("no policy was loaded: start the demo with --policy RUN, or choose a prompt")
        if not by_policy and not words:
            raise ValueError("the prompt is empty: choose one, or type your own")
        if not by_policy and len(words) > LONGEST_PROMPT:
            raise ValueError(f"the prompt has {len(words):,} characters, expected at most {LONGEST_PROMPT:,}")
        result = self.maker.answer(image, None if by_policy else words)
        errors = fused = file = None
        if result.scorer is not None:
            expected = error_map(result.mask.astype(np.float32), result.scorer.foreground_prob)
            errors = (255 * colormaps["inferno"](expected)[..., :3]).astype(np.uint8)
            fused = paint_mask(image, fusion(result.soft, result.scorer.foreground_prob, weight) > 0.5, AFTER)
        if result.segs:
            upload = Path(str(path))
            file = Path(mkdtemp(dir=self.folder)) / f"{upload.stem}_mask.png"
            grey, (height, width) = Image.fromarray(result.mask.astype(np.uint8) * 255), image_size(upload)
            whole = np.asarray(grey.resize((width, height), Image.Resampling.BILINEAR)) > 127  # smooth outlines
            save_mask(file, whole, result.prompt)
        soft = np.repeat((255 * result.soft).astype(np.uint8)[..., None], 3, axis=2)
        share = f"{100 * result.mask.mean():.1f} % of the image" if file else "none, the answer has no [SEG]"
        lines = [f"{note}Prompt: {result.prompt}", f"Answer: {_plain(result.answer)}", f"Mask: {share}"]
        told = "\n".join([*lines, *self._quality(result)])
        return Pictures(file, paint_mask(image, result.mask, AFTER), soft, errors, fused, told)

    def _quality(self, result: Answered) -> list[str]:
        """Lines of predicted Dice, interval or why there is none, and spread; none without a reward network."""
        if result.scorer is None or self.maker.network is None:
            return []
        predicted = predicted_quality(self.maker.network, result.scorer, result.mask, result.source)
        if predicted.dice is None:
            return [f"Predicted Dice: {predicted}"]
        spread = float(result.scorer.quality(result.mask[None].astype(np.float32))["std"][0])
        limits = given_interval(self.maker.network.config, result.scorer, result.mask)
        refused = isinstance(limits, str)
        words = str(predicted).replace(" (no interval can be given)", "")
        lines = [f"Predicted Dice{'' if refused else ' [90 % interval]'}: {words}"]
        lines.append(f"Spread between the networks: {spread:.3f}")
        return lines + [f"No 90 % interval: {limits}"] * refused

    def all_prompts(self, path: str | None) -> list[tuple[np.ndarray, str]]:
        """The masks of all prompts on the image; each with its predicted Dice, if it can be predicted, and its prompt.

        A beginning that all prompts share is left out, so that the rest fits under a small picture.
        """
        image, maker = self.open(path)[0], self.maker
        limits = {"max_new_tokens": maker.max_new_tokens, "batch_size": len(self.prompts)}
        (answers,) = maker.model.segment([image], list(self.prompts), maker.processor, **limits)
        masks, scorer = np.stack([answer.masks().any(axis=0) for answer in answers]), scorer_of(maker.network, image)
        scores = [""] * len(masks)
        if scorer is not None and not scorer.outside:
            scores = [f"{dice:.3f} " for dice in scorer.quality(masks.astype(np.float32))["dice"]]
        shared = commonprefix(self.prompts).rfind(" ") + 1 if len(self.prompts) > 1 else 0  # noqa: RUF071 (words)
        shown = zip(masks, scores, self.prompts, strict=True)
        return [(paint_mask(image, mask, AFTER), score + prompt[shared:]) for mask, score, prompt in shown]

    def caption(self, path: str | None, region: np.ndarray | None) -> str:
        """What Sa2VA says about a region, bool (H, W) of the image's size; ValueError for an empty one."""
        image, _ = self.open(path)
        if region is None or not region.any():
            raise ValueError("no region is drawn: draw over the object first")
        if region.shape != image.shape[:2]:
            raise ValueError("the region was drawn on another image: draw it again")
        processor, note, given = self.maker.processor, "", {"mask_prompts": [region[None]]}
        question = DESCRIBE if is_small(self.model_path) else DESCRIBE_REAL
        if not processor.shows_regions:
            image, given = draw_region(image, region, processor.region_prompt), {}
            question, note = QUESTIONS[processor.region_prompt], DRAWN[processor.region_prompt]
        settings: dict[str, Any] = {"text": f"<image>{question}", "processor": processor, "max_new_tokens": 64}
        result = self.maker.model.predict_forward(image=image, **given, **settings)
        return _plain(str(result["prediction"])) + note


def _plain(answer: str) -> str:
    return answer.replace("<|im_end|>", "").strip()


def check_upload(path: str | Path, folder: Path) -> Path:
    """The file, links resolved: whoever can reach the page could name any file of the computer."""
    file = Path(path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError("the image is no upload and no example: upload it")
    if not file.is_file():
        raise ValueError(f"{file.name}: uploads are deleted after an hour or two; upload it again")
    return file


def drawn_region(drawing: dict[str, Any] | None, folder: Path) -> np.ndarray | None:
    """bool (H, W): where the user has drawn; None without a drawing.

    The layers of the editor are paths or bytes of image files with transparency. ValueError: a file elsewhere, no
    image, larger than a picture of the page, without transparency, or layers of several sizes.
    """
    drawn = []
    for layer in filter(None, (drawing or {}).get("layers") or []):
        data = layer if isinstance(layer, bytes) else check_upload(layer, folder).read_bytes()
        grid = decode_grid(data, "the drawing", LONGEST_SIDE**2)
        if grid.ndim != 3 or grid.shape[2] not in (2, 4):
            raise ValueError("the drawing: expected an image with transparency; draw it on this page")
        drawn.append(grid[..., -1] > 0)
    if len({layer.shape for layer in drawn}) > 1:
        raise ValueError("the drawing has layers of different sizes: draw it again")
    return np.logical_or.reduce(drawn) if drawn else None


def write_examples(folder: Path) -> list[Path]:
    """Write angiograms of three looks and a scene of coloured objects; returns the files."""
    folder.mkdir(parents=True)
    pictures = {look: next(render_series(np.random.default_rng(1), look, 1)).image for look in LOOKS}
    pictures["scene"] = next(make_scenes(1, 0)).image
    for name, picture in pictures.items():
        Image.fromarray(picture).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]


def load_answers(folder: Path, model_path: str | None, policy: Path | None = None, *rest: Any, **named: Any) -> Answers:
    """The model behind the page, for images in a folder; other arguments and errors as in `load_mask_maker`."""
    maker = load_mask_maker(model_path, PROMPTS[0], policy, *rest, **named)
    return Answers(maker, tuple(maker.trained.get("prompts", PROMPTS)), model_path or default_model(policy), folder)
