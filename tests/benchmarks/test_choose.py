"""The bake-off of criteria: looks of an image, and what each criterion chooses."""

from typing import Any

import numpy as np
import pytest

from benchmarks.choose import choices, show_criteria, shown


def test_a_look_shows_the_middle_or_the_whole_in_a_border() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 24:40] = 255
    for part, area in ((1.0, 1.0), (0.5, 4.0), (2.0, 0.25)):
        middle = shown(mask, part)
        assert middle.shape == mask.shape
        assert middle.mean() / mask.mean() == pytest.approx(area, rel=0.15)
        rows, columns = (np.flatnonzero((middle > 127).any(axis=axis)).mean() for axis in (1, 0))
        assert (rows, columns) == pytest.approx((31.5, 31.5), abs=1)


def candidate(dice: float, **more: float) -> dict[str, Any]:
    names = ("last step", "confidence", "consistency", "referee", "shape as at home", "collapsed")
    return {"dice": dice, "validation at home": 0.7, **dict.fromkeys(names, 0.0), **more}


def test_each_criterion_chooses_its_best_and_the_table_has_regret_and_harm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [candidate(0.6, referee=0.9), candidate(0.7), candidate(0.55, **{"last step": 60.0, "confidence": 0.9})]
    found = choices(rows)
    assert found | {"confidence": 2, "referee": 0, "last step": 2, "dice": 1} == found
    agrees = "last step if the referee agrees more"
    assert found[agrees] == 0
    assert choices([*rows[:2], rows[2] | {"referee": 0.95}])[agrees] == 2
    kept = "last step unless collapsed or worse at home"
    assert found[kept] == 2
    assert choices([row | {"collapsed": 1.0} for row in rows])[kept] == 0
    assert choices([*rows[:2], rows[2] | {"validation at home": 0.6}])[kept] == 0
    show_criteria({"one": rows, "other": rows[:2]})
    table = capsys.readouterr().out
    (confidence,) = (line for line in table.splitlines() if line.startswith("| confidence"))
    assert [cell.strip() for cell in confidence.split("|")[2:-1]] == ["0.125", "0.150", "-0.025", "-0.050", "1 of 2"]
