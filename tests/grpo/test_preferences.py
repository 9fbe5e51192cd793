"""Dense DPO: the loss in closed form and against TRL's, judges, candidates, pairs, and a run that follows them."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo.image_context import open_batch
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.plan import RewardArgs
from rl_reward_network.grpo.preferences import PairMaker, candidate_masks, compared_batch, dpo_margin, preference_loss
from rl_reward_network.grpo.rollouts import Pair, RolloutGenerator
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.rewards.metrics import dice
from tests.grpo.nano import SETTINGS, annotated, assert_resumes, config, image_of, nano, planned, train
from tests.models.test_reward_network import network_of

PLAN = GRPOPlan(
    "quick",
    RewardWeights(0.0, 0.0, 0.0, 0.0),
    lora_r=4,
    lora_alpha=8,
    settings=GRPOSettings(
        **SETTINGS
        | {"objective": "dpo", "mask_to_caption_weight": 0.0, "learning_rate": 1e-3, "preferred_by": "truth"}
        | {"bce_weight": 1.0, "dice_weight": 0.5}
    ),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    return annotated(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def run(images: GRPOInputs) -> Path:
    return train(images, PLAN, images.config.output_dir / "sa2va_grpo_1")


LOGITS, REFERENCE = torch.tensor([[1.5, -0.5]]), torch.tensor([[0.2, 0.4]])
CHOSEN, REJECTED = torch.tensor([[True, False]]), torch.tensor([[False, True]])


def test_the_margin_is_that_of_two_mean_cross_entropies() -> None:
    def log_prob(logits: torch.Tensor, mask: torch.Tensor) -> float:
        return -F.binary_cross_entropy_with_logits(logits, mask.float()).item()

    ours = dpo_margin(LOGITS, REFERENCE, CHOSEN, REJECTED).item()
    of_model = log_prob(LOGITS, CHOSEN) - log_prob(LOGITS, REJECTED)
    of_reference = log_prob(REFERENCE, CHOSEN) - log_prob(REFERENCE, REJECTED)
    assert ours == pytest.approx(of_model - of_reference, rel=1e-6)
    assert ours == pytest.approx(((1.5 - 0.2) - (-0.5 - 0.4)) / 2, rel=1e-6)


def test_pixels_on_which_both_masks_agree_have_no_part() -> None:
    def wide(pixels: torch.Tensor, more: float | bool) -> torch.Tensor:
        return torch.cat([pixels, torch.full((1, 6), more, dtype=pixels.dtype)], dim=1)

    small = dpo_margin(LOGITS, REFERENCE, CHOSEN, REJECTED)
    logits = wide(LOGITS, -3.0).requires_grad_()
    large = dpo_margin(logits, wide(REFERENCE, 2.0), wide(CHOSEN, True), wide(REJECTED, True))
    assert large.item() == pytest.approx(small.item(), rel=1e-6)
    large.backward()
    assert logits.grad[0].tolist() == pytest.approx([0.5, -0.5, 0, 0, 0, 0, 0, 0])
    same = dpo_margin(LOGITS, REFERENCE, CHOSEN, CHOSEN)
    assert same.item() == 0, "equal masks say nothing, and divide by nothing"


def test_loss_and_gradient_of_two_pixels_are_those_of_trl() -> None:
    """A mask of two pixels as a completion of two tokens; TRL sums over tokens where we take the mean."""
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    from trl.trainer.dpo_trainer import DPOTrainer

    def log_probs(logits: torch.Tensor) -> torch.Tensor:
        masks = torch.cat([CHOSEN, REJECTED]).float()
        return -F.binary_cross_entropy_with_logits(logits.expand(2, -1), masks, reduction="none")

    ours, theirs = LOGITS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    settings = config("unused", objective="dpo", dpo_beta=0.7, sft_weight=0.0, bce_weight=1.0, dice_weight=0.5)
    pair = replace(image_of(), pair=Pair(CHOSEN.numpy(), REJECTED.numpy()))
    loss, logged = preference_loss([(pair, ours)], [REFERENCE], settings, 1.0)
    loss.backward()
    of_reference = log_probs(REFERENCE).sum(dim=1)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x),
        aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        loss_types=["sigmoid"], loss_weights=[1.0], beta=0.7 / 2, use_weighting=False, label_smoothing=0.0,
        args=SimpleNamespace(), _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    nothing = torch.zeros(2, 2)
    output = SimpleNamespace(
        log_probs=log_probs(theirs), entropy=nothing, mean_logits=nothing, is_top1=torch.zeros(2, 2, dtype=torch.bool)
    )
    completion = torch.tensor([[0, 1, 1], [0, 1, 1]])
    batch = {"input_ids": tokens, "attention_mask": tokens + 1, "completion_mask": completion}
    batch |= {"ref_chosen_logps": of_reference[:1], "ref_rejected_logps": of_reference[1:]}
    expected = DPOTrainer._compute_loss(stub, lambda **_: output, batch, False)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert logged["dpo/accuracy"] == 1
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.7 * 1.1)), rel=1e-6)


def stack(*rows: str) -> np.ndarray:
    """Masks bool (K, H, W), each of a string such as "##. ..#"."""
    return np.array([[[letter == "#" for letter in line] for line in row.split()] for row in rows])


def test_judges_prefer_what_they_say() -> None:
    line, islands, ring = "##### ..... .....", "##.## ..... .....", "##### #...# #####"
    masks = stack(line, islands, ring)
    image = image_of(truth=stack(line)[0], pixels=np.zeros((3, 5, 3), np.uint8))
    values, better = PairMaker("truth", 0.05).judged(image, masks)
    np.testing.assert_allclose(values, dice(masks, stack(line, line, line)))
    assert better.tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert not PairMaker("truth", 0.9).judged(image, masks)[1].any(), "no difference is that large"
    pair: Any = PairMaker("truth", 0.0).pair(image, stack(line, line, islands), np.random.default_rng(0))
    assert (pair.chosen.sum(), pair.rejected.sum()) == (5, 4)
    for alike in (stack(line, line), stack("###.. ..... .....", "..### ..... .....")):
        assert PairMaker("truth", 0.0).pair(image, alike, np.random.default_rng(0)) is None, "no difference, no pair"


class TwoMembers:
    """A reward network whose members' scores of masks, by their number of pixels, are given."""

    def __init__(self, by_size: dict[int, tuple[float, float]]) -> None:
        self.by_size = by_size

    def scorer(self, image: np.ndarray) -> Any:
        def quality(masks: np.ndarray) -> dict[str, np.ndarray]:
            members = np.array([self.by_size[int(mask.sum())] for mask in masks])
            return {"score": members.mean(axis=1), "member_scores": members}

        return SimpleNamespace(quality=quality)


