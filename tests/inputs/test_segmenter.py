"""What happens when the GPU's memory runs out, without a GPU."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.inputs import segmenter
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, answers_fingerprint, load_segmenter
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.conftest import tube_image
from tests.qwen_vl import write_tiny_qwen

IMAGE = np.zeros((8, 8, 3), np.uint8)


def limited(batch: int, fits: int) -> tuple[Sa2VASegmenter, list[int]]:
    """A segmenter whose model holds at most `fits` prompts at once, and the batches it was asked for."""
    asked: list[int] = []

    def segment(images: Any, prompts: list[str], processor: Any, batch_size: int, max_new_tokens: int) -> Any:
        asked.append(batch_size)
        if batch_size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        one = SimpleNamespace(mask_logits=torch.ones(1, 4, 4), vision_features=torch.ones(3))
        return [[one for _ in prompts]]

    return Sa2VASegmenter(SimpleNamespace(segment=segment), None, batch, 64, "x"), asked  # type: ignore[arg-type]


def test_the_batch_is_halved_once_and_stays_so() -> None:
    model, asked = limited(batch=16, fits=8)
    with pytest.warns(UserWarning, match=r"out of memory with SEGMENT_BATCH=16 .*going on with 8"):
        answer = model.segment(IMAGE, ["a", "b"])
    assert answer.mask_logits.shape == (2, 4, 4)
    model.segment(IMAGE, ["a"])
    assert asked == [16, 8, 8]


@pytest.mark.parametrize(("batch", "tried"), [(16, [16, 8]), (1, [1])])
def test_when_half_does_not_fit_either_the_message_names_the_remedy(batch: int, tried: list[int]) -> None:
    model, asked = limited(batch, fits=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=rf"out of memory with SEGMENT_BATCH={tried[-1]} .*set a lower one"):
            model.segment(IMAGE, ["a"])
    assert asked == tried


def test_features_are_the_mean_of_sam_2_s_coarsest_map(tiny_checkpoint: Path) -> None:
    frozen, (image, _) = load_segmenter(tiny_checkpoint), tube_image(96, 0)
    features = frozen.segment(image, ["the vessel", "the rib"]).vision_features
    with torch.no_grad():
        maps = frozen.model.get_sam_features(frozen.processor.sam_pixel_values(image)).maps
    np.testing.assert_allclose(features, maps[2][0].mean(dim=(1, 2)).numpy(), rtol=1e-6)


def test_a_process_loads_the_model_of_one_folder_once(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_segmenter(tiny_checkpoint)
    assert load_segmenter(str(tiny_checkpoint)) is first
    assert load_segmenter(tiny_checkpoint, max_tiles=2) is not first
    monkeypatch.setattr(segmenter, "load_sa2va_model", lambda *_, **__: pytest.fail("the files have changed"))
    path = tiny_checkpoint / "config.json"
    stat = path.stat()
    os.utime(path, (1, 1))
    with pytest.raises(pytest.fail.Exception):
        load_segmenter(tiny_checkpoint)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_files_of_a_qwen_vl_count_in_its_fingerprint(tmp_path: Path) -> None:
    """Another chat template, normalisation or resize gives other answers with the same weights."""
    model, processor = load_sa2va_model(write_tiny_qwen(tmp_path / "model"))
    found = [answers_fingerprint(model, processor, 64)]
    processor.chat = "system" + processor.chat
    found.append(answers_fingerprint(model, processor, 64))
    processor.patches.image_mean = (0.4, 0.4, 0.4)
    found.append(answers_fingerprint(model, processor, 64))
    processor.set_image_resize("training")
    found.append(answers_fingerprint(model, processor, 64))
    assert len(set(found)) == 4
