"""Improvement: who decides, what is trained and deployed, when nothing is, resume, and what is refused."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_reward_network.atomic_io import PICTURES, read_json
from rl_reward_network.bit_depth import DATA_SET
from rl_reward_network.cli.improve import Args, check
from rl_reward_network.grpo import collapse
from rl_reward_network.grpo.inputs import GRPOInputs
from rl_reward_network.grpo.plan import make_plan
from rl_reward_network.grpo.stage import captions_of
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.methods import improve
from rl_reward_network.methods.improve import (
    ImprovePlan,
    decide,
    has_collapsed,
    inputs_of,
    make_improve_plan,
    masks_of,
    notes_of,
    open_improve_inputs,
    parts_of,
    plan_lines,
    run_improve_stage,
    sa2va_args,
    settings_of,
)
from rl_reward_network.methods.improve_report import FUSION, IMPROVED, SEGMENTER, SIDE, START, TEACHER, Improvement
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.run import BEST_REWARD_NET, DEPLOYED, IMPROVE_RUN, Run, differences
from rl_reward_network.segment.maker import trainable_model
from tests.conftest import tube_image, write_deep_data, write_tiny_data


def opened(
    folder: Path,
    images: int = 8,
    bare: int = 0,
    unlabelled: bool = False,
    first: Mapping[str, Any] | None = None,
    **record: Any,
) -> GRPOInputs:
    """Images of a patient each; the last `bare` have no mask, `record` is added to every record, `first` to one."""
    data = write_tiny_data(folder / "data", images=images, size=64)
    records = [row | record for row in json.loads((data / "annotations.json").read_text())]
    records[0] |= first or {}
    for row in records[images - bare :]:
        del row["mask_png"]
    (data / "annotations.json").write_text(json.dumps(records))
    root = folder / "more" if unlabelled else None
    if root:
        write_tiny_data(root, images=30, size=64)
        (root / "annotations.json").unlink()
        shutil.rmtree(root / "masks")
        for number in range(20):
            (root / "images" / f"P{number:04d}({number:010d})_1_frame_000001.png").unlink()
    return open_improve_inputs(RunConfig(data_root=data, output_dir=folder / "out", gpu=-1, unlabelled_root=root))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    """Eight labelled patients, and ten images without masks of others."""
    return opened(tmp_path_factory.mktemp("project"), unlabelled=True)


@pytest.fixture(scope="module")
def plan(images: GRPOInputs) -> ImprovePlan:
    return replace(make_improve_plan(images, "full", steps=2), folds=2)


@pytest.fixture(scope="module", autouse=True)
def small_segmenter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        smallest = RewardNetworkConfig(members=1, channels=(4, 8), packing=2)
        patch.setattr(improve, "RewardNetworkConfig", lambda: smallest)
        yield


def improved(images: GRPOInputs, plan: ImprovePlan, run: Run, **dice: float) -> Improvement:
    """Improve as if each candidate had that Dice on the patients that judge it."""

    def as_if(values: np.ndarray, groups: list[str], rows: list[str], *rule: bool) -> tuple[str, np.ndarray]:
        assert values.shape == (len(rows), 8)
        assert len(set(groups)) == 8, "every patient has judged"
        planted = np.array([[dice.get(row, 0.5)] * 8 for row in rows]) + np.arange(8) / 1000
        return decide(planted, groups, rows, *rule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(improve, "decide", as_if)
        return run_improve_stage(images, plan, run)


@pytest.fixture(scope="module")
def fused(images: GRPOInputs, plan: ImprovePlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Improvement]:
    """A run that deploys the fusion."""
    run = Run(tmp_path_factory.mktemp("fused") / "improve", IMPROVE_RUN)
    return run, improved(images, plan, run, segmenter=0.6, mean_teacher=0.55, fusion=0.7)


@pytest.fixture
def again(fused: tuple[Run, Improvement], tmp_path: Path) -> Run:
    """The same run, interrupted after the last training."""
    left = shutil.ignore_patterns("done.json", "eval.json", "improved")
    shutil.copytree(fused[0].path, tmp_path / "again", ignore=left)
    return Run(tmp_path / "again", IMPROVE_RUN)


def test_a_candidate_is_deployed_only_if_the_choice_is_better_on_patients_that_did_not_choose() -> None:
    groups, noise = [str(number) for number in range(8)], np.random.default_rng(0).normal(0, 0.002, 8)

    def chosen(*gains: np.ndarray | float, patients: int = 8) -> str:
        dice = np.array([np.full(8, 0.5), *(0.5 + gain + noise for gain in gains)])[:, :patients]
        return decide(dice, groups[:patients], [START, SEGMENTER, SIDE])[0]

    assert chosen(0.02, 0.01) == SEGMENTER
    assert chosen(0.02, 0.03) == SIDE
    assert chosen(0.0, -0.01) == START
    assert chosen(np.array([0.3, -0.2, 0.1, -0.1, 0.2, -0.1, 0.0, -0.1])) == START
    assert chosen(0.02, 0.01, patients=5) == START, "five patients decide nothing"


def test_where_a_model_is_tuned_the_best_estimate_is_deployed() -> None:
    """A mean gain that eight patients cannot show is enough, and one below 0 is not."""
    gains, groups = np.array([0.3, -0.2, 0.1, -0.1, 0.2, -0.1, 0.0, -0.1]), [str(number) for number in range(8)]
    for change, chosen in ((0.05, SIDE), (-0.1, START)):
        dice = np.array([np.full(8, 0.5), 0.5 + gains + change])
        assert decide(dice, groups, [START, SIDE])[0] == START
        assert decide(dice, groups, [START, SIDE], tunes=True)[0] == chosen


def test_a_collapse_is_read_from_the_config_of_the_training(tmp_path: Path) -> None:
    file = tmp_path / TEACHER / "final_model" / "config.json"
    assert not has_collapsed(tmp_path)
    file.parent.mkdir(parents=True)
    for said in (None, "step 10: the mean teacher has collapsed"):
        file.write_text(json.dumps({"collapse": said}))
        assert has_collapsed(tmp_path) is (said is not None)


def test_a_mean_teacher_that_has_collapsed_is_not_deployed(
    images: GRPOInputs, plan: ImprovePlan, again: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(improve, "has_collapsed", lambda part: part.name == "all")
    result = improved(images, plan, again, segmenter=0.6, mean_teacher=0.8, fusion=0.9)
    assert result.chosen == SEGMENTER
    assert len(replace(result, elsewhere=True).notes) == 2, "one does not hide the other"
    page = (again / "report.html").read_text()
    assert "The mean teacher has collapsed in all: neither it nor the fusion is a candidate." in page


def with_darker_images(inputs: GRPOInputs) -> GRPOInputs:
    """The inputs after the images of `--unlabelled_root` have become those of another place."""
    assert inputs.config.unlabelled_root is not None
    for path in (inputs.config.unlabelled_root / "images").iterdir():
        Image.fromarray(np.asarray(Image.open(path).convert("L").resize((96, 80))) // 2).save(path)
    return open_improve_inputs(inputs.config)


def test_where_images_of_another_place_are_left_out_the_own_ones_without_masks_still_teach(tmp_path: Path) -> None:
    inputs = with_darker_images(opened(tmp_path, images=18, bare=10, unlabelled=True))
    plan = make_improve_plan(inputs, "full")
    assert plan.elsewhere
    assert plan.last == TEACHER
    judging, final = parts_of(inputs, plan.folds, plan.elsewhere)
    for part in (*judging, final):
        taught = inputs_of(part.inputs, TEACHER, "sa2va-nano")
        own = {prompt.sample_id for prompt in taught.pick("reward", "policy") if not prompt.labelled}
        assert len(own) == 10
        assert not any(sample.joined for sample in taught.samples)


def test_images_of_another_place_are_known_by_their_looks_and_the_plan_says_what_follows(tmp_path: Path) -> None:
    inputs = opened(tmp_path, unlabelled=True)
    assert not make_improve_plan(inputs, "full").elsewhere
    inputs = with_darker_images(inputs)
    plan = make_improve_plan(inputs, "full")
    assert plan.elsewhere
    assert TEACHER not in plan.members
    left_out = "Sa2VA, mean teacher: left out: a training has 0 images without masks of this place, and it needs 10"
    assert left_out in "\n".join(plan_lines(inputs, plan))
    assert "they are of another place, where no mask judges" in "\n".join(plan_lines(inputs, plan))
    assert not make_improve_plan(inputs, "quick").elsewhere, "quick does not train on them"


@pytest.fixture
def elsewhere_trained(images: GRPOInputs, plan: ImprovePlan, fused: tuple[Run, Improvement], tmp_path: Path) -> Path:
    """A run that deployed a Sa2VA with a side network, without the pictures that it has learned."""
    improve.deploy(images, plan, SIDE, fused[0] / "all", tmp_path / "run" / IMPROVED)
    (tmp_path / "run" / IMPROVED / PICTURES).unlink()
    return tmp_path / "run"


def test_a_run_that_deployed_a_sa2va_is_a_start_that_is_tuned(
    images: GRPOInputs, plan: ImprovePlan, elsewhere_trained: Path
) -> None:
    inputs = open_improve_inputs(replace(images.config, model_path=trainable_model(str(elsewhere_trained))))
    assert inputs.config.model_path == str(elsewhere_trained / IMPROVED)
    tuned = make_improve_plan(inputs, "full")
    assert (tuned.steps[SIDE], tuned.steps[TEACHER], tuned.tunes) == (150, 1400, True)
    assert "what is best on the patients of the folds is deployed" in "\n".join(plan_lines(inputs, tuned))
    assert "side network: 4 x 150 steps; on angiograms of another hospital" in "\n".join(plan_lines(inputs, tuned))
    masks_alone = inputs_of(inputs, SIDE, inputs.config.model_path)
    settings = make_plan(sa2va_args(masks_alone, tuned, SIDE), masks_alone, None)
    assert settings.side_network is None, "its own is tuned"
    assert settings.settings.side_learning_rate == 1e-3
    masks_alone = inputs_of(images, SIDE, images.config.model_path)
    fresh = make_plan(sa2va_args(masks_alone, plan, SIDE), masks_alone, None)
    assert fresh.settings.side_learning_rate == 3e-3


def test_a_run_that_deployed_no_sa2va_is_no_start(fused: tuple[Run, Improvement]) -> None:
    with pytest.raises(ValueError, match=r"not a Sa2VA alone.*give its Sa2VA: .*improved.mean_teacher$"):
        trainable_model(str(fused[0].path))


def test_where_nothing_differs_nothing_is_deployed() -> None:
    """The best of four has an interval above 0 in more than 5 % of such runs; the choice, out of fold, has not."""
    rng, groups = np.random.default_rng(0), [str(number) for number in range(12)]
    worlds = [np.vstack([np.zeros(12), rng.normal(size=(1, 12)) + rng.normal(size=(4, 12))]) for _ in range(200)]
    assert np.mean([decide(0.05 * world, groups, range(5))[0] != 0 for world in worlds]) <= 0.05


def test_every_patient_is_judged_by_models_that_have_not_seen_it(images: GRPOInputs, plan: ImprovePlan) -> None:
    judging, final = parts_of(images, plan.folds)
    judges = [sample.group_id for part in judging for sample in part.judges]
    assert sorted(judges) == sorted({sample.group_id for sample in images.samples if sample.labelled})
    for part in judging:
        training = {prompt.group_id for prompt in part.inputs.pick("reward", "policy")}
        assert not training & {sample.group_id for sample in part.judges}
        assert len(training) == 4 + 10, "the other patients, and those without masks"
    assert len(final.inputs.pick("reward", "policy")) == 8 + 10
    assert final.inputs.split.groups["val"] == final.inputs.split.groups["test"] == ()


def test_an_image_without_a_mask_does_not_train_where_its_picture_is_held_out(tmp_path: Path) -> None:
    """Images of `--unlabelled_root` may be copies of labelled ones that the seed's split lets train."""
    alone = opened(tmp_path, unlabelled=True)
    policy = next(one for one in alone.samples if one.labelled and one.group_id in alone.split.groups["policy"])
    shutil.copyfile(policy.image_path, tmp_path / "more" / "images" / "copy.png")
    inputs = open_improve_inputs(alone.config)
    (copy,) = (one for one in inputs.samples if one.image_path.name == "copy.png")
    judging, final = parts_of(inputs, 2)
    trained = [copy.group_id in part.inputs.split.ids("policy") for part in judging]
    assert trained == [policy.group_id not in {one.group_id for one in part.judges} for part in judging]
    assert copy.group_id in final.inputs.split.ids("policy")
    said = [notes_of(inputs, make_improve_plan(inputs, mode)) for mode in ("full", "quick")]
    assert ["name no patient" in " ".join(notes) for notes in said] == [True, False], "quick trains on masks alone"


