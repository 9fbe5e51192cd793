"""The table, the choice on validation patients, and the verdict, from made-up results."""

from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.methods.measure import MethodResult
from rl_reward_network.methods.table import Choice, choose, make_table, verdict_lines
from rl_reward_network.methods.table import TestImages as Images  # not a test
from rl_reward_network.methods.view import BASE
from rl_reward_network.report.cost import Cost
from rl_reward_network.report.statistics import max_t
from rl_reward_network.report.table import p_words
from rl_reward_network.rewards.metrics import METRICS

PATIENTS = 12


def images(patients: int = PATIENTS) -> Images:
    groups = tuple(f"p{number // 2}" for number in range(2 * patients))
    return Images(groups, tuple(f"i{number}" for number in range(2 * patients)), groups)


def result(
    method: str,
    val: float,
    test: float,
    minutes: float = 0.0,
    seed: int = 0,
    patients: int = PATIENTS,
    answers: float = 1.0,
) -> MethodResult:
    """Results whose images differ a little, in the same way for every road."""
    ripple = np.random.default_rng(7).normal(0, 0.05, 2 * patients)
    own = np.random.default_rng(len(method)).normal(0, 0.002, 2 * patients)
    values = tuple((test + ripple + own).tolist())
    columns = {name: values for name in METRICS}
    return MethodResult(method, seed, BASE, None, tuple((val + ripple + own).tolist()), columns, answers, Cost(minutes))


def table(*results: MethodResult, patients: int = PATIENTS):  # type: ignore[no-untyped-def]
    by_method: dict[str, list[MethodResult]] = {}
    for one in results:
        by_method.setdefault(one.method, []).append(one)
    return make_table(by_method, images(patients))


def test_differences_are_paired_and_p_is_that_of_one_test_of_all_rows() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.6, 0.6), result("reward_net_segmentation", 0.5, 0.5))
    base, own, fusion = rows  # the order of METHODS
    assert base.p is None
    assert fusion.to_base.mean == pytest.approx(0.1, abs=0.002)
    assert fusion.to_base.low is not None
    assert fusion.to_base.low > 0.09  # the ripple that both share is gone
    gains = [np.subtract(row.results[0].test["dice"], base.results[0].test["dice"]) for row in (own, fusion)]
    assert [own.p, fusion.p] == max_t(np.array(gains), images().groups).p.tolist()
    assert [row.verdict for row in rows] == ["", "cannot tell", "better"]


def test_values_of_an_image_are_means_over_seeds() -> None:
    rows = table(
        *(result(BASE, 0.5, 0.5, seed=seed) for seed in (0, 1)),
        result("fusion", 0.6, 0.6),
        result("fusion", 0.7, 0.8, seed=1),
    )
    assert rows[1].row.estimates["dice"].mean == pytest.approx(0.7, abs=0.02)
    assert rows[1].val.mean == pytest.approx(0.65, abs=0.02)
    assert rows[0].seed_spread == 0
    assert rows[1].seed_spread == pytest.approx(np.std([0.6, 0.8], ddof=1))
    assert table(result(BASE, 0.5, 0.5))[0].seed_spread is None


def test_of_several_better_roads_validation_patients_choose_the_best() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.7, 0.55), result("ascent", 0.6, 0.9))
    found = choose(rows, images())
    assert (found.best, found.better) == ("fusion", ("fusion", "ascent"))
    lines = verdict_lines(rows, found, images(), "x")
    assert lines[0].startswith("Best: fusion with")
    assert lines[1].startswith("Better than the model as it is, too: ten steps")


def test_a_small_sure_gain_is_not_hidden_behind_a_larger_doubtful_one() -> None:
    """The road with the highest mean owes it to one patient."""
    lucky = np.random.default_rng(0).normal(0, 0.002, 2 * PATIENTS) + np.eye(2 * PATIENTS)[0] * 0.9
    base, small = result(BASE, 0.5, 0.5), result("fusion", 0.53, 0.53)
    values = tuple((np.array(base.val) + lucky).tolist())
    large = replace(base, method="ascent", val=values, test=base.test | {"dice": values})
    rows = table(base, small, large)
    assert rows[2].to_base.mean > rows[1].to_base.mean
    found = choose(rows, images())
    assert found.better == ("fusion",)
    assert found.best == found.cheapest == "fusion"


