"""Rollouts: random numbers from the seed alone, a greedy teacher, references, answers without `[SEG]`; mask policies.

The policies are compared with torch's own distributions.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Normal, kl_divergence

from rl_reward_network.grpo.image_context import ImageContext, PromptBatch, region_cells
from rl_reward_network.grpo.prompts import DESCRIBE
from rl_reward_network.grpo.rewards import score, step_advantages
from rl_reward_network.grpo.rollouts import MASK_POLICIES, MicroBatch, RolloutGenerator, SigmaController
from rl_reward_network.grpo.trainer import with_advantages
from rl_reward_network.models.ema import EMA
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding, _Decoder
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.templates import TEMPLATES
from rl_reward_network.rewards.metrics import iou
from tests.grpo.nano import config, nano, regions, rewards, shake
from tests.grpo.test_image_context import predict


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> RolloutGenerator:
    return RolloutGenerator(*nano(), config(tmp_path_factory.mktemp("rollouts")))


def test_equal_seeds_give_equal_rollouts_and_others_do_not(generator: RolloutGenerator) -> None:
    first, again, other = (generator.generate(regions()[:4], seed) for seed in ((0, 1, 2), (0, 1, 2), (0, 1, 3)))
    ids = [[caption.completion_ids for caption in rollouts.captions] for rollouts in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert all(torch.equal(a.actions, b.actions) for a, b in zip(first.masks, again.masks, strict=True))
    assert not torch.equal(first.masks[0].actions, other.masks[0].actions)


def test_rewards_are_those_of_their_columns(generator: RolloutGenerator) -> None:
    prompts = regions()[:4]
    rollouts = generator.generate(prompts, (0, 0, 0))
    terms, columns = score(rollouts, rewards()), rollouts.columns["loop1"]
    assert columns["captions"] == [prompt.caption for prompt in prompts for _ in range(4)]
    for number, prompt in enumerate(prompts):
        _, truth = prompt.load()
        for g in range(4):
            row = 4 * number + g
            mask = columns["predicted_masks"][row]
            expected = 0.0 if mask is None else iou(mask[None], truth[None])[0]
            assert terms["loop1"].values["iou"][number, g] == pytest.approx(expected)
            ids = rollouts.captions[number].completion_ids[g]
            assert columns["completions"][row] == generator.processor.text(ids).removesuffix("<|im_end|>").strip()
    assert terms["loop2"].values["meteor"].shape == (4, 4)


def test_the_teachers_caption_of_a_mask_is_the_models_prediction(generator: RolloutGenerator) -> None:
    """Greedy, and the same words as one plain prediction with that region."""
    prompt = regions()[0]
    rollouts = generator.generate([prompt], (0, 0, 0))
    image, _ = prompt.load()
    for row in range(2):
        mask = rollouts.columns["loop2"]["predicted_masks"][row]
        expected = predict(generator.model, generator.processor, image, DESCRIBE, mask)["prediction"]
        assert rollouts.columns["loop2"]["completions"][row] == expected


def test_the_mean_action_is_the_models_prediction(generator: RolloutGenerator) -> None:
    prompt = regions()[1]
    image, _ = prompt.load()
    generator.sigma_controller.sigma = 1e-6
    rollouts = generator.generate([prompt], (0, 0, 0))
    generator.sigma_controller.sigma = 0.3
    prediction = predict(generator.model, generator.processor, image, prompt.question)
    differ = rollouts.columns["loop2"]["predicted_masks"][0] ^ prediction["prediction_masks"][0][0]
    assert differ.mean() < 1e-3


def test_the_teacher_has_the_averaged_weights(tmp_path: Any) -> None:
    model, processor = nano()
    generator = RolloutGenerator(model, processor, config(tmp_path))
    generator.ema = EMA(model)
    before = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    shake(model, 0.3)
    generator.ema = None
    captions = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    assert captions["completions"] != before["completions"], "the policy has changed"
    generator.ema = EMA(model)
    shake(model, -0.3)  # undone, while the average stays
    mixed = generator.generate(regions()[:2], (0, 0, 0)).columns["loop1"]
    assert mixed["completions"] == before["completions"]
    pairs = zip(mixed["predicted_masks"], before["predicted_masks"], strict=True)
    assert any(a is None or b is None or (a != b).any() for a, b in pairs), "the teacher's masks have changed"


def test_a_missing_seg_is_a_true_0(generator: RolloutGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageContext, "segment", lambda self, questions, **_: [([], None) for _ in questions])
    rollouts = generator.generate(regions()[:2], (0, 0, 0))
    terms = score(rollouts, rewards())
    assert not terms["loop1"].values["iou"].any()
    assert not terms["loop2"].values["meteor"].any()
    (advantages,) = step_advantages([terms], rewards(), generator.config)
    batch = with_advantages(MicroBatch(rollouts, [], []), advantages)
    assert (batch.rollouts.masks, batch.mask_advantages) == ([], [])
    answers = [generator.processor.text(answer.answer_ids) for answer in rollouts.answers]
    assert answers == ["Sure, [SEG]"] * 2, "the reference answer is learned in place of the model's"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_reference_caption_ends_as_generation_does(tmp_path: Any, template: str) -> None:
    model, processor = nano()
    processor.template = TEMPLATES[template]
    generator = RolloutGenerator(model, processor, config(tmp_path, objective="supervised"))
    (caption,) = generator.references(regions()[:1]).rollouts.captions
    (ids,) = caption.completion_ids
    answer, decoder = Answer(), _Decoder(model, processor, Decoding(100), torch.ones(1, 1), None)
    for number, token_id in enumerate(ids, start=1):
        assert not answer.stopped
        decoder.append(answer, token_id)
        assert answer.stopped == (number == len(ids)), "at the last token, which is trained"
    assert PromptBatch.text(SimpleNamespace(processor=processor), answer) == regions()[0].caption


@pytest.mark.parametrize("masked", [True, False])
def test_truncated_captions_are_not_counted(tmp_path: Any, masked: bool) -> None:
    settings = config(tmp_path, max_completion_length=3, mask_truncated_completions=masked)
    captions = RolloutGenerator(*nano(), settings).generate(regions()[:2], (0, 0, 0)).captions
    assert [caption.counted.tolist() for caption in captions] == [[not masked] * 4] * 2


def test_a_region_between_all_cells_gets_the_nearest(generator: RolloutGenerator) -> None:
    mask = np.zeros((256, 256), dtype=bool)
    mask[5, 5] = True
    assert region_cells(generator.processor, mask).sum() == 1
    with pytest.raises(ValueError, match="region 1 has no pixel"):
        region_cells(generator.processor, np.zeros((256, 256), dtype=bool))


# ---- policies over masks ---------------------------------------------------------------------------------------------

FEATURES = Sam2Features((torch.zeros(1, 4, 32, 32), torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 8, 8)))
SIZES = {"gaussian": 8, "bernoulli": 256}


def exact(name: str, width: float, seed: int = 0) -> tuple[Tensor, Any]:
    """Parameters, and torch's distribution of them."""
    parameters = torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed))
    return parameters, Normal(parameters, width) if name == "gaussian" else Bernoulli(logits=parameters / width)


