"""Which data are read, which are rendered first, and their levels."""

import json
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.data import images
from rl_reward_network.data.splits import SPLITS
from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.inputs import loading
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.doctor import check_data
from rl_reward_network.inputs.loading import decode_files, describe_run, open_inputs, read_samples, saved_config
from rl_reward_network.run import REWARD_RUN, Run
from tests.conftest import write_deep_data, write_tiny_data

NO_GAP = Path("data/angiograms_no_gap")


@pytest.fixture(autouse=True)
def four_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "PATIENTS", 4)


@pytest.mark.parametrize("folder", [RunConfig().data_root, NO_GAP])
def test_the_embedded_data_are_rendered_when_they_are_not_there(folder: Path) -> None:
    assert len(read_samples(folder)) == 4 * embedded.SERIES * embedded.FRAMES
    assert [path.name for path in Path("data").glob("[!.]*")] == [folder.name]


def test_rendered_data_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read_samples(NO_GAP)
    monkeypatch.setattr(embedded, "RECIPE", 99)
    with pytest.raises(ValueError, match=r"recipe\.json: .*recipe.*99"):
        read_samples(NO_GAP)


def test_a_users_own_data_in_that_place_are_read_as_they_are() -> None:
    write_tiny_data(embedded.DEFAULT_DATA)
    assert len(read_samples(embedded.DEFAULT_DATA)) == 8


def with_split(folder: Path, parts: str) -> Path:
    """One record per patient, the first letters of whose parts are given."""
    records = json.loads((write_tiny_data(folder, len(parts), 48) / "annotations.json").read_text())
    names = {"t": "train", "v": "val", "x": "test"}
    own = [{"split": names[part]} if part in names else {} for part in parts]
    content = [record | more for record, more in zip(records, own, strict=True)]
    (folder / "annotations.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ("tttvvx", "split of the data: train 3, val 2, test 1 patients"),
        ("ttttxx", "split of the data: train 3, val 1, test 2 patients; val is cut from train"),
        ("------", "patients: reward 2, policy 2, val 1, test 1"),
    ],
)
def test_runs_and_doctor_tell_which_split_they_use(without_model: None, parts: str, told: str) -> None:
    config = RunConfig(data_root=with_split(Path("own"), parts))
    inputs, details = open_inputs(config), check_data(config, RegionConfig()).details
    assert inputs.summary == f"6 annotated images, 6 with a mask; {told}"
    assert details.startswith(inputs.summary)
    prompts = open_grpo_inputs(config)
    assert (prompts.summary, prompts.split) == (inputs.summary, inputs.split)
    by_name = open_grpo_inputs(config, RegionConfig(dataset_name="names"))
    assert by_name.split.groups == inputs.split.groups


def test_fractions_make_another_split_that_an_evaluation_finds_again(without_model: None) -> None:
    run, config = Path("outputs/run"), RunConfig(data_root=write_tiny_data(Path("own")), fractions=(0.5, 0.25, 0.25))
    inputs = open_inputs(config)
    assert inputs.summary.endswith("; patients: reward 2, policy 2, val 2, test 2")
    assert inputs.split.settings["split_sizes"] == [2, 2, 2, 2]
    written = json.loads(json.dumps(describe_run(Run(run, REWARD_RUN), inputs, {})))
    assert saved_config(run, written)[0].fractions == (0.5, 0.25, 0.25)
    assert open_inputs(*saved_config(run, written), run / "split.json").split == inputs.split
    config = replace(config, data_root=with_split(Path("owned"), "tttvvx"))
    for regions in (None, RegionConfig("names")):
        with pytest.raises(ValueError, match=r"owned/annotations\.json has a field `split`: leave --fractions out"):
            open_grpo_inputs(config, regions) if regions else open_inputs(config)


def test_few_patients_are_counted_and_other_ways_are_named(without_model: None) -> None:
    counted = r"few/annotations\.json: 3 labelled patient\(s\) with 3 image.*sa2va-rl improve"
    with pytest.raises(ValueError, match=counted):
        open_inputs(RunConfig(data_root=write_tiny_data(Path("few"), 3)))
    inputs = open_inputs(RunConfig(data_root=with_split(Path("fold"), "tttvvx")))
    fold = replace(inputs.split, groups={**inputs.split.groups, "test": ()})
    with pytest.raises(ValueError, match=r"no images in the test split \(0 patient\(s\), 0 image\(s\)\)"):
        replace(inputs, split=fold).pick("test", 3)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    segmenter = SimpleNamespace(segment=None, fingerprint="none")
    monkeypatch.setattr(loading, "load_segmenter", lambda *_: segmenter)


