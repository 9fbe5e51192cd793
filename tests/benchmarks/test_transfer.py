"""The table of models, plain segmenter and fusion: fused masks, and the weight that validation chooses."""

import numpy as np
import pytest
from scipy.special import expit, logit

from benchmarks import transfer
from benchmarks.transfer import MEAN, NETWORK, SoftMasks, best_weight, fused_rows, mean_in_logits, scores, show_rows
from rl_reward_network.methods.methods import FUSION_WEIGHTS
from tests.models.test_reward_network import network_of


def found(one: float, other: float, network: float) -> SoftMasks:
    """Two models and a network, each of one probability on an object of the left half and 0.1 beside it."""
    truth = np.zeros((8, 8), bool)
    truth[:, :4] = True
    of_value = {value: np.where(truth, value, 0.1) for value in (one, other, network)}
    mean = mean_in_logits([of_value[one], of_value[other]])
    rows = {"one": [of_value[one]], "other": [of_value[other]], MEAN: [mean], NETWORK: [of_value[network]]}
    return SoftMasks(rows, [truth], ["a"])


def test_masks_are_averaged_in_logits() -> None:
    masks = [np.full((2, 2), value) for value in (0.2, 0.5, 0.9)]
    expected = expit(np.mean([logit(value) for value in (0.2, 0.5, 0.9)]))
    np.testing.assert_allclose(mean_in_logits(masks), expected, rtol=1e-6)


def test_validation_chooses_the_least_weight_of_the_best() -> None:
    blind = found(0.2, 0.3, 0.9)
    weight = best_weight(blind)
    assert scores(fused_rows(blind, weight), blind.truths)[0] == 1
    lower = FUSION_WEIGHTS[FUSION_WEIGHTS.index(weight) - 1]
    assert scores(fused_rows(blind, lower), blind.truths)[0] == 0
    assert best_weight(found(0.9, 0.8, 0.2)) == 0


def test_images_are_resized_for_the_network_and_its_map_is_resized_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "foreground_prob", lambda network, image: image[..., 0].astype(np.float32) / 255)
    image = np.zeros((30, 60, 3), np.uint8)
    image[:, 30:] = 255
    prob = transfer.resized_prob(network_of(), image, 64)
    assert prob.shape == (30, 60)
    np.testing.assert_array_equal(prob > 0.5, image[..., 0] > 0)


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows("data", found(0.9, 0.2, 0.9), 0.5)
    text = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")][2:] == [
        "one", "other", MEAN, NETWORK, "fusion, weight 0.5",
    ]  # fmt: skip
    assert "-1.00 " in next(line for line in text.splitlines() if "| other" in line)
