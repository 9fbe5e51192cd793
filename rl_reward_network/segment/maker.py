"""`segment`: from image files to the files of their masks, which replace only masks of the same prompt.

Load Sa2VA, choose the prompt, segment, write, predict the quality; or apply the method that a comparison has chosen.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from stable_baselines3.common.policies import ActorCriticPolicy
from tqdm import tqdm

from rl_reward_network.atomic_io import weights_fingerprint, whole_file
from rl_reward_network.bit_depth import GreyWindow, window_for
from rl_reward_network.data.images import IMAGE_SUFFIXES, image_size, load_for_model
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.methods.compare import load_deployed
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.generation_sa2va import Segmentation, image_features
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.ppo.policy import deployed_prompt, load_policy, policy_folder, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.report.overlays import AFTER, paint_mask
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import REWARD_NET

PROMPT_KEY = "sa2va_prompt"  # of the text in a PNG that holds the prompt of the mask
NO_MASK = "there is no mask, which is not an empty one: ask for a segmentation, or see sa2va-rl doctor"
MAX_LETTERS = 60  # of a prompt in a file name
NO_POLICY = {"max_tiles": None, "max_new_tokens": 64}  # limits of an answer where no run has set them


class Target(NamedTuple):
    """An image, and the paths of its mask and overlay."""

    image: Path
    mask: Path
    overlay: Path


def image_files(paths: Sequence[Path]) -> list[Path]:
    """The images among files and folders, in this order; those of a folder by name, without masks written here."""
    if not paths:
        raise ValueError("no image: name images, or a folder of them")
    images: list[Path] = []
    for path in paths:
        if not path.is_dir():
            images.append(_checked(path))
            continue
        named = (file for file in sorted(path.iterdir()) if file.suffix.lower() in IMAGE_SUFFIXES)
        found = [file for file in named if file.name[0] != "." and prompt_of(_checked(file)) is None]
        if not found:
            raise ValueError(f"{path}: holds no image ({', '.join(IMAGE_SUFFIXES)}); name the folder that holds them")
        images += found
    return images


def _checked(path: Path) -> Path:
    if not (path.exists() or path.is_symlink()):
        raise ValueError(f"{path}: no such file or folder; name images, or a folder of them")
    image_size(path)
    return path


def targets(images: Sequence[Path], output: Path | None, prompt: str | None) -> list[Target]:
    """The files to write: beside each image, in the folder `output`, or, for one image, the PNG `output`.

    The words of the prompt, where it is given, become part of the names. A ValueError for an `output` that is a file
    for several images or no PNG, and for two masks of one name.
    """
    if output is not None and output.suffix.lower() in IMAGE_SUFFIXES and not output.is_dir():
        if len(images) > 1 or output.suffix.lower() != ".png":
            raise ValueError(f"--output {output}: give a folder, or, for a single image, a file name that ends in .png")
        return [Target(images[0], output, output.with_name(f"{output.stem}_overlay.png"))]
    result = []
    for image in images:
        paths = (f"{image.stem}_{words_of(prompt)}{kind}.png" for kind in ("mask", "overlay"))
        result.append(Target(image, *((output or image.parent) / path for path in paths)))
    mask, count = Counter(target.mask for target in result).most_common(1)[0]
    if count > 1:
        both = ", ".join(str(target.image) for target in result if target.mask == mask)
        raise ValueError(f"{both}: their masks would have the same name, {mask}; give each an --output of its own")
    return result


def words_of(prompt: str | None) -> str:
    """The words of a prompt as part of a file name, with an underscore at the end; "" for None."""
    return "" if prompt is None else ("-".join(re.findall(r"\w+", prompt.lower()))[:MAX_LETTERS] or "prompt") + "_"


def check_free(target: Target, prompt: str) -> None:
    """Raise a ValueError if a file exists that was not written here, or holds the mask of another prompt."""
    for path in target[1:]:
        if path.exists() and (existing := prompt_of(path)) != prompt:
            what = "was not written by segment" if existing is None else f"is of another prompt, {existing!r}"
            raise ValueError(f"{path}: exists already and {what}; choose another place by --output, or move the file")


def prompt_of(path: Path) -> str | None:
    """The prompt of a mask or overlay written here; None for any other file, an unreadable one, too."""
    return text_of(path, PROMPT_KEY)


def text_of(path: Path, name: str) -> str | None:
    """A text in a PNG file; None where there is none, or the file is unreadable."""
    try:
        with Image.open(path) as image:
            return image.info.get(name)
    except (OSError, Image.DecompressionBombError):
        return None


def write_mask(target: Target, image: np.ndarray, mask: np.ndarray | None, prompt: str) -> float:
    """Write the mask, bool (H, W), and its outline on the image, uint8 (H, W, 3), with the prompt; returns its share.

    None removes the files of an earlier mask: the answer of now has none, which is not an empty mask.
    """
    if mask is None:
        for path in target[1:]:
            path.unlink(missing_ok=True)
        return 0.0
    save_mask(target.mask, mask, prompt)
    save_mask(target.overlay, paint_mask(image, mask, AFTER, opacity=0), prompt)
    return float(mask.mean())


def save_mask(path: Path, pixels: np.ndarray, prompt: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a mask, bool (H, W), as 0 and 255, or a picture, uint8 (H, W, 3), with its prompt and `more` texts."""
    text = PngInfo()
    for name, value in {PROMPT_KEY: prompt, **more}.items():
        text.add_itxt(name, value)
    values = np.where(pixels, np.uint8(255), np.uint8(0)) if pixels.dtype == bool else pixels
    with whole_file(path) as temporary:
        Image.fromarray(values).save(temporary, "PNG", pnginfo=text)


