import json
import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, judge
from rl_reward_network.rewards import masks as exact

NUMBERS = ("dice", "iou", "precision", "recall")
SMALL = RewardNetworkConfig(channels=(8, 16))


def pair(height, width, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, height, width, generator=generator), torch.rand(
        batch, 1, height, width, generator=generator
    )


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(3)
    network = RewardNetwork(SMALL, {"mode": "quick", "splits": ["reward"]})
    network.save_pretrained(tmp_path / "best_reward_net")
    return network, tmp_path / "best_reward_net"


def test_judge_of_binary_maps_is_the_exact_overlap():
    rng = np.random.default_rng(0)
    mask, truth = rng.random((2, 6, 200, 200)) < rng.uniform(0.1, 0.9, (2, 6, 1, 1))
    output = judge(*(torch.from_numpy(x)[:, None].float() for x in (mask, truth)))
    for name in NUMBERS:  # smoothed by one pixel of thousands
        np.testing.assert_allclose(getattr(output, name).numpy(), getattr(exact, name)(mask, truth), atol=3e-4)
    np.testing.assert_array_equal(output.error_map[:, 0].numpy(), mask ^ truth)


def test_judge_of_soft_maps_in_closed_form():
    mask, truth = torch.full((1, 1, 10, 10), 0.5), torch.full((1, 1, 10, 10), 0.2)
    output = judge(mask, truth)  # sums: both 10, mask 50, truth 20
    assert output.dice.item() == pytest.approx(21 / 71)
    assert output.iou.item() == pytest.approx(11 / 61)
    assert output.precision.item() == pytest.approx((10 + 1 / 71) / 51)
    assert output.recall.item() == pytest.approx((10 + 1 / 71) / 21)
    assert output.error_map.unique().item() == pytest.approx(0.5)  # .5 * .8 + .5 * .2


def test_judge_keeps_the_empty_mask_rule():
    empty, full = torch.zeros(1, 1, 64, 64), torch.ones(1, 1, 64, 64)
    for mask, truth, expected in ((empty, empty, 1), (empty, full, 0), (full, empty, 0), (full, full, 1)):
        output = judge(mask, truth)
        assert [getattr(output, name).item() for name in NUMBERS] == pytest.approx([expected] * 4, abs=3e-4)


@pytest.mark.parametrize("size", [(97, 131), (64, 64), (1, 1), (3, 200)])
def test_any_size_gives_numbers_and_maps_in_range(size):
    image, mask = pair(*size)
    output = RewardNetwork()(image, mask)
    assert output.error_map.shape == output.truth_map.shape == (2, 1, *size)
    for field in fields(output):
        value = getattr(output, field.name)
        assert value.shape[0] == 2
        assert ((value >= 0) & (value <= 1)).all(), field.name
    assert torch.equal(output.score, output.dice)


def test_padding_repeats_the_border_below_and_right_and_is_cut_off_again():
    network, (image, mask) = RewardNetwork(SMALL), pair(21, 30)
    padded = (torch.nn.functional.pad(x, (0, 2, 0, 3), mode="replicate") for x in (image, mask))
    expected = network(*padded).truth_map[..., :21, :30]
    torch.testing.assert_close(network(image, mask).truth_map, expected, rtol=0, atol=1e-6)


def test_size_of_the_default():
    count = sum(parameter.numel() for parameter in RewardNetwork().parameters())
    assert 100_000 < count < 500_000


def test_masks_of_a_batch_do_not_see_each_other():
    network, (image, mask) = RewardNetwork(SMALL), pair(40, 56)
    both = network(image, mask).score
    alone = torch.cat([network(image[i : i + 1], mask[i : i + 1]).score for i in range(2)])
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-6)


def test_training_and_evaluation_mode_agree():
    network, (image, mask) = RewardNetwork(SMALL), pair(40, 56)
    assert torch.equal(network.train()(image, mask).score, network.eval()(image, mask).score)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_gradient_reaches_every_pixel_of_the_mask_and_is_finite(value):
    image, _ = pair(50, 70, batch=1)
    mask = torch.full((1, 1, 50, 70), value, requires_grad=True)
    output = RewardNetwork(SMALL)(image, mask)
    for number in (output.score, output.iou, output.precision, output.recall, output.error_map.mean()):
        (gradient,) = torch.autograd.grad(number.sum(), mask, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient != 0).all()


def test_gradient_is_the_slope_of_the_score():
    network, (image, mask) = RewardNetwork(SMALL).double(), pair(12, 12, batch=1)
    mask = mask.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda m: network(image.double(), m).precision, (mask,))


@pytest.mark.parametrize(
    ("image", "mask", "message"),
    [
        (torch.zeros(2, 3, 8, 8), torch.zeros(1, 1, 8, 8), r"got \(2, 3, 8, 8\) and \(1, 1, 8, 8\)"),
        (torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8), r"expected image \(B, 3, H, W\)"),
        (torch.zeros(1, 3, 8, 8), torch.zeros(1, 1, 8, 9), r"and \(1, 1, 8, 9\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, 1, 8, 8), "must be float .* got torch.uint8"),
    ],
)
def test_bad_input(image, mask, message):
    with pytest.raises(ValueError, match=message):
        RewardNetwork(SMALL)(image, mask)


def test_sizes_that_cannot_be_built_are_refused():
    with pytest.raises(ValueError, match=r"channels=\(12,\): every width must be a positive multiple of norm_groups=8"):
        RewardNetworkConfig(channels=(12,))


def test_saved_and_loaded_are_equal_bit_for_bit(saved):
    network, folder = saved
    loaded = RewardNetwork.from_pretrained(str(folder))
    assert (loaded.config, loaded.training_info) == (network.config, network.training_info)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), loaded.parameters(), strict=True))
    image, mask = pair(33, 47)
    assert torch.equal(network(image, mask).error_map, loaded(image, mask).error_map)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((folder / "model.safetensors").read_bytes())


def test_saving_again_replaces_but_never_deletes_other_files(saved):
    network, folder = saved
    network.training_info = {"mode": "full"}
    network.save_pretrained(folder)
    assert RewardNetwork.from_pretrained(folder).training_info == {"mode": "full"}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds 1 other files"):
        network.save_pretrained(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no reward network here .*`bash run_experiment3.sh quick`"):
        RewardNetwork.from_pretrained(tmp_path / "nowhere")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_other_version_is_refused(saved):
    edit_config(saved[1], version=99)
    with pytest.raises(ValueError, match=r"config.json: field version is 99, this code reads 1; train one"):
        RewardNetwork.from_pretrained(saved[1])


def test_unknown_field_is_refused(saved):
    edit_config(saved[1], depth=3)
    with pytest.raises(ValueError, match=r"config.json: missing or unknown fields \['depth'\]"):
        RewardNetwork.from_pretrained(saved[1])


@pytest.mark.parametrize("keep", [0, 4, 100, -4])
def test_truncated_weights_are_refused(saved, keep):
    path = saved[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: damaged or of another network .* train one"):
        RewardNetwork.from_pretrained(saved[1])


def test_weights_of_another_network_are_refused(saved):
    path = saved[1] / "model.safetensors"
    weights = load_file(path)
    weights["tail.bias"] = weights.pop("head.bias")
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"model.safetensors: damaged or of another network .*head.bias.*tail.bias"):
        RewardNetwork.from_pretrained(saved[1])
