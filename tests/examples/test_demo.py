"""What the demo shows: pictures, words, and a clear message for whatever cannot be shown; nothing here needs Gradio."""

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
from examples.demo.answers import (
    LOOKS,
    Answers,
    enlarged,
    load_answers,
    open_layer,
    open_upload,
    write_examples,
)
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
    assert len({file.read_bytes() for file in files}) == len(files)
    return [str(file) for file in files]


def test_an_answer_has_every_picture_and_the_predicted_quality(answers: Answers, images: list[str]) -> None:
    shown = answers.segment(images[0], PROMPTS[0], False, 0.5)
    image = answers.open(images[0])
    for picture in (shown.overlay, shown.soft, shown.errors, shown.fused):
        assert picture is not None
        assert (picture.shape, picture.dtype) == (image.shape, np.uint8)
    assert (shown.overlay != image).any()
    lines = shown.words.splitlines()
    assert lines[:2] == [f"Prompt: {PROMPTS[0]}", "Answer: Sure, [SEG]."]
    assert re.fullmatch(r"Predicted Dice: 0\.\d{3}, score 0\.\d{3}", lines[3])
    assert lines[4].startswith("Spread between the networks: 0.")
    assert lines[5:] == ["No 90 % interval: none was fitted to masks of these weights, or to the network's own"]
    own, fused = (answers.segment(images[0], PROMPTS[0], False, weight).fused for weight in (0.0, 1.0))
    painted = (shown.overlay != image).any(axis=2)
    np.testing.assert_array_equal((own != image).any(axis=2), painted, "weight 0 is Sa2VA's own mask")
    assert (own != fused).any()


def test_an_interval_is_shown_where_there_is_one(answers: Answers, images: list[str]) -> None:
    assert answers.maker.network is not None
    fitted = copy(answers.maker.network)
    fitted.config = replace(
        fitted.config, intervals=dict.fromkeys(("Sa2VA", "own segmentation"), DiceInterval(-1.0, 1.0, 0.02, 40))
    )
    shown = replace(answers, maker=replace(answers.maker, network=fitted)).segment(images[0], "one", False, 0.5)
    assert re.search(r"^Predicted Dice \[90 % interval\]: 0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\], score", shown.words, re.M)
    assert "No 90 %" not in shown.words
    fitted.config = replace(fitted.config, intervals={"Sa2VA": DiceInterval(-1.0, 1.0, 0.02, 8)})
    few = replace(answers, maker=replace(answers.maker, network=fitted)).segment(images[0], "one", False, 0.5)
    assert "No 90 % interval: it needs 9 validation patients, got 8" in few.words


def test_outside_the_networks_domain_there_is_a_sentence_and_no_number(
    answers: Answers, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: "outside the reward network's domain: too dark")
    lines = answers.segment(images[0], PROMPTS[0], False, 0.5).words.splitlines()
    assert lines[3:] == ["Predicted Dice: none, outside the reward network's domain: too dark"]
    assert ["Please segment " + label for _, label in answers.all_prompts(images[0])] == list(PROMPTS)


def test_without_a_network_its_pictures_are_left_out(answers: Answers, images: list[str]) -> None:
    plain = replace(answers, maker=replace(answers.maker, network=None))
    shown = plain.segment(images[0], PROMPTS[0], False, 0.5)
    assert shown.errors is shown.fused is None
    assert "Predicted" not in shown.words
    labels = [label for _, label in plain.all_prompts(images[0])]
    assert ["Please segment " + label for label in labels] == list(PROMPTS)


