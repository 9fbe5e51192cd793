"""The rows of `sa2va-rl consistency`: a model prepared as for training, compared with the official recipe."""

from tempfile import TemporaryDirectory
from typing import Any

import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.grpo.consistency import ConsistencyRow, consistency_rows
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.prompts import region_prompt
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.settings import MaskPolicyName
from rl_reward_network.grpo.trainable import freeze_unreached, prepare_model
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.functions import iou_reward


def compare_with_sft(
    model_path: str,
    lora_r: int,
    lora_alpha: int,
    mask_policy: MaskPolicyName,
    max_tiles: int = 1,
    device: str | None = None,
) -> list[ConsistencyRow]:
    """All rows, for a model trained by GRPO with these settings.

    Args:
        model_path: Sa2VA folder or hub id.
        lora_r, lora_alpha: rank and scale of the adapters.
        mask_policy: of the run.
        max_tiles: most tiles an image is cut into.
        device: None is the first GPU if there is one, else the CPU.
    """
    folder = open_checkpoint(model_path)
    model, processor = load_sa2va_model(folder.path, device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    processor.max_tiles = max_tiles
    prepare_model(model, lora_r, lora_alpha)
    freeze_as_in_training(model, processor, mask_policy)
    return consistency_rows(model, processor, folder, mask_policy)


def freeze_as_in_training(model: Any, processor: Sa2VAProcessor, mask_policy: MaskPolicyName) -> None:
    """Freeze parameters without a gradient from any loss of the default run on captioned regions.

    They are found by one backward pass on a rendered scene.
    """
    scene = next(iter(make_scenes(1, 0)))
    target = scene.objects[0]
    item = region_prompt(make_region(target.caption, to_rle(target.mask), "scene", "scene", lambda: scene.image))
    rewards = {loop: {"iou": Reward(iou_reward, 1.0)} for loop in ("loop1", "loop2")}
    with TemporaryDirectory() as output_dir:
        settings = Sa2VAGRPOConfig(
            output_dir=output_dir,
            mask_policy=mask_policy,
            use_cpu=model.device.type == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Sa2VAGRPOTrainer(model, processor, settings, [item] * settings.prompts_per_step, rewards)
        freeze_unreached(trainer, [item])
