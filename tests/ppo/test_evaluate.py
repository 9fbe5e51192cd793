"""The notes of an evaluation; the stage as a whole is run in test_prompts.py and test_end_to_end.py."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_reward_network.env.observation import IMAGE_FEATURES
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.ppo.baselines import POLICY, RIDGE, compare
from rl_reward_network.ppo.evaluate import pick_test_samples, rehearsal_note, segmenter_note
from rl_reward_network.report.deployment import decide
from tests.ppo.test_baselines import tables


def compared(own_dice, count=8):
    """Images of a patient each, whose best prompt has Dice 0.8."""
    dice = np.tile([0.5, 0.8, 0.6, 0.1], (count, 1))
    rows = tables(dice, dice)
    chosen = np.ones(count, dtype=np.int64)
    comparison = compare(
        rows, rows, {POLICY: chosen, RIDGE: chosen}, decide(dice.T, dice[:, 1], [row.group_id for row in rows]), 0
    )
    features = np.zeros(IMAGE_FEATURES, np.float32)
    images = [
        PromptContext(row.sample_id, features, row.scores, row.metrics or {}, row.group_id, own_dice=own_dice)
        for row in rows
    ]
    return images, comparison


@pytest.mark.parametrize(
    ("own_dice", "images", "advice"),
    [
        (0.9, 8, ": a plain segmenter serves these images better than any choice of prompts."),
        (0.9, 5, ": a plain segmenter may serve these images better than any choice of prompts."),
        (0.7, 8, "]."),
    ],
)
def test_the_report_says_when_a_plain_segmenter_serves_better(own_dice, images, advice):
    (note,) = segmenter_note(*compared(own_dice, images))
    mean = "{:.2f} [" if images > 5 else "{:.2f}"
    assert f"own segmentation of these images has Dice {mean.format(own_dice)}" in note
    assert f"the best prompt of each image {mean.format(0.8)}" in note
    assert note.endswith(advice)


def test_unlabelled_images_tell_nothing_about_it():
    entries, comparison = compared(None)
    unlabelled = [replace(entry, metrics={}) for entry in entries]
    assert segmenter_note(unlabelled, comparison) == ()


def test_images_without_foreground_say_nothing_about_a_segmenter():
    entries, comparison = compared(None)
    (note,) = segmenter_note(entries, comparison)
    assert "No true mask of these images has foreground" in note
    assert "Dice" not in note
    entries[2:] = [replace(entry, own_dice=0.9) for entry in entries[2:]]
    (note,) = segmenter_note(entries, comparison)
    assert "has Dice 0.90 [" in note
    assert note.endswith("(2 with an empty true mask are left out).")


def test_the_embedded_model_is_named_on_images_that_are_not_its_own(tmp_path):
    def note(**config):
        inputs = SimpleNamespace(config=RunConfig(data_root=tmp_path, **config))
        return rehearsal_note(inputs)

    assert "sa2va-nano has learned rendered pictures only" in note()[0]
    assert note(model_path="some/other") == ()
    (tmp_path / "recipe.json").write_text("{}")
    assert note() == ()


@pytest.mark.parametrize(
    ("mode", "asked", "there", "used", "noted"),
    [
        ("quick", None, 240, 80, True),
        ("quick", None, 80, 80, False),
        ("quick", None, 9, 9, False),
        ("quick", 240, 240, 240, False),
        ("quick", 5, 240, 5, False),
        ("full", None, 240, 240, False),
    ],
)
def test_a_quick_evaluation_takes_eighty_images_and_says_so(mode, asked, there, used, noted):
    inputs = SimpleNamespace(samples=range(960), pick=lambda _, count: list(range(there))[:count])
    samples, notes = pick_test_samples(inputs, mode, asked)
    assert len(samples) == used
    assert notes == (("quick: 80 of 240 test images; evaluate --images 240 takes all.",) if noted else ())
