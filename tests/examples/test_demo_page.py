"""The page in a server, and in headless Chromium with real clicks."""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

import numpy as np
import pytest
from PIL import Image

gradio = pytest.importorskip("gradio", reason="needs Gradio: pip install -e '.[demo]'")

from examples.demo import page as page_module  # noqa: E402
from examples.demo.answers import Answers, write_examples  # noqa: E402
from examples.demo.page import drawn_region, fill_page, guarded, image_change, launch  # noqa: E402
from rl_reward_network.segment.maker import MaskMaker  # noqa: E402
from tests.examples.serving import headless, served  # noqa: E402

PORT = 7897
FOREIGN = "![a](http://example.com/b.png) <img src=http://example.com/c.png>"  # as Markdown or HTML it would be loaded


def test_the_region_is_where_the_user_has_drawn(tmp_path: Path) -> None:
    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2, 3] = 200
    other = np.zeros((4, 6, 4), np.uint8)
    other[3, 5, 3] = 1
    Image.fromarray(layer).save(tmp_path / "layer.png")
    file = io.BytesIO()
    Image.fromarray(other).save(file, "PNG")
    layers = [str(tmp_path / "layer.png"), None, file.getvalue()]
    region = drawn_region({"background": None, "layers": layers, "composite": None}, tmp_path)
    assert region is not None
    assert np.argwhere(region).tolist() == [[1, 2], [3, 5]]
    assert drawn_region(None, tmp_path) is drawn_region({"layers": []}, tmp_path) is None
    Image.new("RGBA", (9, 9)).save(tmp_path / "larger.png")
    with pytest.raises(ValueError, match="layers of different sizes"):
        drawn_region({"layers": [*layers, str(tmp_path / "larger.png")]}, tmp_path)


