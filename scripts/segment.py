"""Segment one image by one prompt: print the answer, write the mask and a picture of it over the image.

    python -m scripts.segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."

Written beside the image, or to --output_dir: <name>_mask.png (0 / 255) and <name>_overlay.png. A trained prompt policy
chooses the prompt with --policy <run>/final_model.
"""

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
from rl_reward_network.data.images import load_image
from rl_reward_network.env.observation import EPISODE_FEATURES, observe_image
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.modeling_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation, image_features
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.training.prompt_policy import load_policy, read_policy_config, try_prompts
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Segment one image by one prompt."""

    image: tyro.conf.Positional[Path]
    """Image file."""
    model_path: str | None = None
    """Sa2VA folder or hub id; by default the one the policy was trained on, without a policy the small embedded one."""
    prompt: str = PROMPTS[0]
    """What to ask."""
    policy: Path | None = None
    """final_model folder of a trained prompt policy, which then chooses the prompt."""
    output_dir: Path | None = None
    """Where to write; the image's own folder by default."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    max_tiles: int | None = None
    """Most tiles the image is cut into: as in the policy's training, without a policy as the model says."""


def main(args: Args) -> None:
    """Load, choose the prompt, segment, write."""
    image = load_image(args.image)
    trained = {} if args.policy is None else read_policy_config(args.policy)
    model_path = args.model_path or (DEFAULT_MODEL if args.policy is None else trained["world"]["model_path"])
    model, processor = load_sa2va_model(model_path, args.device)
    tiles = trained.get("world", {}).get("max_tiles", processor.max_tiles)
    processor.max_tiles = tiles if args.max_tiles is None else max(1, args.max_tiles)
    features = image_features(model, processor, image)  # both the policy and the masks are made of them

    def ask(prompt: str) -> Segmentation:
        segmentation: Segmentation = model.segment([image], [prompt], processor, sam_features=[features])[0][0]
        return segmentation

    prompt = args.prompt if args.policy is None else chosen_prompt(args.policy, trained, image, features, ask)
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
        raise ValueError(f"{folder}: the policy was trained on another Sa2VA's features; leave --model_path out")

    def score(tried: np.ndarray) -> np.ndarray:  # asked only where the policy tries several prompts
        network = RewardNetwork.from_pretrained(trained["reward_net"])
        mask = np.asarray(ask(prompts[int(tried[0])]).masks().any(axis=0), dtype=np.float32)
        return score_masks(network, image, mask[None])

    context = PromptContext("new image", seen, np.zeros(len(prompts), dtype=np.float32))
    steps, sees = plan["ppo"]["max_steps"], plan["reward"] == "net"
    return str(prompts[int(try_prompts(load_policy(folder), [context], score, steps, sees)[0])])


def save_png(pixels: np.ndarray, path: Path) -> None:
    """Write uint8 pixels, whole or not at all."""
    with whole_file(path) as temporary:
        Image.fromarray(pixels).save(temporary)


if __name__ == "__main__":
    run(main, Args)
