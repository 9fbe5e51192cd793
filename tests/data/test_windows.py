"""Random windows: image and mask share their pose, seeds decide, and whole images stay whole."""

import numpy as np
import pytest
import torch

from rl_reward_network.data import windows
from rl_reward_network.data.windows import LabelledImages, augmented, draw_batch, window_side


def labelled(*pairs):
    return LabelledImages(*map(list, zip(*pairs, strict=True)))


def bars(size=(90, 120), seed=0):
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for column in rng.choice(size[1] - 8, 2, replace=False):
        truth[:, column : column + 8] = True
    return np.repeat((60 + 130 * truth[..., None]).astype(np.uint8), 3, axis=2), truth


@pytest.mark.parametrize("side", [64, 96, 160])
def test_image_and_truth_of_a_window_share_their_pose(side):
    image, truth = draw_batch(labelled(bars(), bars((40, 60), 1)), 6, side, np.random.default_rng(0))
    assert (image.shape, truth.shape) == ((6, 3, side, side), (6, 1, side, side))
    assert (image.dtype, truth.dtype) == (torch.float32, torch.float32)
    assert set(truth.unique().tolist()) == {0.0, 1.0}
    assert 0 <= image.min() <= image.max() <= 1
    for grey, bar in zip(image.mean(1), truth[:, 0] > 0, strict=True):
        middle = (grey.max() + grey.min()) / 2  # half of the step between bar and background
        assert ((grey > middle) == bar).float().mean() > 0.99


def test_poses_differ_and_follow_the_seed():
    batches = [draw_batch(labelled(bars()), 4, 64, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])
    truths = batches[0][1]
    assert not any(torch.equal(truths[0], other) for other in truths[1:])


def test_no_image_is_twice_in_a_batch_while_there_are_enough():
    data = labelled(*((np.full((32, 32, 3), 20 * n, np.uint8), np.full((32, 32), n % 2 > 0)) for n in range(8)))
    assert draw_batch(data, 8, 32, np.random.default_rng(3))[1].mean() == 0.5
    assert len(draw_batch(data, 20, 32, np.random.default_rng(3))[0]) == 20
    empty = labelled((np.zeros((90, 120, 3), np.uint8), np.zeros((90, 120), bool)))
    assert not draw_batch(empty, 5, 48, np.random.default_rng(0))[1].any(), "an image without object has windows, too"


def test_windows_of_large_images_are_inside_and_mostly_on_the_object():
    truth = np.zeros((400, 600), dtype=bool)
    truth[390:400, 0:10] = True
    centres = np.array([windows._centre(truth, 100, np.random.default_rng(seed)) for seed in range(200)])
    assert (centres >= 50).all()
    assert (centres <= (550, 350)).all()
    assert 0.65 < (np.abs(centres - (50, 350)) < 1e-9).all(axis=1).mean() < 0.85
    small = np.zeros((30, 50), dtype=bool)
    assert windows._centre(small, 200, np.random.default_rng(0)).tolist() == [25, 15], "small images are centred"


def test_the_side_is_that_of_the_largest_image_up_to_a_limit():
    images = [np.zeros((40, 70, 3)), np.zeros((65, 20, 3))]
    assert [window_side(images, 512, 64), window_side(images, 64, 64), window_side(images[:1], 512, 4)] == [128, 64, 72]


def test_views_are_mirrored_only_where_wanted():
    """A bright half on the left stays there, but for rotations of at most 20 degrees."""
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :32] = 200
    truth = image[..., 0] > 0

    def left_of(seed, **words):
        _, (mask,) = augmented(image, truth[None], np.random.default_rng(seed), **words)
        return mask[:, :20].mean()

    assert min(left_of(seed, mirror=False) for seed in range(20)) > 0.9
    mirrored = [left_of(seed) for seed in range(20)]
    assert min(mirrored) < 0.1 < 0.9 < max(mirrored)


def test_a_view_has_the_size_of_the_image_and_all_masks_share_it():
    image, truth = bars((90, 120))
    views = [augmented(image, np.stack([truth, ~truth, truth & False]), np.random.default_rng(n)) for n in (0, 0, 1)]
    for pixels, masks in views:
        assert (pixels.shape, pixels.dtype) == ((90, 120, 3), np.uint8)
        assert (masks.shape, masks.dtype) == ((3, 90, 120), bool)
        mask = masks[0]
        assert (mask != masks[1]).mean() > 0.99
        assert not masks[2].any()
        assert ((pixels.mean(axis=2) > ((float(pixels.max()) + float(pixels.min())) / 2)) == mask).mean() > 0.98
    assert np.array_equal(views[0][0], views[1][0])
    assert not np.array_equal(views[0][0], views[2][0])


def test_a_strong_view_turns_the_soft_mask_with_the_image_and_hides_a_square() -> None:
    image = np.zeros((96, 96, 3), np.uint8)
    image[:, 40:48] = 255
    probs = (image[None, ..., 0] > 0).astype(np.float32) * 0.8
    rng = np.random.default_rng(3)
    views = [windows.strongly_augmented(image, probs, rng) for _ in range(20)]
    inside = [view[..., 0][soft[0] > 0.7].mean() - view[..., 0][soft[0] < 0.1].mean() for view, soft in views]
    assert min(inside) > 60  # the bright bar stays under its mask, whatever pose, gamma and noise
    assert {soft.dtype for _, soft in views} == {np.dtype(np.float32)}
    assert max(soft.max() for _, soft in views) < 0.81
    same = windows.strongly_augmented(image, probs, np.random.default_rng(5))
    again = windows.strongly_augmented(image, probs, np.random.default_rng(5))
    assert all(np.array_equal(one, other) for one, other in zip(same, again, strict=True))
