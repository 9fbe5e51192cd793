import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage.draw import line
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.data.windows import LabelledImages, draw_batch
from rl_reward_network.models.ema import swapped
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, UNet
from rl_reward_network.reward_training import train as training
from rl_reward_network.reward_training.masks import damage, true_dice
from rl_reward_network.reward_training.train import (
    PRESETS,
    RewardTrainingConfig,
    train_reward_network,
)
from rl_reward_network.rewards.learned import predict_mask_quality

SMALL = RewardNetworkConfig(channels=(8, 16), packing=2, members=2)
TINY = RewardTrainingConfig(steps=4, batch_size=2, eval_every=2)


def bright_lines(seed, size=(64, 64)):
    rng = np.random.default_rng(seed)
    truth = np.zeros(size, dtype=bool)
    for _ in range(4):
        truth[line(*rng.integers(0, size[0], 4).tolist())] = True
    truth = ndimage.binary_dilation(truth, np.ones((3, 3)))
    image = rng.integers(20, 60, (*size, 3)) + 130 * truth[..., None]
    return image.astype(np.uint8), truth


def labelled(*pairs):
    return LabelledImages(*map(list, zip(*pairs, strict=True)))


TRAIN, VAL = labelled(*map(bright_lines, range(8))), labelled(*map(bright_lines, range(100, 103)))


def weights(network):
    return torch.cat([tensor.flatten().double() for tensor in network.state_dict().values()])


def test_learns_to_score_masks_it_never_saw(tmp_path):
    config = RewardTrainingConfig(steps=60, batch_size=6, eval_every=30, learning_rate=1e-2)
    network = train_reward_network(TRAIN, VAL, config, tmp_path, replace(SMALL, members=1))
    rng, predicted, true = np.random.default_rng(5), [], []
    for image, truth in map(bright_lines, range(200, 205)):
        masks = np.stack([damage(truth, rng) for _ in range(8)])
        predicted.extend(predict_mask_quality(network, image, masks.astype(np.float32))["dice"])
        true.extend(true_dice(masks, truth))
    predicted, true = np.array(predicted), np.array(true)
    assert np.abs(predicted - true).mean() < 0.6 * np.abs(true - true.mean()).mean()
    assert np.corrcoef(predicted, true)[0, 1] > 0.9


def test_another_seed_and_another_member_have_other_weights(tmp_path, whole):
    other = train_reward_network(TRAIN, VAL, replace(TINY, seed=2), tmp_path / "other", SMALL)
    assert not torch.equal(weights(whole[1]), weights(other))
    assert not torch.equal(*(weights(member) for member in other.members)), "members differ in start and batches"


