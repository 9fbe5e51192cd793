"""The verdict of experiment 2: better only if PPO chooses by the image."""

from collections.abc import Sequence

from rl_reward_network.env.operations import EditedImage
from rl_reward_network.ppo.post_evaluate import (
    AS_IS,
    ORACLE,
    POLICY,
    SEQUENCE,
    _over_its_usual,
    _rows,
    verdict_of,
)
from rl_reward_network.report.statistics import Verdict
from tests.env.edited_images import DILATE, ERODE, known_image, known_images

RIGHT = {0: (DILATE,), 1: (ERODE,)}  # of even and of odd images


def verdict(test: Sequence[EditedImage], policy: Sequence[tuple[int, ...]], fixed: tuple[int, ...]) -> Verdict:
    right = [RIGHT[int(image.sample_id.split()[1]) % 2] for image in test]
    chosen = {AS_IS: [()] * len(test), SEQUENCE: [fixed] * len(test), POLICY: list(policy), ORACLE: right}
    masks = {name: [image.mask(one) for image, one in zip(test, of, strict=True)] for name, of in chosen.items()}
    rows = {row.name: row for row in _rows(masks, chosen, test, 0)}
    return verdict_of(rows[POLICY], rows[ORACLE], _over_its_usual(test, policy))


def test_one_sequence_for_all_images_is_not_better_however_bad_the_one_beside_it() -> None:
    """As a useless reward network may have it: its search finds a bad sequence, and its PPO settles on a good one."""
    alike = [known_image(number) for number in range(0, 24, 2)]
    found = verdict(alike, [(DILATE,)] * 12, (ERODE,))
    assert found.label == "cannot tell"
    assert "it does not beat its most frequent sequence for all images (+0.000" in found.sentence


def test_the_right_sequence_for_each_image_is_better() -> None:
    found = verdict(known_images(12), [RIGHT[number % 2] for number in range(12)], (ERODE,))
    assert found.label == "better"
