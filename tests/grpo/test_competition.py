"""Names that compete: for pixels in the losses, for the image in the answers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.names import NamedClass
from rl_reward_network.grpo.competition import clear_areas, contested, rivals, ruled_out, without_excluded
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.losses import against_rivals
from rl_reward_network.grpo.measure import Measured, measure, named_share, of_whole_images, unpacked
from rl_reward_network.grpo.prompts import TrainingItem, class_prompt
from tests.conftest import tube_image
from tests.grpo.nano import image_of, nano

LEFT = NamedClass("left", ("the left",), "on the left", ("1", "2"))
RIGHT = NamedClass("right", ("the right", "arteria dextra"), "on the right", ("3",), never_with=("left",))
STUMP = NamedClass("stump", ("the stump",), "a stump", ("1",))
TREE = NamedClass("tree", ("the tree",), "all of it", ("all",))


def soft_of(*levels: float, size: int = 8) -> list[np.ndarray]:
    """Masks of one probability each."""
    return [np.full((size, size), level, np.float32) for level in levels]


def test_classes_without_a_common_category_are_rivals() -> None:
    found = rivals([LEFT, RIGHT, STUMP, TREE, None])
    assert found.tolist() == [
        [False, True, False, False, False],
        [True, False, True, False, False],
        [False, True, False, False, False],
        [False] * 5,
        [False] * 5,
    ]
    assert RIGHT.excludes(LEFT)
    assert LEFT.excludes(RIGHT), "one of the two says it"
    assert not RIGHT.excludes(STUMP)


def test_contested_logits_are_those_of_a_softmax_over_the_rivals_and_the_background() -> None:
    logits = torch.randn(3, 4, 5, requires_grad=True)
    everyone = ~np.eye(3, dtype=bool)
    shares = torch.cat([torch.zeros(1, 4, 5), logits]).softmax(0)[1:]
    torch.testing.assert_close(contested(logits, everyone).sigmoid(), shares)
    torch.testing.assert_close(contested(logits, np.zeros((3, 3), bool)), logits)
    large = contested(torch.tensor([300.0, -300.0, 0.0])[:, None, None], everyone).flatten()
    assert large.tolist() == pytest.approx([300 - np.log(2), -360, -60], rel=1e-6), "finite"
    contested(logits, everyone)[0].sum().backward()
    assert logits.grad is not None
    assert (logits.grad[1:] < 0).all(), "a rival that gives way helps"


def test_the_class_with_the_largest_clear_area_empties_those_that_it_excludes() -> None:
    left, right = soft_of(0.6, 0.6)
    left[:, 3:], right[:, :2] = 0.1, 0.1  # three columns against six, one of which is contested
    areas = clear_areas([left, right], rivals([LEFT, RIGHT]))
    assert areas.tolist() == [2 / 8, 5 / 8]
    assert ruled_out([left, right, left], [LEFT, RIGHT, STUMP]).tolist() == [True, False, False]
    assert ruled_out([left], [LEFT]).tolist() == [False], "a name that is asked alone"
    assert ruled_out([left, right], [LEFT, None]).tolist() == [False, False]
    assert ruled_out(soft_of(0.1, 0.2), [LEFT, RIGHT]).tolist() == [False, False], "no mask"
    assert ruled_out(soft_of(0.1, 0.2), [LEFT, RIGHT], threshold=0.15).tolist() == [True, False]
    left[:] = right  # nowhere clear
    assert ruled_out([left, right], [LEFT, RIGHT]).sum() == 1, "never both"
    left[0] = 0
    assert ruled_out([left, right], [LEFT, RIGHT]).tolist() == [True, False], "the larger mask"
    assert ruled_out([], []).tolist() == []


def test_areas_of_large_images_are_those_of_every_few_pixels() -> None:
    large = np.zeros((1024, 2048), np.float32)
    large[:, :512] = 0.9
    assert clear_areas([large], rivals([LEFT])).tolist() == [0.25]


def prompt_of(one: NamedClass, key: str) -> TrainingItem:
    return replace(class_prompt(one, tube_image(48, len(key))[0]), image_key=key)


def test_only_the_names_of_one_image_compete() -> None:
    prompts = [prompt_of(LEFT, "a"), prompt_of(RIGHT, "b"), prompt_of(RIGHT, "a"), prompt_of(LEFT, "b")]
    few, many = soft_of(0.6, 0.9)
    kept = without_excluded(prompts, [few, few, many, None])
    assert [None if mask is None else bool(mask.any()) for mask in kept] == [False, True, True, None]


def test_masks_are_contested_by_the_other_names_of_their_image() -> None:
    truths = np.eye(3, dtype=bool)[:, None]  # of one pixel each
    images = [image_of(row, truth=truth) for row, truth in zip((0, 1, 0), truths, strict=True)]
    masks = [(image, torch.full((2, 2), level)) for image, level in zip(images, (1.0, 2.0, 3.0), strict=True)]
    against = against_rivals(masks, [LEFT, RIGHT, RIGHT])
    assert [image for image, _ in against] == images
    expected = [1 - np.log1p(np.exp(3)), 2.0, 3 - np.log1p(np.e)]
    assert [logits.mean().item() for _, logits in against] == pytest.approx(expected, rel=1e-6)
    assert against_rivals(masks, [LEFT, RIGHT, STUMP]) == [], "no rivals in one image"
    same = [(image_of(0, truth=truths[0]), logits) for _, logits in masks]
    assert against_rivals(same, [LEFT, RIGHT, RIGHT]) == [], "a part that is drawn over its whole"


def test_a_batch_holds_all_names_of_its_images() -> None:
    prompts = [prompt_of(one, key) for one in (LEFT, RIGHT, TREE) for key in ("a", "b", "c")]
    assert of_whole_images(prompts, 7) == [[0, 3, 6, 1, 4, 7], [2, 5, 8]]
    assert of_whole_images(prompts, 1) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert of_whole_images([replace(p, image_key="") for p in prompts], 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_measured_masks_are_in_the_order_of_the_prompts_and_have_competed() -> None:
    model, processor = nano()
    vessel = NamedClass("vessel", ("the blood vessel",), "")
    other = replace(vessel, name="other", never_with=("vessel",))
    prompts = [prompt_of(one, key) for one in (vessel, other) for key in ("a", "bb")]
    measured = measure(model, prompts, FeatureCache(model, processor), 4, quiet=True)
    masks = [unpacked(mask) for mask in measured.masks]
    for row in (0, 1):
        alone = measure(model, [prompts[row + 2]], FeatureCache(model, processor), 4, quiet=True)
        np.testing.assert_array_equal(masks[row], unpacked(alone.masks[0]))
        assert masks[row] is not None
        assert masks[row].any()
        assert not masks[row + 2].any(), "of equal answers the first stays"


def test_a_true_region_is_named_by_the_mask_that_overlaps_it_most() -> None:
    truth = np.zeros((4, 4), bool)
    truth[:2] = True
    image = np.zeros((4, 4, 3), np.uint8)

    def asked(one: NamedClass, key: str, own: np.ndarray) -> TrainingItem:
        return replace(prompt_of(one, key), load=lambda: (image, own))

    prompts = [
        asked(one, key, own) for key in "ab" for one, own in ((LEFT, truth), (RIGHT, truth & False), (TREE, truth))
    ]
    good, empty, whole = to_rle(truth), to_rle(truth & False), to_rle(truth | True)
    measured = Measured({}, [], [good, whole, good, empty, empty, good], [], np.zeros((6, 2), int))
    assert named_share(prompts, measured) == 0.5, "the tree is no rival, and of a tie none is right"
    assert named_share([prompts[0], prompts[2]], measured) is None
