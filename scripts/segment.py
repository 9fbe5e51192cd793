"""Segment one image by one prompt: print the answer, write the mask and a picture of it over the image.

    python -m scripts.segment image.png [--model_path MODEL] --prompt "Please segment the blood vessel."

Written beside the image, or to --output_dir: <name>_mask.png (0 / 255) and <name>_overlay.png. A trained prompt policy
chooses the prompt with --policy <run>/final_model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from skimage.segmentation import mark_boundaries

from rl_reward_network.artefacts import read_json, whole_file
from rl_reward_network.data.images import load_image
from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.modeling_sa2va import load_sa2va_model
from rl_reward_network.training.prompt_ppo import choose_prompts, load_policy
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
    trained = {} if args.policy is None else policy_config(args.policy / "config.json")
    prompt = args.prompt if args.policy is None else chosen_prompt(args.policy, trained["prompts"], image)
    model_path = args.model_path or (DEFAULT_MODEL if args.policy is None else trained["world"]["model_path"])
    model, processor = load_sa2va_model(model_path, args.device)
    tiles = trained.get("world", {}).get("max_tiles", processor.max_tiles)
    processor.max_tiles = tiles if args.max_tiles is None else max(1, args.max_tiles)
    (answer,) = model.segment([image], [prompt], processor)[0]
    mask = answer.masks().any(axis=0)  # several [SEG] are joined; none is an empty mask
    folder = args.output_dir or args.image.parent
    mask_file, overlay_file = (folder / f"{args.image.stem}_{kind}.png" for kind in ("mask", "overlay"))
    overlay = mark_boundaries(image, mask.astype(int), color=(1, 0.6, 0))  # float, [0, 1]
    save_png(np.where(mask, np.uint8(255), np.uint8(0)), mask_file)
    save_png(np.asarray(overlay * 255, dtype=np.uint8), overlay_file)
    print(f"prompt: {prompt}\nanswer: {answer.answer}")
    print(f"mask:   {mask.mean():.1%} of the image, {len(answer.mask_logits)} [SEG]")
    print(f"\nwritten: {mask_file} {overlay_file}")


def policy_config(file: Path) -> dict[str, Any]:
    """What a policy was trained on; a ValueError where it does not say."""
    config = read_json(file)
    for field in ("prompts", "world"):
        if field not in config:
            raise ValueError(f"{file}: field {field} is missing; this is not a final_model folder")
    return dict(config)


def chosen_prompt(policy: Path, prompts: list[str], image: np.ndarray) -> str:
    """The prompt a trained policy picks for a uint8 (H, W, 3) image.

    Raises:
        ValueError: the folder is not a policy's.
    """
    context = PromptContext("", observe_image(image), np.zeros(len(prompts), dtype=np.float32))
    return prompts[int(choose_prompts(load_policy(policy), [context])[0])]


def save_png(pixels: np.ndarray, path: Path) -> None:
    """Write uint8 pixels, whole or not at all."""
    with whole_file(path) as temporary:
        Image.fromarray(pixels).save(temporary)


if __name__ == "__main__":
    run(main, Args)
