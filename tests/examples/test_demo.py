"""What the demo shows, without a browser: pictures, words, clear messages; no file of others."""

import os
import re
import signal
import subprocess
import sys
import zlib
from copy import copy
from dataclasses import replace
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

import examples.demo.__main__ as demo
from benchmarks.random_checkpoint import write_random_checkpoint
from examples.demo.answers import LOOKS, Answers, drawn_region, load_answers, write_examples
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.pixels_sa2va import QUESTIONS, draw_region
from rl_reward_network.segment.maker import MaskMaker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def answers(folder: Path) -> Answers:
    RewardNetwork(RewardNetworkConfig(channels=(4, 8), members=2)).save_pretrained(folder / "best_reward_net")
    return load_answers(folder, None, None, folder / "best_reward_net", "cpu")


@pytest.fixture(scope="module")
def images(folder: Path) -> list[str]:
    files = write_examples(folder / "examples")
    assert [file.stem for file in files] == [*LOOKS, "scene"]
    return [str(file) for file in files]


def with_maker(answers: Answers, **changes: Any) -> Answers:
    return replace(answers, maker=replace(answers.maker, **changes))


def test_an_answer_has_every_picture_and_the_predicted_quality(answers: Answers, images: list[str]) -> None:
    shown = answers.segment(images[1], PROMPTS[3], False, 0.5)
    image, _ = answers.open(images[1])
    for picture in (shown.overlay, shown.soft, shown.errors, shown.fused):
        assert picture is not None
        assert (picture.shape, picture.dtype) == (image.shape, np.uint8)
    lines = shown.words.splitlines()
    assert lines[:2] == [f"Prompt: {PROMPTS[3]}", "Answer: Sure, [SEG]."]
    assert re.fullmatch(r"Predicted Dice: 0\.\d{3}, score 0\.\d{3}", lines[3])
    assert lines[4].startswith("Spread between the networks: 0.")
    assert lines[5:] == ["No 90 % interval: none was fitted to masks of these weights, or to the network's own"]
    own, fused = (answers.segment(images[1], PROMPTS[3], False, weight).fused for weight in (0.0, 1.0))
    painted = (shown.overlay != image).any(axis=2)
    np.testing.assert_array_equal((own != image).any(axis=2), painted, "weight 0 is Sa2VA's own mask")
    assert (own != fused).any()
    pictures = answers.all_prompts(images[1])
    assert ["Please segment " + label.split(" ", 1)[1] for _, label in pictures] == list(PROMPTS)
    np.testing.assert_array_equal(pictures[3][0], shown.overlay)
    assert f"Predicted Dice: {pictures[3][1].split(' ')[0]}," in shown.words


def test_quality_is_an_interval_a_reason_or_nothing(
    answers: Answers, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: Any = copy(answers.maker.network)
    for patients, words in (
        (40, r"Predicted Dice \[90 % interval\]: 0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\], score"),
        (8, ""),
    ):
        interval = DiceInterval(-1.0, 1.0, 0.02, patients)
        intervals = dict.fromkeys(("Sa2VA", "own segmentation"), interval)
        fitted.config = replace(fitted.config, intervals=intervals)
        told = with_maker(answers, network=fitted).segment(images[0], "one", False, 0.5).words
        assert re.search(words, told)
        assert ("No 90 % interval: it needs 9 validation patients, got 8" in told) == (patients == 8)
    plain = with_maker(answers, network=None)
    shown = plain.segment(images[0], PROMPTS[0], False, 0.5)
    assert shown.errors is shown.fused is None
    assert "Predicted" not in shown.words
    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: "outside the reward network's domain: too dark")
    lines = answers.segment(images[0], PROMPTS[0], False, 0.5).words.splitlines()
    assert lines[3:] == ["Predicted Dice: none, outside the reward network's domain: too dark"]
    for one in (answers, plain):
        assert ["Please segment " + label for _, label in one.all_prompts(images[0])] == list(PROMPTS)


