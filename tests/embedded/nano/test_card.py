"""The card and its pictures, on a world whose masks are known."""

from pathlib import Path

import numpy as np

from rl_reward_network.artefacts import read_json
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.nano.card import CardFacts, card_text, overlay_sheet, write_card
from rl_reward_network.embedded.nano.score import RegionScores, score_vessels
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import RunInputs


def test_the_card_says_what_it_is_and_every_number_it_was_given(known_world: RunInputs, tmp_path: Path) -> None:
    vessels, regions = score_vessels(known_world), RegionScores(3, 10, 0.512, 0.7)
    facts = CardFacts("sa2va-rl nano", 0, (25.2, 36.9), "two cores", 3_800_000, {"torch": "2"})
    text = card_text(vessels, regions, facts)
    for said in ("This is a rehearsal model", facts.command, "25 + 37 minutes", "3,800,000", "0.512", "70.0%"):
        assert said in text
    assert all(f"| {prompt} |" in text for prompt in PROMPTS)
    write_card(tmp_path, known_world, vessels, regions, facts)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "scores.json", "overlays.png"}
    assert read_json(tmp_path / "scores.json")["angiograms"]["gap"] == vessels.gap


def test_overlays_show_two_patients_of_each_look_and_prompt_k_as_the_best_in_look_k(known_world: RunInputs) -> None:
    sheet = overlay_sheet(known_world)
    assert sheet.dtype == np.uint8
    assert sheet.shape == (len(LOOKS) * 192, 2 * 3 * 192, 3)
    strips = sheet.reshape(len(LOOKS), 192, 2, 3, 192, 3).transpose(0, 2, 3, 1, 4, 5)  # look, patient, tile

    def orange(tile: np.ndarray) -> float:
        """Share of pixels that are more red than blue by far: the filling."""
        return float((tile[..., 0].astype(int) - tile[..., 2] > 40).mean())

    for row, look in enumerate(LOOKS):
        for patient in strips[row]:
            assert orange(patient[0]) == 0
            assert orange(patient[2]) > 0.03, look  # the best prompt's mask is the whole tree
            assert (orange(patient[1]) > 0.03) == (row == 0), look  # the default prompt's only in its own look
