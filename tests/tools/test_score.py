"""Scores and model card, on test patients whose masks are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import read_json
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.sa2va.generation_sa2va import Segmentation
from tools.nano.card import overlay_sheet, write_card
from tools.nano.score import RegionScores, score_regions, score_vessels


def test_scores_by_look_and_prompt_have_their_known_values(known_masks: RunInputs) -> None:
    scores = score_vessels(known_masks)
    looks = list(LOOKS)
    assert set(scores.oracle_dice.values()) == set(scores.oracle_recall.values()) == {1.0}
    shares = np.array([scores.best_on[prompt] for prompt in PROMPTS])
    assert shares.sum() == pytest.approx(1, abs=1e-3)
    assert (shares[len(looks) :] == 0).all()
    for number, prompt in enumerate(PROMPTS):
        for look in set(looks) & set(scores.oracle_dice):
            assert scores.dice[prompt][look] == float(number < len(looks) and looks[number] == look)
        assert scores.dice[prompt]["all"] == pytest.approx(shares[number], abs=1e-4)
    assert scores.gap == pytest.approx(1 - shares[PROMPTS.index(scores.best_fixed)], abs=1e-4)
    assert scores.default_recall == pytest.approx(shares[0], abs=1e-4)


class Known:
    """Answers every phrase with the mask of the scene's objects in order, and describes each as told."""

    def __init__(self, scenes: list, caption: str | None) -> None:
        self.scenes, self.caption = {scene.image.tobytes(): scene for scene in scenes}, caption

    def segment(self, images: list, prompts: list, processor: object) -> list[list[Segmentation]]:
        masks = [torch.from_numpy(obj.mask) for obj in self.scenes[images[0].tobytes()].objects]
        one = torch.ones(1)
        return [[Segmentation("", torch.where(m, 9.0, -9.0)[None], one, one, (256, 256), 256) for m in masks]]

    def predict_forward(self, image: np.ndarray, mask_prompts: list, **_: object) -> dict[str, str]:
        objects = self.scenes[image.tobytes()].objects
        return {"prediction": self.caption or next(o.caption for o in objects if (o.mask == mask_prompts[0][0]).all())}


def test_regions_have_the_scores_of_known_answers() -> None:
    scenes = list(make_scenes(3, seed=0))
    expected = RegionScores(3, sum(len(scene.objects) for scene in scenes), 1.0, 1.0)
    known: Any = Known(scenes, None)
    assert score_regions(known, None, scenes) == expected  # type: ignore[arg-type]
    known.caption = "a vessel"
    assert score_regions(known, None, scenes) == replace(expected, captions_right=0.0)  # type: ignore[arg-type]
    first = scenes[0].objects[0]
    cut = first.mask & (np.cumsum(first.mask).reshape(first.mask.shape) <= first.mask.sum() // 2)  # half of one object
    known.scenes[scenes[0].image.tobytes()] = replace(
        scenes[0], objects=(replace(first, mask=cut), *scenes[0].objects[1:])
    )
    whole = sum(int(obj.mask.sum()) for scene in scenes for obj in scene.objects)
    ciou = score_regions(known, None, scenes).phrase_ciou  # type: ignore[arg-type]
    assert ciou == pytest.approx(1 - (first.mask & ~cut).sum() / whole, abs=1e-4)  # sums, then the ratio


def test_the_card_names_every_number_it_was_given(known_masks: RunInputs, tmp_path: Path) -> None:
    vessels, regions = score_vessels(known_masks), RegionScores(3, 10, 0.512, 0.7)
    made = {"command": "python -m tools.nano --seed 3", "seed": 3, "minutes": [25.2, 36.9], "machine": "two cores"}
    made |= {"parameters": 3_800_000, "versions": {"torch": "2"}}
    write_card(tmp_path, known_masks, vessels, regions, made)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "scores.json", "overlays.png"}
    text = (tmp_path / "README.md").read_text()
    for part in ("it segments nothing of yours", made["command"], "25 + 37 minutes", "3,800,000", "0.512", "70.0%"):
        assert part in text
    assert all(f"| {prompt} |" in text for prompt in PROMPTS)
    scores = read_json(tmp_path / "scores.json")
    assert (scores["angiograms"]["gap"], scores["made"]) == (vessels.gap, made)


def test_overlays_show_two_patients_of_each_look_and_prompt_k_as_the_best_in_look_k(known_masks: RunInputs) -> None:
    sheet = overlay_sheet(known_masks)
    assert sheet.dtype == np.uint8
    assert sheet.shape == (len(LOOKS) * 192, 2 * 3 * 192, 3)
    strips = sheet.reshape(len(LOOKS), 192, 2, 3, 192, 3).transpose(0, 2, 3, 1, 4, 5).astype(int)  # look, patient, tile
    filled = (strips[..., 0] - strips[..., 2] > 40).mean(axis=(3, 4))  # share of pixels that are far more red than blue
    assert (filled[..., 0] == 0).all()
    assert (filled[..., 2] > 0.03).all()  # the best prompt's mask is the whole tree
    np.testing.assert_array_equal(filled[..., 1] > 0.03, np.arange(len(LOOKS))[:, None] == [0, 0])  # the default's