def test_headline_table_and_p_column_give_the_same_numbers() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("fusion", 0.6, 0.6), result("ascent", 0.51, 0.503))
    lines = verdict_lines(rows, choose(rows, images()), images(), "x")
    assert f"{PATIENTS} test patients, fewer than 20: the intervals are rough." in lines
    assert f"({rows[1].to_base.signed}, p {p_words(rows[1].p)})" in lines[0]


def test_the_cheapest_is_nearly_as_good_as_the_best() -> None:
    rows = table(
        result(BASE, 0.5, 0.5),
        result("fusion", 0.7, 0.7, minutes=30),
        result("flips_and_scales", 0.6995, 0.7, answers=8),
    )
    found = choose(rows, images())
    assert (found.best, found.cheapest) == ("fusion", "flips_and_scales")
    lines = verdict_lines(rows, found, images(), "outputs/compare_1")
    assert "30.0 minutes" in lines[0]
    assert any("segment --run outputs/compare_1/cheapest" in line for line in lines)
    assert "cannot be excluded." in lines[0]
    worse = table(result(BASE, 0.5, 0.5), result("fusion", 0.7, 0.7, minutes=30), result("ascent", 0.69, 0.6))
    assert choose(worse, images()).cheapest == "fusion"


def test_a_cheap_method_must_be_shown_to_be_nearly_as_good() -> None:
    """It is 0.03 worse on the mean, but so unevenly that nothing is significant on 12 patients."""
    best = result("fusion", 0.7, 0.7, minutes=30)
    uneven = np.random.default_rng(3).normal(-0.03, 0.08, 2 * PATIENTS)
    cheap = tuple((np.array(best.test["dice"]) + uneven - uneven.mean() - 0.03).tolist())
    rows = table(
        result(BASE, 0.4, 0.4),
        best,
        replace(best, method="ascent", val=best.val, test=best.test | {"dice": cheap}, cost=Cost()),
    )
    found = choose(rows, images())
    assert found.better == ("fusion", "ascent")
    assert max_t(np.subtract([cheap], best.test["dice"]), images().groups).p > 0.05
    assert (found.best, found.cheapest) == ("fusion", "fusion")
    assert choose(rows, images(), margin=0.2).cheapest == "ascent"


def test_without_a_significant_gain_the_model_stays() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("reward_net_segmentation", 0.6, 0.5002))
    found = choose(rows, images())
    assert found.best == found.cheapest == BASE
    line = verdict_lines(rows, found, images(), "x")[0]
    assert "(adjusted for 1 method): keep the model as it is" in line


def test_no_road_is_better_than_a_plain_segmenter() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("reward_net_segmentation", 0.9, 0.9), result("fusion", 0.7, 0.7))
    lines = verdict_lines(rows, choose(rows, images()), images(), "x")
    assert lines[-1].startswith("No method is better than a plain segmenter")


def test_a_road_better_than_a_plain_segmenter_is_not_hidden_by_a_worse_one() -> None:
    rows = table(
        result(BASE, 0.5, 0.5),
        result("reward_net_segmentation", 0.7, 0.7),
        result("fusion", 0.9, 0.6),
        result("ascent", 0.8, 0.8),
    )
    last = verdict_lines(rows, choose(rows, images()), images(), "x")[-1]
    assert last.startswith("A plain segmenter is worse than 1 of 3 other methods: ten steps")


def test_masks_equal_to_the_plain_segmenter_are_not_compared_with_it() -> None:
    base, own = result(BASE, 0.5, 0.5), result("reward_net_segmentation", 0.9, 0.9)
    same = replace(own, method="fusion")
    rows = table(base, own, same, result("ascent", 0.8, 0.85))
    last = verdict_lines(rows, choose(rows, images()), images(), "x")[-1]
    assert last.startswith("No method is better than a plain segmenter")
    assert "ten steps" in last
    assert (
        "gives other masks"
        in verdict_lines(table(own, replace(own, method=BASE)), Choice((), BASE, BASE), images(), "x")[-1]
    )


@pytest.mark.parametrize("patients", [1, 5])
def test_with_too_few_patients_for_any_test_the_model_stays(patients: int) -> None:
    rows = table(
        result(BASE, 0.5, 0.5, patients=patients), result("fusion", 0.7, 0.7, patients=patients), patients=patients
    )
    assert rows[1].verdict == "cannot tell"
    found = choose(rows, images(patients))
    assert found.best == found.cheapest == BASE
    lines = verdict_lines(rows, found, images(patients), "x")
    assert lines[0].startswith(f"Cannot tell: {patients} test patients, and no test can decide below 6; keep")
