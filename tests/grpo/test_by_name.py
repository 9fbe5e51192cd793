"""A run on images that are asked for several classes by name: questions, budget, training, evaluation, refusals."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.image_context import FeatureCache, open_batch
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs, validation_prompts, within_budget
from rl_reward_network.grpo.measure import Measured, exact_share
from rl_reward_network.grpo.plan import PlanArgs, make_plan
from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.grpo.trainer import taken_together
from rl_reward_network.grpo.validation import EXACT, METRICS, ValidationCallback, mean_over_classes
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.report.by_name import ALL_CLASSES
from rl_reward_network.report.overlays import class_colours
from tests.conftest import tube_image
from tests.grpo.nano import PLAN, changed, make_trainer, nano, train
from tests.models.test_reward_network import network_of

CLASSES = [
    {"name": "tube", "phrases": ["the tube", "the bright tube"], "held_out": "the tube in the picture", "ids": "1"},
    {"name": "ring", "phrases": ["the ring"], "held_out": "the round ring", "ids": "2", "never_with": "tube"},
]


def write_named(folder: Path, images: int = 8, without: tuple[int, ...] = ()) -> Path:
    """Each image has a tube, but for those of some numbers, and certainly no ring."""
    (folder / "images").mkdir(parents=True)
    for kind in ("tube", "ring"):
        (folder / kind).mkdir()
    records = []
    for number in range(images):
        image, mask = tube_image(48, number)
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
        for kind, truth in (("tube", mask & (number not in without)), ("ring", mask & False)):
            Image.fromarray(truth.astype(np.uint8) * 255).save(folder / kind / f"{number}.png")
        files = [f"{kind}/{number}.png" for kind in ("tube", "ring")]
        records.append({"image": f"{number}.png", "text": ["Tube", "ring"], "mask_png": files, "group": number})
    (folder / "annotations.json").write_text(json.dumps(records))
    (folder / "classes.json").write_text(json.dumps(CLASSES))
    return folder


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    folder = tmp_path_factory.mktemp("named")
    return open_grpo_inputs(RunConfig(data_root=write_named(folder / "data"), output_dir=folder / "out", gpu=-1))


def test_every_image_is_asked_for_every_class_in_its_wordings(named: GRPOInputs) -> None:
    patients = "patients: reward 3, policy 2, val 1, test 2"
    assert named.summary == f"8 annotated images, 2 phrases, 16 of 16 questions with a mask; {patients}"
    questions = Counter((prompt.name, prompt.question, prompt.held_out) for prompt in named.prompts)
    asked, held_out = ("the tube", "the bright tube"), "Please segment the tube in the picture."
    tubes = {("tube", f"Please segment {phrase}.", held_out) for phrase in asked}
    assert {key for key in questions if key[0] == "tube"} == tubes
    assert questions["ring", "Please segment the ring.", "Please segment the round ring."] == 8


def test_a_budget_counts_images_with_all_their_questions(named: GRPOInputs) -> None:
    prompts = named.pick("reward", "policy")
    for most in (1, 3):
        chosen = within_budget(named, prompts, most)
        assert Counter(Counter(prompt.image_key for prompt in chosen).values()) == {2: most}
    assert len(validation_prompts(named)) == 2 * len({prompt.image_key for prompt in named.pick("val")})


def test_without_a_file_the_phrases_are_the_questions(tmp_path: Path) -> None:
    (write_named(tmp_path) / "classes.json").unlink()
    prompts = open_grpo_inputs(RunConfig(data_root=tmp_path, gpu=-1)).prompts
    assert {(p.name, p.question, p.held_out) for p in prompts} == {
        ("tube", "Please segment Tube.", ""),  # the class of each spelling
        ("ring", "Please segment ring.", ""),
    }


def test_what_does_not_fit_several_classes_is_refused(named: GRPOInputs, tmp_path: Path) -> None:
    config = named.config
    with pytest.raises(ValueError, match=r"segment_question is for other data, but .* holds images of several phrases"):
        open_grpo_inputs(config, RegionConfig(segment_question="Where?"))
    with pytest.raises(ValueError, match="--reward_net judges one kind of object, but these images are asked for"):
        make_plan(PlanArgs(), named, network_of())
    (write_named(tmp_path) / "classes.json").write_text(json.dumps([CLASSES[1] | {"never_with": []}]))
    with pytest.raises(ValueError, match=r"classes.json: annotations.json has the phrase 'Tube', which is the `name`"):
        open_grpo_inputs(RunConfig(data_root=tmp_path, gpu=-1))


def test_one_class_has_nothing_to_contrast_with(named: GRPOInputs) -> None:
    args = PlanArgs(grpo=GRPOSettings(objective="supervised", contrast_weight=0.5))
    assert make_plan(args, named, None).settings.contrast_weight == 0.5
    tubes = replace(named, prompts=[prompt for prompt in named.prompts if prompt.name == "tube"])
    with pytest.raises(ValueError, match=r"--contrast_weight 0\.5 does nothing in this run"):
        make_plan(args, tubes, None)


def test_supervised_batches_hold_all_questions_of_an_image_and_others_do_not(named: GRPOInputs, tmp_path: Path) -> None:
    prompts = named.pick("reward", "policy")
    masks = {"caption_to_mask_weight": 1.0, "mask_to_caption_weight": 0.0}
    trainer = make_trainer(tmp_path, prompts, objective="supervised", **masks)
    batch = [prompt for _, prompts in trainer._prompt_batches() for prompt in prompts]
    assert Counter(Counter(prompt.image_key for prompt in batch).values()) == {2: trainer.args.prompts_per_step}
    assert trainer.order.rollouts_per_epoch == len({p.image_key for p in prompts}) // trainer.args.prompts_per_step
    assert taken_together(prompts, replace(trainer.args, objective="grpo")) == [[n] for n in range(len(prompts))]


def test_questions_of_an_image_share_its_view(named: GRPOInputs) -> None:
    ordered = sorted(named.pick("reward", "policy"), key=lambda prompt: prompt.name)  # those of an image lie apart
    batch = open_batch(ordered, FeatureCache(*nano()), np.random.default_rng(0))
    images = {prompt.image_key for prompt in ordered}
    assert len(batch.features) == len(images) == len(ordered) // 2
    for key in images:
        ring, tube = (row for row, prompt in enumerate(ordered) if prompt.image_key == key)
        assert batch.images[ring] is batch.images[tube]
        assert not batch.truths[ring].any()
        assert batch.truths[tube].any()
        assert not np.array_equal(batch.images[tube], ordered[tube].load()[0])


def test_a_run_is_evaluated_class_by_class(named: GRPOInputs) -> None:
    plan = changed(PLAN, objective="supervised", mask_to_caption_weight=0.0, max_steps=2, save_steps=2)
    run = train(named, replace(plan, eval_steps=2, max_labelled=3), named.config.output_dir / "run")
    config = read_json(run / "config.json")
    assert config["labels"] == 3, "images, not questions"
    assert "| true masks used in training | 3 |" in (run / "final_model" / "README.md").read_text()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(step["loss/contrast"] > 0 for step in steps if "loss/mask" in step)
    assert sum("loss/contrast" in step for step in steps) == 2
    assert config["settings"]["wordings"]
    result, page = run_grpo_evaluation(run / "final_model")
    assert result.by_name is not None
    assert result.by_name.models == ("before", "after", "held-out wording")
    rows = {row.name: row for row in result.by_name.rows}
    counts = {"tube": (2, 0), "ring": (0, 2), ALL_CLASSES: (2, 2)}
    assert {name: (row.images, row.absent) for name, row in rows.items()} == counts
    dice = rows["tube"].dice[1]
    found = [n for n, prompt in enumerate(named.pick("test")) if prompt.name == "tube"]
    assert dice is not None
    assert dice.mean == pytest.approx(result.after.values["dice"][found].mean())
    assert read_json(page.with_name("eval.json"))["by_name"]["rows"][0]["name"] in rows
    assert "certainly absent" in page.read_text()
    assert result.totals["true region named"][1] in (0, 0.5, 1), "of two true tubes"
    for one in result.named:
        masks = [mask is not None and mask.any() for mask in one.after.values()]
        assert sum(masks) <= 1, "tube and ring exclude each other"
    worst = result.named[-1]
    assert worst.title.startswith("worst: Dice ")
    assert worst.truth.keys() == worst.after.keys() == {"ring", "tube"}
    for colour in class_colours(["ring", "tube"]).values():
        assert f"rgb{colour}" in page.read_text()


def test_the_same_folder_holds_regions_with_names(named: GRPOInputs) -> None:
    regions = open_grpo_inputs(named.config, RegionConfig(dataset_name="names"))
    summary = "annotated images, captioned by their phrases, 8 images, 8 regions"
    assert (regions.kind, regions.summary) == ("regions", summary)
    assert {prompt.caption for prompt in regions.prompts} == {"Tube"}, "an absent ring is no region"
    assert regions.split.groups == named.split.groups
    assert {prompt.group_id for prompt in regions.pick("test")} == {prompt.group_id for prompt in named.pick("test")}
    image, mask = regions.prompts[0].load()
    own_image, own_mask = next(p for p in named.prompts if p.sample_id == regions.prompts[0].sample_id).load()
    np.testing.assert_array_equal(image, own_image)
    np.testing.assert_array_equal(mask, own_mask)


def test_regions_have_the_split_of_the_images_where_some_have_none(tmp_path: Path) -> None:
    config = RunConfig(data_root=write_named(tmp_path / "data", 20, without=(2, 5, 11, 17)), gpu=-1)
    split = open_grpo_inputs(config).split.groups
    regions = open_grpo_inputs(config, RegionConfig(dataset_name="names"))
    assert sum(map(len, regions.split.groups.values())) == 16
    for name, groups in regions.split.groups.items():
        assert set(groups) < set(split[name]) or groups == split[name]


def test_a_caption_is_exact_but_for_case_dot_and_article(named: GRPOInputs) -> None:
    prompts = open_grpo_inputs(named.config, RegionConfig(dataset_name="names")).prompts[:5]
    captions = ["the tube.", "Tube", "a tube", "tubes", "the ring"]
    values = {"dice": np.zeros(5), "cycle_iou": np.ones(5)}
    measured = Measured(values, captions, [None] * 5, [None] * 5, np.zeros((5, 2), int))
    assert exact_share(prompts, measured) == 3 / 5
    points = ValidationCallback(cast(Any, None), prompts, 1, names=True)._means(measured)
    assert points[next(tag for tag in METRICS if tag in points)] == 3 / 5, "the criterion, not the IoU of mask'"
    assert EXACT not in ValidationCallback(cast(Any, None), prompts, 1)._means(measured)


def test_validation_weighs_classes_alike_however_often_they_are_asked_for() -> None:
    dice = np.array([0.2, 0.4, 0.6, 1.0, np.nan])
    groups = ["a", "a", "b", "b", "c"]
    assert mean_over_classes(dice, groups, ["tube"] * 3 + ["ring"] * 2) == pytest.approx(((0.3 + 0.6) / 2 + 1.0) / 2)
    assert mean_over_classes(dice, groups, [""] * 5) == pytest.approx((0.3 + 0.8) / 2), "one question: over patients"
    assert mean_over_classes(dice[4:], ["c"], ["tube"]) is None
