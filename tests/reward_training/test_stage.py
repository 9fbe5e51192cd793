"""Step 1 as a whole, its test, the search for a reward network of the same settings, and the check of its patients."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.inputs.doctor import check_reward_network
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.report.overlays import compare_masks
from rl_reward_network.reward_training import calibration
from rl_reward_network.reward_training import stage as reward_stage
from rl_reward_network.reward_training import train as training
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    OWN,
    RIDGE,
    SEGMENTER,
    SHIFTED,
    SOURCES,
    RewardExample,
    true_dice,
)
from rl_reward_network.reward_training.report import agreement_lines
from rl_reward_network.reward_training.stage import (
    CAUTIOUS,
    MEAN,
    MEMBER,
    NETWORK,
    SCALE,
    SOURCE_MEAN,
    SheetRow,
    _ascent,
    check_no_leak,
    find_reward_network,
    find_unfinished,
    interval_row,
    measure_agreement,
    origin,
    reward_plan,
    run_reward_stage,
    sheet_rows,
    sized,
    without_masks,
    write_sheet,
)
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import REWARD_RUN, Run
from tests.conftest import tiny_reward_plan as plan_of


@pytest.fixture
def inputs(tiny_inputs, tmp_path):
    return replace(tiny_inputs, config=replace(tiny_inputs.config, output_dir=tmp_path))


@pytest.fixture
def plan(tiny_inputs):
    return plan_of(tiny_inputs)


def test_a_budget_of_labels_replaces_the_presets_images(inputs):
    assert reward_plan(inputs.config, "quick", max_labelled=20).config.images == 20
    assert reward_plan(inputs.config, "quick").config.images == 50
    with pytest.raises(ValueError, match="max_labelled is 0, expected 1 or more"):
        reward_plan(inputs.config, "full", max_labelled=0)


@pytest.mark.parametrize(("size", "packing"), [((256, 100), 2), ((100, 257), 4)])
def test_the_packing_follows_the_largest_image(size, packing):
    small = np.zeros((64, 64), dtype=bool), np.zeros(size, dtype=bool)
    train = LabelledImages([np.repeat(truth[..., None], 3, axis=2).astype(np.uint8) for truth in small], list(small))
    assert sized(RewardNetworkConfig(members=2), train) == RewardNetworkConfig(members=2, packing=packing)


def test_a_run_finds_the_network_it_would_train_again_and_no_other(tiny_inputs, reward_run):
    network = reward_run / "best_reward_net"
    other_seed = replace(tiny_inputs, config=replace(tiny_inputs.config, seed=5))
    plan, other = plan_of(tiny_inputs), plan_of(other_seed)
    assert find_reward_network(tiny_inputs, plan) == find_reward_network(tiny_inputs, plan, seed=0) == network
    assert find_reward_network(other_seed, other) == network, "any seed, unless one is named"
    assert find_reward_network(other_seed, other, seed=5) is None
    for changed in (
        plan_of(tiny_inputs, steps=3),
        plan_of(tiny_inputs, "full"),  # full never uses quick
        reward_plan(tiny_inputs.config, "quick", 2, members=2),
        reward_plan(tiny_inputs.config, "quick", 2, 1, (0.5, 0.0, 0.0, 0.5)),
    ):
        assert find_reward_network(tiny_inputs, changed) is None
    for change in (
        {"prompts": ("a", "b")},
        {"split": replace(tiny_inputs.split, seed=1)},
        {"split": replace(tiny_inputs.split, fingerprint="x")},
        {"segmenter": replace(tiny_inputs.segmenter, fingerprint="x")},
    ):
        assert find_reward_network(replace(tiny_inputs, **change), plan) is None, change


def test_a_mean_teacher_is_trained_where_it_is_asked_for_and_judges_none_of_its_images(tiny_inputs, tmp_path):
    known = {sample.group_id for name in ("reward", "val", "test") for sample in tiny_inputs.pick(name, 99)}
    further = [sample for sample in tiny_inputs.samples if sample.group_id not in known]
    joined = [replace(sample, mask_parts=None, joined=True) for sample in further]
    inputs = replace(tiny_inputs, samples=[*tiny_inputs.samples, *joined], unlabelled="f" * 64)
    plain, plan = plan_of(inputs), plan_of(inputs)._replace(mean_teacher=True)
    assert origin(inputs, plain)["unlabelled"] is None, "images for later steps train no reward network"
    assert origin(inputs, plan)["unlabelled"] == "f" * 64
    run = Run(tmp_path / "reward_net_1", REWARD_RUN)
    network = run_reward_stage(inputs, plan, run)
    used = without_masks(inputs, inputs.pick("reward", plan.config.images, labelled=True))
    assert not any(sample.labelled for sample in used)
    assert read_json(run / "agreement.json")["unlabelled"]["images"] == len(used) >= len(further)
    assert set(network.training_info["unlabelled_groups"]) == {sample.group_id for sample in used}
    with pytest.raises(ValueError, match=r"trained without masks on .* patients of the policy split"):
        check_no_leak(inputs.split, RewardNetwork.from_pretrained(run / "best_reward_net"), run.path)


def test_unfinished_and_damaged_networks_are_passed_over(inputs, plan, reward_run, tmp_path):
    copy = tmp_path / "reward_net_1"
    shutil.copytree(reward_run.path, copy)
    assert find_reward_network(inputs, plan) == copy / "best_reward_net"
    (copy / "best_reward_net" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="passed over"):
        assert find_reward_network(inputs, plan) is None
    shutil.rmtree(copy)
    shutil.copytree(reward_run.path, copy)
    (copy / "agreement.json").unlink()  # written last: training was cut off
    assert find_reward_network(inputs, plan) is None


def test_an_interrupted_run_is_found_and_ends_in_the_same_weights(inputs, plan, reward_run, tmp_path, monkeypatch):
    interrupted = Run(tmp_path / "reward_net_1", REWARD_RUN)
    with monkeypatch.context() as patch:
        patch.setattr(reward_stage, "calibrated", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_reward_stage(inputs, plan, interrupted)
    assert not (interrupted / "best_reward_net").exists()
    assert find_unfinished(inputs, plan) == interrupted
    other_seed = replace(inputs, config=replace(inputs.config, seed=5))
    for where, other in ((inputs, plan_of(inputs, steps=3)), (other_seed, plan_of(other_seed))):
        assert find_unfinished(where, other) is None
    with monkeypatch.context() as patch:
        patch.setattr(training, "train_step", lambda *_: pytest.fail("trained again what was trained"))
        run_reward_stage(inputs, plan, interrupted)
    weights = [(run / "best_reward_net/model.safetensors").read_bytes() for run in (reward_run.path, interrupted.path)]
    assert weights[0] == weights[1]
    agreements = [read_json(run / "agreement.json") for run in (reward_run.path, interrupted.path)]
    seconds = [result.pop("seconds") for result in agreements]
    assert seconds[0].keys() == seconds[1].keys() == {"making masks", "training", "calibrating", "comparing"}
    assert [result.pop("resumed") for result in agreements] == [False, True]
    assert all(result.pop("peak_memory_gib") > 0 for result in agreements), "of a process, not of a run"
    assert all(set(result.pop("bank")) == {"computed", "reused"} for result in agreements)
    assert agreements[0] == agreements[1]
    assert find_unfinished(inputs, plan) is None


@pytest.mark.parametrize("field", ["train_groups", "val_groups"])
@pytest.mark.parametrize("split", ["reward", "policy", "val", "test", "joined", None])
def test_no_patient_is_judged_by_a_network_that_knows_it(inputs, field, split):
    info = {}
    if split:
        patient = "new" if split == "joined" else inputs.split.groups[split][0]
        info = {"train_groups": [], "val_groups": [], field: [patient]}
    allowed = split == "reward" or (split, field) == ("val", "val_groups")
    message = f"1 patients of the {'policy' if split == 'joined' else split} split" if split else "groups is missing"
    with nullcontext() if allowed else pytest.raises(ValueError, match=message):
        check_no_leak(replace(inputs.split, joined=("new",)), RewardNetwork(training_info=info), Path("net"))


def test_images_under_other_names_are_not_judged_by_a_network_that_has_seen_them(inputs, reward_run, tmp_path):
    network = RewardNetwork.from_pretrained(reward_run / "best_reward_net")
    check_no_leak(inputs.split, network, Path("net"), samples=inputs.samples)
    renamed = [replace(sample, group_id=f"other {sample.group_id}") for sample in inputs.samples]
    names = {name: tuple(f"other {group}" for group in ids) for name, ids in inputs.split.groups.items()}
    seen = len(inputs.pick("reward", 999))
    for moved, message in (
        ({"test": names["reward"], "reward": names["test"]}, f"trained on {seen} of the {seen} images of the test"),
        ({"policy": names["val"], "val": names["policy"]}, "chosen on .* images of the policy split, perhaps under"),
    ):
        split = replace(inputs.split, groups=names | moved)
        with pytest.raises(ValueError, match=rf"^net: the reward network was {message}.*\.png.*; train one on these"):
            check_no_leak(split, network, Path("net"), samples=renamed)
    joined = [replace(one, joined=True) for one in renamed if one.group_id in names["reward"]]
    split = replace(inputs.split, joined=tuple(one.group_id for one in joined))
    with pytest.raises(ValueError, match="images of the policy split"):
        check_no_leak(split, network, Path("net"), [*inputs.samples, *joined])
    folder, other = str(reward_run / "best_reward_net"), replace(inputs.config, split_seed=3)
    with pytest.raises(ValueError, match=r"best_reward_net: the reward network was .* images of the \w+ split"):
        check_reward_network(folder, other)
    assert check_reward_network(folder, inputs.config).details.endswith(f"trained on {seen} patients")
    network.pictures = {}  # as of an earlier version
    network.save_pretrained(tmp_path / "old")
    old = RewardNetwork.from_pretrained(tmp_path / "old")
    with pytest.warns(UserWarning, match=r"net: the network does not record its images.*compared by name alone"):
        check_no_leak(inputs.split, old, Path("net"), samples=renamed)
    assert "its images are not recorded" in check_reward_network(str(tmp_path / "old"), other).details


def test_a_run_says_what_it_used_and_how_far_it_can_be_trusted(inputs, reward_run):
    result = read_json(reward_run / "agreement.json")
    assert list(result["tables"]) == list(SOURCES)
    assert all(0 <= row["mae"] <= 1 for rows in result["tables"].values() for row in rows.values())
    picked = inputs.pick("reward", 50, labelled=True)
    patients, series = ({getattr(sample, name) for sample in picked} for name in ("group_id", "series_id"))
    used = {"images": len(picked), "patients": len(patients), "series": len(series)}
    assert result["used"]["reward"] == used
    assert {path.name for path in reward_run.path.iterdir()} == {
        *("agreement.json", "best_reward_net", "checkpoint.pt", "config.json", "cost.json", "done.json", "logs"),
        *(".lock", "metrics.jsonl", "report.html", "sheet.png", "split.json"),
    }
    info = RewardNetwork.from_pretrained(reward_run / "best_reward_net").training_info
    assert set(info["train_groups"]) <= set(inputs.split.groups["reward"])
    assert set(info["val_groups"]) <= set(inputs.split.groups["val"])


def test_labelled_images_are_picked_first(inputs):
    unlabelled = [replace(sample, mask_parts=None) for sample in inputs.samples[:8]]
    groups = {"policy": tuple(sample.group_id for sample in inputs.samples), "reward": (), "val": (), "test": ()}
    split = replace(inputs.split, groups=groups)
    mixed = replace(inputs, samples=unlabelled + inputs.samples[8:], split=split)
    assert all(sample.labelled for sample in mixed.pick("policy", 4))
    assert sum(sample.labelled for sample in mixed.pick("policy", 6)) == 4
    assert len(mixed.pick("policy", 6, labelled=True)) == 4


def test_a_run_that_is_still_going_is_not_taken_over(inputs, plan, reward_run):
    with reward_run.lock(), pytest.raises(ValueError, match="another process"):
        run_reward_stage(inputs, plan, reward_run)


# ---- the test on test patients ---------------------------------------------------------------------------------------


class KnowsTheTruth(RewardNetwork):
    """Sees the object exactly, because it is bright; the second member is a little less sure."""

    def foreground_probs(self, image):
        bright = (image.mean(dim=1, keepdim=True) > 0.5).float()
        return torch.stack([bright, 0.99 * bright])


INTERVALS = {source: DiceInterval(-0.2, 0.3, 0.01, 40) for source in SOURCES if source != RIDGE}
NETWORK_CONFIG = RewardNetworkConfig(channels=(8,), packing=2, members=2, ascent_step=0.4, intervals=INTERVALS)


def example(seed):
    truth = np.zeros((64, 80), dtype=bool)
    truth[20 + seed : 34 + seed, 10:70] = True
    image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
    return RewardExample(image, truth, np.stack([truth, np.roll(truth, 9, axis=0)]))


def measured(examples, masks=2, config=NETWORK_CONFIG):
    return measure_agreement(KnowsTheTruth(config), examples, 0.6, masks, [0])


@pytest.fixture(scope="module")
def result():
    return measured([example(seed) for seed in range(4)], 5)


def test_every_source_has_every_row(result):
    assert tuple(result["tables"]) == SOURCES == (SEGMENTER, DAMAGED, SHIFTED, RIDGE, OWN)
    assert result["masks"] == {SEGMENTER: 8, DAMAGED: 20, SHIFTED: 20, RIDGE: 24, OWN: 4}
    for rows in result["tables"].values():
        assert tuple(rows) == (NETWORK, MEMBER, CAUTIOUS, MEAN, SOURCE_MEAN)
        assert rows[MEAN]["pearson"] is rows[SOURCE_MEAN]["pearson"] is None


def test_a_network_that_knows_the_truth_is_found_to_know_it(result):
    for source, rows in result["tables"].items():
        assert rows[NETWORK]["mae"] < 0.01
        assert rows[MEMBER]["mae"] < 0.005
        assert source == OWN or rows[NETWORK]["mae"] < min(rows[name]["mae"] for name in (MEAN, SOURCE_MEAN))
    assert result["own_dice"] == 1
    assert result["without_foreground"] == 0
    assert (result["own_above_truth"], result["outside"]) == (0, 0), "its own segmentation is the truth"
    assert result["predicted_own"] == result["predicted_truth"] > 0.99
    assert result["ascent"]["raised"] == 1
    assert result["ascent"]["dice_after"] > 0.99 > result["ascent"]["dice_before"]


class SeesMore(RewardNetwork):
    """Sure of an object that is larger than it is: it prefers its own segmentation to the truth."""

    def foreground_probs(self, image):
        wide = F.max_pool2d((image.mean(dim=1, keepdim=True) > 0.5).float(), 15, 1, 7)
        return torch.stack([wide, 0.97 * wide])


def test_that_a_network_prefers_its_own_mask_to_the_truth_is_measured_and_calibrated():
    thick = [example(0)] * 12
    for n, one in enumerate(thick):
        truth = np.zeros_like(one.truth)
        truth[20 : 32 + 3 * (n % 4), 10:70] = True
        image = np.repeat((40 + 180 * truth[..., None]).astype(np.uint8), 3, axis=2)
        thick[n] = one._replace(image=image, truth=truth, masks=np.stack([np.roll(truth, 25, axis=0)]))
    known, new = [one for n, one in enumerate(thick) if n not in (5, 6)], [thick[5], thick[6]]
    network = SeesMore(replace(NETWORK_CONFIG, intervals={}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "RewardNetwork", SeesMore)
        network = calibration.calibrated(network, known, [f"p{n}" for n in range(10)], 2, [0])
    found = measure_agreement(network, new, 0.6, 2, [0])
    assert found["own_above_truth"] == 1
    assert found["predicted_own"] > found["predicted_truth"] + 0.1
    assert found["own_dice"] < 0.75, "the mask that it likes best is not good"
    assert found["intervals"][OWN]["coverage"] == 1
    scorer = ImageScorer(network, new[0].image)
    low, high = given_interval(network.config, scorer, scorer.own_mask, OWN)
    assert low <= true_dice(scorer.own_mask[None], new[0].truth)[0] <= high
    assert high < scorer.quality(scorer.own_mask[None].astype(np.float32))["dice"][0], "it is told that it is too sure"


def test_the_reward_is_compared_with_the_score_that_it_predicts():
    config = replace(NETWORK_CONFIG, intervals={}, score_weights=(0.0, 0.0, 1.0, 0.0))
    wide = [example(seed)._replace(masks=np.ones((1, 64, 80), dtype=bool)) for seed in range(2)]
    assert measured(wide, config=config)["tables"][SEGMENTER][CAUTIOUS]["mae"] < 0.01
    share = np.mean([e.truth.mean() for e in wide])  # the precision of a mask that covers everything; its Dice is 0.3
    assert 0.1 < share < 0.2


def test_masks_that_were_right_cannot_be_raised_and_do_not_count():
    found = _ascent(np.array([1.0, 0.5, 0.5]), np.array([1.0, 0.75, 0.25]))
    assert found == dict.fromkeys(("raised", "dice_before", "dice_after"), 0.5)
    assert _ascent(np.ones(2), np.ones(2))["raised"] is None


def test_intervals_are_measured_by_source_and_none_is_given_for_a_source_that_was_not_calibrated(result):
    for source in INTERVALS:
        row = result["intervals"][source]
        assert row["refusal"] is None
        assert row["coverage"] == 1
        assert 0 < row["half_width"] < 0.01
    refused = result["intervals"][RIDGE]
    assert (refused["coverage"], refused["half_width"]) == (None, None)
    assert "not fitted" in refused["refusal"]


@pytest.mark.parametrize(("with_object", "own"), [(0, None), (1, 1.0)])
def test_images_without_foreground_do_not_count_for_the_networks_own_dice(with_object, own):
    """Nothing is found where nothing is: no praise for a segmenter."""
    dark = np.full((64, 80, 3), 40, np.uint8)
    empty = [RewardExample(dark, np.zeros((64, 80), bool), np.zeros((2, 64, 80), bool))] * 2
    examples = [*empty, *(example(seed) for seed in range(with_object))]
    found = measured(examples)
    assert (found["own_dice"], found["without_foreground"]) == (own, 2)
    about = {"notes": [], "used": {}, "bank": {"computed": 0, "reused": 0}, "seconds": {}, "resumed": False}
    line = " ".join(agreement_lines(found | about))
    assert ("1.000 (2 with an empty true mask are left out)" in line) == bool(with_object)
    assert ("no true mask of the 2 test images has foreground" in line) == (not with_object)


def test_coverage_and_half_width_of_intervals_in_numbers():
    dice, true = np.array([[0.5, 0.5], [0.9, 0.9], [0.01, 0.01], [0.5, 0.5]]), np.array([0.46, 0.99, 0.0, 0.7])
    row = interval_row(DiceInterval(-2.0, 4.0, 0.09, 30), dice, true)  # -0.06 to +0.12, limited to [0, 1]
    assert row == {"refusal": None, "coverage": 0.75, "half_width": pytest.approx(np.median([0.09, 0.08, 0.065, 0.09]))}
    for interval, why in ((DiceInterval(-2.0, 4.0, 0.09, 8), "got 8"), (DiceInterval(-2.0, 4.0, 0.21, 30), "0.21")):
        row = interval_row(interval, dice, true)
        assert why in row["refusal"]
        assert row["coverage"] is None


def test_the_sheet_shows_each_source_in_turn_with_its_true_numbers():
    examples = [example(seed) for seed in range(6)]
    rows = sheet_rows(KnowsTheTruth(NETWORK_CONFIG), examples, [0])
    assert [row.titles[0] for row in rows] == [*SOURCES, SEGMENTER]
    for row, shown in zip(rows, examples, strict=True):
        image, mask, predicted, errors = row.pictures
        assert image is shown.image
        assert np.array_equal(errors, compare_masks(mask, shown.truth))
        assert row.titles[2] == f"true Dice {true_dice(mask[None], shown.truth)[0]:.2f}"
        np.testing.assert_allclose(predicted, mask ^ shown.truth, atol=0.01)
    assert np.array_equal(rows[5].pictures[1], examples[5].masks[1]), "the second mask of that source"
    assert rows[3].titles[1].endswith(", no interval"), "the ridge filter's has none"
    for row in rows[:3]:
        dice, low, high = (float(part.strip("[], ")) for part in row.titles[1].split()[2:])
        assert 0 <= low <= dice <= high <= 1


def test_a_sheet_is_a_picture_with_a_line_for_each_mask(tmp_path):
    def row(side=30):
        rng = np.random.default_rng(0)
        image, mask = rng.integers(0, 256, (side, side, 3), dtype=np.uint8), rng.random((side, side)) > 0.5
        return SheetRow((image, mask, rng.random((side, side)), ~mask), ("Sa2VA", "0.7", "0.65"))

    for count in (1, 3):
        write_sheet(tmp_path / f"{count}.png", [row(), row(50), row()][:count])
    one, three = (Image.open(tmp_path / f"{count}.png") for count in (1, 3))
    assert one.width == three.width
    scale = SCALE * 90  # pixels of the colour bar
    assert three.height - scale == pytest.approx(3 * (one.height - scale), abs=3)
    assert len(np.unique(np.asarray(three.convert("L")))) > 50
