"""What a GRPO run works on: which reader takes a folder, splits that do not leak, and what is refused."""

import io
import json
import shutil
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from rl_reward_network.atomic_io import PICTURES, load_arrays, pixels_digest, read_json, write_json
from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.cli import grpo
from rl_reward_network.data.identity import among, thumbnails
from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.splits import SPLITS, make_split, save_split, select, subsample
from rl_reward_network.embedded import datasets as embedded
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo import inputs as inputs_file
from rl_reward_network.grpo.final_model import merge_run
from rl_reward_network.grpo.inputs import GRPOInputs, check_prompts, judged_prompts, open_grpo_inputs, within_budget
from rl_reward_network.grpo.plan import RewardArgs
from rl_reward_network.grpo.prompts import DESCRIBE, DESCRIBE_REAL, TrainingItem
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.grpo.stage import wanted_settings
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RegionConfig, RunConfig, pick_fields
from rl_reward_network.inputs.loading import check_model_apart, open_inputs, portable_settings, read_samples
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import GRPO_RUN, Run
from tests.conftest import write_deep_data, write_tiny_data
from tests.grpo.nano import ONE_STEP, PLAN, changed, train
from tests.models.test_reward_network import network_of
from tests.ppo.test_prompts import write_new_patients


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regions") / "scenes"
    write_regions(folder, 6, 3, 96)
    return folder


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_data(tmp_path_factory.mktemp("annotated"), images=8, size=48)


def opened(folder: Path, **changed: Any) -> GRPOInputs:
    names = {field.name for field in fields(RegionConfig)} & changed.keys()
    regions = RegionConfig(**{name: changed.pop(name) for name in names})
    return open_grpo_inputs(RunConfig(data_root=folder, **changed), regions)


def test_regions_are_recognised(captioned: Path) -> None:
    inputs = opened(captioned)
    summary = f"Grasp-Any-Region, 1 shard, 6 images, {len(inputs.prompts)} regions"
    assert (inputs.kind, inputs.summary) == ("regions", summary)
    assert len(inputs.prompts) >= 18
    assert all(item.caption.startswith("a ") and item.labelled for item in inputs.prompts)
    assert inputs.prompts[0].question == f"Please segment the {inputs.prompts[0].caption.removeprefix('a ')}."
    assert opened(captioned, dataset_name="gar").split == inputs.split
    assert len(opened(captioned, max_regions=13).prompts) == 13


def test_annotated_images_are_recognised(annotated: Path) -> None:
    inputs = opened(annotated)
    summary = "8 annotated images, 8 with a mask; patients: reward 3, policy 2, val 1, test 2"
    assert (inputs.kind, inputs.summary, len(inputs.prompts)) == ("images", summary, 8)
    assert {item.question for item in inputs.prompts} == {PROMPTS[0]}
    assert {item.caption for item in inputs.prompts} == {""}
    asked = opened(annotated, dataset_name="annotations", segment_question="Where?")
    assert {item.question for item in asked.prompts} == {"Where?"}
    assert asked.split == inputs.split
    image, mask = asked.prompts[0].load()
    assert image.shape == (48, 48, 3)
    assert mask is not None


def test_a_budget_of_labels_takes_the_reward_networks_images_first(tmp_path: Path) -> None:
    folder = write_tiny_data(tmp_path, images=20, size=48)
    inputs = opened(folder, seed=3)
    prompts, count = inputs.pick("policy", "reward"), len(inputs.pick("reward"))
    chosen = {most: [p.sample_id for p in within_budget(inputs, prompts, most)] for most in (1, 4, count, 99)}
    samples = select(read_samples(folder), inputs.split, "reward")
    for most in (1, 4, count):
        assert chosen[most] == [sample.sample_id for sample in subsample(samples, most, 3)], "as step 1 picks them"
        assert chosen[most] == chosen[99][:most], "a smaller budget is a subset of a larger one"
    assert set(chosen[99][count:]) == {p.sample_id for p in inputs.pick("policy")}
    assert chosen[99] != [p.sample_id for p in within_budget(opened(folder, seed=4), prompts, 99)], "by the seed"


def test_a_copy_of_the_embedded_model_is_asked_its_own_question(captioned: Path, tmp_path: Path) -> None:
    shutil.copy(EMBEDDED["sa2va-nano"] / "config.json", tmp_path)
    questions = [
        {prompt.describe for prompt in opened(captioned, model_path=model).prompts}
        for model in (str(tmp_path), "sa2va-nano", "owner/Sa2VA-4B")
    ]
    assert questions == [{DESCRIBE}, {DESCRIBE}, {DESCRIBE_REAL}]


