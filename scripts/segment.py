"""Segment one image by one prompt: print the answer, write the mask and a picture of it over the image.

    python -m scripts.segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."

Written beside the image, or to --output_dir: <name>_mask.png (0 / 255) and <name>_overlay.png. A trained prompt policy
chooses the prompt with --policy <run>/final_model.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from skimage.segmentation import mark_boundaries

from rl_reward_network.artefacts import whole_file
from rl_reward_network.data.grey_levels import DATA_SET, given_levels
from rl_reward_network.data.images import load_for_model
from rl_reward_network.env.observation import EPISODE_FEATURES, observe_image
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.models.fingerprint import weights_fingerprint
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation, image_features
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.training.policy_stage import REWARD_NET
from rl_reward_network.training.prompt_policy import load_policy, read_policy_config, try_prompts
from rl_reward_network.training.run_folder import located_model
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Segment one image by one prompt."""

    image: tyro.conf.Positional[Path]
    """Image file."""
    model_path: str | None = None
    """Sa2VA folder or hub id; by default the one the policy was trained on, without a policy the small embedded one."""
    prompt: str | None = None
    """What to ask; by default the first built-in prompt."""
    policy: Path | None = None
    """final_model folder of a trained prompt policy, which then chooses the prompt."""
    output_dir: Path | None = None
    """Where to write; the image's own folder by default."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    max_tiles: int | None = None
    """Most tiles the image is cut into: as in the policy's training, without a policy as the model says."""
    bit_depth: int | None = None
    """Bits of a grey image above 8 bit, 10 to 16; with a policy white is as in its data, else a point of its own."""


def main(args: Args) -> None:
    """Load, choose the prompt, segment, write."""
    if args.policy is not None and args.prompt is not None:
        raise ValueError(
            f"--prompt {args.prompt!r} and --policy {args.policy}: the policy chooses the prompt; give one"
        )
    trained = {} if args.policy is None else read_policy_config(args.policy)
    own = trained.get("world", {"max_tiles": None, "max_new_tokens": 64})
    image, said = load_for_model(args.image, white_level(args, own.get("white_levels")))
    if said:
        print(said)
    tiles = own["max_tiles"] if args.max_tiles is None else max(1, args.max_tiles)
    model_path = args.model_path or (
        DEFAULT_MODEL if args.policy is None else located_model(args.policy.parent, trained, "--model_path")
    )
    model, processor = load_sa2va_model(model_path, args.device)
    processor.max_tiles = tiles or processor.max_tiles
    if trained and not trained["model_fingerprint"].startswith(weights_fingerprint(model)):
        warnings.warn(
            f"{args.policy}: trained on other weights, or on another kind of device, than these", stacklevel=2
        )
    features = image_features(model, processor, image)  # both the policy and the masks are made of them

    def ask(prompt: str) -> Segmentation:
        limits: dict[str, Any] = {"max_new_tokens": own["max_new_tokens"], "sam_features": [features]}
        segmentation: Segmentation = model.segment([image], [prompt], processor, **limits)[0][0]
        return segmentation

    prompt = args.prompt or PROMPTS[0]
    if args.policy is not None:
        prompt = chosen_prompt(args.policy, trained, image, features, ask)
    answer = ask(prompt)
    mask = answer.masks().any(axis=0)  # several [SEG] are joined; none is an empty mask
    folder = args.output_dir or args.image.parent
    mask_file, overlay_file = (folder / f"{args.image.stem}_{kind}.png" for kind in ("mask", "overlay"))
    overlay = mark_boundaries(image, mask.astype(int), color=(1, 0.6, 0))  # float, [0, 1]
    save_png(np.where(mask, np.uint8(255), np.uint8(0)), mask_file)
    save_png(np.asarray(overlay * 255, dtype=np.uint8), overlay_file)
    print(f"prompt: {prompt}\nanswer: {answer.answer}")
    print(f"mask:   {mask.mean():.1%} of the image, {len(answer.mask_logits)} [SEG]")
    print(f"\nwritten: {mask_file} {overlay_file}")


def white_level(args: Args, trained: dict[str, int] | None) -> int | None:
    """What is white in a grey image above 8 bit: as in the policy's data, else by --bit_depth; None: nobody says.

    Raises:
        ValueError: both say, or --bit_depth is not 8 to 16.
    """
    if trained and args.bit_depth is not None:
        raise ValueError(
            f"--bit_depth {args.bit_depth}: the policy was trained with white at {trained[DATA_SET]}; leave it out"
        )
    levels = given_levels(args.bit_depth, trained)
    return levels[DATA_SET] if levels else None


def chosen_prompt(
    folder: Path,
    trained: dict[str, Any],
    image: np.ndarray,
    features: Sam2Features,
    ask: Callable[[str], Segmentation],
) -> str:
    """The prompt that a run deploys on a uint8 (H, W, 3) image: its policy's, or the best fixed one.

    Raises:
        ValueError: the folder is not a policy's, or the policy was made for another model's features.
    """
    prompts, plan, deployment = trained["prompts"], trained["plan"], trained["deployment"]
    if not deployment["policy"]:
        print(f"the run deploys its best fixed prompt, because {deployment['reason']}")
        return str(prompts[deployment["best_fixed"]])
    pooled = features.pooled()[0].cpu().float().numpy() if plan["vision_features"] else None
    seen = observe_image(image, pooled)
    if len(seen) + EPISODE_FEATURES != len(trained["observation"]):
        raise ValueError(f"{folder}: trained on a Sa2VA with features of another width; leave --model_path out")
    judge = functools.cache(lambda: RewardNetwork.from_pretrained(folder.parent / REWARD_NET))

    def score(tried: np.ndarray) -> np.ndarray:  # asked only where the policy tries several prompts
        mask = np.asarray(ask(prompts[int(tried[0])]).masks().any(axis=0), dtype=np.float32)
        return score_masks(judge(), image, mask[None])

    context = PromptContext("new image", seen, np.zeros(len(prompts), dtype=np.float32))
    steps, sees = plan["ppo"]["max_steps"], plan["reward"] == "net"
    return str(prompts[int(try_prompts(load_policy(folder), [context], score, steps, sees)[0])])


def save_png(pixels: np.ndarray, path: Path) -> None:
    """Write uint8 pixels, whole or not at all."""
    with whole_file(path) as temporary:
        Image.fromarray(pixels).save(temporary)


if __name__ == "__main__":
    run(main, Args)
