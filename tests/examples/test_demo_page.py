"""The page of the demo: in a server, and (slow) in headless Chromium, as a user meets it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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

from examples.demo.__main__ import fill_page, guarded, image_change, launch  # noqa: E402
from examples.demo.answers import Answers, drawn_region, write_examples  # noqa: E402
from rl_reward_network.embedded.angiograms import TREE, render_series  # noqa: E402
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig  # noqa: E402
from rl_reward_network.segment.maker import MaskMaker  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PORT, PATIENCE = 7897, 60_000  # milliseconds; the computer may be busy
FOREIGN = "![a](http://example.com/b.png) <img src=http://example.com/c.png>"  # as Markdown or HTML it would be loaded


def test_the_region_is_where_the_user_has_drawn(tmp_path: Path) -> None:
    layers = np.zeros((2, 4, 6, 4), np.uint8)
    layers[0, 1, 2, 3], layers[1, 3, 5, 3] = 200, 1
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    for layer, file in zip(layers, files, strict=True):
        Image.fromarray(layer).save(file)
    given = [str(files[0]), None, files[1].read_bytes()]
    region = drawn_region({"background": None, "layers": given, "composite": None}, tmp_path)
    assert region is not None
    assert np.argwhere(region).tolist() == [[1, 2], [3, 5]]
    assert drawn_region(None, tmp_path) is drawn_region({"layers": []}, tmp_path) is None
    Image.new("RGBA", (9, 9)).save(tmp_path / "larger.png")
    with pytest.raises(ValueError, match="layers of different sizes"):
        drawn_region({"layers": [*given, str(tmp_path / "larger.png")]}, tmp_path)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("<img src=x>.png: too large"), "&lt;img src=x&gt;.png: too large"),
        (RuntimeError("CUDA out of memory\nframe 1"), "the model failed (CUDA out of memory); a smaller image"),
        (MemoryError(), "the model failed (MemoryError); a smaller image"),
    ],
)
def test_errors_become_escaped_messages(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise error

    shown: list[str] = []
    monkeypatch.setattr(gradio, "Warning", lambda message, duration: shown.append(message))
    assert guarded(fails)() == gradio.skip(), "what is on the page stays"
    assert shown[0].startswith(message)


def test_a_new_image_clears_the_answers_and_a_refused_one_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradio, "Warning", lambda message, duration: None)
    picture, no_file = np.zeros((8, 8, 3), np.uint8), gradio.update(value=None, interactive=False)

    def opened(path: str) -> tuple[np.ndarray, str]:
        if path == "words.png":
            raise ValueError("words.png: not a readable image")
        return picture, ""

    answers: Any = SimpleNamespace(open=opened)
    changed = image_change(answers, 3)
    assert changed("a.png", "a.png") == gradio.skip()
    assert changed("a.png", None) == ["a.png", gradio.skip(), no_file, None, None, picture]
    assert changed(None, "a.png") == [None, gradio.skip(), no_file, None, None, None]
    assert changed("words.png", "a.png") == [None, None, no_file, None, None, None]


@pytest.mark.parametrize("trained", [False, True])
def test_components_show_what_the_model_has_and_leave_files_undecoded(trained: bool) -> None:
    """A layer of 144 megapixels is a small file and gigabytes of memory."""
    parts: Any = {"policy": object(), "network": object()} if trained else {"policy": None, "network": None}
    maker = MaskMaker(model=None, processor=None, max_new_tokens=64, prompt="two", trained={}, **parts)
    with gradio.Blocks():
        parts = fill_page(Answers(maker, ("one", "two"), "model", Path("uploads")), [])
    chosen = (parts["prompt"].value, parts["by_policy"].value, parts["by_policy"].visible)
    assert chosen == (("one", True, True) if trained else ("two", False, False))
    assert parts["gallery"].label == "All prompts" + ", with predicted Dice" * trained
    file = SimpleNamespace(path="layer.png", orig_name="layer.png")
    given = parts["drawing"].preprocess(SimpleNamespace(id=None, background=file, layers=[file, b"b"], composite=file))
    assert given == {"background": None, "layers": ["layer.png", b"b"], "composite": None}
    assert parts["image"].preprocess(file) == "layer.png"
    assert not list((ROOT / "examples").rglob("*.pyi"))


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
    """The address of a demo with a reward network, started as a user does; it prints no traceback, keeps no upload."""
    folder = tmp_path_factory.mktemp("page")
    network, uploads, log = folder / "best_reward_net", folder / "uploads", folder / "server.log"
    RewardNetwork(RewardNetworkConfig(channels=(4, 8), members=2)).save_pretrained(network)
    uploads.mkdir()
    url = f"http://127.0.0.1:{PORT}"
    flags = ["--device", "cpu", "--port", str(PORT), "--reward_net", str(network)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(uploads)}
    command = [sys.executable, "-m", "examples.demo", *flags]
    with log.open("w") as printed, subprocess.Popen(command, env=variables, stdout=printed, stderr=printed) as server:
        try:
            for _ in range(240):
                assert server.poll() is None, log.read_text()
                try:
                    urlopen(url, timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield url
        finally:
            server.terminate()
    assert not list(uploads.iterdir()), "uploads stay on the disk"
    assert "Traceback" not in log.read_text()


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
    session, headers = uuid4().hex, {"Content-Type": "application/json"}
    body = json.dumps({"data": values, "fn_index": call, "session_hash": session}).encode()
    urlopen(Request(f"{address}/gradio_api/queue/join", body, headers), timeout=20).close()
    with urlopen(f"{address}/gradio_api/queue/data?session_hash={session}", timeout=60) as stream:
        return b"".join(takewhile(lambda line: b"close_stream" not in line, stream)).decode()


@pytest.mark.slow
def test_from_an_upload_to_the_file_of_its_mask_in_a_browser(address: str, tmp_path: Path) -> None:
    """Masks appear, errors are messages, another image clears, labels overlap nothing, nothing leaves the computer."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, a driver of browsers")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path, or its file in the variable CHROMIUM")
    frame, asked, faults = next(render_series(np.random.default_rng(5), "bright", 1)), list[str](), list[Any]()
    Image.fromarray(frame.image).resize((1600, 1200)).save(tmp_path / "run_12.png")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", faults.append)
        page.goto(address)
        start, answer = page.get_by_role("button", name="Segment"), page.get_by_label("Answer")
        start.click()
        page.get_by_text("there is no image yet").wait_for()
        page.locator("input[type=file]").first.set_input_files(str(tmp_path / "run_12.png"))
        page.wait_for_timeout(3000)
        for prompt in (FOREIGN, "Please segment the bright vessels."):
            page.get_by_label("Prompt").fill(prompt)
            start.click()
            api.expect(answer).to_have_value(re.compile(re.escape(f"Prompt: {prompt}\n")), timeout=PATIENCE)
        assert answer.input_value().startswith("Image: 1600 x 1200 pixels, shrunk to 1024 x 768\n")
        with page.expect_download() as started:
            page.get_by_role("button", name="Download the mask").click()
        started.value.save_as(tmp_path / "mask.png")
        page.get_by_role("button", name="All prompts").click()
        page.locator(".caption-label", has_text="the main vessel trunk").wait_for()
        for width in (1280, 390):  # a phone
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(1000)
            assert page.evaluate("document.documentElement.scrollWidth") == width
        page.get_by_role("button", name="Describe").click()
        page.get_by_text("no region is drawn").wait_for()
        page.locator("button.gallery-item").last.click()
        api.expect(answer).to_have_value("", timeout=PATIENCE)
        browser.close()
    mask, vessels = np.asarray(Image.open(tmp_path / "mask.png")) > 0, frame.parts & TREE > 0
    vessels = np.asarray(Image.fromarray(vessels).resize((1600, 1200)))
    assert 2 * (mask & vessels).sum() / (mask.sum() + vessels.sum()) > 0.7, "the mask lies elsewhere"
    assert not faults
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
