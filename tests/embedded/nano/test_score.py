"""Scores and card on a world whose masks are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.nano.score import RegionScores, score_regions, score_vessels
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation


def test_scores_by_look_and_prompt_have_their_known_values(known_world: RunInputs) -> None:
    scores = score_vessels(known_world)
    looks = list(LOOKS)
    assert scores.oracle_dice == {name: 1.0 for name in scores.oracle_dice}
    assert set(scores.oracle_recall.values()) == {1.0}
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
        (obj,) = [o for o in self.scenes[image.tobytes()].objects if (o.mask == mask_prompts[0][0]).all()]
        return {"prediction": self.caption or obj.caption}


def test_ciou_sums_overlaps_and_unions_before_it_divides() -> None:
    (scene,) = make_scenes(1, seed=1)
    known = Known([scene], None)
    first = scene.objects[0]
    cut = first.mask & (np.cumsum(first.mask).reshape(first.mask.shape) <= first.mask.sum() // 2)  # half of one object
    wrong = replace(scene, objects=(replace(first, mask=cut), *scene.objects[1:]))
    whole = sum(int(obj.mask.sum()) for obj in scene.objects)
    known.scenes = {scene.image.tobytes(): wrong}
    known.predict_forward = lambda **_: {"prediction": ""}  # type: ignore[method-assign]
    expected = (whole - int(first.mask.sum()) + int(cut.sum())) / whole
    assert score_regions(known, None, [scene]).phrase_ciou == pytest.approx(expected, abs=1e-4)  # type: ignore[arg-type]


def test_regions_are_scored_one_when_all_is_right_and_captions_zero_when_wrong() -> None:
    scenes = list(make_scenes(3, seed=0))
    count = sum(len(scene.objects) for scene in scenes)
    right = score_regions(Known(scenes, None), None, scenes)  # type: ignore[arg-type]
    assert right == RegionScores(3, count, 1.0, 1.0)
    wrong = score_regions(Known(scenes, "a vessel"), None, scenes)  # type: ignore[arg-type]
    assert wrong == replace(right, captions_right=0.0)