@pytest.mark.parametrize("name", SIZES)
def test_log_probability_and_divergence_are_torchs(name: str) -> None:
    policy, width = MASK_POLICIES[name], torch.tensor(1.5)
    (parameters, own), (ref_parameters, reference) = exact(name, 1.5), exact(name, 1.5, 1)
    actions = policy.sample(parameters, width, 5, torch.Generator().manual_seed(2))
    expected = own.log_prob(actions).mean(dim=1)
    log_probs = policy.log_prob(parameters, width, actions)
    torch.testing.assert_close(log_probs - log_probs[0], expected - expected[0])  # a Gaussian's constant is left out
    torch.testing.assert_close(policy.kl(parameters, ref_parameters, width), kl_divergence(own, reference).mean())
    assert policy.kl(parameters, parameters, width).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("name", SIZES)
def test_samples_have_the_distribution_and_follow_the_seed(name: str) -> None:
    policy, (parameters, own), width = MASK_POLICIES[name], exact(name, 0.5), torch.tensor(0.5)
    draws = [policy.sample(parameters, width, 4000, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    torch.testing.assert_close(draws[0].mean(dim=0), own.mean, atol=0.05, rtol=0)


def test_the_width_of_the_gaussian_follows_the_embedding() -> None:
    policy = MASK_POLICIES["gaussian"]
    assert policy.width(torch.tensor([3.0, -3.0]), 0.5).item() == pytest.approx(1.5)
    assert not policy.width(torch.ones(2, requires_grad=True), 0.5).requires_grad


def test_the_controller_widens_alike_masks_and_narrows_foreign_ones() -> None:
    controller = SigmaController(0.3)
    # Foreign masks, the last, are narrowed even when rewards are equal.
    for (iou_, equal), sigma in {
        (0.95, 0.0): 0.315,
        (0.85, 0.5): 0.33075,
        (0.85, 0.1): 0.33075,
        (0.5, 1.0): 0.315,
    }.items():
        controller.update(iou_, equal)
        assert controller.sigma == pytest.approx(sigma)
    for _ in range(200):
        controller.update(1.0, 1.0)
    assert controller.sigma == controller.LIMITS[1]


def test_sampled_cells_lie_on_the_cells_of_the_image() -> None:
    """A mask made of cells, sampled and drawn at image size, is that mask: the blocks are not shifted."""
    cells = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.5
    truth = cells.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
    policy = MASK_POLICIES["bernoulli"]
    logits = policy.mask_logits(None, FEATURES, torch.zeros(4), cells.flatten()[None].float())
    drawn = upsample_mask_logits(logits, (128, 128), 64)[0] > 0
    centres = (slice(4, None, 8), slice(4, None, 8))  # corners of blocks are rounded by the bilinear upsampling
    assert torch.equal(drawn[centres], cells)
    assert torch.equal(drawn.flip(0, 1), upsample_mask_logits(logits.flip(1, 2), (128, 128), 64)[0] > 0)
    assert (drawn & truth).sum() / (drawn | truth).sum() > 0.85