@pytest.mark.parametrize("folds", [1, 2])
def test_further_images_of_the_labelled_patients_train_where_these_do_not_judge(folds: int, tmp_path: Path) -> None:
    data = opened(tmp_path, unlabelled=True).config
    for number in range(8):
        name = f"P{number:04d}({number:010d})_2_frame_000001.png"
        Image.fromarray(tube_image(64, 300 + number)[0]).save(tmp_path / "more" / "images" / name)
    inputs = open_improve_inputs(data)
    patients = {sample.group_id for sample in inputs.samples if sample.labelled}
    further = {one.sample_id: one.group_id for one in inputs.samples if one.joined and one.group_id in patients}
    assert len(further) == 8
    judging, final = parts_of(inputs, folds)
    for part in [*judging, final]:
        trained = [prompt.sample_id for prompt in part.inputs.pick("reward", "policy")]
        assert len(trained) == len(set(trained)), "none is there twice"
        apart = {*part.inputs.split.groups["val"], *part.inputs.split.groups["test"]}
        assert apart >= {sample.group_id for sample in part.judges}
        assert further.keys() & set(trained) == {one for one, group in further.items() if group not in apart}


def test_patients_without_an_object_are_in_every_fold(tmp_path: Path) -> None:
    inputs = opened(tmp_path, images=6)
    for mask in sorted((inputs.config.data_root / "masks").iterdir())[:4]:
        Image.fromarray(np.zeros((64, 64), np.uint8)).save(mask)
    inputs = open_improve_inputs(inputs.config)
    for part in parts_of(inputs, 2)[0]:
        assert len(improve._with_object(part.judges)) == 1