# ---- one prompt, or the policy's ----


@dataclass(frozen=True)
class Segmented:
    """The result for one image."""

    target: Target  # nothing is written where `segs` is 0
    prompt: str
    answer: str
    share: float  # of the image that the mask covers, [0, 1]
    segs: int | None  # number of `[SEG]` in the answer; None where several answers make the mask
    quality: str = ""  # Dice and score predicted by the reward network, or why it gives none; "" without one


@dataclass(frozen=True, eq=False)
class Answered:
    """Sa2VA's answer to one prompt on one image."""

    prompt: str  # that was used, or chosen
    answer: str  # special tokens kept
    segs: int  # number of `[SEG]` in the answer
    soft: np.ndarray  # float32 (H, W) in [0, 1], maximum over the `[SEG]`
    mask: np.ndarray  # bool (H, W)
    scorer: ImageScorer | None  # the reward network applied to the image


@dataclass(frozen=True)
class MaskMaker:
    """A loaded Sa2VA, with the policy that chooses the prompt and the reward network that predicts a mask's quality."""

    model: Any
    processor: Any
    max_new_tokens: int
    prompt: str  # where no policy chooses
    trained: dict[str, Any]  # config.json of the policy's final_model; empty without a policy
    policy: ActorCriticPolicy | None
    network: RewardNetwork | None
    grey: GreyWindow | None = None  # window of grey above 8 bit; None: each image has its own

    def __call__(self, target: Target) -> Segmented:
        """Choose the prompt, segment, write, predict the quality; without `[SEG]` nothing is written."""
        image, note = load_for_model(target.image, self.grey)
        if note:
            tqdm.write(note)
        result = self.answer(image, before=lambda prompt: check_free(target, prompt))
        share = write_mask(target, image, result.mask if result.segs else None, result.prompt)
        quality = self.quality(result) if result.segs else ""
        return Segmented(target, result.prompt, result.answer, share, result.segs, quality)

    def answer(
        self, image: np.ndarray, prompt: str | None = None, before: Callable[[str], None] = lambda prompt: None
    ) -> Answered:
        """The answer to a prompt, or the policy's or own one, which `before` is told, on an image, uint8 (H, W, 3)."""
        features = image_features(self.model, self.processor, [image])  # used for both the policy and the masks
        scorer = self.scorer(image)
        prompt = prompt or self._choose(image, features, scorer)
        before(prompt)
        answer, mask = self._segment(image, features, prompt)
        soft = answer.probabilities().max(axis=0, initial=0.0)
        return Answered(prompt, answer.answer, len(answer.mask_logits), soft, mask, scorer)

    def scorer(self, image: np.ndarray) -> ImageScorer | None:
        """The reward network applied to an image, uint8 (H, W, 3): its U-Nets run once; None without a network."""
        return None if self.network is None else ImageScorer(self.network, image)

    def quality(self, result: Answered) -> str:
        """The predicted Dice, its 90 % interval if one can be given, and score; or why not; empty without a network."""
        scorer, mask = result.scorer, result.mask
        if scorer is None or self.network is None:
            return ""
        if scorer.outside:
            return f"none, {scorer.outside}"
        quality = scorer.quality(mask[None].astype(np.float32))
        limits = given_interval(self.network.config, scorer, mask)
        interval = " (no interval can be given)" if isinstance(limits, str) else " [{:.3f}, {:.3f}]".format(*limits)
        return f"{float(quality['dice'][0]):.3f}{interval}, score {float(quality['score'][0]):.3f}"

    def _segment(self, image: np.ndarray, features: Sam2Features, prompt: str) -> tuple[Segmentation, np.ndarray]:
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "sam_features": [features]}
        answer: Segmentation = self.model.segment([image], [prompt], self.processor, **limits)[0][0]
        joined = np.logical_or.reduce(answer.masks())  # several [SEG] are joined; none is an empty mask
        return answer, joined

    def _choose(self, image: np.ndarray, features: Sam2Features, scorer: ImageScorer | None) -> str:
        if self.policy is None:
            return self.prompt
        prompts, pooled = self.trained["prompts"], features.pooled()[0].cpu().float().numpy()

        def score(index: int) -> float:
            if scorer is None:
                raise ValueError(
                    "--policy: it tries several prompts, but its reward network is missing; give --reward_net"
                )
            mask = self._segment(image, features, prompts[index])[1].astype(np.float32)
            return float(scorer.quality(mask[None])["score"][0])

        return str(prompts[deployed_prompt(self.policy, self.trained, image, pooled, score)])