def message_of(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    def fails() -> None:
        raise error

    shown: list[str] = []
    monkeypatch.setattr(gradio, "Warning", lambda message, duration: shown.append(message))
    assert guarded(fails)() == gradio.skip(), "what is on the page stays"
    assert guarded(fails, otherwise=None)() is None
    assert shown[0] == shown[1]
    return shown[0]


def test_errors_become_escaped_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped = "&lt;img src=x&gt;.png: too large"
    assert message_of(ValueError("<img src=x>.png: too large"), monkeypatch) == escaped
    cuda = message_of(RuntimeError("CUDA out of memory\nframe 1"), monkeypatch)
    assert "the model failed (CUDA out of memory)" in cuda
    assert "the model failed (MemoryError)" in message_of(MemoryError(), monkeypatch)


def test_a_new_image_clears_the_answers_and_a_refused_one_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(gradio, "Warning", lambda message, duration: shown.append(message))
    picture = np.zeros((8, 8, 3), np.uint8)

    def opened(path: str) -> np.ndarray:
        if path == "words.png":
            raise ValueError("words.png: not a readable image")
        return picture

    answers: Any = SimpleNamespace(open=opened)
    changed = image_change(answers, 3)
    no_file = gradio.update(value=None, interactive=False)
    assert changed("a.png", "a.png") == gradio.skip()
    assert changed("a.png", None) == ["a.png", gradio.skip(), no_file, None, None, picture]
    assert changed(None, "a.png") == [None, gradio.skip(), no_file, None, None, None]
    assert changed("words.png", "a.png") == [None, None, no_file, None, None, None]
    assert shown == ["words.png: not a readable image"]


def test_components_show_what_the_model_has_and_leave_files_undecoded(tmp_path: Path) -> None:
    """A layer of 144 megapixels is a small file and gigabytes of memory."""
    plain = Answers(MaskMaker(None, None, 64, "two", {}, None, None), ("one", "two"), "model", Path("uploads"))
    trained: Any = {"policy": object(), "network": object()}
    for answers, chosen, label in (
        (plain, ("two", False, False), "All prompts"),
        (
            replace(plain, maker=replace(plain.maker, **trained)),
            ("one", True, True),
            "All prompts, with predicted Dice",
        ),
    ):
        with gradio.Blocks():
            parts = fill_page(answers, [])
        assert (parts["prompt"].value, parts["by_policy"].value, parts["by_policy"].visible) == chosen
        assert (parts["gallery"].label, parts["gallery"].format) == (label, "png")
    file = SimpleNamespace(path="layer.png", orig_name="layer.png")
    given = parts["drawing"].preprocess(SimpleNamespace(id=None, background=file, layers=[file, b"b"], composite=file))
    assert given == {"background": None, "layers": ["layer.png", b"b"], "composite": None}
    assert parts["image"].preprocess(file) == "layer.png"
    assert not list(Path(page_module.__file__).parent.glob("*.pyi"))


def test_the_page_asks_for_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, neither the page nor its calls are there without it."""
    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.Button("Segment").click(lambda: None)
    codes: dict[str, int] = {}

    def ask() -> None:
        for path in ("config", "gradio_api/info"):
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{page.local_url}{path}", timeout=20)
            codes[path] = refused.value.code
        form = urlencode({"username": "me", "password": "secret"}).encode()
        codes["login"] = urlopen(Request(f"{page.local_url}login", form), timeout=20).status

    monkeypatch.setattr(page, "block_thread", ask)
    try:
        launch(page, False, None, ("me", "secret"))
    finally:
        page.close()
    assert codes == {"config": 401, "gradio_api/info": 401, "login": 200}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a demo of the embedded model, served by the command as a user starts it."""
    with served(PORT, tmp_path_factory.mktemp("page")) as url:
        yield url


@pytest.mark.slow
def test_no_call_over_http_reads_a_file_of_the_computer(address: str, tmp_path: Path) -> None:
    """Whoever opens the page can send any path; the calls are those of the page itself."""
    write_examples(tmp_path / "examples")
    secret = {"path": str(tmp_path / "examples" / "plain.png")}
    meta = {"meta": {"_type": "gradio.FileData"}}
    with urlopen(f"{address}/config", timeout=20) as reply:
        calls = json.load(reply)["dependencies"]
    editor = {"background": secret | meta, "layers": [secret | meta], "composite": secret | meta}
    replies = []
    for call in calls:
        for file in (secret, secret | meta):
            values = [file, "Please segment the vessel.", False, 0.5] if len(call["inputs"]) == 4 else [file, editor]
            replies.append(_answer(address, call["id"], values[: len(call["inputs"])]))
    assert not [reply for reply in replies if "/file=" in reply]  # the address of a picture
    assert sum("no upload and no example" in reply for reply in replies) >= 3  # segment, all prompts, a new image


def _answer(address: str, call: int, values: list[Any]) -> str:
    """What the server says to a call of the page, as a browser makes it."""
    session = uuid4().hex
    body = json.dumps({"data": values, "fn_index": call, "session_hash": session}).encode()
    headers = {"Content-Type": "application/json"}
    urlopen(Request(f"{address}/gradio_api/queue/join", body, headers), timeout=20).close()
    with urlopen(f"{address}/gradio_api/queue/data?session_hash={session}", timeout=60) as stream:
        lines = takewhile(lambda line: b"close_stream" not in line, stream)
        return b"".join(lines).decode()


@pytest.mark.slow
def test_clicks_in_a_browser(address: str, tmp_path: Path) -> None:
    """Masks appear, errors are messages, another image clears, the server lives on, and nothing leaves the computer."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, a driver of browsers")
    words = tmp_path / "words.png"
    words.write_text("no image")
    asked: list[str] = []
    with headless() as browser:
        pages = [_opened(browser, address, asked) for _ in range(2)]
        pages[0].get_by_role("button", name="Segment").click()
        pages[0].get_by_text("there is no image yet").wait_for()
        for page, example in zip(pages, write_examples(tmp_path / "examples"), strict=False):
            page.locator("input[type=file]").first.set_input_files(str(example))
            page.wait_for_timeout(2000)
        for page in pages:  # two users at once
            page.get_by_role("button", name="Segment").click()
        for page in pages:
            api.expect(page.get_by_label("answer")).to_have_value(re.compile("of the image"), timeout=20_000)
        pages[1].get_by_label("prompt").fill(FOREIGN)
        pages[1].get_by_label("prompt").press("Enter")
        pages[1].get_by_role("button", name="Segment").click()
        api.expect(pages[1].get_by_label("answer")).to_have_value(re.compile(re.escape(f"Prompt: {FOREIGN}")))
        pages[0].get_by_role("button", name="All prompts").click()
        pages[0].locator(".caption-label", has_text="the main vessel trunk").wait_for(timeout=20_000)
        grid = pages[0].locator(".grid-wrap")
        assert grid.evaluate("box => box.scrollHeight <= box.clientHeight"), "prompts are cut off"
        pages[0].get_by_role("button", name="Describe").click()
        pages[0].get_by_text("no region is drawn").wait_for(timeout=20_000)
        pages[0].locator("button.gallery-item").last.click()
        api.expect(pages[0].get_by_label("answer")).to_have_value("", timeout=20_000)
        api.expect(pages[0].locator(".caption-label")).to_have_count(0, timeout=20_000)
        pages.append(_opened(browser, address, asked))
        pages[2].locator("input[type=file]").first.set_input_files(str(words))
        pages[2].get_by_text("words.png: not a readable image").first.wait_for(timeout=20_000)
        pages[2].get_by_role("button", name="Segment").click()
        pages[2].get_by_text("there is no image yet").wait_for(timeout=20_000)
    assert asked
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    urlopen(address, timeout=5).close()


def _opened(browser: Any, address: str, asked: list[str]) -> Any:
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.get_by_role("button", name="Segment").wait_for(timeout=60_000)
    return page
