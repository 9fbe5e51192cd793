"""Load what the roads work with: models with their mask banks, and the trained policies."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import read_json
from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank
from rl_reward_network.inputs.segmenter import Sa2VASegmenter
from rl_reward_network.methods.masks import PromptChooser, Tools
from rl_reward_network.methods.methods import BASE, POST, PROMPTS_LABELS, PROMPTS_NET
from rl_reward_network.methods.views import FrozenModel, ImageView
from rl_reward_network.ppo.deploy import deployed_prompt, load_policy, load_post_policy, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.run import FINAL


class Models:
    """Sa2VA with different weights; besides the base only the weights used last stay in memory.

    Args:
        base: the model as it is.
        folders: name of weights -> folder of a checkpoint.
        load: folder -> segmenter.
        bank: folder of the mask bank; None computes every mask anew.
    """

    def __init__(
        self,
        base: Sa2VASegmenter,
        folders: Mapping[str, Path],
        load: Callable[[Path], Sa2VASegmenter],
        bank: Path | None,
    ) -> None:
        self.folders, self._load, self._bank = dict(folders), load, bank
        self._base = self._frozen(base)
        self._other: tuple[str, FrozenModel] | None = None

    def __call__(self, weights: str) -> FrozenModel:
        """The Sa2VA with these weights."""
        if weights == BASE:
            return self._base
        if self._other is None or self._other[0] != weights:
            self._other = None  # frees the memory before the next model is read
            self._other = weights, self._frozen(self._load(self.folders[weights]))
        return self._other[1]

    def _frozen(self, segmenter: Sa2VASegmenter) -> FrozenModel:
        bank = self._bank
        if bank is None:
            return FrozenModel(segmenter.segment, segmenter.upsample)

        def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
            return MaskBank(bank, segmenter.segment, segmenter.fingerprint, prompts).answer(image)

        return FrozenModel(answer, segmenter.upsample)


def load_tools(prompts: tuple[str, ...], runs: Mapping[str, Path]) -> Tools:
    """The trained parts as the roads use them.

    Args:
        prompts: of the comparison; index 0 is the default.
        runs: part -> its finished run.

    Raises:
        ValueError: a run is damaged.
    """
    policies = [part for part in (PROMPTS_LABELS, PROMPTS_NET) if part in runs]
    configs = {part: read_policy_config(runs[part] / FINAL) for part in policies}
    tools = Tools(
        prompts,
        {part: _chooser(runs[part] / FINAL, config) for part, config in configs.items()},
        {part: int(config["deployment"]["best_fixed"]) for part, config in configs.items()},
    )
    return _with_operations(tools, runs[POST] / FINAL) if POST in runs else tools


def _chooser(final_model: Path, config: dict[str, Any]) -> PromptChooser:
    """The policy of a run, or the one prompt that it deploys."""
    deployment = Deployment.from_json(config["deployment"])
    if deployment.choice != "policy":
        return lambda view, weights: deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS
    policy = load_policy(final_model)

    def choose(view: ImageView, weights: str) -> int:
        def score(index: int) -> float:
            mask = (view.soft(weights, config["prompts"][index : index + 1]) > 0.5).astype(np.float32)
            return float(view.scorer.quality(mask)["score"][0])

        return deployed_prompt(policy, config, view.image, view.features(weights, config["prompts"][0]), score)

    return choose


def _with_operations(tools: Tools, final_model: Path) -> Tools:
    """The tools of experiment 2."""
    policy = load_post_policy(final_model)

    def edit(view: ImageView, weights: str, soft: np.ndarray) -> np.ndarray:
        return policy.edit(view.image, soft, view.features(weights, tools.prompts[0]))

    def sequence(view: ImageView, soft: np.ndarray) -> np.ndarray:
        return policy.edit_by_sequence(view.image, soft)

    return replace(tools, edit=edit, sequence=sequence, threshold=float(policy.config["best_threshold"]))


def deploys(part: str, run: Path) -> str:
    """What the policy of a run deploys, in words; empty for parts without a policy."""
    if part not in (PROMPTS_LABELS, PROMPTS_NET, POST):
        return ""
    deployment = Deployment.from_json(read_json(run / FINAL / "config.json")["deployment"])
    return deployment.words("best fixed sequence" if part == POST else "best fixed prompt", "the model as it is")
