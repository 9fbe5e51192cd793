import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.draw import line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.models.reward_network import RewardNetworkConfig, UNet
from rl_reward_network.reward_training import train as training
from rl_reward_network.reward_training.damage import damage
from rl_reward_network.reward_training.masks import RewardExample, balance, make_windows, true_dice
from rl_reward_network.reward_training.train import (
    PRESETS,
    RewardTrainingConfig,
    ranking_loss,
    train_reward_network,
)
from rl_reward_network.rewards.learned import predict_mask_quality

SMALL = RewardNetworkConfig(channels=(8, 16), members=2)
TINY = RewardTrainingConfig(steps=4, batch_size=2, window=32, masks=6, masks_per_window=3, eval_every=2)


def bright_lines(seed, size=(64, 64)):
    """Bright lines on noise, and masks as a segmenter would give."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for _ in range(4):
        truth[line(*rng.integers(0, size[0], 4).tolist())] = True
    truth = ndimage.binary_dilation(truth, np.ones((3, 3)))
    image = rng.integers(20, 60, (*size, 3)) + 130 * truth[..., None]
    return RewardExample(image.astype(np.uint8), truth, damage(truth, rng)[None], f"patient{seed}")


def windows(seeds, side=32, masks=6):
    return make_windows([bright_lines(seed) for seed in seeds], 2, side, masks, [0])


TRAIN, VAL = windows(range(8)), windows(range(100, 103))


def weights(network):
    return torch.cat([tensor.flatten().double() for tensor in network.state_dict().values()])


def test_learns_to_judge_masks_it_never_saw(tmp_path):
    sizes = {"batch_size": 6, "window": 64, "masks": 8, "masks_per_window": 4}
    config = RewardTrainingConfig(steps=80, eval_every=40, learning_rate=1e-2, **sizes)
    parts = windows(range(12), 64, 8), windows(range(100, 103), 64, 8)
    network = train_reward_network(*parts, config, tmp_path, replace(SMALL, members=1))
    rng, predicted, true = np.random.default_rng(5), [], []
    for example in [bright_lines(200 + seed) for seed in range(5)]:
        masks = np.stack([damage(example.truth, rng) for _ in range(8)])
        predicted.extend(predict_mask_quality(network, example.image, masks.astype(np.float32))["dice"])
        true.extend(true_dice(masks, example.truth))
    predicted, true = np.array(predicted), np.array(true)
    assert np.abs(predicted - true).mean() < 0.6 * np.abs(true - true.mean()).mean()
    assert np.corrcoef(predicted, true)[0, 1] > 0.9


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not(tmp_path):
    runs = {
        name: weights(train_reward_network(TRAIN, VAL, replace(TINY, seed=seed), tmp_path / name, SMALL))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    assert torch.equal(runs["a"], runs["b"])
    assert not torch.equal(runs["a"], runs["c"])
    assert (tmp_path / "a/metrics.jsonl").read_text() == (tmp_path / "b/metrics.jsonl").read_text()


def test_members_of_an_ensemble_differ_in_start_and_batches(tmp_path):
    network = train_reward_network(TRAIN, VAL, TINY, tmp_path, SMALL)
    assert not torch.equal(*(weights(member) for member in network.members))
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["member"], row["step"]) for row in rows] == [(0, 2), (0, 4), (1, 2), (1, 4)]


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_run_that_was_cut_off_ends_in_the_same_weights(tmp_path, monkeypatch, stop_at):
    config = replace(TINY, steps=4)
    whole = train_reward_network(TRAIN, VAL, config, tmp_path / "whole", SMALL)

    step_of, calls = training._step, []

    def cut_off(*args):
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return step_of(*args)

    monkeypatch.setattr(training, "_step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_reward_network(TRAIN, VAL, config, tmp_path / "cut", SMALL)
    monkeypatch.setattr(training, "_step", step_of)
    resumed = train_reward_network(TRAIN, VAL, config, tmp_path / "cut", SMALL)
    assert torch.equal(weights(whole), weights(resumed))
    assert (tmp_path / "cut/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_the_bar_of_a_run_that_goes_on_begins_where_it_was(tmp_path, monkeypatch, capsys):
    step_of = training._step
    monkeypatch.setattr(training, "_step", lambda *args: step_of(*args) if args[-1] < 4 else pytest.fail("cut off"))
    with pytest.raises(pytest.fail.Exception):
        train_reward_network(TRAIN, VAL, TINY, tmp_path, SMALL)
    monkeypatch.setattr(training, "_step", step_of)
    capsys.readouterr()
    train_reward_network(TRAIN, VAL, TINY, tmp_path, SMALL)
    assert capsys.readouterr().err.strip().startswith("member 1 of 2:  50%|")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.reward_training.test_train import *
from rl_reward_network import artefacts

real, left = os.replace, [int(sys.argv[3])]
def replace_or_die(*args):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)

artefacts.os.replace = replace_or_die
train_reward_network(TRAIN, VAL, TINY, Path(sys.argv[2]), SMALL)
"""


