"""Images of `--unlabelled_root` that join the training split: which they are, and which are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample, pseudonym
from rl_reward_network.data.splits import Split, make_split, select
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import join_unlabelled, unlabelled_summary
from tests.conftest import SHARED, tube_image, write_tiny_data

pytestmark = pytest.mark.filterwarnings("ignore:.*unlabelled images name no patient")

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
    return f"P{patient:04d}({patient:010d})_2_frame_000001.png"


def joined(root: Path, data: Data, **settings: Any) -> list[Sample]:
    config = RunConfig(data_root=data[0][0].image_path.parents[1], unlabelled_root=root, **settings)
    samples, split, fingerprint = join_unlabelled(config, *data)
    new = samples[len(data[0]) :]
    assert samples[: len(data[0])] == data[0]
    assert all(one.joined and not one.labelled for one in new)
    assert select(new, split, "policy") == new
    assert split == data[1], "what is saved is the split of the data"
    assert fingerprint is not None
    return new


def test_images_of_a_plain_folder_are_groups_of_their_own(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["a.png", "deeper/a.png", "b.JPG", ".hidden.png"])
    (root / "notes.txt").write_text("no image")
    samples = joined(root, data)
    assert sorted(sample.image_path.relative_to(root).as_posix() for sample in samples) == [
        *("a.png", "b.JPG", "deeper/a.png")
    ]
    assert len({sample.group_id for sample in samples}) == len({sample.sample_id for sample in samples}) == 3
    assert {sample.text for sample in samples} == {"blood vessel"}
    assert samples[0].load_image().shape == (48, 48, 3)
    assert unlabelled_summary(samples) == "3 unlabelled images of 3 groups"
    assert join_unlabelled(RunConfig(), *data) == (*data, None)


def test_masks_of_a_data_folder_are_not_read_and_change_nothing(data: Data, tmp_path: Path) -> None:
    root = write_tiny_data(tmp_path / "new", images=3, size=48)
    for number, path in enumerate(sorted((root / "images").iterdir())):
        Image.fromarray(tube_image(48, 100 + number)[0]).save(path.with_name(named_as(100 + number)))
        path.unlink()
    text = (root / "annotations.json").read_text()
    for number in range(3):
        text = text.replace(f"P{number:04d}({number:010d})_1_", f"P{100 + number:04d}({100 + number:010d})_2_")
    (root / "annotations.json").write_text(text)
    config = RunConfig(data_root=data[0][0].image_path.parents[1], unlabelled_root=root)
    first = join_unlabelled(config, *data)
    assert len(first[0]) == len(data[0]) + 3
    (root / "masks/1.png").write_bytes((root / "masks/2.png").read_bytes())
    assert join_unlabelled(config, *data)[2] == first[2]
    Image.fromarray(tube_image(48, 200)[0]).save(root / "images" / named_as(101))
    assert join_unlabelled(config, *data)[2] != first[2]


@pytest.mark.parametrize("split", ["reward", "val", "test"])
def test_patients_of_other_splits_are_refused_with_their_number(data: Data, tmp_path: Path, split: str) -> None:
    numbers = [n for n in range(8) if pseudonym("group", f"{n:010d}") in data[1].groups[split]]
    root = write_plain(tmp_path / "new", [*map(named_as, numbers), "other.png"])
    message = rf"--unlabelled_root: {len(numbers)} of its {len(numbers) + 1} groups are in the {split} split"
    with pytest.raises(ValueError, match=message):
        joined(root, data)
    spelled = write_plain(tmp_path / "spelled", [f"x-{numbers[0]}.png", f"x-00{numbers[0]}b.png"])
    with pytest.raises(ValueError, match=f"1 of its 2 groups are in the {split} split"):
        joined(spelled, data, group_regex=r"^x-(?P<group>.+)\.png")


def test_groups_are_found_in_names_and_an_image_named_as_one_of_the_data_has_its_own_id(data, tmp_path):
    root = write_plain(tmp_path / "new", ["x-1.png", "x-2.png", "y-1.png"])
    samples = joined(root, data, group_regex=r"^(?P<group>[a-z])-")
    assert [sample.group_id for sample in samples] == [pseudonym("group", name) for name in "xxy"]
    policy = next(s for s in data[0] if s.group_id in data[1].groups["policy"])
    (sample,) = joined(write_plain(tmp_path / "same", [policy.image_path.name]), data)
    assert sample.group_id == policy.group_id
    assert sample.sample_id != policy.sample_id


def test_folders_show_patients_and_files_of_one_name_in_two_sets_are_no_patient(data: Data, tmp_path: Path) -> None:
    samples = joined(write_plain(tmp_path / "new", ["Patient 1/a.png", "Patient_01/b.png", "c.png"]), data)
    assert samples[0].group_id == samples[1].group_id == pseudonym("group", "Patient 1") != samples[2].group_id
    root = write_plain(tmp_path / "own/images", ["c.png"], 200).parent
    (root / "annotations.json").write_text('[{"image": "c.png", "text": "blood vessel"}]')
    (sample,) = joined(root, data)
    assert sample.group_id == pseudonym("group", "unlabelled image c.png")


def test_copies_in_another_format_mirrored_or_scaled_are_refused(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["other.png"])
    copies = (("reward", "bmp"), ("policy", "tiff"), ("val", "jpg"), ("test", "png"))
    for number, (name, suffix) in enumerate(copies):
        sample = next(sample for sample in data[0] if sample.group_id in data[1].groups[name])
        copy = Image.open(sample.image_path)
        if number % 2:
            copy = copy.transpose(Image.Transpose.ROTATE_270).resize((96, 96))
        copy.save(root / f"{name}.{suffix}", quality=90)
    with pytest.raises(ValueError, match=r"3 images are also in the reward and val and test split .*reward\.bmp"):
        joined(root, data)


def test_images_without_names_of_patients_are_said_to_be_so(data: Data, tmp_path: Path) -> None:
    root = write_plain(tmp_path / "new", ["a.png", "b_png.rf.01ab.jpg", "c/b_png.rf.77Cd.jpg", named_as(99)])
    with pytest.warns(UserWarning, match="3 of 4 unlabelled images name no patient: other images of test patients"):
        samples = joined(root, data)
    assert unlabelled_summary(samples) == "4 unlabelled images of 3 groups", "versions of one picture share a group"


def test_exports_of_test_images_as_jpeg_are_refused() -> None:
    case = SHARED / "cases" / "unlabelled-jpeg-copies" / "input"
    if not case.is_dir():
        pytest.skip(f"{case} is missing: cases lie beside the repository")
    samples = read_annotations(case / "labelled")
    with pytest.raises(ValueError, match="9 images are also in the reward and val and test split of the data"):
        joined(case / "unlabelled", (samples, make_split(samples, 0)))


def test_what_cannot_be_read_is_named(data: Data, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    save_mask(tmp_path / "drawn/masks/a.png")
    root = write_plain(tmp_path / "flat", ["frames/a.png", "frames/b.png"])
    for name in ("truth/a.png", "SegmentationClass/b.png", "frames/b_mask.png"):
        save_mask(root / name)
    other = [replace(sample, text="airway") for sample in data[0]]
    for folder, samples, message in (
        ("nowhere", data[0], "nowhere: no such folder; --unlabelled_root"),
        ("empty", data[0], "empty: --unlabelled_root: no images here"),
        ("drawn", data[0], r"no images here \(1 pictures are masks by their folder or name\)"),
        ("flat", data[0], "1 of its 3 images hold a few flat colours, as masks do; leave them out"),
        (write_tiny_data(tmp_path / "new", images=1, size=48), other, "other phrases than the data"),
    ):
        with pytest.raises(ValueError, match=message):
            joined(tmp_path / folder, (samples, data[1]))
    (root / "truth/a.png").unlink()
    assert [sample.image_path.name for sample in joined(root, data)] == ["a.png", "b.png"], "masks beside images"


def save_mask(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((tube_image(48, 1)[1] > 0).astype(np.uint8) * 255).save(path)


def test_deep_grey_has_the_window_of_this_folder(data: Data, tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    Image.fromarray(np.linspace(0, 1000, 48 * 48).reshape(48, 48).astype(np.uint16)).save(root / "a.png")
    (sample,) = joined(root, data)
    assert 990 <= sample.grey.white <= 1000
    (given,) = joined(root, data, bit_depth=12)
    assert given.grey.white == 4095
