import numpy as np
import pytest
import torch

from rl_reward_network.reward_training import windows
from rl_reward_network.reward_training.windows import draw_batch, labelled_images, window_side


def bars(size=(90, 120), seed=0):
    """A grey image with bright bars, and their mask."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for column in rng.choice(size[1] - 8, 2, replace=False):
        truth[:, column : column + 8] = True
    return np.repeat((60 + 130 * truth[..., None]).astype(np.uint8), 3, axis=2), truth


@pytest.mark.parametrize("side", [64, 96, 160])
def test_image_and_truth_share_their_pose(side):
    data = labelled_images([bars(), bars((40, 60), 1)])
    image, truth = draw_batch(data, 6, side, np.random.default_rng(0))
    assert (image.shape, truth.shape) == ((6, 3, side, side), (6, 1, side, side))
    assert (image.dtype, truth.dtype) == (torch.float32, torch.float32)
    assert set(truth.unique().tolist()) == {0.0, 1.0}
    assert 0 <= image.min() <= image.max() <= 1
    for grey, bar in zip(image.mean(1), truth[:, 0] > 0, strict=True):
        middle = (grey.max() + grey.min()) / 2  # half of the step between bar and background
        assert ((grey > middle) == bar).float().mean() > 0.99


def test_poses_differ_and_follow_the_seed():
    data = labelled_images([bars()])
    batches = [draw_batch(data, 4, 64, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])
    truths = batches[0][1]
    assert not any(torch.equal(truths[0], other) for other in truths[1:])


def test_no_image_is_drawn_twice_while_there_are_enough():
    data = labelled_images([(np.full((32, 32, 3), 20 * n, np.uint8), np.full((32, 32), n % 2 > 0)) for n in range(8)])
    _, truth = draw_batch(data, 8, 32, np.random.default_rng(3))
    assert truth.mean() == 0.5
    assert len(draw_batch(data, 20, 32, np.random.default_rng(3))[0]) == 20


def test_windows_of_large_images_are_inside_and_mostly_on_the_object():
    truth = np.zeros((400, 600), dtype=bool)
    truth[390:400, 0:10] = True
    centres = np.array([windows._centre(truth, 100, np.random.default_rng(seed)) for seed in range(200)])
    assert (centres >= 50).all()
    assert (centres <= (550, 350)).all()
    in_corner = (np.abs(centres - (50, 350)) < 1e-9).all(axis=1)
    assert 0.65 < in_corner.mean() < 0.85


def test_windows_of_small_images_are_centred():
    truth = np.zeros((30, 50), dtype=bool)
    assert windows._centre(truth, 200, np.random.default_rng(0)).tolist() == [25, 15]


def test_an_image_without_object_still_gives_windows():
    data = labelled_images([(np.zeros((90, 120, 3), np.uint8), np.zeros((90, 120), bool))])
    assert not draw_batch(data, 5, 48, np.random.default_rng(0))[1].any()


def test_the_side_is_that_of_the_largest_image_up_to_a_limit():
    images = [np.zeros((40, 70, 3)), np.zeros((65, 20, 3))]
    assert window_side(images, 512, 64) == 128
    assert window_side(images, 64, 64) == 64
    assert window_side(images[:1], 512, 4) == 72


@pytest.mark.parametrize(
    ("image", "truth", "message"),
    [
        (bars()[0], bars()[1] * 1, r"image 1: truth .*int64"),
        (bars()[0] / 255, bars()[1], r"image 1: .*\(90, 120, 3\).*float64"),
        (bars()[0][:80], bars()[1], r"image 1: .*\(80, 120, 3\)"),
    ],
)
def test_other_arrays_are_refused(image, truth, message):
    with pytest.raises(ValueError, match=message):
        labelled_images([bars(), (image, truth)])
