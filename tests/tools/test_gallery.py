"""The pictures of the gallery from a tiny comparison: it shows what the table says, and recomputes nothing."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.masks import load_mask
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.inputs.segmenter import Sa2VASegmenter
from rl_reward_network.methods.compare import ComparePlan, run_compare_stage
from rl_reward_network.methods.methods import METHODS, TRAINED
from rl_reward_network.methods.training import REWARD_NET
from rl_reward_network.report.overlays import AFTER, TRUTH
from rl_reward_network.run import COMPARE_RUN, Run
from tests.conftest import tube_series
from tools import gallery
from tools.gallery import FRAME, GAP, LINE, PANEL, Args, Comparison, frame_sheet, panel, save, write_series

pytestmark = pytest.mark.usefixtures("load_once")
FUSION = [method for method in METHODS if method.group in (None, "fusion")]


@pytest.fixture(scope="module")
def compared(
    tiny_inputs: RunInputs, reward_run: Run, load_once: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished comparison of the model as it is and the group fusion."""
    output, segmenter = tmp_path_factory.mktemp("outputs"), tiny_inputs.segmenter
    bank = MaskBank(output / "mask_bank", segmenter.segment, segmenter.fingerprint, tiny_inputs.prompts)
    inputs = replace(tiny_inputs, config=replace(tiny_inputs.config, output_dir=output), bank=bank)
    run = output / "compare_1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRAINED, REWARD_NET, lambda job: (reward_run.path, True))
        run_compare_stage(inputs, ComparePlan("quick", ("fusion",), (0,)), None, Run(run, COMPARE_RUN), "typed")
    return run


@pytest.fixture(scope="module")
def comparison(compared: Path) -> Iterator[Comparison]:
    """It was measured before, so no model may run again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sa2VASegmenter, "segment", None)
        yield Comparison(compared)


def test_best_median_and_worst_are_those_of_the_table(comparison: Comparison) -> None:
    with (comparison.folder / "eval.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for method in FUSION:
        values = sorted(float(line["dice"]) for line in lines if line["method"] == method.name)
        best, median, worst = values[-1], values[len(values) // 2], values[0]
        words = [shown.words for shown in comparison.panels(method)]
        assert words == [f"best {best:.2f}", f"median {median:.2f}", f"worst {worst:.2f}"]


def test_a_sheet_has_every_method_of_its_group(comparison: Comparison, tmp_path: Path) -> None:
    (name, sheet), *others = gallery.method_sheets(comparison)
    assert (name, others) == ("fusion", [])
    assert sheet.width == 2 * (3 * PANEL + 2 * GAP) + 6 * GAP, "two methods side by side"
    assert sheet.height == 2 * (PANEL + 3 * LINE) + 6 * GAP, "four methods"
    save(sheet, tmp_path / "methods.png")
    written = Image.open(tmp_path / "methods.png")
    assert (written.size, written.mode) == (sheet.size, "P")
    colours = {colour for _, colour in written.convert("RGB").getcolors() or []}
    assert {TRUTH, AFTER} <= colours


def test_a_mask_that_was_not_measured_is_not_shown(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "mask", lambda method, image: np.ones(image.shape[:2], dtype=bool))
    with pytest.raises(ValueError, match=r"base: Dice of .* is 0\.\d+, in eval\.csv 0\.\d+; what it used was changed"):
        comparison.panels(FUSION[0])


def test_the_truth_is_drawn_over_the_mask_and_the_shape_is_kept() -> None:
    image = np.full((40, 80, 3), 100, np.uint8)
    mask, truth = np.zeros((2, 40, 80), bool)
    mask[:, :40] = truth[10:30, 50:60] = True
    shown = panel(image, mask, truth, 80, "")
    assert shown.pixels.shape == (80, 80, 3)
    assert (shown.pixels[[0, -1]] == 255).all(), "above and below a wide image"
    assert (shown.pixels[40, 20] == (146, 118, 70)).all(), "tinted"
    assert (shown.pixels[40, 55] == 100).all(), "missed: only an outline"
    assert (shown.pixels[40, [49, 60]] == TRUTH).all()


def test_frames_are_shown_with_masks_and_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "render_series", tube_series)  # much faster
    frames, segmented = tmp_path / "series", tmp_path / "frames" / "series_segmented"
    write_series(frames)
    (segmented / "masks").mkdir(parents=True)
    for path in sorted((tmp_path / "series_masks").iterdir()):
        Image.fromarray(load_mask(path, (64, 64)).astype(np.uint8) * 255).save(segmented / "masks" / path.name)
    sheet = np.asarray(frame_sheet(frames, segmented))
    assert sheet.shape == (2 * (FRAME + LINE), 3 * FRAME + 2 * GAP, 3), "six frames"
    gallery.main(Args(sequences=((frames, segmented),), to=tmp_path))
    assert Image.open(tmp_path / "frames.png").size == sheet.shape[1::-1]
    with pytest.raises(ValueError, match=r"holds no eval\.json; name a finished"):
        gallery.main(Args(comparison=tmp_path))
    (segmented / "masks" / "0003.png").unlink()
    with pytest.raises(ValueError, match="5 masks of 6 frames; run"):
        frame_sheet(frames, segmented)


def test_the_page_shows_pictures_that_are_there_and_small() -> None:
    docs = Path(__file__).parents[2] / "docs"
    files = list((docs / "pictures" / "gallery").iterdir())
    page = (docs / "gallery.md").read_text(encoding="utf-8")
    assert all(f"(pictures/gallery/{file.name})" in page for file in files)
    assert all(file.stat().st_size <= 300_000 for file in files)
    assert sum(file.stat().st_size for file in files) <= 1_200_000