@pytest.fixture
def threads():
    """Set the number of torch's threads; it is put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_members_side_by_side_end_in_the_weights_of_one_after_the_other(tmp_path, monkeypatch, threads, whole, count):
    used, step_of = set(), training.train_step

    def noted(*args):
        used.add((threading.get_ident(), torch.get_num_threads()))
        return step_of(*args)

    monkeypatch.setattr(training, "train_step", noted)
    threads(count)
    check_like_whole(whole, tmp_path)
    assert len(used) == count
    assert {number for _, number in used} == {1}
    assert torch.get_num_threads() == count


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_reward_network(TRAIN, VAL, TINY, folder, SMALL)


def check_like_whole(whole, run, unlabelled=None):
    """Resume `run`: it ends in the weights and rows of the whole run."""
    assert torch.equal(weights(whole[1]), weights(train_reward_network(TRAIN, VAL, TINY, run, SMALL, unlabelled)))
    assert (run / "metrics.jsonl").read_text() == (whole[0] / "metrics.jsonl").read_text()


UNLABELLED = training.LabelledImages(
    [bright_lines(seed)[0] for seed in range(300, 306)], [np.zeros((64, 64), bool) for _ in range(6)]
)


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    return folder, train_reward_network(TRAIN, VAL, TINY, folder, SMALL, UNLABELLED)


def test_images_without_masks_teach_by_the_moving_average(taught, whole):
    assert not torch.equal(weights(taught[1]), weights(whole[1]))
    rows = [json.loads(line) for line in (taught[0] / "metrics.jsonl").read_text().splitlines()]
    assert all({"taught", "taught_dice_loss"} <= row["train"].keys() for row in rows)
    assert all("teacher_dice" in row["val"] for row in rows)


def test_a_taught_window_is_segmented_by_the_average_as_it_is_and_learned_perturbed(tmp_path):
    torch.manual_seed(0)
    network = RewardNetwork(replace(SMALL, members=1))
    member = training._Member(network, 0, TINY, UNLABELLED)
    with torch.no_grad():
        member.unet.head.bias += 3.0  # the student moves away from its average
    images, probs, weight = member._taught(2, 64, 4)
    rng = np.random.default_rng([TINY.seed, 0, 4, 1])
    weak = draw_batch(UNLABELLED, 2, 64, rng)[0]
    with swapped(member.unet.eval(), member.teacher.weights):
        torch.testing.assert_close(probs, member.unet(weak).sigmoid())
    assert images.shape == weak.shape
    assert not torch.equal(images, weak)
    assert weight == 1, "faded in after 30 % of the steps"
    assert member._taught(2, 64, 1)[0].shape[-1] == 32, "half the resolution, as of the labelled windows"


@pytest.mark.parametrize(("of", "stop_at"), [("whole", 1), ("whole", 4), ("whole", 5), ("taught", 5), ("taught", 8)])
def test_an_interrupted_run_ends_in_the_same_weights(tmp_path, monkeypatch, capsys, request, of, stop_at):
    uninterrupted, unlabelled = request.getfixturevalue(of), UNLABELLED if of == "taught" else None
    step_of, calls = training.train_step, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return step_of(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_reward_network(TRAIN, VAL, TINY, tmp_path, SMALL, unlabelled)
    capsys.readouterr()
    check_like_whole(uninterrupted, tmp_path, unlabelled)
    assert capsys.readouterr().err.strip().startswith(f"2 members:  {'50' if stop_at > 4 else ' 0'}%|")


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tests.reward_training.test_train import *
from rl_reward_network import atomic_io

real, left = os.replace, [int(sys.argv[3])]
def replace_or_die(*args):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)

atomic_io.os.replace = replace_or_die
train_reward_network(TRAIN, VAL, TINY, Path(sys.argv[2]), SMALL)
"""


def test_a_run_that_was_killed_while_it_wrote_ends_in_the_same_weights(tmp_path, whole):
    arguments = [str(Path(__file__).parents[2]), str(tmp_path), "2"]  # in its second checkpoint
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    time.sleep(1.1)  # TensorBoard orders its files by the second they were opened in
    check_like_whole(whole, tmp_path)
    curves = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in curves.Scalars("val/dice")] == [2, 4]


@pytest.mark.parametrize("scores", [[(0.1, 0), (0.3, 0), (0.2, 0)], [(0, 0.1), (0, 0.3), (0, 0.2)]])
def test_the_best_weights_of_each_member_are_kept(tmp_path, monkeypatch, scores):
    """By Dice; by soft Dice while every mask is empty."""
    left, kept = list(scores), []

    def validate(member, *_):
        kept.append(weights(member.members[0]).clone())
        return dict(zip(("dice", "soft_dice"), left.pop(0), strict=True))

    monkeypatch.setattr(training, "own_scores", validate)
    network = train_reward_network(TRAIN, VAL, replace(TINY, steps=6), tmp_path, replace(SMALL, members=1))
    assert torch.equal(weights(network.members[0]), kept[1])


def test_validation_measures_the_mask_and_the_probabilities():
    member = RewardNetwork(replace(SMALL, members=1)).eval()
    torch.nn.init.zeros_(member.members[0].head.weight)
    torch.nn.init.constant_(member.members[0].head.bias, 100.0)  # everything is foreground
    share = np.array([truth.mean() for truth in VAL.truths])
    scores = training.own_scores(member, VAL)
    assert scores["dice"] == pytest.approx((2 * share / (1 + share)).mean())
    assert scores["soft_dice"] == pytest.approx(scores["dice"], abs=1e-3)


def test_weights_are_chosen_by_means_over_patients(monkeypatch):
    """Four images of one patient and one of another: Dice 1 and 0, so 0.5."""
    truth = np.ones((32, 32), dtype=bool)
    data = LabelledImages([np.zeros((32, 32, 3), np.uint8)] * 5, [truth] * 4 + [~truth], ["a"] * 4 + ["b"])
    monkeypatch.setattr(training, "foreground_prob", lambda network, image: np.ones((32, 32), np.float32))
    member = RewardNetwork(replace(SMALL, members=1))
    assert training.own_scores(member, data)["dice"] == pytest.approx(0.5)
    assert training.own_scores(member, data._replace(groups=()))["dice"] == pytest.approx(0.8)