@pytest.mark.parametrize("renames", [1, 2, 4])
def test_a_run_that_was_killed_while_it_wrote_ends_in_the_same_weights(tmp_path, renames):
    whole = train_reward_network(TRAIN, VAL, TINY, tmp_path / "whole", SMALL)
    arguments = [str(Path(__file__).parents[2]), str(tmp_path / "cut"), str(renames)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    time.sleep(1.1)  # TensorBoard orders its files by the second they were opened in
    resumed = train_reward_network(TRAIN, VAL, TINY, tmp_path / "cut", SMALL)
    assert torch.equal(weights(whole), weights(resumed))
    assert (tmp_path / "cut/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    curves = EventAccumulator(str(tmp_path / "cut/logs")).Reload()
    assert [event.step for event in curves.Scalars("val/dice_mae")] == [2, 4, 6, 8]


def test_the_best_weights_of_each_member_are_kept(tmp_path, monkeypatch):
    errors = iter([0.3, 0.1, 0.2])
    kept = {}

    def validate(member, *_):
        error = next(errors)
        kept[error] = weights(member).clone()
        return {"dice_mae": error}

    monkeypatch.setattr(training, "_validate", validate)
    network = train_reward_network(TRAIN, VAL, replace(TINY, steps=6), tmp_path, replace(SMALL, members=1))
    assert torch.equal(weights(network.members[0]), kept[0.1])


def test_curves_of_all_members_follow_each_other(tmp_path):
    train_reward_network(TRAIN, VAL, TINY, tmp_path, SMALL)
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {"train/loss", "train/ranking_loss", "val/dice_mae", "val/recall_mae"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(1, 9))
    assert [event.step for event in curves.Scalars("val/dice_mae")] == [2, 4, 6, 8]


def test_image_truth_and_masks_of_a_batch_are_posed_together():
    chance = balance(TRAIN.dice)
    for step in range(10):
        image, truth, masks = training._draw_batch(TRAIN, chance, TINY, np.random.default_rng(step))
        assert (image.shape, truth.shape, masks.shape) == ((2, 3, 32, 32), (2, 1, 32, 32), (2, 3, 32, 32))
        assert 0 <= image.min() <= image.max() <= 1
        grey, object_ = image.mean(1, keepdim=True), truth.bool()
        if object_.any():
            assert grey[object_].mean() > grey[~object_].mean() + 0.2


def test_a_mask_that_is_the_truth_stays_so_in_every_pose():
    intact = TRAIN._replace(masks=TRAIN.masks[:, :1], dice=TRAIN.dice[:, :1])
    for step in range(10):
        _, truth, masks = training._draw_batch(intact, balance(intact.dice), TINY, np.random.default_rng(step))
        assert torch.equal(masks, truth.expand_as(masks))


def test_one_step_moves_every_weight_by_the_sum_of_the_losses():
    torch.manual_seed(0)
    member = UNet((8, 16))
    before = [parameter.clone() for parameter in member.parameters()]
    optimizer = torch.optim.AdamW(member.parameters(), lr=1e-3)
    batch = training._draw_batch(TRAIN, balance(TRAIN.dice), TINY, np.random.default_rng(0))
    losses = training._step(member, optimizer, batch, TINY, 1)
    expected = 4 * losses["truth_map_loss"] + losses["numbers_loss"] + 2 * losses["ranking_loss"]
    assert losses["loss"] == pytest.approx(expected, rel=1e-5)
    assert all(not torch.equal(a, b) for a, b in zip(before, member.parameters(), strict=True))


def test_ranking_loss_by_hand():
    true = torch.tensor([[0.2, 0.8]])
    cost = 0.05 * np.log1p(np.exp(-0.1 / 0.05))  # both orders of the one pair
    assert ranking_loss(torch.tensor([[0.5, 0.6]]), true).item() == pytest.approx(cost, rel=1e-5)
    wrong = ranking_loss(torch.tensor([[0.6, 0.5]]), true).item()
    assert wrong == pytest.approx(0.05 * np.log1p(np.exp(0.1 / 0.05)), rel=1e-5)
    assert ranking_loss(true, true).item() < 1e-5
    assert ranking_loss(torch.tensor([[0.1, 0.9]]), torch.tensor([[0.5, 0.5]])).item() == 0


def test_the_learning_rate_rises_then_falls():
    config, optimizer = replace(TINY, steps=100), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    rates = []
    for step in range(1, 101):
        training._set_learning_rate(optimizer, config, step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert np.argmax(rates) == 14
    assert max(rates) == pytest.approx(config.learning_rate, rel=2e-3)
    assert (np.diff(rates[:15]) > 0).all()
    assert (np.diff(rates[14:]) < 0).all()
    assert rates[-1] == pytest.approx(1e-3 * config.learning_rate)


def test_divergence_stops_the_run_and_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"step \d: .* try another seed"):
        train_reward_network(TRAIN, VAL, replace(TINY, learning_rate=1e30), tmp_path, SMALL)


def test_presets_and_settings():
    assert (PRESETS["quick"].images, PRESETS["full"].images) == (50, 200)
    with pytest.raises(ValueError, match="steps=0:"):
        RewardTrainingConfig(steps=0)
    with pytest.raises(ValueError, match="window=100:"):
        RewardTrainingConfig(window=100)
