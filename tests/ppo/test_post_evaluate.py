"""The rows and the verdict of experiment 2: better only if PPO chooses by the image."""

from collections.abc import Sequence

import pytest

from rl_reward_network.ppo.post_evaluate import AS_IS, ORACLE, POLICY, SEQUENCE, measured, over_usual, verdict_of
from tests.env.edited_images import DILATE, ERODE, known_image, known_images

BOTH = known_images(24)
ALIKE = [known_image(number) for number in range(0, 24, 2)]
MANY_ALIKE = [known_image(number) for number in range(0, 200, 2)]
RIGHT = {0: (DILATE,), 1: (ERODE,)}  # of even and of odd images


@pytest.mark.parametrize(
    ("test", "policy", "fixed", "label", "words"),
    [
        (BOTH, RIGHT, (ERODE,), "better", "It closes 100% of the oracle's gain."),
        (BOTH, {0: (ERODE,), 1: (DILATE,)}, (DILATE,), "worse", "one sequence for all images is better"),
        (BOTH[:5], RIGHT, (ERODE,), "cannot tell", "fewer than 6 test patients"),
        (MANY_ALIKE, RIGHT, (DILATE,), "no gap", "a fixed sequence is enough, the oracle gains +0.000"),
        # As a useless reward network may have it: its search finds a bad sequence, and its PPO settles on a good one.
        (ALIKE, RIGHT, (ERODE,), "cannot tell", "does not beat its most frequent sequence for all images (+0.000"),
        (ALIKE, {0: ()}, (ERODE,), "cannot tell", "does not beat the mask as it is (PPO minus it: +0.000"),
    ],
)  # fmt: skip
def test_the_verdict(
    test: list[object], policy: dict[int, tuple[int, ...]], fixed: tuple[int, ...], label: str, words: str
) -> None:
    images: Sequence = test  # type: ignore[type-arg]
    parity = [int(image.sample_id.split()[1]) % 2 for image in images]
    chosen = {AS_IS: [()] * len(images), SEQUENCE: [fixed] * len(images)}
    chosen |= {POLICY: [policy[odd] for odd in parity], ORACLE: [RIGHT[odd] for odd in parity]}
    masks = {name: [image.mask(one) for image, one in zip(images, of, strict=True)] for name, of in chosen.items()}
    results = measured(masks, images, 0)
    assert [row.name for row in results.rows] == [AS_IS, SEQUENCE, POLICY, ORACLE]
    verdict = verdict_of(results, over_usual(images, chosen[POLICY]))
    assert verdict.label == label
    assert words in verdict.sentence
