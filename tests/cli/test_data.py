"""Which embedded data set the flags name, and which flags exclude each other."""

from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.cli import data


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("angiograms", False)),
        ({"no_gap": True}, ("angiograms", True)),
        ({"regions": True}, ("regions", False)),
        ({"regions": True, "daylight": True}, ("regions", True)),
    ],
)
def test_the_flags_name_one_data_set(flags, expected, monkeypatch, capsys):
    calls: list[tuple[str, bool]] = []
    for name in ("angiograms", "regions"):
        monkeypatch.setattr(
            data, f"embedded_{name}", lambda folder, variant, name=name: calls.append((name, variant)) or folder / name
        )
    data.main(data.Args(Path("somewhere"), **flags))
    assert calls == [expected]
    assert capsys.readouterr().out == f"embedded data: somewhere/{expected[0]}\n"


@pytest.mark.parametrize(
    ("flags", "field"), [({"regions": True, "no_gap": True}, "no_gap"), ({"daylight": True}, "daylight is True")]
)
def test_flags_that_exclude_each_other_are_refused(flags: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=field):
        data.main(data.Args(tmp_path / "data", **flags))
    assert not (tmp_path / "data").exists()
