"""Segmenting new images: one, many, a folder; where the masks go, what is never written over, what is printed."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json, weights_fingerprint
from rl_reward_network.cli import segment
from rl_reward_network.cli.app import run
from rl_reward_network.data.images import load_grid
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.domain import STATISTICS, Domain
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.segment import maker
from rl_reward_network.segment.files import image_files, prompt_of, targets
from rl_reward_network.segment.results import LINE, segment_image, soft_dice
from tests.conftest import tube_image

NAMES = ["a.png", "b.jpg", "c.TIF"]
WRITTEN = "written: 3 masks and overlays, results.csv and contact_sheet.png in"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with three images, of 40 x 50 pixels, and a file that is none."""
    folder = tmp_path / "images"
    folder.mkdir()
    for seed, name in enumerate(NAMES):
        Image.fromarray(tube_image(50, seed)[0][:40]).save(folder / name)
    (folder / "notes.txt").write_text("not an image")
    return folder


def segmented(capsys: pytest.CaptureFixture[str], *images: Path, **flags: Any) -> list[str]:
    segment.main(segment.Args(images, device="cpu", **flags))
    return capsys.readouterr().out.strip().splitlines()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_segmented_with_one_model_load(images, tmp_path, capsys, monkeypatch):
    loads: list[str] = []
    monkeypatch.setattr(
        maker, "load_sa2va_model", lambda *args, **how: loads.append("once") or load_sa2va_model(*args, **how)
    )
    lines = segmented(capsys, images, output=tmp_path / "out")
    assert loads == ["once"]
    assert names(tmp_path / "out") == sorted(
        [*(f"{n[0]}_{kind}.png" for n in NAMES for kind in ("mask", "overlay")), "contact_sheet.png", "results.csv"]
    )
    assert names(images) == [*NAMES, "notes.txt"]
    assert lines[-1] == f"{WRITTEN} {tmp_path / 'out'}"
    rows = [line.split() for line in lines if line.split() and line.split()[0] in NAMES]
    model, processor = load_sa2va_model("sa2va-nano")
    for name, row in zip(NAMES, rows, strict=True):
        image = np.asarray(Image.open(images / name).convert("RGB"))
        soft = model.segment([image], [PROMPTS[0]], processor)[0][0].probabilities().max(axis=0)
        mask = soft > 0.5
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out" / f"{name[0]}_mask.png")), 255 * mask)
        assert row == [name, f"{mask.mean():.1%}", "1", f"{soft_dice(soft, mask):.3f}"]


