"""The evaluation of a GRPO run: both models on test items, item by item, from the run folder alone."""

import csv
import html
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_reward_network.atomic_io import read_json, weights_fingerprint
from rl_reward_network.cli import evaluate as evaluate_command
from rl_reward_network.data.splits import subsample
from rl_reward_network.grpo import evaluate as evaluation_file
from rl_reward_network.grpo.evaluate import PICTURED, pictured, run_grpo_evaluation
from rl_reward_network.grpo.final_model import grpo_model, load_base
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.inputs import GRPOInputs, labelled_prompts, open_grpo_inputs, validation_prompts
from rl_reward_network.grpo.measure import Measured, iou_of_captions, measure, unpacked
from rl_reward_network.grpo.settings import RewardWeights
from rl_reward_network.grpo.stage import asks_network
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.lora import load_trainable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.report.before_after import CAPTION_LEGEND, MASK_LEGEND, SHOWN, BeforeAfter
from rl_reward_network.rewards.learned import foreground_prob, score_masks
from rl_reward_network.rewards.metrics import dice
from tests.conftest import write_tiny_data
from tests.grpo.nano import ONE_STEP, PLAN, SETTINGS, changed, nano, train
from tests.grpo.test_measure import CAPTIONED, MASKED
from tests.models.test_reward_network import network_of
from tests.report.html_page import Page

ITEMS = 2
METRICS = {*CAPTIONED, *MASKED, "cycle_iou_by_base"}


@pytest.fixture(scope="session")
def trained(grpo_inputs: GRPOInputs, grpo_run: Path) -> tuple[GRPOInputs, Path]:
    return grpo_inputs, grpo_run


@pytest.fixture(scope="module")
def evaluated(trained: tuple[GRPOInputs, Path]) -> tuple[BeforeAfter, Path]:
    return run_grpo_evaluation(trained[1] / "final_model", items=ITEMS)


@pytest.fixture(scope="module")
def by_hand(trained: tuple[GRPOInputs, Path]) -> tuple[Measured, Measured, np.ndarray]:
    """Both models measured, and what the first draws from the captions of the second."""
    inputs, run = trained
    items = subsample(inputs.pick("test"), ITEMS, inputs.config.seed)
    (first, processor), (second, _) = nano(), nano()
    load_trainable(second, run / "final_model" / "trainable")
    longest, caches = SETTINGS["max_completion_length"], [FeatureCache(model, processor) for model in (first, second)]
    before, after = (measure(cache.model, items, cache, longest, quiet=True) for cache in caches)
    return before, after, iou_of_captions(first, items, caches[0], after.captions)


