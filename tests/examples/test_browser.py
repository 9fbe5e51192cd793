"""The demo as a user meets it in a browser: log in, upload an image, ask, look, download the mask."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="needs Gradio: pip install -e '.[demo]'")
api = pytest.importorskip("playwright.sync_api", reason="needs playwright, a driver of browsers")

from rl_reward_network.embedded.angiograms import TREE, render_series  # noqa: E402
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig  # noqa: E402
from tests.examples.serving import headless, served  # noqa: E402

pytestmark = pytest.mark.slow

PORT = 7898
PHONE = 390  # pixels
PATIENCE = 60_000  # milliseconds; the computer may be busy
PROMPT = "Please segment the bright vessels."
PICTURES = ("Mask", "Soft mask (white: 1)", "Expected errors (yellow: 1)", "Fused mask")
QUALITY = r"^Predicted Dice: 0\.\d{3}, score 0\.\d{3}\nSpread between the networks: 0\.\d{3}$"
OVERLAPS = """() => {
    const box = element => element.getBoundingClientRect();
    const visible = selector => [...document.querySelectorAll(selector)].filter(one => box(one).width > 0);
    const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const pictures = visible(".image-frame img, .thumbnail-item > img").map(box);
    const words = visible("label.float, .icon-button-wrapper, .caption-label, button.lg").map(box);
    return words.filter(word => pictures.some(picture => overlap(word, picture))).length;
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A demo with a reward network, for those who know the password; it prints no traceback."""
    folder = tmp_path_factory.mktemp("browser")
    RewardNetwork(RewardNetworkConfig(channels=(4, 8), members=2)).save_pretrained(folder / "best_reward_net")
    network = ["--reward_net", str(folder / "best_reward_net")]
    with served(PORT, folder, *network, SA2VA_DEMO_AUTH="me:secret") as url:
        yield url
    assert "Traceback" not in (folder / "server.log").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless() as started:
        yield started


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The login page; a fault of its scripts fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened, faults = context.new_page(), []
    opened.on("pageerror", lambda fault: faults.append(fault))
    opened.goto(address)
    yield opened
    context.close()
    assert not faults


@pytest.fixture(scope="module")
def angiogram(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A rendered image, larger than what the model sees, and where its vessels are, bool (H, W)."""
    frame = next(render_series(np.random.default_rng(5), "bright", 1))
    file = tmp_path_factory.mktemp("images") / "run_12.png"
    Image.fromarray(frame.image).resize((1600, 1200)).save(file)
    return file, np.asarray(Image.fromarray(frame.parts & TREE > 0).resize((1600, 1200)))


def log_in(page: Any, password: str = "secret") -> None:
    page.get_by_label("username").fill("me")
    page.get_by_label("password").fill(password)
    page.get_by_role("button", name="Login").click()


def upload(page: Any, file: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(str(file))
    page.wait_for_timeout(3000)  # until answers about the last image are gone


def segment(page: Any, prompt: str) -> str:
    """The words of the answer to a prompt."""
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Segment").click()
    answer = page.get_by_label("Answer")
    api.expect(answer).to_have_value(re.compile(re.escape(f"Prompt: {prompt}\n")), timeout=PATIENCE)
    return str(answer.input_value())


def download(page: Any, folder: Path) -> tuple[str, np.ndarray]:
    """The name that the browser proposes for the mask, and the stored numbers."""
    with page.expect_download() as started:
        page.get_by_role("button", name="Download the mask").click()
    started.value.save_as(folder / "mask.png")
    return started.value.suggested_filename, np.asarray(Image.open(folder / "mask.png"))


def refusal(page: Any) -> str:
    """The one message on the page, which is closed."""
    message = page.locator(".toast-body")
    message.first.wait_for()
    page.wait_for_timeout(1000)  # a second message would be there, too
    (words,) = message.all_inner_texts()
    page.locator(".toast-close").click()
    message.wait_for(state="detached")
    return str(words)


def test_the_login_page_refuses_a_wrong_password(page: Any) -> None:
    start = page.get_by_role("button", name="Segment")
    log_in(page, "guess")
    page.get_by_text("Incorrect Credentials").wait_for()
    page.reload()
    page.get_by_label("username").wait_for()
    assert start.count() == 0
    log_in(page)
    start.wait_for()


def test_from_an_upload_to_the_file_of_its_mask(page: Any, angiogram: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    file, vessels = angiogram
    log_in(page)
    api.expect(page.get_by_role("button", name="Download the mask")).to_be_disabled(timeout=PATIENCE)
    upload(page, file)
    words = segment(page, PROMPT)
    assert words.startswith("Image: 1600 x 1200 pixels, shrunk to 1024 x 768\n")
    assert re.search(QUALITY, words, re.MULTILINE)
    for label in PICTURES:
        picture = page.locator(".block", has=page.get_by_text(label, exact=True)).last.locator("img")
        assert picture.evaluate("img => img.decode().then(() => [img.naturalWidth, img.naturalHeight])") == [1024, 768]
    name, mask = download(page, tmp_path)
    assert (name, mask.shape, mask.dtype) == ("run_12_mask.png", (1200, 1600), np.uint8)
    assert np.unique(mask).tolist() == [0, 255]
    share = re.search(r"Mask: ([\d.]+) % of the image", words)
    assert share is not None
    assert 100 * (mask > 0).mean() == pytest.approx(float(share[1]), abs=0.2)
    dice = 2 * (mask[vessels] > 0).sum() / ((mask > 0).sum() + vessels.sum())
    assert dice > 0.7, "the mask lies elsewhere"


def test_what_is_refused_is_one_message_and_the_page_keeps_working(
    page: Any, angiogram: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    log_in(page)
    start = page.get_by_role("button", name="Segment")
    start.click()
    assert "there is no image yet" in refusal(page)
    Image.new("1", (10_000, 6_000)).save(tmp_path / "huge.png")
    (tmp_path / "broken.png").write_bytes(angiogram[0].read_bytes()[:9000])
    for name, message in (("huge", "10000 x 6000 pixels, expected at most 50"), ("broken", "not a readable image")):
        page.locator("input[type=file]").first.set_input_files(str(tmp_path / f"{name}.png"))
        assert f"{name}.png: {message}" in refusal(page)
        api.expect(page.get_by_text("Drop Image Here")).to_be_visible()
    upload(page, angiogram[0])
    words = segment(page, PROMPT)
    for prompt, message in (("  ", "the prompt is empty"), ("a" * 2001, "2,001 characters, expected at most 2,000")):
        page.get_by_label("Prompt").fill(prompt)
        start.click()
        assert message in refusal(page)
        assert page.get_by_label("Answer").input_value() == words
        assert page.get_by_text("Error", exact=True).count() == 0, "it covers the answers"
    name, mask = download(page, tmp_path)
    assert mask.any(), "the last answer can still be used"


def test_nothing_overlaps_on_a_phone_or_is_cut(page: Any, angiogram: tuple[Path, np.ndarray]) -> None:
    log_in(page)
    upload(page, angiogram[0])
    segment(page, PROMPT)
    page.get_by_role("button", name="All prompts").click()
    page.locator(".caption-label").first.wait_for()
    for width in (1280, PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERLAPS) == 0
        label, tools = (
            page.locator(".block:has(canvas)").last.locator(part).first.bounding_box()
            for part in ("label.float", ".icon-button-wrapper")
        )
        assert label["x"] + label["width"] <= tools["x"]