def test_what_is_white_is_found_again(tmp_path: Path) -> None:
    inputs = opened(write_deep_data(tmp_path / "deep"), output_dir=tmp_path / "outputs")
    saved = json.loads(json.dumps(portable_settings(tmp_path / "outputs" / "run", inputs.config, inputs.regions)))
    config = replace(pick_fields(RunConfig, saved), data_root=tmp_path / "deep", output_dir=tmp_path)
    again = open_grpo_inputs(config, pick_fields(RegionConfig, saved))
    assert (again.prompts[0].load()[0] == inputs.prompts[0].load()[0]).all()
    assert {sample.grey for sample in opened(tmp_path / "deep", bit_depth=12).samples} == {GreyWindow(0, 4095)}


def test_captioned_regions_above_8_bit_are_shown(tmp_path: Path) -> None:
    grey = np.linspace(0, 1023, 40 * 50).astype(np.uint16).reshape(40, 50)
    grey[2, 2] = 65535
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    mask = to_rle(grey > 500)
    said = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a bright half"}]
    rows = [
        {
            "image": {"bytes": file.getvalue() + bytes(n), "path": None},  # the same picture in four files
            "mask_rle": mask,
            "conversations": [said[0], said[1] | {"value": f"half {n}"}],
            "group": str(n),
        }
        for n in range(4)
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "deep")
    for bits, mean in ((None, 127.5), (10, 127.5), (12, 32)):
        shown = opened(tmp_path / "deep", bit_depth=bits).prompts[0].load()[0]
        assert shown.mean() == pytest.approx(mean, abs=1)


