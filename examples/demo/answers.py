"""What the page shows, from the image and the words of the user; nothing here knows of the browser.

Images are read from the folder of the server alone, and shrunk to what a model can use.
"""

from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from matplotlib import colormaps
from PIL import Image

from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.images import decode_grid, image_size, load_for_model
from rl_reward_network.embedded.angiograms import render_series
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.prompts import DESCRIBE, DESCRIBE_REAL
from rl_reward_network.methods.methods import fusion
from rl_reward_network.models.default import is_small
from rl_reward_network.models.reward_network import error_map
from rl_reward_network.models.sa2va.loading_sa2va import Dtype
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, RegionPrompt, draw_region
from rl_reward_network.report.overlays import BLUE, ORANGE, paint_mask
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.segment.files import save_mask
from rl_reward_network.segment.maker import Answered, MaskMaker, default_model, load_mask_maker

CAPTION_TOKENS = 64
LONGEST_PROMPT = 2000  # characters; the time of an answer grows with the prompt
DRAWN: dict[RegionPrompt, str] = {  # said with a caption of a Qwen-VL
    "outline": " (This model cannot be shown a region: it was asked about a picture with a red outline around it.)",
    "crop": " (This model cannot be shown a region: it was asked about a picture cropped to it.)",
}
LOOKS = ("plain", "bright", "faint")  # of the example angiograms
LONGEST_SIDE = 1024  # pixels; SAM 2 sees no more, and a larger mask holds the server for minutes
MOST_PIXELS = 50_000_000  # larger files are not decoded; cameras of phones give 48 million


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of one answer, uint8 (H, W, 3) each; those of the reward network are None without one.

    Args:
        overlay: the mask on the image.
        soft: the soft mask, black 0 to white 1.
        errors: where the reward network expects errors of the mask, black 0 to yellow 1.
        fused: the mask of the mean of logits with the reward network's map, on the image.
        words: prompt, answer and predicted quality; plain text.
        file: the mask as PNG, 0 and 255, in the size of the uploaded image; None without a `[SEG]`.
    """

    overlay: np.ndarray
    soft: np.ndarray
    errors: np.ndarray | None
    fused: np.ndarray | None
    words: str
    file: Path | None


@dataclass(frozen=True)
class Answers:
    """The model behind the page.

    Args:
        maker: Sa2VA, perhaps with a policy and a reward network.
        prompts: built-in prompts, or those of the policy.
        model_path: of Sa2VA.
        folder: of uploads and examples; no file elsewhere is read for a user.
    """

    maker: MaskMaker
    prompts: tuple[str, ...]
    model_path: str
    folder: Path

    @property
    def first_prompt(self) -> str:
        """The prompt to begin with: the best fixed one, where a run deploys it instead of its policy."""
        return self.maker.prompt if self.maker.policy is None else self.prompts[0]

    def open(self, path: str | None) -> np.ndarray:
        """An uploaded image, uint8 (H, W, 3), shrunk if it is large; errors as in `open_upload`."""
        return open_upload(path, self.folder, self.maker.levels)[0]

    def segment(self, path: str | None, prompt: str | None, by_policy: bool, weight: float) -> Pictures:
        """The answer to a prompt.

        Args:
            path: of the image.
            prompt: the user's words.
            by_policy: let the policy choose the prompt instead.
            weight: of the reward network's map in the fused mask, in [0, 1].

        Raises:
            ValueError: as `open`; an empty or long prompt; no policy.
        """
        image, note = open_upload(path, self.folder, self.maker.levels)
        if by_policy and self.maker.policy is None:
            raise ValueError("no policy was loaded: start the demo with --policy RUN, or choose a prompt")
        result = self.maker.answer(image, None if by_policy else checked_prompt(prompt))
        errors = fused = None
        if result.scorer is not None:
            expected = error_map(result.mask.astype(np.float32), result.scorer.foreground_prob)
            errors = (255 * colormaps["inferno"](expected)[..., :3]).astype(np.uint8)
            fused = paint_mask(image, fusion(result.soft, result.scorer.foreground_prob, weight) > 0.5, ORANGE)
        soft = np.repeat((255 * result.soft).astype(np.uint8)[..., None], 3, axis=2)
        overlay, words = paint_mask(image, result.mask, BLUE), self._words(result, note)
        return Pictures(overlay, soft, errors, fused, words, self._write_mask(Path(str(path)), result))

    def _write_mask(self, image: Path, result: Answered) -> Path | None:
        """Write the mask of an uploaded image; returns its file, in a folder of its own, None without a `[SEG]`."""
        if not result.segs:
            return None
        file = Path(mkdtemp(dir=self.folder)) / f"{image.stem}_mask.png"
        save_mask(file, enlarged(result.mask, image_size(image)), result.prompt)
        return file

    def _words(self, result: Answered, note: str) -> str:
        lines = [f"Image: {note}"] if note else []
        lines += [f"Prompt: {result.prompt}", f"Answer: {result.answer.replace('<|im_end|>', '').strip()}"]
        share = f"{100 * result.mask.mean():.1f} % of the image"
        lines.append(f"Mask: {share if result.segs else 'none, the answer has no [SEG]'}")
        return "\n".join(lines + self._quality(result))

    def _quality(self, result: Answered) -> list[str]:
        """Lines of predicted Dice, interval or why there is none, and spread; none without a reward network."""
        if result.scorer is None or self.maker.network is None:
            return []
        if result.scorer.outside:
            return [f"Predicted Dice: {self.maker.quality(result)}"]
        quality = result.scorer.quality(result.mask[None].astype(np.float32))
        limits = given_interval(self.maker.network.config, result.scorer, result.mask)
        reason = limits if isinstance(limits, str) else None
        title = "Predicted Dice" if reason else "Predicted Dice [90 % interval]"
        predicted = self.maker.quality(result).replace(" (no interval can be given)", "")
        lines = [f"{title}: {predicted}", f"Spread between the networks: {float(quality['std'][0]):.3f}"]
        return lines + ([f"No 90 % interval: {reason}"] if reason else [])

    def all_prompts(self, path: str | None) -> list[tuple[np.ndarray, str]]:
        """The masks of all prompts on the image; each with its predicted Dice, if it can be predicted, and its prompt.

        A beginning that all prompts share is left out, so that the rest fits under a small picture.

        Raises:
            ValueError: as `open`.
        """
        image = self.open(path)
        maker = self.maker
        limits = {"max_new_tokens": maker.max_new_tokens, "batch_size": len(self.prompts)}
        (answers,) = maker.model.segment([image], list(self.prompts), maker.processor, **limits)
        masks = np.stack([answer.masks().any(axis=0) for answer in answers])
        scorer = maker.scorer(image)
        scores = [""] * len(masks)
        if scorer is not None and not scorer.outside:
            scores = [f"{dice:.3f} " for dice in scorer.quality(masks.astype(np.float32))["dice"]]
        shared = commonprefix(self.prompts).rfind(" ") + 1 if len(self.prompts) > 1 else 0  # noqa: RUF071 (words)
        labels = [score + prompt[shared:] for prompt, score in zip(self.prompts, scores, strict=True)]
        return [(paint_mask(image, mask, BLUE), label) for mask, label in zip(masks, labels, strict=True)]

    def caption(self, path: str | None, region: np.ndarray | None) -> str:
        """What Sa2VA says about a region.

        Args:
            path: of the image.
            region: bool (H, W), of the image's size; None or empty: nothing was drawn.

        Raises:
            ValueError: as `open`; an empty region.
        """
        image = self.open(path)
        if region is None or not region.any():
            raise ValueError("no region is drawn: draw over the object first")
        if region.shape != image.shape[:2]:
            raise ValueError("the region was drawn on another image: draw it again")
        processor, regions, note = self.maker.processor, [region[None]], ""
        question = DESCRIBE if is_small(self.model_path) else DESCRIBE_REAL
        if not processor.shows_regions:
            image, regions = draw_region(image, region, processor.region_prompt), []
            question, note = QUESTIONS[processor.region_prompt], DRAWN[processor.region_prompt]
        result = self.maker.model.predict_forward(
            image=image,
            text=f"<image>{question}",
            mask_prompts=regions or None,
            processor=processor,
            max_new_tokens=CAPTION_TOKENS,
        )
        return f"{str(result['prediction']).replace('<|im_end|>', '').strip()}{note}"


def checked_prompt(prompt: str | None) -> str:
    """The prompt, without space around it; ValueError for one that is empty or long."""
    words = (prompt or "").strip()
    if not words:
        raise ValueError("the prompt is empty: choose one, or type your own")
    if len(words) > LONGEST_PROMPT:
        raise ValueError(f"the prompt has {len(words):,} characters, expected at most {LONGEST_PROMPT:,}; shorten it")
    return words


def check_upload(path: str | Path, folder: Path) -> Path:
    """The file, links resolved; whoever can reach the page could name any file of the computer.

    Args:
        path: as the browser names it.
        folder: of uploads and examples.

    Raises:
        ValueError: it lies elsewhere, or was deleted.
    """
    file = Path(path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise ValueError("the image is no upload and no example: upload it")
    if not file.is_file():
        raise ValueError(f"{file.name}: uploads are deleted after an hour or two; upload it again")
    return file


def open_upload(path: str | None, folder: Path, levels: Levels | None) -> tuple[np.ndarray, str]:
    """An uploaded image or an example, uint8 (H, W, 3), at most `LONGEST_SIDE` pixels long; and how it was shrunk.

    Args:
        path: of the image.
        folder: of uploads and examples.
        levels: as in `load_for_model`.

    Raises:
        ValueError: no image, a file elsewhere, a file that is no image, or one that is too large.
    """
    if not path:
        raise ValueError("there is no image yet: upload one, or pick an example")
    file = check_upload(path, folder)
    try:
        image, _ = load_for_model(file, levels, MOST_PIXELS)
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), file.name)) from None
    height, width = image.shape[:2]
    if max(height, width) <= LONGEST_SIDE:
        return image, ""
    small = Image.fromarray(image)
    small.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return np.array(small), f"{width} x {height} pixels, shrunk to {small.width} x {small.height}"


def enlarged(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The mask of a shrunk image, bool (H, W), in the size (H, W) of the image itself, with smooth outlines."""
    grey = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
    return np.asarray(grey.resize(size[::-1], Image.Resampling.BILINEAR)) > 127