def test_all_prompts_are_shown_with_their_predicted_dice(answers: Answers, images: list[str]) -> None:
    pictures = answers.all_prompts(images[1])
    assert ["Please segment " + label.split(" ", 1)[1] for _, label in pictures] == list(PROMPTS)
    single = answers.segment(images[1], PROMPTS[3], False, 0.5)
    np.testing.assert_array_equal(pictures[3][0], single.overlay)
    assert f"Predicted Dice: {pictures[3][1].split(' ')[0]}," in single.words


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
        assert np.array_equal(given["image"], draw_region(answers.open(images[3]), region, how))
    else:
        assert caption.startswith("a ")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda of, image: of.segment(None, PROMPTS[0], False, 0.5), "upload one"),
        (lambda of, image: of.segment(image, "  ", False, 0.5), "prompt is empty"),
        (lambda of, image: of.segment(image, "a" * 2001, False, 0.5), "2,001 characters, expected at most 2,000"),
        (lambda of, image: of.segment(image, PROMPTS[0], True, 0.5), "--policy RUN"),
        (lambda of, image: of.caption(image, None), "draw over the object"),
        (lambda of, image: of.caption(image, np.ones((3, 5), bool)), "drawn on another image"),
        *(
            (call, "no upload and no example")
            for call in (
                lambda of, image: of.open(__file__),
                lambda of, image: of.all_prompts(__file__),
                lambda of, image: of.segment(__file__, PROMPTS[0], False, 0.5),
                lambda of, image: of.caption(__file__, np.ones((256, 256), bool)),
            )
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(call: Any, message: str, answers: Answers, images: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        call(answers, images[3])


def test_a_policy_chooses_the_prompt_and_gives_the_list(
    answers: Answers, images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskMaker, "_choose", lambda *_: PROMPTS[2])
    trained = replace(answers, maker=replace(answers.maker, policy=object(), trained={"prompts": ["one", "two"]}))
    assert f"Prompt: {PROMPTS[2]}" in trained.segment(images[0], "", True, 0.5).words
    monkeypatch.setattr("examples.demo.answers.load_mask_maker", lambda *_, **__: trained.maker)
    monkeypatch.setattr("examples.demo.answers.default_model", lambda policy: "models/mine")
    loaded = load_answers(Path("uploads"), None, Path("run"))
    assert (loaded.prompts, loaded.model_path, loaded.first_prompt) == (("one", "two"), "models/mine", "one")
    fixed = replace(loaded, maker=replace(loaded.maker, policy=None, prompt="two"))
    assert fixed.first_prompt == "two", "the best fixed prompt, where the run deploys it"


# ---- uploads ----


def refused(path: Path, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        open_upload(str(path), folder, None)
    assert str(folder) not in str(error.value)
    return str(error.value)


def test_a_file_elsewhere_is_refused_whether_it_exists_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    folder.mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "patient.png")
    os.symlink(tmp_path / "patient.png", folder / "link.png")
    other = tmp_path / "uploads_of_others"  # its name begins as that of the folder
    other.mkdir()
    Image.new("L", (8, 8)).save(other / "patient.png")
    elsewhere = (tmp_path / "patient.png", folder / ".." / "patient.png", folder / "link.png", other / "patient.png")
    messages = {refused(path, folder) for path in (*elsewhere, tmp_path / "missing.png")}
    assert messages == {"the image is no upload and no example: upload it"}
    Image.new("L", (8, 8)).save(folder / "mine.png")
    assert open_upload(str(folder / "mine.png"), folder, None)[0].shape == (8, 8, 3)


def test_files_that_are_no_images_are_named_without_their_folder(tmp_path: Path) -> None:
    (tmp_path / "words.png").write_text("no image")
    assert refused(tmp_path / "words.png", tmp_path).startswith("words.png: not a readable image")
    (tmp_path / "empty.png").touch()
    assert "empty.png: not a readable image (the file is empty)" in refused(tmp_path / "empty.png", tmp_path)
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "whole.png").read_bytes()[:500])
    assert refused(tmp_path / "broken.png", tmp_path).startswith("broken.png: not a readable image")
    assert "gone.png: uploads are deleted after an hour or two; upload it" in refused(tmp_path / "gone.png", tmp_path)


def test_the_size_is_checked_before_pixels_are_decoded(tmp_path: Path) -> None:
    header = b"IHDR" + pack(">IIBBBBB", 10_000, 6_000, 8, 0, 0, 0, 0)
    pixels = b"IDAT" + b"damaged"  # decoding would fail with another message
    parts = [pack(">I", len(part) - 4) + part + pack(">I", zlib.crc32(part)) for part in (header, pixels)]
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    assert "10000 x 6000 pixels, expected at most 50 million; make it smaller" in refused(
        tmp_path / "huge.png", tmp_path
    )