def test_the_curves_are_means_over_the_members(whole):
    curves = EventAccumulator(str(whole[0] / "logs")).Reload()
    tags = {"train/loss", "train/cross_entropy", "train/dice_loss", "val/dice", "val/soft_dice"}
    assert tags <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("train/loss")] == [1, 2, 3, 4]
    rows = [json.loads(row) for row in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    assert [(row["member"], row["step"]) for row in rows] == [(0, 2), (1, 2), (0, 4), (1, 4)]
    means = [np.mean([row["val"]["soft_dice"] for row in rows if row["step"] == step]) for step in (2, 4)]
    assert [event.value for event in curves.Scalars("val/soft_dice")] == pytest.approx(means)


def test_one_step_moves_every_weight_by_the_sum_of_the_losses():
    torch.manual_seed(0)
    member = UNet((8, 16), 2)
    before = [parameter.clone() for parameter in member.parameters()]
    optimizer = torch.optim.AdamW(member.parameters(), lr=1e-3)
    batch = draw_batch(TRAIN, 2, 64, np.random.default_rng(0))
    losses = training.train_step(member, optimizer, batch, TINY, 1)
    assert losses["loss"] == pytest.approx(losses["cross_entropy"] + 0.5 * losses["dice_loss"], rel=1e-5)
    assert all(not torch.equal(a, b) for a, b in zip(before, member.parameters(), strict=True))


def test_the_first_steps_see_windows_of_half_the_resolution(tmp_path, monkeypatch):
    seen, step_of = [], training.train_step

    def noted(member, optimizer, batch, *args):
        seen.append((tuple(batch[0].shape), tuple(batch[1].shape)))
        return step_of(member, optimizer, batch, *args)

    monkeypatch.setattr(training, "train_step", noted)
    small = labelled(bright_lines(0, (37, 50)), bright_lines(1, (20, 41)))
    config = RewardTrainingConfig(steps=5, batch_size=2, coarse=0.4)
    train_reward_network(small, VAL, config, tmp_path, replace(SMALL, channels=(4, 8, 8), members=1))
    half, whole = (((2, 3, side, side), (2, 1, side, side)) for side in (32, 64))
    assert seen == [half] * 2 + [whole] * 3


@pytest.mark.parametrize("has", [{}, {"avx512_f": True}, {"amx_bf16": True}, {"avx512_bf16": True, "amx_bf16": False}])
def test_mixed_precision_follows_the_hardware(monkeypatch, has):
    """A GPU that only emulates bfloat16 computes in float32, too."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    with training.mixed_precision(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    fast = bool(has.get("amx_bf16") or has.get("avx512_bf16"))
    assert product.dtype == (torch.bfloat16 if fast else torch.float32)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or fast)
    monkeypatch.setattr(torch, "autocast", lambda *_, enabled: enabled)
    assert training.mixed_precision(torch.device("cuda")) == fast


def test_the_learning_rate_rises_then_falls():
    config = replace(TINY, steps=100)
    rates = [training.learning_rate(config, step) for step in range(1, 101)]
    assert np.argmax(rates) == 14
    assert max(rates) == pytest.approx(config.learning_rate, rel=2e-3)
    assert (np.diff(rates[:15]) > 0).all()
    assert (np.diff(rates[14:]) < 0).all()
    assert rates[-1] == pytest.approx(1e-3 * config.learning_rate)


def test_divergence_stops_the_run_and_names_the_remedy(tmp_path, threads):
    threads(2)
    with pytest.raises(ValueError, match=r"step \d: .* try another seed"):
        train_reward_network(TRAIN, VAL, replace(TINY, learning_rate=1e30), tmp_path, SMALL)
    assert torch.get_num_threads() == 2
    assert not [thread.name for thread in threading.enumerate() if "Pool" in thread.name], "none is left behind"


@pytest.mark.parametrize(
    ("settings", "message"), [({"steps": 0}, "steps=0:"), ({"coarse": 1.5}, r"coarse=1\.5: .* 0 to 1")]
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardTrainingConfig(**settings)
    assert (PRESETS["quick"].images, PRESETS["full"].images, PRESETS["full"].coarse) == (50, 200, 0)
