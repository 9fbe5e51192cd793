import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.draw import line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.rewards.masks import dice
from rl_reward_network.training import reward_network as training
from rl_reward_network.training.damage import damage
from rl_reward_network.training.reward_network import (
    PRESETS,
    RewardExample,
    RewardTrainingConfig,
    train_reward_network,
)

SMALL = RewardNetworkConfig(channels=(16, 32))
TINY = RewardTrainingConfig(steps=4, batch_size=2, crop=32, eval_every=2, val_images=2, val_masks=3, device="cpu")


def bright_lines(seed, group, size=(64, 64), masks=1):
    """Bright lines on noise, and blurred masks as a segmenter would give."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for _ in range(4):
        truth[line(*rng.integers(0, size[0], 4).tolist())] = True
    truth = ndimage.binary_dilation(truth, np.ones((3, 3)))
    image = rng.integers(20, 60, (*size, 3)) + 130 * truth[..., None]
    soft = [ndimage.gaussian_filter(damage(truth, rng).astype(np.float32), 1) for _ in range(masks)]
    return RewardExample(image.astype(np.uint8), truth, [np.clip(mask, 0, 1) for mask in soft], group)


TRAIN = [bright_lines(seed, f"patient{seed % 3}") for seed in range(12)]
VAL = [bright_lines(100 + seed, "patient7") for seed in range(3)]


def test_learns_to_judge_masks_it_never_saw(tmp_path):
    config = RewardTrainingConfig(steps=60, batch_size=6, crop=64, eval_every=20, val_images=3, device="cpu")
    network = train_reward_network(TRAIN, VAL, config, tmp_path, network_config=SMALL)
    rng, predicted, true = np.random.default_rng(5), [], []
    for example in [bright_lines(200 + seed, "patient9") for seed in range(5)]:
        masks = np.stack([damage(example.truth, rng) for _ in range(8)])
        predicted.extend(score_masks(network, example.image, masks.astype(np.float32)))
        true.extend(dice(masks, np.repeat(example.truth[None], 8, axis=0)))
    predicted, true = np.array(predicted), np.array(true)
    assert np.abs(predicted - true).mean() < 0.6 * np.abs(true - true.mean()).mean()
    assert np.corrcoef(predicted, true)[0, 1] > 0.8


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not(tmp_path):
    runs = {
        name: train_reward_network(TRAIN, VAL, replace(TINY, seed=seed), tmp_path / name, network_config=SMALL)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    weights = {name: torch.cat([p.flatten() for p in network.parameters()]) for name, network in runs.items()}
    assert torch.equal(weights["a"], weights["b"])
    assert not torch.equal(weights["a"], weights["c"])
    assert (tmp_path / "a/metrics.jsonl").read_text() == (tmp_path / "b/metrics.jsonl").read_text()


def test_run_folder_holds_the_best_weights_curves_and_what_they_came_from(tmp_path):
    info = {"mode": "quick", "data_fingerprint": "abc", "splits": ["reward"]}
    network = train_reward_network(TRAIN, VAL, replace(TINY, steps=5), tmp_path, info, SMALL)
    lines = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines] == [2, 4, 5]
    best = min(lines, key=lambda row: row["val"]["dice_mae"])
    assert network.training_info == RewardNetwork.from_pretrained(tmp_path / "best_reward_net").training_info
    assert network.training_info["best_step"] == best["step"]
    assert network.training_info["val"] == best["val"]
    assert network.training_info["train_groups"] == ["patient0", "patient1", "patient2"]
    assert info.items() <= network.training_info.items()
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {"train/loss", "val/dice_mae", "val/recall_mae"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("train/loss")] == [1, 2, 3, 4, 5]


def test_windows_are_native_pixels_mirrored_only_where_the_image_ends():
    example, rng = bright_lines(0, "p", size=(40, 100)), np.random.default_rng(0)
    window = training._draw_window(example, 64, 3, rng)
    assert (window.image.shape, window.truth.shape, window.mask.shape) == (
        (3, 3, 64, 64),
        (3, 1, 64, 64),
        (3, 1, 64, 64),
    )
    array = np.arange(12).reshape(3, 4)
    assert training._cut(array, 1, 1, 2).tolist() == [[5, 6], [9, 10]]
    assert training._cut(array, 0, 0, 4)[3].tolist() == array[2].tolist()


def test_image_truth_and_mask_of_a_window_are_turned_together():
    example, rng = bright_lines(3, "p", masks=0), np.random.default_rng(1)
    for _ in range(20):
        window = training._draw_window(example, 48, 1, rng)
        truth = window.truth.bool()
        assert (
            window.image.mean(1, keepdim=True)[truth].mean() > window.image.mean(1, keepdim=True)[~truth].mean() + 0.2
        )
    intact = [
        w for w in (training._draw_window(example, 48, 1, rng) for _ in range(60)) if torch.equal(w.mask, w.truth)
    ]
    assert 1 <= len(intact) <= 20


def test_masks_of_the_segmenter_are_cut_at_the_same_place(monkeypatch):
    monkeypatch.setattr(training, "INTACT", 0)
    monkeypatch.setattr(training, "FROM_SEGMENTER", 1)
    example = bright_lines(5, "p", size=(60, 140))
    example = example._replace(masks=[example.truth.astype(np.float16)])
    for seed in range(10):
        window = training._draw_window(example, 40, 2, np.random.default_rng(seed))
        assert torch.equal(window.mask, window.truth)


def test_an_image_without_object_still_gives_windows():
    empty = bright_lines(5, "p", masks=0)._replace(truth=np.zeros((64, 64), dtype=bool))
    window = training._draw_window(empty, 48, 20, np.random.default_rng(0))
    assert not window.truth.any()
    numbers = training._exact(window)[0]
    assert set(numbers) == {0, 1}  # false blobs score 0, empty masks 1


def test_one_step_moves_every_weight(tmp_path):
    torch.manual_seed(0)
    network = RewardNetwork(SMALL)
    before = [parameter.clone() for parameter in network.parameters()]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = training._step(network, optimizer, training._draw_batch(TRAIN, TINY, np.random.default_rng(0)), 4.0, 1)
    assert losses["loss"] == pytest.approx(4 * losses["truth_map_loss"] + losses["numbers_loss"], rel=1e-5)
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))


def test_divergence_stops_the_run_and_names_the_remedy(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step [23]: .* lower learning_rate"):
        train_reward_network(
            TRAIN, VAL, replace(TINY, learning_rate=1e30, eval_every=4), tmp_path, network_config=SMALL
        )


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ([], VAL, "got 0 and 3"),
        (TRAIN, [VAL[0]._replace(group_id="patient1")], r"\['patient1'\] in both train and val; split by group"),
        ([TRAIN[0]._replace(truth=TRAIN[0].truth * 1)], VAL, r"train\[0\].truth must be bool"),
        ([TRAIN[0]._replace(image=TRAIN[0].image / 255)], VAL, r"train\[0\].image must be uint8"),
        (TRAIN, [VAL[0]._replace(masks=[VAL[0].masks[0][1:]])], r"val\[0\].masks\[0\] must be float \(64, 64\)"),
        (TRAIN, [VAL[0]._replace(masks=[VAL[0].masks[0] * 9])], r"val\[0\].masks\[0\] must be in \[0, 1\]"),
    ],
)
def test_bad_examples_are_refused_before_anything_is_written(tmp_path, train, val, message):
    with pytest.raises(ValueError, match=message):
        train_reward_network(train, val, TINY, tmp_path / "run", network_config=SMALL)
    assert not (tmp_path / "run").exists()


def test_presets_and_settings():
    assert (PRESETS["quick"].images, PRESETS["full"].images) == (50, 200)
    with pytest.raises(ValueError, match="steps=0: must be greater than 0"):
        RewardTrainingConfig(steps=0)
