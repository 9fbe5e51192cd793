import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from rl_reward_network.ppo.baselines import DEPLOYED, POLICY, RANDOM, overlay_picks
from rl_reward_network.ppo.prompt_report import EvaluationResult, deployed_sentence, write_report
from rl_reward_network.report.overlays import Overlay
from rl_reward_network.report.page import made_by
from tests.ppo.test_baselines import compared, tables

VOID = {"meta", "br", "img"}
PROMPTS = ("Please segment <b>it</b> & more.", "the rib", "the trunk")


class Page(HTMLParser):
    """Checks that tags nest, and collects what a reader and a browser get."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.text, self.loose_tables = [], [], [], "", 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self.loose_tables += tag == "table" and self.open[-1] not in (
            ("div", "scroll"),
            ("div", "wrap"),
            ("div", "dense"),
        )
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data


def make_result(labelled=True, count=6, choice="policy"):
    rng = np.random.default_rng(0)
    test = tables(rng.random((count, 3)), rng.random((count, 3)), labelled=labelled)
    comparison = compared(test, test, rng.integers(3, size=count), choice=choice)
    mask = np.zeros((90, 120), dtype=bool)
    mask[20:60, 30:50] = True
    image = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    overlays = tuple(
        Overlay(title, comparison.tables[place].sample_id, image, mask if labelled else None, mask, ~mask, mask * 0.5)
        for title, place in overlay_picks(comparison).items()
    )
    config = {"model": "sa2va-nano", "data fingerprint": "0a1b", "reward network": "<script>alert(1)</script>"}
    rollouts = tuple({"step": step, "custom/val_score": 0.5 + step / 100} for step in range(5))
    return EvaluationResult(comparison, PROMPTS, config, ("An <em>extra</em> note.",), overlays, rollouts)


def written(folder, result):
    page = write_report(folder, result)
    return page.read_text(encoding="utf-8"), json.loads((folder / "eval.json").read_text())


@pytest.mark.parametrize("labelled", [True, False])
def test_the_page_is_whole_readable_and_self_contained(tmp_path, labelled):
    result = make_result(labelled)
    text, _ = written(tmp_path, result)
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert 'name="viewport" content="width=device-width' in text
    assert page.loose_tables == 0, "wide tables scroll inside their own box, or break their words"
    assert page.links
    assert all(link.startswith("data:image/") for link in page.links)
    assert not re.search(r"https?://|url\(|@import", re.sub(r"base64,[^\"]*", "", text))
    assert "script" not in page.tags
    assert "em" not in page.tags, "notes, prompts and settings are text, not markup"
    panels = 3 * (5 + 1 if labelled else 4 + 1)  # the colour scale below each
    plots = 3 if labelled else 2  # choices, training; reward and truth where there is truth
    assert page.tags.count("img") == panels + plots


def test_the_page_shows_every_row_setting_prompt_and_note(tmp_path):
    result = make_result()
    text, _ = written(tmp_path, result)
    shown = Page(text).text
    comparison = result.comparison
    assert shown.index(comparison.verdict.sentence) < shown.index("Results"), "the verdict comes first"
    for row in comparison.rows:
        assert row.name in shown
        assert all(str(value) in shown for value in (*row.means.values(), row.to_default, row.to_fixed))
    closed = [f"{row.gap_closed:.0%}" for row in comparison.rows]
    for part in (*PROMPTS, *result.config.values(), *result.notes, *closed, deployed_sentence(comparison)):
        assert part in shown
    for title, place in overlay_picks(comparison).items():
        assert f"{title} of the deployed choice, by Dice: {comparison.tables[place].sample_id}" in shown
    assert shown.count("\u25a0 truth, \u25a0 default prompt, \u25a0 deployed.") == 3
    assert shown.count("Expected errors: predicted probability") == 3


def test_what_is_deployed_is_what_the_pictures_show(tmp_path):
    result = make_result(choice="fixed")
    comparison = result.comparison
    deployed = comparison.row(DEPLOYED)
    assert (deployed.weights != comparison.row(POLICY).weights).any()
    shown = Page(written(tmp_path, result)[0]).text
    assert "Shown is what is deployed: the best fixed prompt (index 0)" in shown
    assert "Deployed: the model as it is (default prompt), because why." in deployed_sentence(
        make_result(choice="as it is").comparison
    )
    dice = comparison.values(deployed, "dice")
    for place in overlay_picks(comparison).values():
        assert f"deployed (index 0): Dice {dice[place]:.3f}" in shown
    assert POLICY not in shown.split("Images", 1)[1]


def test_the_header_has_facts_and_links_and_other_files_do_not_change(tmp_path):
    plain, full = make_result(), tmp_path / "run" / "evaluation"
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    origin = made_by("evaluate", {"model_path": "run/final_model"}, "40 images", "nano", "0.6", logs)
    text, _ = written(full, replace(plain, origin=origin))
    written(tmp_path / "plain", plain)
    page = Page(text)
    assert page.text.index("sa2va-rl evaluate --model_path run/final_model") < page.text.index("Results")
    assert page.links[:4] == ["eval.csv", "eval_patients.csv", "eval.json", "../logs"]
    for link in page.links[:4]:
        assert (full / link).exists()
    assert (full / "eval.json").read_bytes() == (tmp_path / "plain" / "eval.json").read_bytes()


def test_unlabelled_images_are_said_to_be_so(tmp_path):
    text, summary = written(tmp_path, make_result(labelled=False))
    shown = Page(text).text
    assert "Unlabelled: no verdict" in shown
    assert "no Dice columns" in shown
    assert "oracle" not in [row["name"] for row in summary["rows"]]
    assert summary["labelled"] is False
    assert all(row["gap_closed"] is None for row in summary["rows"])
    with (tmp_path / "eval.csv").open(newline="") as file:
        assert next(csv.reader(file)) == ["sample_id", "group_id", "row", "prompt", "score"]


def test_one_patient_is_shown_without_intervals(tmp_path):
    text, summary = written(tmp_path, make_result(count=1))
    assert "Fewer than 2 test patients" in Page(text).text
    assert all(row["means"]["dice"]["low"] is None for row in summary["rows"])


def test_json_and_csv_hold_the_numbers_of_the_comparison(tmp_path):
    result = make_result()
    _, summary = written(tmp_path, result)
    comparison = result.comparison
    lines, patients = (
        list(csv.DictReader((tmp_path / name).read_text().splitlines())) for name in ("eval.csv", "eval_patients.csv")
    )
    assert len(lines) == len(comparison.rows) * len(comparison.tables)
    for row, saved in zip(comparison.rows, summary["rows"], strict=True):
        assert saved["name"] == row.name
        assert saved["means"]["recall"]["mean"] == row.means["recall"].mean
        assert saved["dice_minus_best_fixed"]["low"] == row.to_fixed.low
        assert sum(saved["action_counts"]) == pytest.approx(len(comparison.tables))
        mine = [line for line in lines if line["row"] == row.name]
        assert [line["sample_id"] for line in mine] == [table.sample_id for table in comparison.tables]
        assert np.mean([float(line["dice"]) for line in mine]) == pytest.approx(row.means["dice"].mean, abs=1e-6)
        of_patients = [float(line["recall"]) for line in patients if line["row"] == row.name]
        assert len(of_patients) == row.to_fixed.groups
        assert np.mean(of_patients) == pytest.approx(row.means["recall"].mean, abs=1e-6)
    prompts = {row: [line["prompt"] for line in lines if line["row"] == row] for row in (RANDOM, POLICY)}
    assert set(prompts[RANDOM]) == {""}
    assert prompts[POLICY] == [str(prompt) for prompt in comparison.row(POLICY).weights.argmax(axis=1)]


def test_equal_results_give_equal_files(tmp_path):
    for folder in ("a", "b"):
        write_report(tmp_path / folder, make_result())
    for name in ("eval.json", "eval.csv", "eval_patients.csv", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_parts_that_do_not_belong_together_are_refused():
    result = make_result()
    with pytest.raises(ValueError, match=r"prompts: got 2, expected 3"):
        replace(result, prompts=PROMPTS[:2])
    with pytest.raises(ValueError, match=r"overlays: .*elsewhere"):
        replace(result, overlays=(replace(result.overlays[0], sample_id="elsewhere"),))
