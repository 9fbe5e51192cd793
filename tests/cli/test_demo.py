"""`sa2va-rl demo`: what is refused before a page is served."""

from pathlib import Path

import pytest

from rl_reward_network.cli import demo


def test_a_missing_gradio_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Gradio.*pip install -e '\.\[demo\]'"):
        demo.main(demo.Args())


def test_a_missing_model_is_refused_before_the_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="no such folder"):
        demo.main(demo.Args(model_path=str(tmp_path / "missing")))
