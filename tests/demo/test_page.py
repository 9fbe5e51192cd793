"""The page in a server, and in headless Chromium with real clicks."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

gradio = pytest.importorskip("gradio", reason="needs Gradio: pip install -e '.[demo]'")

from rl_reward_network.demo.examples import write_examples  # noqa: E402
from rl_reward_network.demo.page import drawn_region  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PORT = 7897
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


def test_the_region_is_where_the_user_has_drawn() -> None:
    layer = np.zeros((4, 6, 4), np.uint8)
    layer[1, 2, 3] = 200
    other = np.zeros((4, 6, 4), np.uint8)
    other[3, 5, 3] = 1
    region = drawn_region({"background": None, "layers": [layer, other], "composite": None})
    assert region is not None
    assert np.argwhere(region).tolist() == [[1, 2], [3, 5]]
    assert drawn_region(None) is None
    assert drawn_region({"layers": []}) is None


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a demo of the embedded model, served by the command as a user starts it."""
    command = [sys.executable, "-m", "rl_reward_network.cli", "demo", "--device", "cpu", "--port", str(PORT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        url = f"http://127.0.0.1:{PORT}"
        try:
            _wait_for(url, server)
            yield url
        finally:
            server.terminate()


def _wait_for(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(240):
        assert server.poll() is None, server.stdout.read().decode() if server.stdout else ""
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer in two minutes")


@pytest.mark.slow
def test_clicks_in_a_browser(address: str, tmp_path: Path) -> None:
    """Mask and caption appear, errors are messages, the server lives on, and nothing leaves the computer."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, a driver of browsers")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path, or its file in the variable CHROMIUM")
    words = tmp_path / "words.png"
    words.write_text("no image")
    asked: list[str] = []
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        pages = [_opened(browser, address, asked) for _ in range(2)]
        pages[0].get_by_role("button", name="Segment").click()
        pages[0].get_by_text("there is no image yet").wait_for()
        for page, example in zip(pages, write_examples(tmp_path / "examples"), strict=False):
            page.locator("input[type=file]").first.set_input_files(str(example))
            page.wait_for_timeout(2000)
        for page in pages:  # two users at once
            page.get_by_role("button", name="Segment").click()
        for page in pages:
            page.get_by_text("of the image").wait_for(timeout=20_000)
        pages[0].get_by_role("button", name="All prompts").click()
        pages[0].get_by_text("the main vessel trunk").first.wait_for(timeout=20_000)
        pages[0].get_by_role("button", name="Describe").click()
        pages[0].get_by_text("no region is drawn").wait_for(timeout=20_000)
        pages.append(_opened(browser, address, asked))
        pages[2].locator("input[type=file]").first.set_input_files(str(words))
        pages[2].wait_for_timeout(2000)
        pages[2].get_by_role("button", name="Segment").click()
        pages[2].get_by_text("cannot identify image file").first.wait_for(timeout=20_000)
        browser.close()
    assert asked
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    urlopen(address, timeout=5).close()


def _opened(browser: Any, address: str, asked: list[str]) -> Any:
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.get_by_role("button", name="Segment").wait_for(timeout=60_000)
    return page