def open_layer(layer: str | bytes, folder: Path) -> np.ndarray:
    """bool (H, W): where a layer of a drawing is not transparent.

    Args:
        layer: path or bytes of an image file with transparency.
        folder: of uploads.

    Raises:
        ValueError: a file elsewhere, no image, larger than a picture of the page, or without transparency.
    """
    data = layer if isinstance(layer, bytes) else check_upload(layer, folder).read_bytes()
    grid = decode_grid(data, "the drawing", LONGEST_SIDE**2)
    if grid.ndim != 3 or grid.shape[2] not in (2, 4):
        raise ValueError("the drawing: expected an image with transparency; draw it on this page")
    return grid[..., -1] > 0


def write_examples(folder: Path) -> list[Path]:
    """Write angiograms of three looks and a scene of coloured objects; returns the files."""
    folder.mkdir(parents=True)
    pictures = {look: next(render_series(np.random.default_rng(1), look, 1)).image for look in LOOKS}
    pictures["scene"] = next(make_scenes(1, 0)).image
    for name, picture in pictures.items():
        Image.fromarray(picture).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]


def load_answers(
    folder: Path,
    model_path: str | None,
    policy: Path | None = None,
    reward_net: Path | None = None,
    device: str | None = None,
    dtype: Dtype | None = None,
) -> Answers:
    """The model behind the page, for images in a folder; other arguments and errors as in `load_mask_maker`."""
    maker = load_mask_maker(model_path, PROMPTS[0], policy, reward_net, device, dtype=dtype)
    return Answers(maker, tuple(maker.trained.get("prompts", PROMPTS)), model_path or default_model(policy), folder)