def test_the_window_is_recorded_with_the_run_and_found_again(without_model: None) -> None:
    data, run = write_deep_data(Path("bits10")), Path("outputs/run")
    inputs = open_inputs(RunConfig(data_root=data, output_dir=Path("outputs")))
    (window,) = {sample.grey for sample in inputs.samples}
    assert 600 < window.white < 800, "the tubes are at 160 of 255"
    saved = describe_run(Run(run, REWARD_RUN), inputs, {})
    assert saved["inputs"]["grey_levels"] == {"data set": [window.black, window.white]}
    Path("bits10").rename("moved")
    config = json.loads((run / "config.json").read_text())
    again = open_inputs(*saved_config(run, config, Path("moved")), run / "split.json")
    assert again.split == inputs.split
    assert {sample.grey for sample in again.samples} == {window}


def test_bit_depth_says_what_is_white(without_model: None) -> None:
    data = write_deep_data(Path("bits10"))
    given = open_inputs(RunConfig(data_root=data, bit_depth=10))
    assert {sample.grey for sample in given.samples} == {GreyWindow(0, 1023)}
    plain = read_samples(write_tiny_data(Path("bits8"), size=48))
    for deep, shallow in zip(given.samples[1:], plain[1:], strict=True):
        assert np.abs(deep.load_image().astype(int) - shallow.load_image()).max() <= 2, "10 bit is 8 bit times four"
    assert given.data_fingerprint != open_inputs(RunConfig(data_root=data)).data_fingerprint, "other pictures"
    with pytest.raises(ValueError, match="bit_depth: got 20; give 8 to 16"):
        RunConfig(bit_depth=20)


def test_a_survey_keeps_what_was_seen_in_order_and_counts_the_damaged() -> None:
    assert decode_files([lambda n=n: n * n for n in range(50)]) == [n * n for n in range(50)]  # type: ignore[misc]

    def damaged(number: int) -> int:
        raise ValueError(f"{number}.png: damaged")

    with pytest.raises(ValueError, match=r"^1\.png: damaged \(and 1 more of 3 checked\)$"):
        decode_files([lambda: 0, lambda: damaged(1), lambda: damaged(2)])


def test_from_the_check_to_the_report_each_file_is_decoded_once(without_model, monkeypatch):
    data, decoded, read = write_tiny_data(Path("counted"), images=12, size=48), Counter[Path](), images._read

    def counted(path: Path, decode: bool = True, most_pixels: int = images.MOST_PIXELS) -> Image.Image:
        decoded[path] += decode
        return read(path, decode, most_pixels)

    monkeypatch.setattr(images, "_read", counted)
    for _ in ("training", "evaluation"):
        inputs = open_inputs(RunConfig(data_root=data, output_dir=Path("outputs")))
        inputs = replace(inputs, bank=MaskBank(Path("bank"), answer, "none", ["vessel"]))
        for split in SPLITS:
            picked = inputs.pick(split, 12)
            inputs.bank.build(sample.load_image() for sample in picked)
            for sample in picked:
                assert sample.load_image().shape == (*sample.size, 3)
                assert sample.load_mask() is not None
    assert len(decoded) == 24
    assert set(decoded.values()) == {1}
    inputs.samples[0].load_image()[:] = 0
    assert inputs.samples[0].load_image().any(), "callers have arrays of their own"


def answer(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
    return FrozenAnswer(np.zeros((len(prompts), 4, 4), np.float32), np.zeros(2, np.float32))


def test_decoded_images_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_KEPT", kept := OrderedDict[object, tuple[np.ndarray, tuple[int, ...]]]())
    monkeypatch.setattr(images, "_used", 0)
    monkeypatch.setattr(images, "MOST_DECODED", 3 * 64)
    rng, calls = np.random.default_rng(0), Counter[int]()
    arrays: dict[int, np.ndarray] = {0: rng.integers(0, 2, (8, 8)).astype(bool)}
    grey, colours = (rng.integers(0, 256, (2, 8, 8, channels), dtype=np.uint8) for channels in (1, 3))
    arrays |= {1: np.repeat(grey[0], 3, axis=2), 2: np.repeat(grey[1], 3, axis=2), 3: colours[0]}

    def decode(number: int) -> np.ndarray:
        calls[number] += 1
        return arrays[number]

    for number in (0, 1, 0, 1, 2, 0, 3, 3, 0):
        np.testing.assert_array_equal(images.decoded_once(number, lambda n=number: decode(n)), arrays[number])  # type: ignore[misc]
        assert images._used == sum(packed.nbytes for packed, _ in kept.values()) <= 3 * 64
    assert calls == {0: 2, 1: 1, 2: 1, 3: 1}, "a mask of 64 pixels takes 8 bytes, a grey image 64"
