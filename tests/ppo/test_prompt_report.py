"""The files and the page of a prompt policy's evaluation."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.ppo.baselines import DEPLOYED, POLICY, RANDOM
from rl_reward_network.ppo.prompt_report import EvaluationResult, Overlay, deployed_sentence, write_report
from rl_reward_network.report.page import made_by
from tests.ppo.test_baselines import compared, tables
from tests.report.html_page import Page

PROMPTS = ("Please segment <b>it</b> & more.", "the rib", "the trunk")


def make_result(labelled=True, count=6, choice="policy"):
    rng = np.random.default_rng(0)
    test = tables(rng.random((count, 3)), rng.random((count, 3)), labelled=labelled)
    comparison = compared(test, test, rng.integers(3, size=count), choice=choice)
    mask = np.zeros((90, 120), dtype=bool)
    mask[20:60, 30:50] = True
    image = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    overlays = tuple(
        Overlay(title, number, image, mask if labelled else None, mask, ~mask, mask * 0.5)
        for title, number in comparison.results.picks(DEPLOYED).items()
    )
    config = {"model": "sa2va-nano", "data fingerprint": "0a1b", "reward network": "<script>alert(1)</script>"}
    rollouts = tuple({"step": step, "custom/val_score": 0.5 + step / 100} for step in range(5))
    return EvaluationResult(comparison, PROMPTS, config, ("An <em>extra</em> note.",), overlays, rollouts)


@pytest.fixture(scope="module", params=[True, False], ids=["labelled", "unlabelled"])
def report(request, tmp_path_factory):
    folder, result = tmp_path_factory.mktemp("report"), make_result(request.param)
    text = write_report(folder, result).read_text(encoding="utf-8")
    return result, text, folder


def test_the_page_is_whole_readable_and_self_contained(report):
    result, text, _ = report
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.loose_tables == 0, "wide tables scroll inside their own box, or break their words"
    assert page.links
    assert all(link.startswith("data:image/") for link in page.links)
    assert not re.search(r"https?://|url\(|@import", re.sub(r"base64,[^\"]*", "", text))
    assert not {"script", "em"} & set(page.tags), "notes, prompts and settings are text, not markup"
    labelled = result.comparison.labelled
    panels = 3 * (5 if labelled else 4) + 1  # the colour scale
    assert page.tags.count("img") == panels + (3 if labelled else 2)  # plots: choices, training; reward and truth


def test_the_page_shows_every_row_setting_prompt_and_note(report):
    result, text, _ = report
    shown, comparison, results = Page(text).text, result.comparison, result.comparison.results
    assert shown.index(comparison.verdict.sentence) < shown.index("best of the deployed") < shown.index("Results")
    for row in results.rows:
        differences = [results.difference(row, other) for other in row.differences]
        assert all(str(value) in shown for value in (row.name, *row.estimates.values(), *differences))
    for part in (*PROMPTS, *result.config.values(), *result.all_notes, deployed_sentence(comparison)):
        assert part in shown
    measure = "Dice" if comparison.labelled else "reward network's score"
    for title, number in results.picks(DEPLOYED).items():
        assert f"{title} of the deployed choice, by {measure}: {results.ids[number][0]}" in shown


@pytest.mark.parametrize("choice", ["fixed", "as it is"])
def test_what_is_deployed_is_what_the_pictures_show(tmp_path, choice):
    result = make_result(choice=choice)
    results = result.comparison.results
    shown = Page(write_report(tmp_path, result).read_text()).text
    what = {"fixed": "the best fixed prompt", "as it is": "the model as it is (default prompt)"}[choice]
    assert f"Deployed: {what}, because why." in shown
    assert f"Shown is what is deployed: {what}" in shown
    for number in results.picks(DEPLOYED).values():
        assert f"deployed (index 0): Dice {results.row(DEPLOYED).values['dice'][number]:.2f}" in shown
    assert POLICY not in shown.split("Images", 1)[1].split("Results")[0]


def test_the_header_has_facts_and_links_and_other_files_do_not_change(tmp_path):
    folder, logs = tmp_path / "run" / "evaluation", tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    origin = made_by("evaluate", {"model_path": "run/final_model"}, "40 images", "nano", "0.6", logs)
    page = Page(write_report(folder, replace(make_result(), origin=origin)).read_text())
    write_report(tmp_path / "plain", make_result())
    assert "sa2va-rl evaluate --model_path run/final_model" in page.text
    assert page.links[-4:] == ["eval.csv", "eval_patients.csv", "eval.json", "../logs"]
    assert all((folder / link).exists() for link in page.links[-4:])
    for name in ("eval.json", "eval.csv", "eval_patients.csv"):
        assert (folder / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_json_and_csv_hold_the_numbers_of_the_comparison(report):
    result, _, folder = report
    comparison, results = result.comparison, result.comparison.results
    summary = json.loads((folder / "eval.json").read_text())
    lines, patients = (
        list(csv.DictReader((folder / name).read_text().splitlines())) for name in ("eval.csv", "eval_patients.csv")
    )
    columns = list(results.rows[0].values)
    assert list(lines[0]) == ["sample_id", "group_id", "row", "prompt", *columns]
    assert list(patients[0]) == ["group_id", "images", "row", *columns]
    assert len(lines) == len(results.rows) * len(results.ids)
    assert (summary["labelled"], summary["images"], summary["patients"]) == (comparison.labelled, 6, 6)
    for row, saved in zip(results.rows, summary["rows"], strict=True):
        assert (saved["name"], list(saved["means"])) == (row.name, columns)
        difference = saved[f"{results.criterion}_minus_best_fixed"]
        assert difference["low"] == results.difference(row, "best fixed prompt").low
        assert saved["gap_closed"] == comparison.closed(row)
        assert sum(saved["action_counts"]) == pytest.approx(len(results.ids))
        for table in (lines, patients):
            mine = [float(line[columns[-1]]) for line in table if line["row"] == row.name]
            assert np.mean(mine) == pytest.approx(row.estimates[columns[-1]].mean, abs=1e-6)
    prompts = {row: [line["prompt"] for line in lines if line["row"] == row] for row in (RANDOM, POLICY)}
    assert set(prompts[RANDOM]) == {""}, "an expectation over prompts"
    assert prompts[POLICY] == [str(prompt) for prompt in comparison.prompts(POLICY)]


def test_names_may_take_the_place_of_hashes(tmp_path):
    write_report(tmp_path, replace(make_result(), names={"s0": "image zero", "patient1": "somebody"}))
    assert (tmp_path / "eval.csv").read_text().splitlines()[1].startswith("image zero,patient0,")
    assert "somebody,1," in (tmp_path / "eval_patients.csv").read_text()


def test_equal_results_give_equal_pages(tmp_path):
    first, second = (write_report(tmp_path / name, make_result(count=1)).read_bytes() for name in "ab")
    assert first == second
    assert b"1 test patients, fewer than 6: there are no intervals" in first