def test_masks_of_two_prompts_have_different_names(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = images / "a.png"
    default = segmented(capsys, image)
    before = (images / "a_mask.png").read_bytes()
    other = segmented(capsys, image, prompt="Please segment the catheter!")
    assert default[-1] == f"written: {images / 'a_mask.png'} {images / 'a_overlay.png'}"
    assert other[-1].startswith(f"written: {images / 'a_please-segment-the-catheter_mask.png'} ")
    assert other[1] == "prompt: Please segment the catheter!"
    assert (images / "a_mask.png").read_bytes() == before
    assert prompt_of(images / "a_please-segment-the-catheter_mask.png") == "Please segment the catheter!"
    for _ in range(2):  # masks beside the images are not taken for images, and written again
        assert segmented(capsys, images)[-1] == f"{WRITTEN} {images}"
        assert len(names(images)) == 4 + 8 + len(("contact_sheet.png", "results.csv"))


def test_output_names_the_mask_of_a_single_image(images, tmp_path, capsys):
    mask = tmp_path / "deep" / "mine.png"
    last = segmented(capsys, images / "a.png", output=mask)[-1]
    assert last == f"written: {mask} {mask.with_name('mine_overlay.png')}"
    with pytest.raises(ValueError, match=r"mine\.png: .*another prompt, 'Please segment the bl"):
        segmented(capsys, images / "a.png", output=mask, prompt="The catheter.")
    assert prompt_of(mask) == PROMPTS[0]


def test_a_reward_network_predicts_how_good_the_masks_are(images, tmp_path, capsys):
    config = RewardNetworkConfig(channels=(4, 4), packing=2, members=2)
    RewardNetwork(config).save_pretrained(tmp_path / "bare")
    assert "no interval can be given" in "".join(segmented(capsys, images / "a.png", reward_net=tmp_path / "bare"))
    intervals = {"Sa2VA": DiceInterval(-1.0, 1.0, 0.1, 40)}
    of_nano = {"model_fingerprint": f"{weights_fingerprint(load_sa2va_model('sa2va-nano')[0])} and settings"}
    RewardNetwork(replace(config, intervals=intervals), of_nano).save_pretrained(tmp_path / "net")
    (line,) = (x for x in segmented(capsys, images / "a.png", reward_net=tmp_path / "net") if x.startswith("predicted"))
    dice, low, high, score = (float(x.strip("[],")) for x in line.split(": ")[1].split() if x != "score")
    assert 0 <= low <= dice <= high <= 1
    assert 0 <= score <= 1
    RewardNetwork(replace(config, intervals=intervals), {"model_fingerprint": "x"}).save_pretrained(tmp_path / "other")
    lines = "".join(segmented(capsys, images / "a.png", reward_net=tmp_path / "other"))
    assert all(words in lines for words in ("intervals are left out", "(no interval can be given)")), "of another model"
    many = segmented(capsys, images, reward_net=tmp_path / "net")
    assert any("predicted Dice [90 %]" in row for row in many)
    assert sum(f"{dice:.3f} [{low:.3f}, {high:.3f}], score {score:.3f}" in row for row in many) == 1


def test_outside_the_networks_domain_there_is_a_sentence_and_no_number(images, tmp_path, capsys):
    limits = dict.fromkeys(STATISTICS, (0.0, 1e9)) | {"brightness": (2.0, 3.0)}
    domain = Domain((32, 512), limits, 0.0, empty=False, images=12)
    config = RewardNetworkConfig(channels=(4,), packing=2, domain=domain)
    RewardNetwork(config).save_pretrained(tmp_path / "net")
    (line,) = (x for x in segmented(capsys, images / "a.png", reward_net=tmp_path / "net") if x.startswith("predicted"))
    start = "predicted Dice [90 %]: none, outside the reward network's domain: the mean grey level"
    assert line.startswith(start)
    assert line.endswith("and it can judge 2 to 3")


def test_a_policy_that_tries_prompts_needs_one_pass_of_the_u_nets(images, tmp_path, monkeypatch):
    """The scores of the tried prompts and the predicted quality of the last mask share the maps of the image."""
    RewardNetwork(RewardNetworkConfig(channels=(4, 4), members=2)).save_pretrained(tmp_path / "net")
    loaded = maker.load_mask_maker(None, PROMPTS[0], reward_net=tmp_path / "net", device="cpu")
    make, scores, passes = replace(loaded, policy=object(), trained={"prompts": PROMPTS}), [], []
    real = RewardNetwork.foreground_probs
    monkeypatch.setattr(RewardNetwork, "foreground_probs", lambda self, image: passes.append(1) or real(self, image))

    def try_three(policy: object, trained: object, image: object, pooled: object, score: Callable[[int], float]) -> int:
        scores.extend(score(index) for index in (0, 1, 2))
        return 1

    monkeypatch.setattr(maker, "deployed_prompt", try_three)
    done = segment_image(make, targets([images / "a.png"], tmp_path / "out", None)[0], None, 0.5, False)
    assert (done.prompt, len(scores), len(passes)) == (PROMPTS[1], 3, 1)
    assert done.predicted is not None
    assert done.predicted.score == pytest.approx(scores[1])


def test_bad_files_are_refused_before_the_model_is_loaded(images, tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(maker, "load_sa2va_model")
    (tmp_path / "empty").mkdir()
    for named, message in (
        ((), "no image"),
        ((tmp_path / "nofile.png",), r"nofile\.png: no such file"),
        ((images / "a.png", images / "notes.txt"), r"notes\.txt: not a readable image"),
        ((tmp_path / "empty",), r"empty: .*no image"),
    ):
        with pytest.raises(ValueError, match=message):
            segmented(capsys, *named)
    before = names(images)
    (images / "b_mask.png").write_bytes((images / "a.png").read_bytes())
    with pytest.raises(ValueError, match=r"b_mask\.png: .*already"):
        segmented(capsys, images / "a.png", images / "b.jpg")
    assert names(images) == sorted([*before, "b_mask.png"])
    there = [path for path in sorted(images.glob("[abc]*")) if path.name != "b_mask.png"]
    assert image_files([images / "c.TIF", images]) == [images / "c.TIF", *there], "a mask is no image"
    assert image_files([images.parent]) == there, "also in folders below"


@pytest.mark.parametrize("flag", ["--output", "--output_dir", "--output-dir"])
def test_the_command_line(images, tmp_path, capsys, monkeypatch, flag):
    parsed: list[segment.Args] = []
    words = [str(images / "a.png"), str(images / "b.jpg"), flag, "out", "--run", "a_run"]
    run(parsed.append, segment.Args, words=words)
    assert parsed[0].model_path == "a_run"
    assert (parsed[0].images, parsed[0].output) == ((images / "a.png", images / "b.jpg"), Path("out"))


def test_all_classes_of_a_file_are_asked_for_in_each_image(images, tmp_path, capsys):
    file, out = tmp_path / "classes.json", tmp_path / "out"
    circle = {"name": "circle", "phrases": ["a red circle", "disc"], "held_out": "a round thing", "ids": "1"}
    square = {"name": "square", "phrases": ["the square"], "held_out": "a box", "ids": "2", "never_with": "circle"}
    file.write_text(json.dumps([circle, square]))
    lines = segmented(capsys, images, classes=file, output=out, format="coco")
    stems = [name[0] for name in NAMES]
    shown = [[load_grid(out / f"{stem}_{name}_mask.png").any() for name in ("circle", "square")] for stem in stems]
    assert all(sum(of_image) <= 1 for of_image in shown), "no image shows both"
    assert any(map(any, shown))
    for stem in stems:
        assert Image.open(out / f"{stem}_classes.png").height == 40 + 2 * LINE, "a line for each class"
    assert prompt_of(out / "a_circle_mask.png") == "Please segment the red circle."
    found = read_json(out / "predictions_coco.json")
    assert [one["name"] for one in found["categories"]] == ["circle", "square"]
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["confidence"] == "" for row in rows] == [not there for of_image in shown for there in of_image]
    assert len(found["images"]) == 3
    assert len(found["annotations"]) == sum(map(sum, shown))
    assert not any("empty mask" in line for line in lines), "an absent object is an answer"
    again = segmented(capsys, images, classes=file, output=out)
    assert again[-1].startswith("written: 6 masks"), "its own files are replaced"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"--classes .*classes\.json: no such file; give the classes\.json of the data that trained the model"),
        ({"prompt": "Where?"}, "--classes and --prompt: the file says what is asked"),
        ({"reward_net": Path("net")}, "--classes and --reward_net: the file says what is asked"),
        ({"format": "nnunet"}, "--classes: an image has several masks; give a folder as --output"),
        ({"output": Path("mask.png")}, "--classes: an image has several masks; give a folder as --output"),
        ({"video": True}, "--video and --classes"),
    ],
)
def test_what_does_not_fit_classes_is_refused(images, tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        segment.main(segment.Args((images,), classes=tmp_path / "classes.json", **flags))


def test_classes_with_files_of_one_name_are_refused(images, tmp_path):
    one = {"name": "left box", "phrases": ["the box"], "held_out": "any box"}
    other = {"name": "left-box", "phrases": ["the case"], "held_out": "any case"}
    (tmp_path / "classes.json").write_text(json.dumps([one, other]))
    with pytest.raises(
        ValueError, match=r"would have the same name, .*a_left-box_mask.png; .* of two classes rename one"
    ):
        segment.main(segment.Args((images,), classes=tmp_path / "classes.json", output=tmp_path / "out"))
