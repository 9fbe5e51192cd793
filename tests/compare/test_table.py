"""The table, the choice on validation patients, and the verdict, from made-up results."""

from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.compare.measure import RoadResult
from rl_reward_network.compare.parts import Cost
from rl_reward_network.compare.roads import BASE
from rl_reward_network.compare.table import TestImages as Images  # not a test
from rl_reward_network.compare.table import choose, make_table, verdict_lines
from rl_reward_network.evaluation.metrics import TABLE_METRICS

PATIENTS = 12


def images(patients: int = PATIENTS) -> Images:
    groups = tuple(f"p{number // 2}" for number in range(2 * patients))
    return Images(groups, tuple(f"i{number}" for number in range(2 * patients)), groups)


def result(
    road: str,
    val: float,
    test: float,
    minutes: float = 0.0,
    seed: int = 0,
    patients: int = PATIENTS,
    asked: float = 1.0,
) -> RoadResult:
    """Results whose images differ a little, in the same way for every road."""
    ripple = np.random.default_rng(7).normal(0, 0.05, 2 * patients)
    own = np.random.default_rng(len(road)).normal(0, 0.002, 2 * patients)
    values = tuple((test + ripple + own).tolist())
    columns = {name: values for name in TABLE_METRICS}
    return RoadResult(road, seed, BASE, None, tuple((val + ripple + own).tolist()), columns, asked, Cost(minutes))


def table(*results: RoadResult, patients: int = PATIENTS):  # type: ignore[no-untyped-def]
    by_road: dict[str, list[RoadResult]] = {}
    for one in results:
        by_road.setdefault(one.road, []).append(one)
    return make_table(by_road, images(patients))


def test_differences_are_paired_and_p_is_corrected() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.6, 0.6), result("own", 0.5, 0.5))
    base, own, fusion = rows  # the order of ROADS
    assert base.p is None
    assert fusion.to_base.mean == pytest.approx(0.1, abs=0.002)
    assert fusion.to_base.low is not None
    assert fusion.to_base.low > 0.09  # the ripple that both share is gone
    assert fusion.p is not None
    assert fusion.p == pytest.approx(2 * 2 / 2**PATIENTS, rel=0.5)  # all signs agree; two roads
    assert own.p is not None
    assert own.p > 0.05


def test_values_of_an_image_are_means_over_seeds() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.6, 0.6), result("fusion", 0.7, 0.8, seed=1))
    assert rows[1].means["dice"].mean == pytest.approx(0.7, abs=0.02)
    assert rows[1].val.mean == pytest.approx(0.65, abs=0.02)


def test_the_best_is_chosen_on_validation_patients_alone() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.7, 0.55), result("ascent", 0.6, 0.9))
    assert choose(rows, images()).best == "fusion"


def test_the_cheapest_lies_within_the_interval_of_the_best() -> None:
    rows = table(
        result(BASE, 0.5, 0.5), result("fusion", 0.7, 0.7, minutes=30), result("flips_and_scales", 0.6995, 0.7, asked=8)
    )
    found = choose(rows, images())
    assert (found.best, found.cheapest) == ("fusion", "flips_and_scales")
    lines = verdict_lines(rows, found, images(), "outputs/compare_1")
    assert "better" in lines[0]
    assert "30.0 minutes" in lines[0]
    assert any("segment --run outputs/compare_1/cheapest" in line for line in lines)


def test_without_a_significant_gain_the_model_stays() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("own", 0.5002, 0.6))
    found = choose(rows, images())
    assert found.best == found.cheapest == BASE
    assert "keep the model as it is" in verdict_lines(rows, found, images(), "x")[0]


def test_no_road_is_better_than_a_plain_segmenter() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("own", 0.9, 0.9), result("fusion", 0.7, 0.7))
    lines = verdict_lines(rows, choose(rows, images()), images(), "x")
    assert lines[-1].startswith("No road is better than a plain segmenter")


def test_masks_equal_to_the_plain_segmenter_are_not_compared_with_it() -> None:
    base, own = result(BASE, 0.5, 0.5), result("own", 0.9, 0.9)
    same = replace(own, road="fusion")
    rows = table(base, own, same, result("ascent", 0.8, 0.85))
    last = verdict_lines(rows, choose(rows, images()), images(), "x")[-1]
    assert last.startswith("No road is better than a plain segmenter")
    assert "ten steps" in last


def test_one_patient_gives_no_interval_and_no_verdict() -> None:
    rows = table(result(BASE, 0.5, 0.5, patients=1), result("fusion", 0.7, 0.7, patients=1), patients=1)
    assert rows[1].to_base.low is None
    assert rows[1].p is None
    found = choose(rows, images(1))
    assert found.best == "fusion"
    assert not found.enough
    lines = verdict_lines(rows, found, images(1), "x")
    assert "by the mean alone" in lines[0]
    assert "cannot tell, fewer than 6 test patients" in lines[0]