def test_a_name_that_does_not_fit_the_folder_is_refused(captioned: Path, annotated: Path, tmp_path: Path) -> None:
    for folder, name, message in (
        (captioned, "dam", r"dataset_name is 'dam', .*Grasp-Any-Region.*--dataset_name gar"),
        (annotated, "gar", r"annotated.*: dataset_name is 'gar'"),
        (captioned, "annotations", r"dataset_name is 'annotations', .*Grasp-Any-Region"),
        (tmp_path / "nowhere", "auto", "nowhere: no such folder"),
        (tmp_path, "auto", r"no known data format \(it is empty\)"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(folder, dataset_name=name)


@pytest.mark.parametrize("name", ["captioned", "annotated"])
def test_no_group_is_in_two_splits(name: str, request: pytest.FixtureRequest) -> None:
    inputs = opened(request.getfixturevalue(name))
    picked = {split: inputs.pick(split) for split in SPLITS}
    groups = [{item.group_id for item in items} for items in picked.values()]
    assert sum(map(len, groups)) == len(set.union(*groups))
    assert sum(map(len, picked.values())) == len(inputs.prompts)
    both = inputs.pick("reward", "policy")
    assert both == picked["reward"] + picked["policy"]
    images = [{pixels_digest(item.load()[0]) for item in items} for items in picked.values()]
    assert sum(map(len, images)) == len(set.union(*images)), "so no image is either"


@pytest.mark.parametrize("name", ["captioned", "annotated"])
def test_a_split_file_is_used_again(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(name)
    first, other = opened(folder, split_seed=0), opened(folder, split_seed=1)
    assert first.split.groups != other.split.groups
    save_split(other.split, tmp_path / "split.json")
    again = open_grpo_inputs(RunConfig(data_root=folder), split_file=tmp_path / "split.json")
    assert again.split == other.split
    assert opened(folder, seed=5).split == first.split, "the seed of training moves nobody"


def test_a_split_of_other_data_and_one_without_items_are_refused(
    captioned: Path, annotated: Path, tmp_path: Path
) -> None:
    save_split(opened(annotated).split, tmp_path / "split.json")
    with pytest.raises(ValueError, match=r"split\.json: group\(s\) .* no split"):
        open_grpo_inputs(RunConfig(data_root=captioned), split_file=tmp_path / "split.json")
    inputs = opened(captioned)
    test_groups = inputs.split.groups["test"]
    empty = replace(inputs, prompts=[prompt for prompt in inputs.prompts if prompt.group_id not in test_groups])
    with pytest.raises(ValueError, match="scenes: no item in the split test"):
        empty.pick("test")
    assert empty.pick("test", "val") == empty.pick("val")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_dynamic_patch": 0}, "max_dynamic_patch is 0, expected 1 or more"),
        ({"max_regions": 3}, "max_regions is 3, expected 4 or more"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
        ({"split_seed": -1}, "split_seed is -1, expected 0 or more"),
        ({"gpu": 2}, "gpu is 2, expected 0 or -1; .* CUDA_VISIBLE_DEVICES=2"),
    ],
)
def test_settings_nothing_can_be_done_with(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        opened(Path("nowhere"), **changed)


def test_the_default_scenes_are_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "SCENES", 5)
    first = open_grpo_inputs(RunConfig(data_root=DEFAULT_REGIONS))
    told = "rendered scenes (embedded data), in the layout of Grasp-Any-Region, 1 shard, 5 images"
    assert first.summary.startswith(told)
    written = (DEFAULT_REGIONS / "recipe.json").stat().st_mtime_ns
    assert open_grpo_inputs(RunConfig(data_root=DEFAULT_REGIONS)).split == first.split
    assert (DEFAULT_REGIONS / "recipe.json").stat().st_mtime_ns == written


def item(number: int, message: str | None = None) -> TrainingItem:
    def load() -> tuple[np.ndarray, None]:
        if message:
            raise ValueError(f"{number}.png: {message}")
        return np.zeros((2, 2, 3), np.uint8), None

    return TrainingItem("g", "s", str(number), "", "?", False, load)


def test_damaged_files_are_found_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check_prompts([item(number) for number in range(5)])
    with pytest.raises(ValueError, match=r"^3\.png: cannot be decoded$"):
        check_prompts([item(number, "cannot be decoded" if number == 3 else None) for number in range(5)])
    several = [item(number, "cannot be decoded" if number % 2 else None) for number in range(6)]
    with pytest.raises(ValueError, match=r"^1\.png: .*2 more of 6"):
        check_prompts(several)
    monkeypatch.setattr(inputs_file, "CHECKED", 3)
    check_prompts(several)  # every second one is looked at


def test_a_region_prompt_is_refused_where_it_has_no_effect(captioned: Path, annotated: Path) -> None:
    with pytest.raises(ValueError, match=r"--region_prompt is for other data, but .* annotated images; leave it out"):
        opened(annotated, region_prompt="crop")
    processor = Sa2VAProcessor.from_pretrained("sa2va-nano")
    with pytest.raises(ValueError, match="region_prompt is 'crop', but this model is shown regions by its text"):
        opened(captioned, region_prompt="crop").set_up(processor)
    opened(captioned).set_up(processor)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    folder = tmp_path_factory.mktemp("world")
    data, new = write_tiny_data(folder / "data", images=6, size=64), write_new_patients(folder / "new")
    return open_grpo_inputs(RunConfig(data_root=data, unlabelled_root=new, output_dir=folder / "out", gpu=-1))


@pytest.fixture(scope="module")
def network() -> RewardNetwork:
    return network_of(RewardNetworkConfig(channels=(4, 8), members=2, packing=2))


@pytest.fixture(scope="module")
def plan(network: RewardNetwork) -> GRPOPlan:
    plan = replace(PLAN, weights=RewardWeights(0.0, 0.0, 0.0, 0.0, 1.0), reward_net=network.fingerprint)
    return changed(plan, mask_to_caption_weight=0.0, pathwise_weight=1.0, **ONE_STEP)


@pytest.fixture(scope="module")
def run(inputs: GRPOInputs, network: RewardNetwork, plan: GRPOPlan) -> Path:
    run = inputs.config.output_dir / "sa2va_grpo_1"
    masks = {mask: mask.read_bytes() for mask in (inputs.config.unlabelled_root or Path()).glob("masks/*.png")}
    for mask in masks:
        mask.write_bytes(b"no picture")  # training never reads them
    train(inputs, plan, run, network=network)
    for mask, content in masks.items():
        mask.write_bytes(content)
    return run


def test_they_join_the_training_prompts_without_masks(
    inputs: GRPOInputs, network: RewardNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = inputs.pick("policy")
    own, new = prompts[:-6], prompts[-6:]
    assert {prompt.group_id for prompt in own} == set(inputs.split.groups["policy"])
    assert inputs.pick("reward", "policy")[-6:] == new
    for prompt in new:
        image, truth = prompt.load()
        assert (image.shape, truth, prompt.labelled) == ((64, 64, 3), None, False)
    assert len({prompt.sample_id for prompt in inputs.prompts}) == len(inputs.prompts)
    joined = "6 unlabelled images of 6 groups; patients: reward 2, policy 2, val 1, test 1"
    assert inputs.summary == f"6 annotated images, 6 with a mask; {joined}"
    maps = ForegroundMaps(network)
    with monkeypatch.context() as patch:
        patch.setattr(RewardNetwork, "outside", lambda *_: None)
        found, check = judged_prompts(prompts, maps)
    assert found == prompts
    assert (check and (check.images, check.outside)) == (len(prompts), 0)
    dark = [prompt.load()[0].mean() for prompt in prompts]
    monkeypatch.setattr(RewardNetwork, "outside", lambda _, image, maps: "dark" if image.mean() in dark[1:] else None)
    left, check = judged_prompts(prompts, ForegroundMaps(network))
    assert left == own[:1], "images of the data, too"
    said = f"{len(own) + 5} of {len(own) + 6} images have no learned reward and are left out"
    assert str(check and check.sentence).startswith(said)
    left, _ = judged_prompts(prompts, ForegroundMaps(network), by_labels=True)
    assert left == own, "true masks need no network"
    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: "dark")
    with pytest.raises(ValueError, match=r"no training image is left: .*dark"):
        judged_prompts(prompts, ForegroundMaps(network))
    assert judged_prompts(prompts, None) == (prompts, None), "without a reward network nothing leaves any out"


def test_a_merged_model_is_measured_on_nothing_that_trained_it(inputs: GRPOInputs, run: Path, tmp_path: Path) -> None:
    merge_run(run / "final_model", tmp_path / "merged")
    config = replace(inputs.config, model_path=str(tmp_path / "merged"), unlabelled_root=None, output_dir=tmp_path)
    assert open_grpo_inputs(config).split == inputs.split, "the same split"
    renamed = tmp_path / "renamed"
    shutil.copytree(config.data_root, renamed)
    records = json.loads((renamed / "annotations.json").read_text())
    annotated = [sample for sample in inputs.samples if not sample.joined]
    for number, sample in enumerate(annotated):
        records[number]["image"] = f"P0099({990000 + number:010d})_1_frame_000001.jpg"
        Image.fromarray(sample.load_image()[:, ::-1]).save(renamed / "images" / records[number]["image"], quality=90)
    (renamed / "annotations.json").write_text(json.dumps(records))
    trained = {prompt.group_id for prompt in inputs.pick("policy")}
    for data in (config.data_root, renamed):
        samples = read_samples(data)
        known = {new.group_id for new, old in zip(samples, annotated, strict=True) if old.group_id in trained}
        seed = next(n for n in range(99) if known & set(make_split(samples, n).groups["test"]))
        for opened_by in (open_grpo_inputs, open_inputs):
            with pytest.raises(ValueError, match=r"merged: the model was trained on .* images of the (val|test) split"):
                opened_by(replace(config, data_root=data, split_seed=seed))


def test_images_whose_masks_a_model_has_not_learned_may_judge_it(
    inputs: GRPOInputs, run: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    known = load_arrays(run / PICTURES, "")
    bare = [sample for sample in inputs.samples if sample.joined]
    labelled = [
        sample for sample in inputs.samples if sample.labelled and sample.group_id in inputs.split.groups["policy"]
    ]
    assert among(thumbnails(bare), known["unlabelled"]).all()
    assert not among(thumbnails(labelled), known["unlabelled"]).any()
    with pytest.raises(ValueError, match=r"was trained on .* images of the judges"):
        check_model_apart(str(run), {"the judges": labelled}, "")
    assert not recwarn.list
    with pytest.warns(UserWarning, match=f"without masks, on {len(bare)} of the {len(bare)} images of the judges"):
        check_model_apart(str(run), {"the judges": bare}, "")


def test_a_resumed_run_has_the_same_unlabelled_images(inputs: GRPOInputs, run: Path, plan: GRPOPlan) -> None:
    config = read_json(run / "config.json")
    fingerprint = config["settings"]["model_fingerprint"]
    Run(run, GRPO_RUN).check_same(wanted_settings(inputs, plan, fingerprint))
    without = wanted_settings(replace(inputs, unlabelled=None), plan, fingerprint)
    with pytest.raises(ValueError, match=r"--resume: it began with other settings .*unlabelled"):
        Run(run, GRPO_RUN).check_same(without)
    old = {**config, "settings": {name: value for name, value in config["settings"].items() if name != "unlabelled"}}
    write_json(run / "config.json", old)
    Run(run, GRPO_RUN).check_same(without)
    write_json(run / "config.json", config)


@pytest.mark.parametrize(
    ("settings", "rewards", "message"),
    [
        (GRPOSettings(objective="supervised"), {}, "--unlabelled_root .*--objective supervised"),
        (GRPOSettings(), {"loop2_iou_weight": 1.0, "reward_net": Path()}, "--unlabelled_root .*--loop2_iou_weight"),
        (GRPOSettings(), {"loop2_mask_rewards": {"dice": 1.0}}, "--unlabelled_root .*--loop2_mask_rewards"),
        (GRPOSettings(), {}, "--unlabelled_root needs .*--reward_net"),
        (GRPOSettings(objective="mean_teacher"), {}, ""),
        (GRPOSettings(), {"loop2_iou_weight": 0.0, "loop2_mask_rewards": {"single_tree": 1.0}}, ""),
    ],
)
def test_what_needs_masks_is_refused_early(tmp_path: Path, settings: Any, rewards: Any, message: str) -> None:
    config = RunConfig(data_root=tmp_path, unlabelled_root=tmp_path, gpu=-1)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        grpo.check(grpo.Args("quick", config, grpo=settings, rewards=RewardArgs(**rewards)))
