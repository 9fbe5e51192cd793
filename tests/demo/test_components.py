"""Components of the page: what is selected at first, and what an upload gives to the calls."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

gradio = pytest.importorskip("gradio", reason="needs Gradio: pip install -e '.[demo]'")

from rl_reward_network.demo import components  # noqa: E402
from rl_reward_network.demo.answers import Answers  # noqa: E402
from rl_reward_network.segment.maker import MaskMaker  # noqa: E402

PLAIN = Answers(MaskMaker(None, None, 64, "two", {}, None, None), ("one", "two"), "model", Path("uploads"))


def parts_of(answers: Answers) -> components.Parts:
    with gradio.Blocks():
        return components.make_parts(answers, [])


def test_the_best_fixed_prompt_is_selected_and_no_policy_is_offered() -> None:
    parts = parts_of(PLAIN)
    assert (parts.prompt.value, parts.by_policy.value, parts.by_policy.visible) == ("two", False, False)
    assert parts.gallery.label == "all prompts"


def test_a_deployed_policy_chooses_at_first_and_numbers_are_explained() -> None:
    trained: Any = {"policy": object(), "network": object()}
    parts = parts_of(replace(PLAIN, maker=replace(PLAIN.maker, **trained)))
    assert (parts.by_policy.value, parts.by_policy.visible) == (True, True)
    assert parts.gallery.label == "all prompts, with predicted Dice"


def test_pictures_are_downloaded_without_loss() -> None:
    parts = parts_of(PLAIN)
    assert {part.format for part in (parts.overlay, parts.soft, parts.errors, parts.fused, parts.gallery)} == {"png"}


def test_an_upload_is_a_path_whatever_is_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no image")
    upload = components.upload(render=False)
    assert upload.preprocess(SimpleNamespace(path=str(tmp_path / "words.png"))) == str(tmp_path / "words.png")
    assert upload.preprocess(None) is None
    assert upload.get_block_name() == "image"


def test_a_drawing_is_not_decoded_by_gradio() -> None:
    """A layer of 144 megapixels is a small file and gigabytes of memory."""
    drawing = parts_of(PLAIN).drawing
    file = SimpleNamespace(path="layer.png", orig_name="layer.png")
    given = drawing.preprocess(SimpleNamespace(id=None, background=file, layers=[file, b"bytes"], composite=file))
    assert given == {"background": None, "layers": ["layer.png", b"bytes"], "composite": None}


def test_no_stub_is_written_beside_the_source() -> None:
    components.upload(render=False)
    assert not list(Path(components.__file__).parent.glob("*.pyi"))