@pytest.mark.parametrize(
    ("how", "words"), [(None, ""), ("outline", "a picture with a red outline"), ("crop", "a picture cropped to it")]
)
def test_a_region_gets_its_caption_which_says_whether_it_was_drawn_into_the_image(
    how: Any, words: str, answers: Answers, images: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how:
        write_random_checkpoint(tmp_path / "model", "tiny-qwen3-vl")
        answers = load_answers(answers.folder, str(tmp_path / "model"), device="cpu")
        answers.maker.processor.region_prompt = how
    region, given, predict = np.zeros((256, 256), bool), {}, answers.maker.model.predict_forward
    region[100:140, 100:140] = True
    monkeypatch.setattr(answers.maker.model, "predict_forward", lambda **named: given.update(named) or predict(**named))
    caption = answers.caption(images[3], region)
    assert "<|" not in caption
    assert words in caption
    if how:
        assert given["text"] == f"<image>{QUESTIONS[how]}"
        assert np.array_equal(given["image"], draw_region(answers.open(images[3])[0], region, how))
    else:
        assert caption.startswith("a ")


def test_a_policy_chooses_the_prompt_and_gives_the_list(
    answers: Answers, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskMaker, "_choose", lambda *_: PROMPTS[2])
    trained = with_maker(answers, policy=object(), trained={"prompts": ["one", "two"]})
    assert f"Prompt: {PROMPTS[2]}" in trained.segment(images[0], "", True, 0.5).words
    monkeypatch.setattr("examples.demo.answers.load_mask_maker", lambda *_, **__: trained.maker)
    monkeypatch.setattr("examples.demo.answers.default_model", lambda policy: "models/mine")
    loaded = load_answers(Path("uploads"), None, Path("run"))
    assert (loaded.prompts, loaded.model_path) == (("one", "two"), "models/mine")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda of, image: of.segment(None, PROMPTS[0], False, 0.5), "upload one"),
        (lambda of, image: of.segment(image, "  ", False, 0.5), "prompt is empty"),
        (lambda of, image: of.segment(image, "a" * 2001, False, 0.5), "2,001 characters, expected at most 2,000"),
        (lambda of, image: of.segment(image, PROMPTS[0], True, 0.5), "--policy RUN"),
        (lambda of, image: of.caption(image, None), "draw over the object"),
        (lambda of, image: of.caption(image, np.ones((3, 5), bool)), "drawn on another image"),
        (lambda of, image: of.all_prompts(__file__), "no upload and no example"),
        (lambda of, image: of.segment(__file__, PROMPTS[0], False, 0.5), "no upload and no example"),
        (lambda of, image: of.caption(__file__, np.ones((256, 256), bool)), "no upload and no example"),
    ],
)
def test_what_cannot_be_shown_is_refused(call: Any, message: str, answers: Answers, images: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        call(answers, images[3])


def test_uploads_are_read_from_their_folder_alone_and_checked_before_they_are_decoded(
    answers: Answers, tmp_path: Path
) -> None:
    folder, other = tmp_path / "uploads", tmp_path / "uploads_of_others"  # its name begins as that of the folder
    for path in (folder, other):
        path.mkdir()
        Image.new("L", (8, 8)).save(path / "patient.png")
    os.symlink(other / "patient.png", folder / "link.png")
    header = b"IHDR" + pack(">IIBBBBB", 10_000, 6_000, 8, 0, 0, 0, 0)
    parts = [pack(">I", len(part) - 4) + part + pack(">I", zlib.crc32(part)) for part in (header, b"IDAT" + b"damaged")]
    (folder / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    (folder / "words.png").write_text("no image")
    (folder / "empty.png").touch()
    Image.effect_noise((64, 64), 50).save(folder / "whole.png")
    (folder / "broken.png").write_bytes((folder / "whole.png").read_bytes()[:500])
    for path, message in {
        other / "patient.png": "the image is no upload and no example",
        folder / ".." / "uploads_of_others" / "patient.png": "the image is no upload and no example",
        folder / "link.png": "the image is no upload and no example",
        tmp_path / "missing.png": "the image is no upload and no example",
        folder / "gone.png": "gone.png: uploads are deleted after an hour or two; upload it",
        folder / "huge.png": "huge.png: 10000 x 6000 pixels, expected at most 50 million; make it smaller",
        folder / "words.png": "words.png: not a readable image",
        folder / "empty.png": "empty.png: not a readable image (the file is empty)",
        folder / "broken.png": "broken.png: not a readable image",
    }.items():
        with pytest.raises(ValueError) as error:
            replace(answers, folder=folder).open(str(path))
        assert str(error.value).startswith(message)
    Image.new("1", (12_000, 12_000)).save(folder / "layer.png")
    for layer in (str(folder / "layer.png"), (folder / "layer.png").read_bytes()):
        with pytest.raises(ValueError, match="the drawing: 12000 x 12000 pixels, expected at most 1 million"):
            drawn_region({"layers": [layer]}, folder)
    for path, message in ((other / "patient.png", "no upload"), (folder / "patient.png", "image with transparency")):
        with pytest.raises(ValueError, match=message):
            drawn_region({"layers": [str(path)]}, folder)


def test_the_file_of_a_mask_has_the_size_of_its_image_and_the_values_0_and_255(
    answers: Answers, images: list[str], folder: Path
) -> None:
    """Also where the image is turned by its EXIF orientation, or was shrunk for the model."""
    plain, exif, files = Image.open(images[0]), Image.Exif(), []
    exif[ExifTags.Base.Orientation] = 6
    plain.resize((300, 200)).save(folder / "turned.jpg", exif=exif)
    plain.resize((1500, 1200)).save(folder / "larger.png")
    for name, size in ((images[0], (256, 256)), ("turned.jpg", (200, 300)), ("larger.png", (1500, 1200))):
        shown = answers.segment(str(folder / name), PROMPTS[0], False, 0.5)
        mask = np.asarray(Image.open(shown.file))
        assert (mask.shape, mask.dtype, np.unique(mask).tolist()) == (size[::-1], np.uint8, [0, 255])
        assert f"Mask: {100 * (mask > 0).mean():.1f} % of the image" in shown.words or name == "larger.png"
        assert (shown.file.name, shown.file.parent.parent) == (f"{Path(name).stem}_mask.png", folder)
        files.append(shown.file)
    assert shown.words.startswith("Image: 1500 x 1200 pixels, shrunk to 1024 x 819\n")
    assert answers.segment(images[0], PROMPTS[3], False, 0.5).file not in files, "that of another answer is kept"


def test_a_public_link_needs_a_password_and_gradio_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(demo.AUTH, raising=False)
    with pytest.raises(ValueError, match=r"^--share .*: set SA2VA_DEMO_AUTH=user:password"):
        demo.read_auth(None, share=True)
    assert demo.read_auth(None, share=False) is None
    for auth in ("secret", "me:", ":secret", ""):
        with pytest.raises(ValueError, match=r"^--auth is not of the form user:password") as error:
            demo.read_auth(auth, share=True)
        assert "secret" not in str(error.value)
    assert demo.read_auth("me:a:b", share=True) == ("me", "a:b")
    monkeypatch.setenv(demo.AUTH, "me:secret")
    assert demo.read_auth(None, share=True) == ("me", "secret")
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Gradio.*pip install -e '\.\[demo\]'"):
        demo.main(demo.Args())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals_remove_the_folder_of_uploads(name: str, tmp_path: Path) -> None:
    script = (
        f"import signal, time; signal.signal(signal.{name}, signal.SIG_DFL)\n"  # nohup, for tests, ignores SIGHUP
        "import examples.demo.__main__ as demo\n"
        "demo.find_spec = lambda name: object()\n"
        "def serve(args, auth, folder):\n"
        "    (folder / 'upload.png').touch(); print(folder, flush=True); time.sleep(60)\n"
        "demo.serve = serve\n"
        "demo.main(demo.Args())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().decode().strip())
        assert (folder / "upload.png").exists()
        server.send_signal(getattr(signal, name))
        assert server.wait(20) == 128 + getattr(signal, name)
    assert folder.parent == tmp_path
    assert not folder.exists()
