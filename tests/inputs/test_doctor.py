"""What the doctor finds in data: what is described, what is noted as suspicious, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoint import write_random_checkpoint
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded import datasets as embedded
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.inputs import doctor
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.doctor import check_data
from tests.conftest import tube_image, write_deep_data, write_tiny_data

Check = Callable[..., str]
GREY = np.zeros((48, 48, 3), np.uint8)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The data check in a folder of its own, as the table of `sa2va-rl doctor` shows it: state, details, notes."""
    monkeypatch.chdir(tmp_path)

    def row(dataset_name: str = "auto", max_regions: int | None = None, **changes: Any) -> str:
        finding = check_data(RunConfig(**changes), RegionConfig(dataset_name, max_regions=max_regions))
        return " ".join(["look" if finding.notes else "OK", *finding.details.splitlines(), *finding.notes])

    return row


def rewrite(folder: Path, change: Callable[[int, dict[str, object]], dict[str, object]]) -> None:
    file = folder / "annotations.json"
    file.write_text(json.dumps([change(n, record) for n, record in enumerate(json.loads(file.read_text()))]))


def drawn(mask: np.ndarray) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda record: {**{k: v for k, v in record.items() if k != "mask_png"}, "mask": to_rle(mask)}


def test_good_data_are_described_without_a_note(check: Check) -> None:
    row = check(data_root=write_tiny_data(Path("data"), 8, 48))
    assert row.startswith("OK 8 annotated images, 8 with a mask; patients: reward 3, policy 2, val 1, test 2 ")
    assert "foreground: " in row
    assert "(8 masks)" in row
    assert "look:" not in row
    assert "grey above" not in row


@pytest.mark.filterwarnings("ignore:.*name no patient")
def test_unlabelled_images_are_told_and_decoded(check: Check) -> None:
    data, new = write_tiny_data(Path("data"), 8, 48), Path("new")
    new.mkdir()
    Image.fromarray(tube_image(48, 99)[0]).save(new / "a.png")
    row = check(data_root=data, unlabelled_root=new)
    assert "8 annotated images, 8 with a mask; 1 unlabelled images of 1 groups; patients: reward 3, policy 2" in row
    assert "look: 1 of 1 unlabelled images name no patient" in row
    assert "leave these" not in row
    Image.fromarray(tube_image(48, 98)[0]).save(new / "P0000(0000000000)_2_frame_000001.png")
    row = check(data_root=data, unlabelled_root=new)
    assert "1 of its 2 groups are in the" in row
    assert "split of the data; leave these patients out; improve does so by itself where they judge" in row
    (new / "b.png").write_bytes((new / "a.png").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"b\.png"):
        check(data_root=data, unlabelled_root=new)
    write_regions(Path("scenes"), 6, 3, 96)
    with pytest.raises(ValueError, match="--unlabelled_root is for images, but scenes holds captions"):
        check(data_root=Path("scenes"), unlabelled_root=new)


def test_the_grey_window_is_described(check: Check) -> None:
    data = write_deep_data(Path("data"), 14)
    row = check(data_root=data)
    assert row.startswith("OK ")
    assert "grey above 8 bit in 8 images: black is " in row
    assert ", white is 1" in row
    assert "(beyond each are 0.1 % of the pixels; --bit_depth sets them)" in row
    assert "black is 0, white is 16383 (--bit_depth 14)" in check(data_root=data, bit_depth=14)
    rewrite(data, lambda n, record: record | {"series": f"s{n % 2}"})
    assert "in 8 series (beyond each are 0.1 %" in check(data_root=data), "two names, but of eight patients"
    with pytest.raises(ValueError, match=r"bit_depth.*3"):
        check(data_root=data, bit_depth=3)


def test_empty_masks_are_noted(check: Check) -> None:
    data = write_tiny_data(Path("data"), 8, 48)
    empty = drawn(np.zeros((48, 48), bool))
    rewrite(data, lambda n, record: empty(record) if n == 0 else record)
    row = check(data_root=data)
    assert "look: 1 empty mask(s)" in row
    assert "(P0000(0000000000)_1_frame_000001.png)" in row
    assert "foreground: 0.0% to " in row


def test_a_picture_in_two_patients_is_noted_with_both_files(check: Check) -> None:
    data = write_tiny_data(Path("data"), 8, 48)
    names = sorted(path.name for path in (data / "images").iterdir())
    Image.open(data / "images" / names[1]).save(data / "images" / names[6], compress_level=0)
    row = check(data_root=data)
    assert "look: 1 picture(s)" in row
    assert f"({names[1]} = {names[6]})" in row
    assert "8 annotated images, 8 with a mask, 2 groups that share pictures, taken for 1; patients: " in row
    Image.open(data / "images" / names[1]).rotate(90).save(data / "images" / names[2])
    assert "look: 3 picture(s)" in check(data_root=data), "a turned copy, too"
    rewrite(data, lambda n, record: record | ({"group": "one"} if n in (1, 2, 6) else {}))
    assert check(data_root=data).startswith("OK "), "in one patient there is no leak"


