"""The table, the choice on validation patients, and the verdict, from made-up results."""

from dataclasses import replace

import numpy as np
import pytest

from rl_reward_network.methods.table import (
    Choice,
    MethodResult,
    MethodRow,
    Report,
    choose,
    deploy_lines,
    make_table,
    verdict_lines,
)
from rl_reward_network.methods.table import TestImages as Images  # not a test
from rl_reward_network.methods.view import BASE
from rl_reward_network.report.deployment import Cost
from rl_reward_network.report.statistics import max_t
from rl_reward_network.report.table import p_words
from rl_reward_network.rewards.metrics import METRICS

PATIENTS = 12
OWN = "reward_net_segmentation"


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
    answers: int = 1,
) -> MethodResult:
    """Results whose images differ a little, in the same way for every method."""
    ripple = np.random.default_rng(7).normal(0, 0.05, 2 * patients)
    own = np.random.default_rng(len(method)).normal(0, 0.002, 2 * patients)
    columns = {name: tuple((test + ripple + own).tolist()) for name in METRICS}
    return MethodResult(method, seed, BASE, None, tuple((val + ripple + own).tolist()), columns, answers, Cost(minutes))


BASIC = result(BASE, 0.5, 0.5)


def compared(*results: MethodResult, patients: int = PATIENTS) -> tuple[tuple[MethodRow, ...], Choice, tuple[str, ...]]:
    """The table of results, the choice, and the verdict."""
    by_method: dict[str, list[MethodResult]] = {}
    for one in results:
        by_method.setdefault(one.method, []).append(one)
    rows = make_table(by_method, images(patients))
    choice = choose(rows, images(patients))
    return rows, choice, verdict_lines(rows, choice, images(patients))


def test_differences_are_paired_and_p_is_that_of_one_test_of_all_rows() -> None:
    rows, choice, lines = compared(BASIC, result("fusion", 0.6, 0.6), result(OWN, 0.5, 0.5))
    base, own, fusion = rows  # the order of METHODS
    assert base.p is None
    assert fusion.to_base.mean == pytest.approx(0.1, abs=0.002)
    assert fusion.to_base.low is not None
    assert fusion.to_base.low > 0.09  # the ripple that both share is gone
    gains = [np.subtract(row.results[0].test["dice"], base.results[0].test["dice"]) for row in (own, fusion)]
    assert [own.p, fusion.p] == max_t(np.array(gains), images().groups).p.tolist()
    assert [row.verdict for row in rows] == ["", "cannot tell", "better"]
    assert f"({fusion.to_base.signed}, p {p_words(fusion.p)})" in lines[0], "headline and table have the same numbers"
    assert choice.best == "fusion"


def test_values_of_an_image_are_means_over_seeds() -> None:
    seeds = [replace(BASIC, seed=1), result("fusion", 0.6, 0.6), result("fusion", 0.7, 0.8, seed=1)]
    rows, *_ = compared(BASIC, *seeds)
    assert rows[1].row.estimates["dice"].mean == pytest.approx(0.7, abs=0.02)
    assert rows[1].val.mean == pytest.approx(0.65, abs=0.02)
    assert rows[0].seed_spread == 0
    assert rows[1].seed_spread == pytest.approx(np.std([0.6, 0.8], ddof=1))
    assert compared(BASIC)[0][0].seed_spread is None


def test_of_several_better_methods_validation_patients_choose_the_best() -> None:
    rows, choice, lines = compared(BASIC, result("fusion", 0.7, 0.55), result("ascent", 0.6, 0.9))
    assert (choice.best, choice.better) == ("fusion", ("fusion", "ascent"))
    assert lines[0].startswith(f"Chosen on validation ({PATIENTS} patients): fusion with")
    assert lines[1].startswith("Better than the model as it is, too: ten steps")
    report = Report(rows, choice, images(), lines, (), {}, {}, ())
    assert [row.method.name for row in report.shown] == ["fusion", "ascent", BASE], "by what chose, not by test"
    assert [report.label(row).endswith(" (chosen)") for row in report.shown] == [True, False, False]


def test_methods_that_validation_does_not_tell_apart_are_level() -> None:
    other = result("ascent", 0.7, 0.9)
    uneven = np.array(other.val) + np.resize([0.1, 0.1, -0.12, -0.12], 2 * PATIENTS)
    lines = compared(BASIC, result("fusion", 0.7, 0.6), replace(other, val=tuple(uneven.tolist())))[2]
    assert lines[0].startswith(f"Chosen on validation ({PATIENTS} patients; level with ten steps")