def test_a_quick_run_on_regions_is_evaluated_on_some_of_them_and_says_so(
    trained: tuple[GRPOInputs, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = trained[0]
    every = inputs.pick("test")
    monkeypatch.setattr(evaluation_file, "QUICK_REGIONS", 3)
    prompts, notes = evaluation_file._test_prompts(inputs, "quick", None)
    assert prompts == subsample(every, 3, inputs.config.seed)
    assert notes == (f"quick: 3 of {len(every)} test regions; evaluate --images {len(every)} takes all.",)
    assert evaluation_file._test_prompts(inputs, "full", None) == (every, ())
    assert evaluation_file._test_prompts(replace(inputs, kind="images"), "quick", None) == (every, ())
    assert evaluation_file._test_prompts(inputs, "quick", 2) == (prompts[:2], ())


def test_both_models_are_measured_on_test_items(
    trained: tuple[GRPOInputs, Path],
    evaluated: tuple[BeforeAfter, Path],
    by_hand: tuple[Measured, Measured, np.ndarray],
) -> None:
    result, (before, after, neutral) = evaluated[0], by_hand
    assert set(result.gains) == METRICS
    for name in METRICS - {"cycle_iou_by_base"}:
        np.testing.assert_allclose(result.before.values[name], before.values[name], atol=1e-6, err_msg=name)
        np.testing.assert_allclose(result.after.values[name], after.values[name], atol=1e-6, err_msg=name)
    assert (before.values["expected_cycle_iou"] != after.values["expected_cycle_iou"]).any()
    assert result.totals == {"cIoU": (before.phrase_ciou, after.phrase_ciou)}
    np.testing.assert_allclose(result.after.values["cycle_iou_by_base"], neutral, atol=1e-6)
    np.testing.assert_array_equal(result.before.values["cycle_iou_by_base"], result.before.values["cycle_iou"])
    items = subsample(trained[0].pick("test"), ITEMS, 0)
    assert result.results.ids == tuple((item.sample_id, item.group_id) for item in items)
    assert {group for _, group in result.results.ids} <= set(trained[0].split.groups["test"])
    assert (result.results.criterion, result.verdict.label) == ("cycle_iou", "cannot tell")


def test_files_lie_in_a_folder_that_names_the_limit(
    trained: tuple[GRPOInputs, Path], evaluated: tuple[BeforeAfter, Path]
) -> None:
    result, page = evaluated
    assert page == trained[1] / "evaluation_2" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["eval.csv", "eval.json", "report.html"]
    actual = json.loads((page.parent / "eval.json").read_text())
    assert actual["items"] == ITEMS
    gains = {metric: gain.mean for metric, gain in result.gains.items()}
    assert {row["metric"]: row["gain"]["mean"] for row in actual["rows"]} == gains
    about = {"steps": 2, "split": "test", "Sa2VA": "sa2va-nano", "objective": "grpo", "LoRA": "rank 4, alpha 8"}
    about |= {"rewards": "iou 1, caption 1, loop2_caption 1, loop2_iou 1", "learning rate": "0.01"}
    assert actual["config"].items() >= about.items()
    with (page.parent / "eval.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 2 * ITEMS


def test_the_report_shows_gains_and_losses(
    evaluated: tuple[BeforeAfter, Path], by_hand: tuple[Measured, Measured, np.ndarray]
) -> None:
    result, path = evaluated
    page = Page(path.read_text(encoding="utf-8"))
    falls = result.after.values["meteor"] - result.before.values["meteor"]
    worse = [number for number in np.argsort(falls, kind="stable") if falls[number] < 0][:PICTURED]
    count = 2 * ITEMS + 3 + len(worse)
    assert page.tags.count("img") == 4 * count + 1, "each item at both ends, three more, worse captions, and the curves"
    files = [link for link in page.links if not link.startswith("data:image/")]
    assert {"eval.csv", "eval.json"} <= set(files)
    assert all((path.parent / link).exists() for link in files), "relative"
    for caption in by_hand[1].captions:
        assert f"after: {caption}" in page.text
    after = result.after.values["cycle_iou"]
    gain, first = after - result.before.values["cycle_iou"], result.shown[SHOWN]
    best = int(np.argmax(gain))
    word = "gained most" if gain[best] > 0 else "lost least"
    assert first.title == f"{word}, IoU of mask': {after[best]:.2f} ({gain[best]:+.2f})"
    assert first.words[1:] == (by_hand[0].captions[best], by_hand[1].captions[best])
    np.testing.assert_array_equal(first.after, unpacked(by_hand[1].drawn[best]))
    assert [line["step"] for line in result.curves] == [1, 2]


def test_captions_that_got_worse_are_shown_with_their_measure() -> None:
    gains, meteor = np.array([0.3, -0.2, 0.0, 0.1, -0.1]), np.array([-0.3, 0.1, -0.1, 0.0, -0.2])
    none: Any = [None] * 5

    def measured(share: float) -> Measured:
        values = {"cycle_iou": 0.5 + share * gains, "meteor": 0.6 + share * meteor}
        return Measured(values, [f"caption {number}" for number in range(5)], none, none, np.zeros((5, 2), np.int64))

    image = np.zeros((8, 8, 3), np.uint8)
    prompts: Any = [
        SimpleNamespace(load=lambda: (image, None), caption=f"reference {number}", group_id="a") for number in range(5)
    ]
    shown = pictured(prompts, measured(0), measured(1), "cycle_iou")
    assert [(item.title, item.words[0][-1]) for item in shown] == [
        ("best after training, IoU of mask': 0.80 (+0.30)", "0"),
        ("median after training, IoU of mask': 0.50 (+0.00)", "2"),
        ("worst after training, IoU of mask': 0.30 (-0.20)", "1"),
        ("gained most, IoU of mask': 0.80 (+0.30)", "0"),
        ("gained most, IoU of mask': 0.60 (+0.10)", "3"),
        ("lost least, IoU of mask': 0.50 (+0.00)", "2"),
        ("lost most, IoU of mask': 0.30 (-0.20)", "1"),
        ("lost most, IoU of mask': 0.40 (-0.10)", "4"),
        ("gained least, IoU of mask': 0.50 (+0.00)", "2"),
        ("lost most, METEOR: 0.30 (-0.30)", "0"),
        ("lost most, METEOR: 0.40 (-0.20)", "4"),
        ("lost most, METEOR: 0.50 (-0.10)", "2"),
    ]


def test_other_weights_than_in_training_are_refused(trained: tuple[GRPOInputs, Path], tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"weights.*--base_model"):
        run_grpo_evaluation(trained[1] / "final_model", base_model=str(tiny_checkpoint))


def test_a_base_that_a_gpu_rounded_is_rounded_here() -> None:
    half = Sa2VAForConditionalGeneration.from_pretrained("sa2va-nano", dtype=torch.bfloat16)
    actual, _ = load_base("sa2va-nano", weights_fingerprint(half))
    assert {p.dtype for p in actual.parameters()} == {torch.float32}
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(actual.get_parameter(name), half.get_parameter(name).float(), rtol=0, atol=0)
    exact, _ = load_sa2va_model("sa2va-nano")
    assert not torch.equal(actual.get_parameter(name), exact.get_parameter(name))
    asked, _ = load_base("sa2va-nano", weights_fingerprint(exact), dtype="bfloat16")
    assert torch.equal(asked.get_parameter(name), half.get_parameter(name))
    kept = {name: (buffer.dtype, buffer.sum().item()) for name, buffer in exact.named_buffers()}
    assert {name: (buffer.dtype, buffer.sum().item()) for name, buffer in asked.named_buffers()} == kept


def copied_run(run: Path, folder: Path) -> Path:
    """The run where neither its data nor its logs are."""
    shutil.copytree(run, folder / "out" / "run", ignore=shutil.ignore_patterns("checkpoint-*", "logs", "evaluation*"))
    return folder / "out" / "run"


def test_a_run_can_be_moved_and_told_where_its_data_are(trained: tuple[GRPOInputs, Path], tmp_path: Path) -> None:
    _, run = trained
    moved = copied_run(run, tmp_path)
    message = r"config\.json: field inputs\.data_root is \.\./\.\./scenes, no folder here; give --data_root"
    with pytest.raises(ValueError, match=message):
        run_grpo_evaluation(moved / "final_model", items=1)
    with pytest.raises(ValueError, match=r"split\.json: .*name that data folder"):
        run_grpo_evaluation(moved / "final_model", write_tiny_data(tmp_path / "other", size=48), items=1)
    assert not list(moved.glob("evaluation*")), "nothing is written before everything fits"


def test_a_checkpoint_is_evaluated_beside_the_final_model(trained: tuple[GRPOInputs, Path], evaluated: Any) -> None:
    _, run = trained
    result, page = run_grpo_evaluation(run / "checkpoint-2", items=ITEMS)
    assert page == run / f"evaluation_checkpoint-2_{ITEMS}" / "report.html"
    final, _ = evaluated
    for name, values in final.after.values.items():
        np.testing.assert_array_equal(result.after.values[name], values, err_msg=name)
    assert result.config["steps"] == 2


def test_a_run_of_a_small_models_copy_and_of_a_removed_mask_policy_is_asked_as_in_training(
    trained: tuple[GRPOInputs, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, run = trained
    moved = copied_run(run, tmp_path)
    asked: list[Any] = []
    config = read_json(moved / "final_model" / "config.json")
    config["inputs"]["model_path"], config["settings"]["training"]["mask_policy"] = "../../copy", "candidates"
    (moved / "final_model" / "config.json").write_text(json.dumps(config))

    def noted(model: Any, prompts: Any, *_: Any, **__: Any) -> Measured:
        asked.extend(prompts)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(evaluation_file, "measure", noted)
    with pytest.raises(ValueError, match=r"out of GPU memory.*--gpu -1"):
        run_grpo_evaluation(moved / "final_model", inputs.config.data_root, "sa2va-nano", items=1)
    assert {prompt.describe for prompt in asked} == {prompt.describe for prompt in inputs.prompts}


def test_annotated_images_can_be_learned_from_without_a_reward_network(tmp_path: Path) -> None:
    data, run = write_tiny_data(tmp_path / "data", images=6), tmp_path / "out" / "supervised"
    inputs = open_grpo_inputs(RunConfig(data_root=data, gpu=-1))
    plan = replace(PLAN, weights=RewardWeights(0.0, 0.0, 0.0, 1.0))
    train(inputs, changed(plan, objective="supervised", mask_to_caption_weight=0.0, **ONE_STEP), run)
    (line,) = (json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines())
    assert line["loss/mask"] > 0
    assert "| rewards | none: true masks are learned" in (run / "final_model" / "README.md").read_text()
    bare = tmp_path / "bare"
    shutil.copytree(data, bare)
    records = [{**one, "mask_png": None} for one in json.loads((data / "annotations.json").read_text())]
    (bare / "annotations.json").write_text(json.dumps(records))
    unlabelled = open_grpo_inputs(RunConfig(data_root=bare, gpu=-1))
    with pytest.raises(ValueError, match=r"objective supervised .*none of the \d .*--reward_net"):
        labelled_prompts(unlabelled.prompts, "objective supervised")
    with pytest.raises(ValueError, match=r"loop2 reward iou .*none of the \d .*--reward_net"):
        train(unlabelled, changed(plan, mask_to_caption_weight=0.0, **ONE_STEP), tmp_path / "out" / "bare")
    by_tree = replace(PLAN, weights=RewardWeights(loop2_iou=0.0), mask_rewards={"loop2": {"single_tree": 1.0}})
    run = train(unlabelled, changed(by_tree, mask_to_caption_weight=0.0, **ONE_STEP), tmp_path / "out" / "by_tree")
    with pytest.raises(ValueError, match=r"none of \d+ test images has a mask, and the run has no reward network"):
        run_grpo_evaluation(run / "final_model")


BY_LABELS: dict[str, Any] = {"mask_to_caption_weight": 0.0, "bce_weight": 1.0, "dice_weight": 0.5, **ONE_STEP}


@pytest.mark.parametrize(
    ("settings", "weights", "asked"),
    [
        ({"objective": "supervised"}, RewardWeights(), False),
        ({"objective": "dpo", "preferred_by": "truth"}, RewardWeights(), False),
        ({"objective": "dpo", "preferred_by": "reward_net_score"}, RewardWeights(), True),
        ({"objective": "grpo"}, RewardWeights(learned=1.0), True),
        ({"objective": "grpo", "caption_to_mask_weight": 0.0}, RewardWeights(learned=1.0), False),
        ({"objective": "grpo", "pathwise_weight": 0.5}, RewardWeights(), True),
    ],
)
def test_a_reward_network_takes_its_patients_from_a_run_that_asks_it_alone(
    settings: dict[str, Any], weights: RewardWeights, asked: bool
) -> None:
    assert asks_network(changed(replace(PLAN, weights=weights), **settings)) == asked


def test_a_reward_network_that_no_loss_asks_leaves_all_labelled_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = open_grpo_inputs(RunConfig(data_root=write_tiny_data(tmp_path / "data"), gpu=-1))
    network = network_of()
    plan = replace(changed(PLAN, objective="supervised", **BY_LABELS), reward_net=network.fingerprint)
    run = train(inputs, plan, tmp_path / "out" / "run", network=network)
    assert read_json(run / "config.json")["images"] == len(inputs.pick("reward", "policy"))
    assert "no loss of this run asks the reward network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "use"),
    [
        ({"objective": "supervised"}, "objective supervised"),
        ({"objective": "dpo", "preferred_by": "truth"}, "preferred_by truth"),
        ({"objective": "grpo"}, "loop2 reward iou"),
    ],
)
def test_masks_that_are_all_empty_teach_nothing(tmp_path: Path, settings: dict[str, Any], use: str) -> None:
    data = write_tiny_data(tmp_path / "data")
    for record in json.loads((data / "annotations.json").read_text()):
        file = data / record["mask_png"]
        Image.fromarray(np.zeros_like(np.asarray(Image.open(file)))).save(file)
    inputs = open_grpo_inputs(RunConfig(data_root=data, gpu=-1))
    plan = replace(changed(PLAN, **BY_LABELS | settings), weights=RewardWeights(0.0, 0.0, 0.0, 1.0))
    with pytest.raises(ValueError, match=rf"{use}: the masks of all \d training images are empty"):
        train(inputs, plan, tmp_path / "out" / "run")
    assert not (tmp_path / "out").exists()


def test_validation_masks_that_are_all_empty_choose_nothing(tmp_path: Path) -> None:
    inputs = open_grpo_inputs(RunConfig(data_root=write_tiny_data(tmp_path / "data"), gpu=-1))
    chosen = validation_prompts(inputs)
    empty = [replace(one, load=lambda: (np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8), bool))) for one in chosen]
    rest = [prompt for prompt in inputs.prompts if prompt not in chosen]
    with pytest.raises(ValueError, match=r"the masks of all \d validation images are empty, which keeps those"):
        validation_prompts(replace(inputs, prompts=rest + empty))
    assert validation_prompts(replace(inputs, prompts=rest + empty[1:] + chosen[:1]))


def test_a_preset_larger_than_the_data_is_lowered_and_said_but_not_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = open_grpo_inputs(RunConfig(data_root=write_tiny_data(tmp_path / "data"), gpu=-1))
    count = len(inputs.pick("reward", "policy"))
    settings = BY_LABELS | {"objective": "supervised", "per_device_train_batch_size": 64}
    train(inputs, changed(PLAN, **settings), tmp_path / "out" / "run")
    said = capsys.readouterr().out
    assert f"each step: {count} regions x true masks" in said
    assert f"since only {count} train" in said
    with pytest.raises(ValueError, match=f"^{count} training prompts, but one optimisation step takes 16"):
        train(inputs, replace(changed(PLAN, **settings), own_batch=True), tmp_path / "out" / "own")


def test_images_are_judged_by_dice_and_the_runs_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a reward network excludes the images that trained the network, and stores a copy of it."""
    data, run = write_tiny_data(tmp_path / "data", images=6), tmp_path / "out" / "images"
    inputs, network = open_grpo_inputs(RunConfig(data_root=data, gpu=-1)), network_of()
    picked: list[tuple[str, ...]] = []
    real = GRPOInputs.pick
    monkeypatch.setattr(GRPOInputs, "pick", lambda self, *names: picked.append(names) or real(self, *names))
    plan = replace(PLAN, weights=RewardWeights(0.0, 0.0, 0.0, 1.0, 1.0), reward_net=network.fingerprint)
    looked: Counter[bytes] = Counter()
    probs = RewardNetwork.foreground_probs

    def noted(self: RewardNetwork, image: torch.Tensor) -> torch.Tensor:
        looked[image.numpy().tobytes()] += 1
        return probs(self, image)

    monkeypatch.setattr(RewardNetwork, "foreground_probs", noted)
    settings = {"mask_to_caption_weight": 0.0, "pathwise_weight": 1.0, **ONE_STEP, "max_steps": 2}
    train(inputs, changed(plan, **settings), run, network=network)
    result, page = run_grpo_evaluation(run / "final_model")
    passes = looked.copy()
    assert set(passes.values()) == {1}, "one pass per image for reward, gradient, both models' scores and the note"
    assert picked == [("policy",), ("test",)]
    assert len(passes) > len(inputs.pick("test")), "images of training, too"
    assert len(list((run.parent / "foreground_maps" / network.fingerprint).iterdir())) == len(passes)
    run_grpo_evaluation(run / "final_model")
    assert looked == passes, "a later process reads the maps"
    config = read_json(run / "config.json")
    assert (config["kind"], config["meteor_variant"]) == ("images", "")
    assert config["settings"]["reward_net"] == network.fingerprint
    assert RewardNetwork.from_pretrained(run / "reward_net").fingerprint == network.fingerprint
    assert page == run / "evaluation" / "report.html", "no limit, no number"
    assert result.results.criterion == "dice"
    assert set(result.gains) == {"dice", "failure", "iou", "precision", "recall", "reward_net_score"}
    items = inputs.pick("test")
    assert len(result.results.ids) == len(items)
    image, _ = items[0].load()
    shown: Any = next(one for one in result.shown if (one.image == image).all())
    assert shown.words == (items[0].question, "", "")
    expected = score_masks(network, image, shown.after[None].astype(np.float32))[0]
    assert result.after.values["reward_net_score"][0] == pytest.approx(expected, abs=1e-5)
    own = [dice((foreground_prob(network, item.load()[0]) > 0.5)[None], item.load()[1][None])[0] for item in items]
    note, few = result.notes
    assert few == "1 test groups, fewer than 6: there are no intervals, and no verdict is possible."
    assert note.startswith(f"The reward network's own segmentation of these images has Dice {np.mean(own):.2f}, the f")
    page_text = page.read_text()
    assert MASK_LEGEND in html.unescape(page_text)
    assert CAPTION_LEGEND not in html.unescape(page_text)
    assert ">before</figcaption>" in page_text, "no words were said"
    bare = [replace(item, load=lambda own=item: (own.load()[0], None)) for item in items]
    monkeypatch.setattr(GRPOInputs, "pick", lambda self, *names: bare)
    unlabelled, _ = run_grpo_evaluation(run / "final_model")
    assert (unlabelled.results.criterion, list(unlabelled.gains)) == ("reward_net_score", ["reward_net_score"])
    assert (unlabelled.totals, unlabelled.notes) == ({}, (few,))
    assert unlabelled.verdict.sentence.startswith("Cannot tell: reward network's score")
    assert unlabelled.gains["reward_net_score"] == result.gains["reward_net_score"]


def test_names_are_not_silently_left_out(trained: tuple[GRPOInputs, Path]) -> None:
    with pytest.raises(ValueError, match="--show_names"):
        evaluate_command.main(evaluate_command.Args((str(trained[1]),), show_names=True))


def test_the_trained_weights_of_a_folder(grpo_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final, cut = grpo_run / "final_model", tmp_path / "cut"
    assert grpo_model(grpo_run) == grpo_model(final) == final
    assert grpo_model(grpo_run / "checkpoint-1") == grpo_run / "checkpoint-1"
    shutil.copytree(grpo_run, cut, ignore=shutil.ignore_patterns("final_model", "evaluation*"))
    assert grpo_model(cut) == cut / "checkpoint-2"
    assert "the run has not ended; its last checkpoint is taken" in capsys.readouterr().out
    (tmp_path / "final_model").mkdir()
    for text in ('{"stage": "policy"}', "{}"):
        (tmp_path / "final_model" / "config.json").write_text(text)
        assert grpo_model(tmp_path) is None
    assert grpo_model(cut / "logs") is None