def load_mask_maker(
    model_path: str | None,
    prompt: str,
    policy: Path | None = None,
    reward_net: Path | None = None,
    device: str | None = None,
    max_tiles: int | None = None,
    bit_depth: int | None = None,
    dtype: Dtype | None = None,
    image_resize: str | None = None,
) -> MaskMaker:
    """Load policy, reward network and model, in this order: the largest last.

    Args:
        model_path, reward_net, max_tiles, dtype, image_resize: None is as in the policy's training; without a policy
            the embedded model, no network, what the model's config says, and "auto".
        prompt: used where no policy chooses.
        policy: a run of step 2, or its final_model folder.
        device: None is the first GPU if there is one, else the CPU.
        bit_depth: of grey images above 8 bit.
    """
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    folder, trained, chooser = None, dict[str, Any](), None
    if policy is not None:
        folder = policy_folder(policy)
        trained = read_policy_config(folder)
        if not trained["deployment"]:
            raise ValueError(f"{folder}: a row of a report, not a policy to use; name the run {folder.parents[1]}")
        deployment = Deployment.from_json(trained["deployment"])
        print(f"the run deploys {deployment.words('best fixed prompt')}, because {deployment.reason}")
        chooser = load_policy(folder) if deployment.choice == "policy" else None
        prompt = str(trained["prompts"][deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS])
    network = load_reward_network(reward_net, folder, device)
    limits = trained.get("inputs", NO_POLICY)
    path = model_path or default_model(policy)
    model, processor = load_sa2va_model(path, device, dtype=dtype or limits.get("dtype", "auto"))
    tiles = limits["max_tiles"] if max_tiles is None else max_tiles
    processor.max_tiles = tiles or processor.max_tiles
    processor.set_image_resize(image_resize or limits.get("image_resize"))
    weights = weights_fingerprint(model) if trained or network else ""
    if trained and not trained["model_fingerprint"].startswith(weights):
        warnings.warn(f"{folder}: trained on other weights, or on another kind of device, than these", stacklevel=2)
    of_others = network and not str(network.training_info.get("model_fingerprint")).startswith(weights)
    if network and of_others and network.config.intervals:
        # Masks of a model that was trained on the score are worse than predicted.
        print("intervals are left out: they were fitted to masks of other weights, or of another kind of device")
        network.config = replace(network.config, intervals={})
    grey = window_for(limits, bit_depth)
    return MaskMaker(model, processor, limits["max_new_tokens"], prompt, trained, chooser, network, grey)


def default_model(policy: Path | None) -> str:
    """The model of the policy's run; without a policy the embedded one."""
    if policy is None:
        return DEFAULT_MODEL
    folder = policy_folder(policy)
    return located_model(folder.parent, read_policy_config(folder), "--model_path")


def load_reward_network(path: Path | None, policy: Path | None, device: str) -> RewardNetwork | None:
    """The reward network at `path`, else the one in the run of the final_model folder `policy`; None if it has none."""
    if policy is not None and (policy.parent / REWARD_NET).exists():
        path = path or policy.parent / REWARD_NET
    return None if path is None else RewardNetwork.from_pretrained(path).to(device)


# ---- the method of a comparison ----


def load_method_maker(run: Path, device: str | None, bit_depth: int | None) -> Callable[[Target], Segmented]:
    """The method in the folder best/ or cheapest/ of a comparison, as a function that makes and writes a mask."""
    method = load_deployed(run, device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    grey, title = window_for(method.saved, bit_depth), method.method.title
    print(f"method: {title}")

    def make(target: Target) -> Segmented:
        check_free(target, title)
        image, note = load_for_model(target.image, grey)
        if note:
            tqdm.write(note)
        mask = method.mask(image)
        return Segmented(target, title, "", write_mask(target, image, mask, title), 0 if mask is None else None)

    return make