def test_a_difference_within_the_reward_networks_noise_makes_no_pair() -> None:
    masks = stack("##### .....", "##... .....", "#.... .....")
    network: Any = TwoMembers({5: (0.8, 0.8), 2: (0.5, 0.5), 1: (0.9, 0.6)})  # who disagree on the last
    image = image_of(pixels=np.zeros((2, 5, 3), np.uint8))
    maker = PairMaker("learned", 0.02, network)
    assert maker.judged(image, masks)[1][0].tolist() == [False, True, False], "0.05 ahead of the last, +-0.15"
    pair: Any = maker.pair(image, masks, np.random.default_rng(0))
    assert np.array_equal(pair, masks[:2])
    assert PairMaker("learned", 0.5, network).pair(image, masks, np.random.default_rng(0)) is None


def test_candidates_differ_and_follow_the_seed(images: GRPOInputs, tmp_path: Path) -> None:
    model, processor = nano()
    generator = RolloutGenerator(model, processor, config(tmp_path, objective="dpo", mask_to_caption_weight=0.0))
    batch = open_batch(images.prompts[:2], generator.cache)
    first, again, other = (candidate_masks(generator, batch, np.random.default_rng(seed)) for seed in (0, 0, 1))
    for masks, same in zip(first, again, strict=True):
        assert np.array_equal(masks, same)
        assert len({mask.tobytes() for mask in masks}) == len(masks) >= 8
        assert masks.shape[1:] == batch.images[0].shape[:2]
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True) if a is not None and b is not None)
    made = compared_batch(generator, images.prompts[:2], (0, 1), PairMaker("truth", 0.02))
    for answer in made.rollouts.answers:
        pair: Any = answer.image.pair
        truth: Any = answer.image.truth
        gap = dice(pair.chosen[None], truth[None]) - dice(pair.rejected[None], truth[None])
        assert gap[0] >= 0.02


def test_a_run_moves_towards_the_preferred_masks_and_a_resumed_one_ends_alike(images: GRPOInputs, run: Path) -> None:
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "dpo/loss" in line]
    assert len(lines) == 2
    assert f'"dpo/loss": {math.log(2):.6f}' in lines[0], "the model is the reference"
    config_json = read_json(run / "final_model" / "config.json")
    assert config_json["labels"] > 0
    assert "preferences between masks, by truth" in (run / "final_model" / "README.md").read_text()
    assert_resumes(images, PLAN, run)


def test_a_reward_network_prefers_without_labels(images: GRPOInputs, tmp_path: Path) -> None:
    network = network_of()
    plan = replace(PLAN, settings=replace(PLAN.settings, preferred_by="learned", max_steps=1), reward_net="x")
    folder = train(images, plan, tmp_path / "run", network=network)
    assert read_json(folder / "final_model" / "config.json")["labels"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--preferred_by learned asks the reward network"),
        ({"preferred_by": "truth", "temperature": 0.5}, "--temperature 0.5 does nothing in this run"),
        ({"preferred_by": "truth", "rewards": RewardArgs(loop2_iou_weight=1.0)}, "--loop2_iou_weight 1.0 does nothing"),
        ({"preferred_by": "truth", "dpo_beta": 0.0}, "dpo_beta is 0.0, expected more than 0"),
        ({"preferred_by": "truth", "num_iterations": 2}, "expected 1 with dpo training"),
    ],
)
def test_what_does_nothing_is_refused(images: GRPOInputs, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned("dpo", images, **flags)


def test_captions_are_no_masks(grpo_inputs: GRPOInputs) -> None:
    with pytest.raises(ValueError, match="dpo is for annotated images with one question"):
        planned("dpo", grpo_inputs, preferred_by="truth")