def test_outlines_that_fill_loops_are_noted(check: Check) -> None:
    data = write_tiny_data(Path("data"), 8, 200)
    square = [60, 60, 140, 60, 140, 98, 195, 98, 195, 102, 140, 102, 140, 140, 60, 140, 60, 102, 5, 102, 5, 98, 60, 98]
    rewrite(data, lambda n, r: {**{k: v for k, v in r.items() if k != "mask_png"}, "mask": [square]} if n < 5 else r)
    row = check(data_root=data)
    assert "look: 5 outline(s)" in row
    assert row.count("_1_frame_000001.png") == 3, "three are named"


def test_several_kinds_of_object_are_refused_here_as_in_training(check: Check) -> None:
    data = write_tiny_data(Path("data"), 8, 48)
    rewrite(data, lambda n, record: record | {"text": [f"object {n % 2}"]})
    with pytest.raises(ValueError, match=r"data/annotations\.json: text .*2 different"):
        check(data_root=data)


@pytest.mark.parametrize("name", ["angiograms", "angiograms_no_gap", "regions_lamplight"])
@pytest.mark.parametrize("parent", ["data", "project/data"])  # as the commands and as the shell files name it
def test_nothing_is_rendered(check: Check, monkeypatch: pytest.MonkeyPatch, name: str, parent: str) -> None:
    monkeypatch.setattr(embedded, "whole_folder", lambda _: pytest.fail("rendered"))
    monkeypatch.setattr(doctor, "CLONE", Path("project"))
    assert check(data_root=Path(parent) / name) == "OK embedded data, not there yet: the run renders them"
    with pytest.raises(ValueError, match="not there yet, so --unlabelled_root cannot be compared; run sa2va-rl data"):
        check(data_root=Path(parent) / name, unlabelled_root=Path("new"))


def test_captioned_regions_are_described(check: Check) -> None:
    write_regions(Path("scenes"), 6, 3, 96)
    row = check(data_root=Path("scenes"))
    assert row.startswith("OK Grasp-Any-Region, 1 shard, 6 images, ")
    assert "for GRPO; groups: reward 2, policy 2, val 1, test 1" in row
    assert "foreground: " in row
    assert "captions: " in row
    assert "13 regions (the limit)" in check(data_root=Path("scenes"), max_regions=13)
    with pytest.raises(ValueError, match="dataset_name is 'dam'"):
        check(data_root=Path("scenes"), dataset_name="dam")
    with pytest.raises(ValueError, match=r"scenes/annotations\.json: file not found"):
        check(data_root=Path("scenes"), dataset_name="annotations")


def test_a_disk_without_space_and_a_gpu_that_is_absent_are_missing(tmp_path, monkeypatch):
    assert doctor.check_disk(tmp_path / "new" / "outputs").details.endswith(" GB")
    monkeypatch.setattr(doctor, "FREE_DISK_GB", 10**9)
    with pytest.raises(ValueError, match=r"outputs: [\d.]+ GB free, 1000000000 needed"):
        doctor.check_disk(tmp_path / "outputs")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert doctor.check_gpu(None).details == doctor.check_gpu(-1).details == "CPU, float32"
    with pytest.raises(ValueError, match=r"GPU=1.*0 GPUs"):
        doctor.check_gpu(1)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("tiny", "official layout, InternVL with Qwen2, 2 x 64 language model, template qwen_chat"),
        ("tiny-qwen3-vl", "official layout, Qwen3-VL, 3 x 64 language model, chat template without system turn"),
        ("tiny-qwen2.5-vl", "official layout, Qwen2.5-VL, 3 x 64 language model, chat template with a system turn"),
    ],
)
def test_the_family_of_a_model_and_its_prompt_format_are_named(size: Any, expected: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", size)
    assert doctor.check_model(str(tmp_path / "model"), tmp_path / "data").details == expected
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in tensors if "mask_decoder" in name)
    tensors[name].view(-1)[:3] = torch.nan
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {name} holds NaN \(3 of "):
        doctor.check_model(str(tmp_path / "model"), tmp_path / "data")


def test_patients_in_several_spellings_and_files_that_are_not_read_are_noted(check: Check) -> None:
    names = ["Patient 1", "patient_01", "PATIENT  1", "Doe^Jane", *(f"p{n}" for n in range(4))]
    folder = write_tiny_data(Path("data"), 8, 48)
    rewrite(folder, lambda n, record: {**record, "group": names[n]})
    (folder / "masks/1.nii.gz").write_bytes(b"")
    row = check(data_root=folder)
    assert "patients: reward 2, policy 2, val 1, test 1" in row
    assert "1 patient(s) whose name is written in several ways, taken for one each" in row
    assert "look: files of kinds that are not read, left out: 1 .nii.gz (masks/1.nii.gz)" in row
    assert "Jane" not in row