@pytest.mark.parametrize(
    ("train", "val", "test", "folds", "judges"),
    [
        (5, 1, 0, 2, 6),  # without a test split of its own nobody is kept from training
        (8, 0, 6, 2, 8),
        (20, 0, 2, 2, 20),  # nor is a val split cut from train
        (4, 2, 3, 2, 6),
        (2, 6, 1, 1, 6),
    ],
)
def test_of_the_split_of_the_user_val_decides_if_it_can_and_test_stays_apart(
    train: int, val: int, test: int, folds: int, judges: int, tmp_path: Path
) -> None:
    inputs = opened(tmp_path, images=train + val + test)
    records, parts = read_json(tmp_path / "data" / "annotations.json"), ["train"] * train + ["val"] * val
    records = [row | {"split": part} for row, part in zip(records, parts + ["test"] * test, strict=True)]
    (tmp_path / "data" / "annotations.json").write_text(json.dumps(records))
    inputs = open_improve_inputs(inputs.config)
    plan = make_improve_plan(inputs, "quick")
    assert plan.folds == folds
    judging, final = parts_of(inputs, folds)
    assert sum(len(part.judges) for part in judging) == judges
    if test:
        assert {one.split for one in inputs.samples if one.group_id in final.inputs.split.groups["test"]} == {"test"}
    assert len(final.inputs.pick("reward", "policy")) == train + val * (folds > 1)


