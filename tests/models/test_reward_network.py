"""The reward network: closed forms, tiles, gradients, what is saved, and what is fitted on validation images."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_reward_network.models.reward_network import (
    NUMBERS,
    DiceInterval,
    LevelCurve,
    RewardNetwork,
    RewardNetworkConfig,
    error_map,
    interval_unit,
    soft_overlap,
)
from rl_reward_network.rewards import metrics as exact

SMALL = RewardNetworkConfig(channels=(8, 16), packing=2, members=2)
LEVEL = tuple(LevelCurve(steepness, 0.3) for steepness in (2.0, 3.0, 4.0, 5.0))


def pair(height, width, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, channels, height, width, generator=generator) for channels in (3, 1))


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(3)
    network = RewardNetwork(
        replace(SMALL, caution=0.5, level=LEVEL, intervals={"Sa2VA": DiceInterval(-1.5, 2.0, 0.1, 40)}),
        {"mode": "quick", "splits": ["reward"]},
    )
    network.save_pretrained(tmp_path / "best_reward_net")
    return network, tmp_path / "best_reward_net"


def network_of(config=SMALL):
    """Random weights that have seen some pictures, so that their BatchNorm is not the identity."""
    torch.manual_seed(1)
    network = RewardNetwork(config)
    for _ in range(3):
        network.foreground_probs(torch.rand(2, 3, 32, 48))
    return network.eval()


def test_soft_overlap_of_binary_maps_is_the_exact_overlap():
    rng = np.random.default_rng(0)
    mask, truth = rng.random((2, 6, 200, 200)) < rng.uniform(0.1, 0.9, (2, 6, 1, 1))
    numbers = soft_overlap(*(torch.from_numpy(x)[:, None].float() for x in (mask, truth)))
    for name, found in zip(NUMBERS, numbers, strict=True):  # smoothed by one pixel of thousands
        np.testing.assert_allclose(found.numpy(), getattr(exact, name)(mask, truth), atol=3e-4)


def test_soft_maps_and_empty_masks_in_closed_form():
    mask, truth = torch.full((1, 1, 10, 10), 0.5), torch.full((1, 1, 10, 10), 0.2)
    expected = [21 / 71, 11 / 61, (10 + 1 / 71) / 51, (10 + 1 / 71) / 21]  # sums: both 10, mask 50, truth 20
    assert soft_overlap(mask, truth)[:, 0].tolist() == pytest.approx(expected)
    prob, mask = np.array([[0.9, 0.9], [0.2, 0.2]]), np.array([[1.0, 0.0], [1.0, 0.5]])
    np.testing.assert_allclose(error_map(mask, prob), [[0.1, 0.9], [0.8, 0.5]])
    np.testing.assert_allclose(error_map(torch.from_numpy(mask), torch.from_numpy(prob)), [[0.1, 0.9], [0.8, 0.5]])
    empty, full = torch.zeros(1, 1, 64, 64), torch.ones(1, 1, 64, 64)
    for mask, truth, value in ((empty, empty, 1), (empty, full, 0), (full, empty, 0), (full, full, 1)):
        assert soft_overlap(mask, truth)[:, 0].tolist() == pytest.approx([value] * 4, abs=3e-4)


@pytest.mark.parametrize("size", [(97, 131), (64, 64), (1, 1), (3, 200)])
def test_any_size_gives_numbers_and_maps_in_range(size):
    image, mask = pair(*size)
    output = RewardNetwork().eval()(image, mask)
    assert output.error_map.shape == output.foreground_prob.shape == (2, 1, *size)
    assert output.members.shape == (4, 3, 2)
    for name in (*NUMBERS, "error_map", "foreground_prob"):
        value = getattr(output, name)
        assert value.shape[0] == 2
        assert ((value >= 0) & (value <= 1)).all(), name


def test_error_map_and_numbers_are_of_the_mean_member():
    network, (image, mask) = network_of(), pair(32, 48)
    maps, output = network.foreground_probs(image), network(image, mask)
    truth = maps.mean(dim=0)
    torch.testing.assert_close(output.foreground_prob, truth)
    torch.testing.assert_close(output.error_map, mask * (1 - truth) + (1 - mask) * truth)
    members = torch.stack([soft_overlap(mask, prob) for prob in maps], dim=1)
    torch.testing.assert_close(output.members, members, rtol=1e-4, atol=1e-6)
    for index, name in enumerate(NUMBERS):
        torch.testing.assert_close(getattr(output, name), output.members[index].mean(dim=0))
    binary = (mask > 0.5).float()
    torch.testing.assert_close(network(image, binary).error_map, torch.where(binary > 0, 1 - truth, truth))


def test_score_is_the_weighted_numbers_less_k_times_their_spread():
    config = replace(SMALL, score_weights=(0.5, 0.0, 0.2, 0.3), caution=1.5)
    image, mask = pair(32, 48)
    output = network_of(config)(image, mask)
    dice, _, precision, recall = output.members
    weighted = 0.5 * dice + 0.2 * precision + 0.3 * recall
    torch.testing.assert_close(output.std, weighted.std(dim=0, correction=0))
    torch.testing.assert_close(output.score, weighted.mean(dim=0) - 1.5 * output.std)
    assert (output.std > 1e-4).all(), "members of one network differ"


@pytest.mark.parametrize("doubt", [0.0, 1e-4, 0.015])
def test_an_empty_mask_scores_best_on_an_image_without_object(doubt):
    network = RewardNetwork(SMALL).eval()
    for member in network.members:
        torch.nn.init.zeros_(member.head.weight)
        torch.nn.init.constant_(member.head.bias, np.log(doubt / (1 - doubt)) if doubt else -100.0)
    image, mask = pair(500, 400, batch=1)
    assert network(image, torch.zeros_like(mask)).score.item() == pytest.approx(1, abs=1e-3)
    assert network(image, (mask > 0.5).float()).score.item() < 0.01


def test_the_fingerprint_changes_with_weights_and_config():
    network = network_of()
    assert network.fingerprint == network_of().fingerprint
    assert network.fingerprint != network_of(replace(SMALL, caution=0.7)).fingerprint
    with torch.no_grad():
        network.members[1].head.bias += 1
    assert network.fingerprint != network_of().fingerprint


def test_one_member_alone_and_maps_do_not_depend_on_the_mask():
    network, (image, mask) = network_of(replace(SMALL, caution=2.0)), pair(32, 48)
    single, all_of_them = network.member(1)(image, mask), network(image, mask)
    torch.testing.assert_close(single.dice, all_of_them.members[0, 1])
    torch.testing.assert_close(single.score, single.dice)
    assert torch.equal(all_of_them.foreground_prob, network(image, 1 - mask).foreground_prob)


@pytest.mark.parametrize("size", [(150, 210), (64, 300), (129, 65)])
def test_tiles_give_the_map_of_the_whole_image(monkeypatch, size):
    network, (image, mask) = network_of(replace(SMALL, channels=(8, 16, 16))), pair(*size)
    whole = network(image, mask)
    monkeypatch.setattr("rl_reward_network.models.reward_network.TILE", 64)
    tiled = network(image, mask)
    torch.testing.assert_close(tiled.foreground_prob, whole.foreground_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(tiled.score, whole.score, rtol=0, atol=1e-5)


def test_the_margin_of_a_tile_is_wider_than_the_receptive_field():
    torch.manual_seed(0)
    network = RewardNetwork(RewardNetworkConfig(members=1)).eval()
    stride = network.config.stride
    image = torch.rand(1, 3, 16 * stride + 8, 4 * stride, requires_grad=True)
    row, column = 8 * stride + 1, 2 * stride
    (gradient,) = torch.autograd.grad(network.foreground_probs(image)[..., row, column].sum(), image)
    reach = (gradient.abs().sum(dim=(0, 1)) > 0).nonzero()[:, 0]
    assert 4 * stride < (reach - row).abs().max() < 8 * stride


def test_padding_repeats_the_border_below_and_right_and_is_cut_off_again():
    network, (image, mask) = network_of(), pair(21, 30)
    padded = (torch.nn.functional.pad(x, (0, 2, 0, 3), mode="replicate") for x in (image, mask))
    expected = network(*padded).foreground_prob[..., :21, :30]
    torch.testing.assert_close(network(image, mask).foreground_prob, expected, rtol=0, atol=1e-6)


def test_samples_are_scored_independently_and_one_image_serves_many_masks():
    network, (image, mask) = network_of(), pair(40, 56, batch=5)
    both = network(image, mask).score
    alone = torch.cat([network(image[i : i + 1], mask[i : i + 1]).score for i in range(5)])
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-6)
    once, again = network(image[:1], mask), network(image[:1].expand(5, -1, -1, -1), mask)
    torch.testing.assert_close(once.score, again.score, rtol=0, atol=1e-6)
    assert once.foreground_prob.shape == again.foreground_prob.shape == (5, 1, 40, 56)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("members", [1, 3])
def test_gradient_reaches_every_pixel_of_the_mask_and_is_finite(value, members):
    image, _ = pair(50, 70, batch=1)
    mask = torch.full((1, 1, 50, 70), value, requires_grad=True)
    output = network_of(replace(SMALL, members=members))(image, mask)
    for number in (output.score, output.iou, output.precision, output.recall, output.error_map.mean()):
        (gradient,) = torch.autograd.grad(number.sum(), mask, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient != 0).all()


def test_gradient_is_the_slope_of_the_score():
    network, (image, mask) = network_of().double(), pair(8, 8, batch=1)
    mask = mask.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda m: network(image.double(), m).score, (mask,))


@pytest.mark.parametrize(
    ("image", "mask", "dtype", "message"),
    [
        ((2, 3, 8, 8), (1, 1, 8, 8), "float32", r"image must be \(B or 1, 3, H, W\) .* \(1, 1, 8, 8\), got \(2,"),
        ((1, 1, 8, 8), (1, 1, 8, 8), "float32", r"image must be .* got \(1, 1, 8, 8\)"),
        ((1, 3, 8, 8), (1, 1, 8, 9), "float32", r"for masks \(1, 1, 8, 9\)"),
        ((2, 3, 8, 8), (2, 2, 8, 8), "float32", r"mask must be \(B, 1, H, W\), got \(2, 2, 8, 8\)"),
        ((1, 3, 8, 8), (1, 1, 8, 8), "uint8", "must be float .* got torch.uint8"),
    ],
)
def test_bad_input(image, mask, dtype, message):
    with pytest.raises(ValueError, match=message):
        RewardNetwork(SMALL)(torch.zeros(image, dtype=getattr(torch, dtype)), torch.zeros(mask))


NAN = float("nan")
SETTINGS = [
    (RewardNetworkConfig, {"channels": ()}, r"channels=\(\).*members=3"),
    (RewardNetworkConfig, {"members": 0}, "members=0"),
    (RewardNetworkConfig, {"score_weights": (1.0, 1.0, 0.0, 0.0)}, r"score_weights=\(1.0, 1.0, 0.0, 0.0\)"),
    (RewardNetworkConfig, {"score_weights": (math.nan, 1.0, 0.0, 0.0)}, r"score_weights=\(nan, 1.0, 0.0, 0.0\)"),
    (RewardNetworkConfig, {"score_weights": (2.0, -1.0, 0.0, 0.0)}, r"score_weights=\(2.0, -1.0, 0.0, 0.0\)"),
    (RewardNetworkConfig, {"caution": -1.0}, "caution=-1.0"),
    *((LevelCurve, values, "level has") for values in [(0.0, 0.5), (15.1, 0.5), (1.0, 1.6), (NAN, 0.5), (1.0, NAN)]),
    *((DiceInterval, values, "DiceInterval") for values in [(1.0, 0.0, 0.1, 30), (-1.0, 1.0, 0.6, 30)]),
    *((DiceInterval, values, "DiceInterval") for values in [(-1.0, 1.0, 0.1, 0), (NAN, 1.0, 0.1, 30)]),
]


@pytest.mark.parametrize(("kind", "values", "message"), SETTINGS)
def test_settings_out_of_range_raise(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values) if isinstance(values, dict) else kind(*values)


def test_saved_and_loaded_are_equal_bit_for_bit(saved):
    network, folder = saved
    loaded = RewardNetwork.from_pretrained(str(folder))
    assert (loaded.config, loaded.training_info) == (network.config, network.training_info)
    assert all(
        torch.equal(a, b) for a, b in zip(network.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    image, mask = pair(33, 47)
    assert torch.equal(network.eval()(image, mask).error_map, loaded(image, mask).error_map)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads((folder / "model.safetensors").read_bytes())


def test_saving_again_replaces_but_never_deletes_other_files(saved):
    network, folder = saved
    network.training_info = {"mode": "full"}
    network.save_pretrained(folder)
    assert RewardNetwork.from_pretrained(folder).training_info == {"mode": "full"}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="1 other files"):
        network.save_pretrained(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no reward network here .*`sa2va-rl reward quick`"):
        RewardNetwork.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "field version is 99.*3.*"),
        ({"channels": None}, ""),
        ({"caution": -1.0}, ""),
        ({"members": "3"}, ""),
        ({"depth": 3}, r"missing or unknown fields \['depth'\]"),
        ({"level": [{"steepness": 99.0, "midpoint": 0.5}] * 4}, ""),
        ({"level": [{"steepness": 2.0, "midpoint": 0.5}]}, ""),
        ({"intervals": {"Sa2VA": {"low": 2.0, "high": 1.0, "half_width": 0.1, "patients": 40}}}, ""),
        ({"intervals": {"Sa2VA": {"low": 2.0}}}, ""),
    ],
)
def test_a_wrong_or_foreign_config_is_refused_by_name(saved, change, message):
    edit_config(saved[1], **change)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}.*; train one"):
        RewardNetwork.from_pretrained(saved[1])


def test_damaged_and_foreign_weights_and_those_that_are_not_finite_are_refused(saved):
    path = saved[1] / "model.safetensors"
    whole, weights = path.read_bytes(), load_file(path)
    renamed = {name.replace("members.0.head.bias", "tail.bias"): tensor for name, tensor in weights.items()}
    wrong = {r".*head.bias.*tail.bias": renamed}
    for name, value, word in (
        ("members.0.head.bias", torch.nan, "NaN"),
        ("members.0.down.0.1.running_var", torch.inf, "inf"),
    ):
        wrong[f"tensor {name} holds {word}"] = weights | {name: torch.full_like(weights[name], value)}
    for message, content in [*(("", whole[:keep]) for keep in (0, 4, 100, -4)), *wrong.items()]:
        path.write_bytes(content) if isinstance(content, bytes) else save_file(content, path)
        with pytest.raises(
            ValueError, match=rf"model.safetensors: damaged or of another network .*{message}.*train one"
        ):
            RewardNetwork.from_pretrained(saved[1])


def test_the_level_is_that_of_every_member_and_keeps_the_gradient():
    image, mask = pair(32, 48)
    raw, levelled = network_of(), network_of(replace(SMALL, level=LEVEL))
    before, after = raw(image, mask), levelled(image, mask.requires_grad_())
    for curve, one, other in zip(LEVEL, before.members, after.members, strict=True):
        torch.testing.assert_close(other, curve(one))
    torch.testing.assert_close(after.dice, after.members[0].mean(dim=0))
    torch.testing.assert_close(after.foreground_prob, before.foreground_prob)
    (gradient,) = torch.autograd.grad(after.score.sum(), mask)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).any()
    empty = torch.zeros_like(mask).requires_grad_()
    (gradient,) = torch.autograd.grad(levelled(image, empty).score.sum(), empty)
    assert gradient.max() > 0, "an empty mask can climb"


def test_the_intervals_of_an_earlier_version_are_not_given(saved):
    network, folder = saved
    old = json.loads((folder / "config.json").read_text())["intervals"]["Sa2VA"]
    del old["conformal"]
    edit_config(folder, intervals={"Sa2VA": old})
    read = RewardNetwork.from_pretrained(folder)
    assert "before version 0.12; train the reward network again" in read.config.intervals["Sa2VA"].refusal
    assert network.config.intervals["Sa2VA"].refusal is None
    assert read.fingerprint == network.fingerprint, "finished runs know it by that"


CURVES = [(0.05, 0.5), (4.0, 0.35), (15.0, 0.25), (15.0, 1.5), (15.0, -0.5), (1.0, -0.3)]


@pytest.mark.parametrize(("steepness", "midpoint"), CURVES)
def test_a_level_curve_maps_0_to_1_onto_itself_rises_everywhere_and_keeps_its_digits(steepness, midpoint):
    """As a difference of float32 numbers near 1 it would give a Dice of -0.0001 in place of 0."""
    curve, x = LevelCurve(steepness, midpoint), torch.linspace(0, 1, 1001, dtype=torch.float64, requires_grad=True)
    y = curve(x)
    assert (y[0].item(), y[-1].item()) == pytest.approx((0, 1), abs=1e-12)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(slope).all()
    assert (slope > 0).all(), "a mask can be improved from any score, also from an empty mask"
    assert (y.diff() > 0).all()
    single = curve(few := torch.tensor([0.0, 1e-4, 1e-3, 1.0]))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, curve(few.double()), rtol=1e-6, atol=1e-9)
    assert single.max() <= 1


def test_a_level_curve_in_numbers():
    assert LevelCurve(4.0, 0.5)(torch.tensor([0.5, 0.75])).tolist() == pytest.approx(
        [0.5, 0.5 + np.tanh(0.5) / np.tanh(1) / 2]
    )
    nearly_identity = LevelCurve(0.05, 0.5)(torch.tensor([0.1, 0.4, 0.8]))
    np.testing.assert_allclose(nearly_identity, [0.1, 0.4, 0.8], atol=1e-4)


def test_intervals_never_leave_0_to_1_and_widen_with_the_disagreement_of_members():
    dice = np.array([[0.02, 0.02], [0.5, 0.5], [0.4, 0.6], [0.99, 0.99]])
    np.testing.assert_allclose(interval_unit(dice), [0.03, 0.03, 0.13, 0.03])
    limits = DiceInterval(-2.0, 1.0, 0.1, 40).around(dice)
    np.testing.assert_allclose(limits, [[0, 0.05], [0.44, 0.53], [0.24, 0.63], [0.93, 1]])


@pytest.mark.parametrize(
    ("half_width", "patients", "why"),
    [(0.15, 30, None), (0.151, 30, "0.151"), (0.5, 400, "0.500"), (0.15, 9, None), (0.01, 8, "got 8")],
)
def test_an_interval_that_says_nothing_is_refused(half_width, patients, why):
    refusal = DiceInterval(-1.0, 1.0, half_width, patients).refusal
    assert refusal is None if why is None else why in refusal
