from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage
from skimage import morphology

from rl_reward_network.data.readers import read_images
from rl_reward_network.data.ridges import MIN_IMAGES, SUSPICIOUS, LabelCheck, check_labels, unlabelled_ratio

REAL = Path(__file__).parents[3] / "shared/realdata"
SIDE = 160


def tree(branches, dark=True, seed=0):
    """A grey image with a trunk and clearer branches to the right, and the masks of trunk and of branches."""
    trunk, twigs = np.zeros((2, SIDE, SIDE), dtype=bool)
    trunk[5:155, 40:44] = True
    for row in range(20, 20 + 20 * branches, 20):
        twigs[row : row + 4, 44:140] = True
    noise = np.random.default_rng(seed).normal(0, 3, (SIDE, SIDE))
    grey = 128 + (-60 if dark else 60) * ndimage.gaussian_filter(trunk + 1.5 * twigs, 1) + noise
    return np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2), trunk, twigs & ~trunk


@pytest.mark.parametrize("dark", [True, False])
def test_the_length_of_what_is_left_out_is_measured(dark):
    image, trunk, twigs = tree(3, dark)
    assert unlabelled_ratio(image, trunk | twigs) == 0
    assert unlabelled_ratio(image, trunk) == pytest.approx(3 * 93 / 150, rel=0.1)  # without the edge of the label
    one = twigs & (np.arange(SIDE)[:, None] < 30)
    assert unlabelled_ratio(image, trunk | one) == pytest.approx(2 * 93 / 244, rel=0.1)


def test_tubes_apart_from_the_tree_and_fainter_ones_do_not_count():
    image, trunk, twigs = tree(3)
    assert unlabelled_ratio(image, trunk | twigs & (np.arange(SIDE) < 44)) > 1
    apart = image.copy()
    apart[:, 44:60] = image[1, 1]  # the branches no longer reach the trunk
    assert unlabelled_ratio(apart, trunk) == 0
    faint = np.where(twigs[..., None], (image.astype(int) + 4 * 128) // 5, image).astype(np.uint8)
    assert unlabelled_ratio(faint, trunk) < 0.1


def test_labels_that_are_no_tubes_have_no_ratio():
    image = tree(3)[0]
    disk = np.zeros((SIDE, SIDE), dtype=bool)
    disk[30:130, 30:130] = morphology.disk(50)[:100, :100] > 0
    assert unlabelled_ratio(image, disk) is None
    assert unlabelled_ratio(image, np.zeros((SIDE, SIDE), dtype=bool)) is None


def test_large_images_are_reduced_and_give_the_same():
    image, trunk, _ = tree(3)
    larger = [np.kron(x, np.ones((7, 7) + (1,) * (x.ndim - 2), dtype=x.dtype)) for x in (image, trunk)]
    assert unlabelled_ratio(*larger) == pytest.approx(unlabelled_ratio(image, trunk), rel=0.1)


def test_the_note_is_given_for_the_median_of_enough_images():
    images = [tree(3, seed=seed) for seed in range(MIN_IMAGES)]
    partly = check_labels((image, trunk) for image, trunk, _ in images)
    assert partly.images == MIN_IMAGES
    assert f"{partly.unlabelled_ratio:.1f} times" in partly.note
    assert check_labels((image, trunk | twigs) for image, trunk, twigs in images).note is None
    assert check_labels((image, trunk) for image, trunk, _ in images[:-1]) == LabelCheck(None, MIN_IMAGES - 1)
    assert LabelCheck(SUSPICIOUS, 9).note
    assert LabelCheck(SUSPICIOUS - 0.01, 9).note is None


@pytest.mark.parametrize(("name", "complete"), [("arcade", False), ("chase_db1", True)])
def test_real_labels(name, complete):
    if not (REAL / name).is_dir():
        pytest.skip(f"{REAL / name} is missing: real data are not part of the project")
    samples = read_images(REAL / name)[:: 27 if name == "arcade" else 3]
    check = check_labels((sample.load_image(), sample.load_mask()) for sample in samples)
    assert check.images >= 9
    assert (check.note is None) == complete
