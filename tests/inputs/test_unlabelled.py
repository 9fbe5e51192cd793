"""Folders of images without masks: which are read, what tells patients apart, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample, pseudonym
from rl_reward_network.data.splits import Split, make_split
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.unlabelled import open_unlabelled, unlabelled_of
from tests.conftest import SHARED, tube_image, write_tiny_data

Data = tuple[list[Sample], Split]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    samples = read_annotations(write_tiny_data(tmp_path_factory.mktemp("data") / "labelled", images=8, size=48))
    return samples, make_split(samples, 0)


def write_plain(folder: Path, names: list[str], first: int = 100) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tube_image(48, first + number)[0]).save(folder / name)
    return folder


def named_as(patient: int) -> str:
    """A file name as `write_tiny_data` gives it."""
    return f"P{patient:04d}({patient:010d})_2_frame_000001.png"


def test_images_of_a_plain_folder_are_groups_of_their_own(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["a.png", "deeper/a.png", "b.JPG", ".hidden.png"])
    (root / "notes.txt").write_text("no image")
    unlabelled = open_unlabelled(root, *data)
    samples = unlabelled.for_training
    assert sorted(sample.image_path.relative_to(root).as_posix() for sample in samples) == [
        *("a.png", "b.JPG", "deeper/a.png")
    ]
    assert len({sample.group_id for sample in samples}) == len({sample.sample_id for sample in samples}) == 3
    assert {sample.text for sample in samples} == {"blood vessel"}
    assert [sample.load_mask() for sample in samples] == [None] * 3
    assert samples[0].load_image().shape == (48, 48, 3)
    assert unlabelled.summary == "3 unlabelled images of 3 groups"


def test_masks_are_read_by_evaluations_alone(data: Data, tmp_path: Path) -> None:
    root = write_tiny_data(tmp_path / "new", images=20, size=48)
    records = json.loads((root / "annotations.json").read_text())[10:]
    (root / "annotations.json").write_text(json.dumps(records))
    for record in records:
        Image.fromarray(tube_image(48, 100 + len(record["image"]) + int(record["mask_png"][6:-4]))[0]).save(
            root / "images" / record["image"]
        )
    unlabelled = open_unlabelled(root, *data)
    assert all(not sample.labelled for sample in unlabelled.for_training)
    truths = [sample.load_mask() for sample in unlabelled.samples]
    assert all(truth is not None and truth.any() for truth in truths)
    assert unlabelled.summary.endswith("10 of them with a mask that training does not read")
    (root / "masks" / "12.png").write_bytes((root / "masks" / "13.png").read_bytes())
    assert open_unlabelled(root, *data).fingerprint == unlabelled.fingerprint
    Image.fromarray(np.zeros((48, 48), np.uint8)).save(root / "images" / records[0]["image"])
    assert open_unlabelled(root, *data).fingerprint != unlabelled.fingerprint


@pytest.mark.parametrize("split", ["reward", "val", "test"])
def test_patients_of_other_splits_are_refused_with_their_number(data: Data, tmp_path: Path, split: str) -> None:
    numbers = [n for n in range(8) if pseudonym("group", f"{n:010d}") in data[1].groups[split]]
    root = write_plain(tmp_path / "new", [*map(named_as, numbers), "other.png"])
    message = rf"--unlabelled_root: {len(numbers)} of its {len(numbers) + 1} groups are in the {split} split"
    with pytest.raises(ValueError, match=message):
        open_unlabelled(root, *data)
    spelled = write_plain(tmp_path / "spelled", [f"x-{numbers[0]}.png", f"x-00{numbers[0]}b.png"])
    with pytest.raises(ValueError, match=f"1 of its 2 groups are in the {split} split"):
        open_unlabelled(spelled, *data, group_regex=r"^x-(?P<group>.+)\.png")


def test_groups_are_found_in_names_and_an_image_named_as_one_of_the_data_has_its_own_id(
    data: Data, tmp_path: Path
) -> None:
    root = write_plain(tmp_path / "new", ["x-1.png", "x-2.png", "y-1.png"])
    samples = open_unlabelled(root, *data, group_regex=r"^(?P<group>[a-z])-").samples
    assert [sample.group_id for sample in samples] == [pseudonym("group", name) for name in "xxy"]
    policy = next(s for s in data[0] if s.group_id in data[1].groups["policy"])
    (sample,) = open_unlabelled(write_plain(tmp_path / "same", [policy.image_path.name]), *data).samples
    assert sample.group_id == policy.group_id
    assert sample.sample_id != policy.sample_id


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tiff", ".jpg"])
def test_copies_of_test_images_are_refused_in_any_format(data: Data, tmp_path: Path, suffix: str) -> None:
    root = write_plain(tmp_path / "new", ["other.png"])
    tests = [sample for sample in data[0] if sample.group_id in data[1].groups["test"]]
    Image.open(tests[0].image_path).save(root / f"renamed{suffix}")
    with pytest.raises(
        ValueError, match=rf"1 images are also in the test split .*\(renamed\{suffix}\); leave them out"
    ):
        open_unlabelled(root, *data)


def test_mirrored_and_scaled_copies_are_counted_over_all_splits(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["other.png"])
    for name in ("reward", "policy", "val", "test"):
        sample = next(sample for sample in data[0] if sample.group_id in data[1].groups[name])
        turned = Image.open(sample.image_path).transpose(Image.Transpose.ROTATE_270)
        turned.resize((96, 96)).save(root / f"{name}.jpg", quality=90)
    with pytest.raises(ValueError, match=r"3 images are also in the reward and val and test split"):
        open_unlabelled(root, *data)


def test_images_without_names_of_patients_are_said_to_be_so(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["a.png", "b_png.rf.01ab.jpg", "c/b_png.rf.77Cd.jpg", named_as(99)])
    unlabelled = open_unlabelled(root, *data)
    assert unlabelled.note.startswith("3 of 4 unlabelled images name no patient: other images of test patients may be")
    assert unlabelled.summary == "4 unlabelled images of 3 groups", "versions of one picture share a group"
    (root / "a.png").unlink()
    assert open_unlabelled(root, *data, group_regex=r"(?P<group>b_png|P\d+)").note == ""
    config = RunConfig(data_root=data[0][0].image_path.parents[1], unlabelled_root=root, output_dir=tmp_path)
    with pytest.warns(UserWarning, match="2 of 3 unlabelled images name no patient"):
        unlabelled_of(config, *data)


def test_exports_of_test_images_as_jpeg_are_refused() -> None:
    case = SHARED / "cases" / "unlabelled-jpeg-copies" / "input"
    if not case.is_dir():
        pytest.skip(f"{case} is missing: cases lie beside the repository")
    samples = read_annotations(case / "labelled")
    with pytest.raises(ValueError, match="9 images are also in the reward and val and test split of the data"):
        open_unlabelled(case / "unlabelled", samples, make_split(samples, 0))


def test_what_cannot_be_read_is_named(data: Data, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_mask(tmp_path / "drawn/masks/a.png")
    other = [replace(sample, text="airway") for sample in data[0]]
    for root, samples, message in (
        ("nowhere", data[0], "nowhere: no such folder; --unlabelled_root"),
        ("empty", data[0], "empty: --unlabelled_root: no images here"),
        ("drawn", data[0], r"no images here \(1 pictures are masks by their folder or name\)"),
        (write_tiny_data(tmp_path / "new", images=1, size=48), other, "other phrases than the data"),
    ):
        with pytest.raises(ValueError, match=message):
            open_unlabelled(tmp_path / root, samples, data[1])


def save_mask(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((tube_image(48, 1)[1] > 0).astype(np.uint8) * 255).save(path)


def test_deep_grey_has_levels_of_this_folder(data: Data, tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    grey = np.linspace(0, 1000, 48 * 48).reshape(48, 48).astype(np.uint16)
    Image.fromarray(grey).save(root / "a.png")
    (sample,) = open_unlabelled(root, *data).samples
    assert sample.levels is not None
    assert 990 <= sample.levels.white <= 1000
    (given,) = open_unlabelled(root, *data, grey_levels={"data set": Levels(0, 4095)}).samples
    assert given.levels == (0, 4095)


def test_masks_beside_unlabelled_images_are_no_images(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["frames/a.png", "frames/b.png"])
    for name in ("truth/a.png", "SegmentationClass/b.png", "frames/b_mask.png"):
        save_mask(root / name)
    with pytest.raises(ValueError, match=r"1 of its 3 images hold a few flat colours, as masks do; leave them out"):
        open_unlabelled(root, *data)
    (root / "truth/a.png").unlink()
    assert [sample.image_path.name for sample in open_unlabelled(root, *data).samples] == ["a.png", "b.png"]