def test_many_patients_let_the_val_split_decide(tmp_path: Path) -> None:
    many = opened(tmp_path, images=40)
    plan = make_improve_plan(many, "quick")
    assert (plan.folds, plan.members) == (1, (SEGMENTER, SIDE))
    judging, final = parts_of(many, plan.folds)
    assert judging == [final]
    assert {sample.group_id for sample in final.judges} == set(many.split.groups["val"])
    assert "the val split" in plan_lines(many, plan)[0]


def test_the_plan_of_few_says_who_decides_and_what_is_left_out(images: GRPOInputs, tmp_path: Path) -> None:
    quick = make_improve_plan(images, "quick")
    lines = "\n".join(plan_lines(images, quick))
    assert (quick.folds, quick.members) == (2, (SEGMENTER, SIDE))
    assert "2 folds of all 8 labelled patients decide" in lines
    assert "mean teacher: left out: it takes longer; full trains it" in lines
    full = make_improve_plan(images, "full")
    assert (full.folds, full.members) == (3, (SEGMENTER, SIDE, TEACHER))
    few = opened(tmp_path, bare=2)
    assert make_improve_plan(few, "full").members == (SEGMENTER, SIDE)
    assert "left out: a training has 2 images without masks, and it needs 10" in "\n".join(
        plan_lines(few, make_improve_plan(few, "full"))
    )


