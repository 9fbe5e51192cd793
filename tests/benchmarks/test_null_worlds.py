"""The benchmark of false verdicts, with few worlds."""

import re

import numpy as np
import pytest

from benchmarks import null_worlds
from benchmarks.null_worlds import NOISES, Args, deploys, has_best, simulate


@pytest.mark.parametrize("found", [has_best, deploys])
@pytest.mark.parametrize("patients", [5, 12, 40])
def test_where_nothing_differs_hardly_anything_is_called_better(found, patients):
    """The best of 21 roads by its own interval was called better in every third of these worlds."""
    false = sum(found(np.random.default_rng([1, world]), NOISES["heavy tails"], patients, 0.0) for world in range(60))
    assert false <= (0 if patients == 5 else 7)  # 3 expected at most; more than 7 have a chance of 1 %


@pytest.mark.parametrize("found", [has_best, deploys])
def test_a_large_gain_is_found(found):
    worlds = [found(np.random.default_rng([2, world]), NOISES["heavy tails"], 40, 0.1) for world in range(10)]
    assert np.mean(worlds) > 0.8


def test_the_last_lines_count_false_verdicts(capsys, monkeypatch):
    monkeypatch.setattr(null_worlds, "WORLDS", (("heavy tails", 8),))
    simulate(Args(worlds=10))
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"false best: \d+ of 10", lines[0])
    assert re.fullmatch(r"deployed against the model as it is: \d+ of 10", lines[1])