def test_a_large_image_is_shrunk_and_a_small_or_a_deep_one_kept(answers: Answers, folder: Path, tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (1024, 600, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "kept.png")
    kept, note = open_upload(str(tmp_path / "kept.png"), tmp_path, None)
    np.testing.assert_array_equal(kept, picture)
    assert note == ""
    Image.fromarray(np.linspace(0, 4095, 128 * 128).reshape(128, 128).astype(np.uint16)).save(tmp_path / "deep.png")
    deep, _ = open_upload(str(tmp_path / "deep.png"), tmp_path, None)
    assert (deep.dtype, deep.max()) == (np.uint8, 255)
    Image.new("L", (1536, 768), 90).save(folder / "large.png")
    shown = answers.segment(str(folder / "large.png"), PROMPTS[0], False, 0.5)
    assert shown.overlay.shape == (512, 1024, 3)
    assert Image.open(shown.file).size == (1536, 768)
    assert shown.words.startswith("Image: 1536 x 768 pixels, shrunk to 1024 x 512\n")


def test_the_file_of_a_mask_has_the_size_of_its_image_and_the_values_0_and_255(
    answers: Answers, images: list[str], folder: Path
) -> None:
    """Also where the image is turned by its EXIF orientation, or was shrunk for the model."""
    plain = Image.open(images[0])
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    plain.resize((300, 200)).save(folder / "turned.jpg", exif=exif)
    plain.resize((1500, 1200)).save(folder / "larger.png")
    files = []
    for name, size in ((images[0], (256, 256)), ("turned.jpg", (200, 300)), ("larger.png", (1500, 1200))):
        shown = answers.segment(str(folder / name), PROMPTS[0], False, 0.5)
        mask = np.asarray(Image.open(shown.file))
        assert (mask.shape, mask.dtype, np.unique(mask).tolist()) == (size[::-1], np.uint8, [0, 255])
        assert f"Mask: {100 * (mask > 0).mean():.1f} % of the image" in shown.words or name == "larger.png"
        assert (shown.file.name, shown.file.parent.parent) == (f"{Path(name).stem}_mask.png", folder)
        files.append(shown.file)
    again = answers.segment(images[0], PROMPTS[3], False, 0.5).file
    assert again not in files, "the file of another answer is not replaced"
    mask = np.random.default_rng(0).random((30, 20)) < 0.3
    np.testing.assert_array_equal(enlarged(mask, (30, 20)), mask)
    half = np.repeat([[True, False]], 4, axis=0)
    np.testing.assert_array_equal(enlarged(half, (8, 8)), np.tile(np.arange(8) < 4, (8, 1)))


def test_a_layer_is_checked_before_it_is_decoded(tmp_path: Path) -> None:
    Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
    for layer in (str(tmp_path / "huge.png"), (tmp_path / "huge.png").read_bytes()):
        with pytest.raises(ValueError, match="the drawing: 12000 x 12000 pixels, expected at most 1 million"):
            open_layer(layer, tmp_path)
    (tmp_path / "uploads").mkdir()
    with pytest.raises(ValueError, match="no upload and no example"):
        open_layer(str(tmp_path / "huge.png"), tmp_path / "uploads")
    Image.new("L", (9, 9)).save(tmp_path / "grey.png")
    with pytest.raises(ValueError, match="expected an image with transparency"):
        open_layer(str(tmp_path / "grey.png"), tmp_path)


# ---- the command ----


def test_a_missing_gradio_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Gradio.*pip install -e '\.\[demo\]'"):
        demo.main(demo.Args())


def test_a_public_link_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert demo.read_auth("you:other", share=True) == ("you", "other")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals_remove_the_folder_of_uploads(name: str, tmp_path: Path) -> None:
    script = (
        "import signal, time\n"
        f"signal.signal(signal.{name}, signal.SIG_DFL)\n"  # nohup, under which tests may run, ignores SIGHUP
        "import examples.demo.__main__ as demo\n"
        "demo.find_spec = lambda name: object()\n"
        "def serve(args, auth, folder):\n"
        "    (folder / 'upload.png').touch()\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
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
