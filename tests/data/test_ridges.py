import numpy as np
from skimage import filters

from rl_reward_network.data.ridges import ridge_strength


def test_both_polarities_equal_two_calls_of_the_filter_of_scikit_image():
    grey = np.random.default_rng(0).random((40, 50))
    dark, bright = ridge_strength(grey, (1, 2, 3))
    np.testing.assert_array_equal(dark, filters.sato(grey, sigmas=(1, 2, 3), black_ridges=True))
    np.testing.assert_array_equal(bright, filters.sato(grey, sigmas=(1, 2, 3), black_ridges=False))
