"""Start the demo as a user does, and the browser to look at it with."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def served(port: int, folder: Path, *flags: str, **environment: str) -> Iterator[str]:
    """The address of a demo on the CPU, which prints to `server.log` in a folder, and must leave no upload there."""
    command = [sys.executable, "-m", "examples.demo", "--device", "cpu", "--port", str(port), *flags]
    uploads, log = folder / "uploads", folder / "server.log"
    uploads.mkdir()
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(uploads), **environment}
    with (
        log.open("w") as printed,
        subprocess.Popen(command, env=variables, stdout=printed, stderr=subprocess.STDOUT) as server,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for(url, server, log)
            assert len(list(uploads.iterdir())) == 1
            yield url
        finally:
            server.terminate()
    assert not list(uploads.iterdir()), "uploads stay on the disk"


def _wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer in two minutes")


@contextmanager
def headless() -> Iterator[Any]:
    """A browser of Playwright; without Playwright or a Chromium the test is skipped."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, a driver of browsers")
    if CHROMIUM is None:
        pytest.skip("needs Chromium on the path, or its file in the variable CHROMIUM")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()