def test_the_fusion_is_deployed_with_both_members_and_a_report(
    plan: ImprovePlan, fused: tuple[Run, Improvement]
) -> None:
    run, result = fused
    assert result.chosen == FUSION
    deployed = read_json(run / IMPROVED / DEPLOYED)
    assert deployed["members"] == [SEGMENTER, TEACHER]
    assert deployed["prompt"] == "Please segment the blood vessel."
    domains = [(run / part / SEGMENTER / BEST_REWARD_NET, part == "all") for part in ("fold_1", "all")]
    for folder, known in [*domains, (run / IMPROVED / SEGMENTER, True)]:
        assert (RewardNetwork.from_pretrained(folder).config.domain is not None) is known
    facts = read_json(run / "eval.json")
    assert facts["deployed"] == IMPROVED
    assert facts["gain_out_of_fold"]["groups"] == 8
    assert set(facts["judged"]) == set(plan.rows)
    page = (run / "report.html").read_text()
    assert "trained on all 8 labelled patients." in page
    before, after = (facts["judged"][row]["dice"]["mean"] for row in ("as it is", FUSION))
    assert re.match(
        rf"Dice {before:.2f} \[.*\] before, {after:.2f} \[.*\] after, on unseen patients\. ", fused[1].verdict
    )
    assert page.count("data:image/jpeg") == 12, "three images: as they are, truth, before, after"
    assert not list(run.path.glob("*/*/merged")), "whole checkpoints are made again where they are needed"


def test_the_fusion_is_the_mean_of_the_soft_masks(
    images: GRPOInputs, plan: ImprovePlan, fused: tuple[Run, Any]
) -> None:
    rows: dict[str, np.ndarray] = {}
    for _, masks in masks_of(images, plan, fused[0] / "all", images.samples[:1]):
        rows |= masks
    assert set(rows) == set(plan.rows)
    both, one = rows[SEGMENTER] & rows[TEACHER], rows[SEGMENTER] | rows[TEACHER]
    assert (rows[FUSION] >= both).all()
    assert (rows[FUSION] <= one).all()


def test_interrupted_before_the_last_training_it_ends_in_the_same_model(
    images: GRPOInputs, plan: ImprovePlan, fused: tuple[Run, Improvement], again: Run
) -> None:
    shutil.rmtree(again / "all" / TEACHER)
    result = improved(images, plan, again, segmenter=0.6, fusion=0.7)
    assert result.judged.dice(plan.rows) == pytest.approx(fused[1].judged.dice(plan.rows))
    ours, theirs = (run / "all" / TEACHER / "final_model" / "trainable" for run in (again, fused[0]))
    for file in theirs.rglob("*.safetensors"):
        assert (ours / file.relative_to(theirs)).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("row", "files"), [(SEGMENTER, "model.safetensors"), (SIDE, "tokenizer.json"), (TEACHER, "tokenizer.json")]
)
def test_a_single_member_is_deployed_as_it_is(
    row: str, files: str, images: GRPOInputs, plan: ImprovePlan, again: Run
) -> None:
    assert improved(images, plan, again, **{row: 0.6}).chosen == row
    assert read_json(again / IMPROVED / DEPLOYED)["members"] == ["."]
    assert (again / IMPROVED / files).exists()