def test_minutes_of_an_interrupted_run_are_marked() -> None:
    rows, *_ = compared(BASIC, replace(result("fusion", 0.6, 0.6), cost=Cost(2.0, resumed=True)))
    assert [row.minutes for row in rows] == ["0.0", "2.0 *"]


def test_a_small_sure_gain_is_not_hidden_behind_a_larger_doubtful_one() -> None:
    """The method with the highest mean owes it to one patient."""
    lucky = np.random.default_rng(0).normal(0, 0.002, 2 * PATIENTS) + np.eye(2 * PATIENTS)[0] * 0.9
    values = tuple((np.array(BASIC.val) + lucky).tolist())
    large = replace(BASIC, method="ascent", val=values, test=BASIC.test | {"dice": values})
    rows, choice, _ = compared(BASIC, result("fusion", 0.53, 0.53), large)
    assert rows[2].to_base.mean > rows[1].to_base.mean
    assert choice.better == ("fusion",)
    assert choice.best == choice.cheapest == "fusion"


def test_the_cheapest_is_nearly_as_good_as_the_best() -> None:
    best = result("fusion", 0.7, 0.7, minutes=30)
    _, choice, lines = compared(BASIC, best, result("flips_and_scales", 0.6995, 0.7, answers=8))
    assert (choice.best, choice.cheapest) == ("fusion", "flips_and_scales")
    assert "30.0 minutes" in lines[0]
    assert "cannot be excluded." in lines[0]
    assert "--model_path outputs/compare_1/cheapest" in deploy_lines(choice, "outputs/compare_1")[1]
    assert compared(BASIC, best, result("ascent", 0.69, 0.6))[1].cheapest == "fusion"


def test_a_cheap_method_must_be_shown_to_be_nearly_as_good() -> None:
    """It is 0.03 worse on the mean, but so unevenly that nothing is significant on 12 patients."""
    best = result("fusion", 0.7, 0.7, minutes=30)
    uneven = np.random.default_rng(3).normal(-0.03, 0.08, 2 * PATIENTS)
    dice = tuple((np.array(best.test["dice"]) + uneven - uneven.mean() - 0.03).tolist())
    cheap = replace(best, method="ascent", test=best.test | {"dice": dice}, cost=Cost())
    rows, choice, _ = compared(result(BASE, 0.4, 0.4), best, cheap)
    assert choice.better == ("fusion", "ascent")
    assert max_t(np.subtract([dice], best.test["dice"]), images().groups).p > 0.05
    assert (choice.best, choice.cheapest) == ("fusion", "fusion")
    assert choose(rows, images(), margin=0.2).cheapest == "ascent"


def test_without_a_significant_gain_the_model_stays() -> None:
    _, choice, lines = compared(BASIC, result(OWN, 0.6, 0.5002))
    assert choice.best == choice.cheapest == BASE
    assert "(adjusted for 1 method): keep the model as it is" in lines[0]


@pytest.mark.parametrize(
    ("others", "starts", "names"),
    [
        ([result("fusion", 0.7, 0.7), result(OWN, 0.9, 0.9)], "No method is better than a plain segmenter", ""),
        (
            [result(OWN, 0.7, 0.7), result("fusion", 0.9, 0.6), result("ascent", 0.8, 0.8)],
            "A plain segmenter is worse than 1 of 3 other methods: ten steps",
            "",
        ),
        (  # masks equal to it are not compared with it
            [result(OWN, 0.9, 0.9), replace(result(OWN, 0.9, 0.9), method="fusion"), result("ascent", 0.8, 0.85)],
            "No method is better than a plain segmenter",
            "ten steps",
        ),
    ],
)
def test_a_plain_segmenter_is_compared_with_every_method(others: list[MethodResult], starts: str, names: str) -> None:
    last = compared(BASIC, *others)[2][-1]
    assert last.startswith(starts)
    assert names in last
    own = result(OWN, 0.9, 0.9)
    assert "gives other masks" in compared(own, replace(own, method=BASE))[2][-1]


@pytest.mark.parametrize("patients", [1, 5])
def test_with_too_few_patients_for_any_test_the_model_stays(patients: int) -> None:
    both = result(BASE, 0.5, 0.5, patients=patients), result("fusion", 0.7, 0.7, patients=patients)
    rows, choice, lines = compared(*both, patients=patients)
    assert rows[1].verdict == "cannot tell"
    assert choice.best == choice.cheapest == BASE
    assert lines[0].startswith(f"Cannot tell: {patients} test patients, and no test can decide below 6; keep")