def test_the_grey_window_of_the_data_is_deployed_with_the_model(
    plan: ImprovePlan, fused: tuple[Run, Any], tmp_path: Path
) -> None:
    config = RunConfig(data_root=write_deep_data(tmp_path / "deep"), output_dir=tmp_path / "out", gpu=-1)
    deep = open_improve_inputs(config)
    improve.deploy(deep, plan, SEGMENTER, fused[0] / "all", tmp_path / "improved")
    grey = deep.samples[0].grey
    assert grey is not None
    assert read_json(tmp_path / "improved" / DEPLOYED)["grey_levels"] == {DATA_SET: list(grey[:2])}
    assert read_json(fused[0] / IMPROVED / DEPLOYED)["grey_levels"] is None


def test_a_mean_teacher_that_collapses_is_the_model_it_began_with(
    images: GRPOInputs, plan: ImprovePlan, fused: tuple[Run, Improvement], tmp_path: Path
) -> None:
    shutil.copytree(fused[0].path / "all" / SIDE, tmp_path / SIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collapse, "difference", lambda *_: "its masks are planted")
        assert not improve.train_member(parts_of(images, 2)[1].inputs, plan, tmp_path, TEACHER)
    said = read_json(tmp_path / TEACHER / "final_model" / "config.json")["collapse"]
    assert "its masks are planted; training stops" in said
    before, after = (open_checkpoint(improve.merged(tmp_path / member)).tensors() for member in (SIDE, TEACHER))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_nothing_is_deployed_where_nothing_is_better(images: GRPOInputs, plan: ImprovePlan, again: Run) -> None:
    result = improved(images, plan, again, segmenter=0.4)
    assert result.chosen == START
    assert not (again / IMPROVED).exists()
    assert read_json(again / "eval.json")["deployed"] is None
    assert "Deployed: nothing." in (again / "report.html").read_text()


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("plan", "folds", 3),
        ("plan", "model_fingerprint", "other"),
        ("regions", "max_dynamic_patch", 4),
        ("config", "image_resize", "training"),
        ("config", "dtype", "bfloat16"),
    ],
)
def test_an_improvement_is_not_resumed_with_settings_that_shape_its_result(
    images: GRPOInputs, plan: ImprovePlan, part: str, setting: str, value: Any
) -> None:
    other, changed = images, {setting: value}
    if part != "plan":
        other, changed = replace(images, **{part: replace(getattr(images, part), **changed)}), {}
    (difference,) = differences(settings_of(images, plan), settings_of(other, replace(plan, **changed)))
    assert difference.startswith(setting)


def test_too_few_patients_are_refused_with_what_works_today(tmp_path: Path) -> None:
    inputs = opened(tmp_path, images=8, bare=3)
    with pytest.raises(ValueError, match=r"5 images of 5 patients have a mask; improve needs 6 .* sa2va-rl segment"):
        make_improve_plan(inputs, "quick")


@pytest.mark.parametrize("first", ["polyp", "Polyp."])
def test_the_data_s_own_phrase_is_asked_for(first: str, tmp_path: Path) -> None:
    """Two spellings are one phrase."""
    inputs = opened(tmp_path, text=["polyp"], first={"text": [first]})
    assert inputs.regions.segment_question == "Please segment the polyp."
    assert {prompt.question for prompt in inputs.prompts} == {"Please segment the polyp."}


@pytest.mark.parametrize("small", [True, False])
def test_every_model_takes_the_same_steps_of_as_many_images(images: GRPOInputs, plan: ImprovePlan, small: bool) -> None:
    for member in (SIDE, TEACHER):
        model = "sa2va-nano" if small else "owner/Sa2VA-4B"
        of_model = inputs_of(images, member, model)
        of_member = make_plan(sa2va_args(of_model, plan, member), of_model, None)
        assert of_member.settings.max_steps == 2
        assert captions_of(of_member.settings) // of_member.settings.num_generations == 8
        assert of_member.eval_steps == 0, "nothing is chosen within a training"
        assert (of_member.side_network or {}).get("pixels", 64) == 64, "no larger than the images"


def test_more_processes_than_images_with_masks_are_refused(images: GRPOInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="a training has 5 images with masks, and each of 6 processes takes its own"):
        make_improve_plan(images, "full")


def test_own_data_are_needed_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="no data are named for it"):
        check(Args(inputs=RunConfig(model_path=".", gpu=-1)))
