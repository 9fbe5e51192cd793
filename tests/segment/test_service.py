"""The HTTP service: masks of `segment`, none lost among many clients, and refusals that show nothing of the inside."""

import asyncio
import base64
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from pycocotools import mask as coco

from benchmarks.service import served
from rl_reward_network.bit_depth import GreyWindow
from rl_reward_network.cli import serve
from rl_reward_network.data.images import as_image
from rl_reward_network.segment import maker as maker_file
from rl_reward_network.segment import service
from rl_reward_network.segment.maker import MaskMaker, load_maker
from rl_reward_network.segment.service import Limits, make_app
from tests.conftest import tube_image

LIMITS = Limits(mebibytes=1, megapixels=0.01, waiting=64)
PROMPT = "Please segment the blood vessel."


@pytest.fixture(scope="module")
def maker() -> MaskMaker:
    return load_maker(None, device="cpu")  # type: ignore[return-value]


@pytest.fixture
def client(maker: MaskMaker) -> Iterator[TestClient]:
    with TestClient(make_app(maker, "nano", LIMITS), raise_server_exceptions=False) as made:
        yield made


def png(seed: int = 0, size: int = 48) -> bytes:
    file = io.BytesIO()
    Image.fromarray(tube_image(size, seed)[0]).save(file, "PNG")
    return file.getvalue()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def ask(client: TestClient, content: bytes | None = None, **words: Any) -> Any:
    return client.post("/segment", files={"image": png() if content is None else content}, data=words)


def test_masks_are_those_of_segment_in_both_forms(client, maker):
    answer = ask(client, prompt=PROMPT).json()
    expected = maker.answer(tube_image(48, 0)[0], PROMPT)
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["mask"]))))
    assert np.array_equal(found, expected.mask * np.uint8(255))
    assert (answer["prompt"], answer["text"], answer["size"]) == (PROMPT, expected.answer, [48, 48])
    assert answer["share"] == pytest.approx(expected.mask.mean())
    assert answer["predicted_dice"] is None, "there is no reward network"
    rle = ask(client, mask="rle", threshold=0.3).json()
    assert np.array_equal(coco.decode(rle["mask"]).astype(bool), expected.soft > 0.3)
    assert rle["prompt"] == maker.prompt


def test_many_clients_get_their_own_answers(client, maker, monkeypatch):
    """Those that wait with one image share its encoding."""
    encoded, real = [], maker_file.image_features
    monkeypatch.setattr(maker_file, "image_features", lambda *args: encoded.append(1) or real(*args))
    images = [png(seed) for seed in range(3)]
    alone = [ask(client, image, mask="rle").json() for image in images]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: ask(client, images[number % 3], mask="rle"), range(24)))
    assert [answer.status_code for answer in found] == [200] * 24
    for number, answer in enumerate(found):
        masks = [coco.decode(one["mask"]) for one in (answer.json(), alone[number % 3])]
        assert (masks[0] != masks[1]).mean() < 0.001
    assert len(encoded) < 3 + 24
    assert client.get("/health").json()["waiting"] == 0


@pytest.mark.parametrize(
    ("content", "words", "code", "message"),
    [
        (b"no picture", {}, 400, "image: not a picture that can be read"),
        (png()[:-300], {}, 400, "not a picture that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", {}, 400, "not a picture that can be read"),
        (None, {"prompt": "x" * 1001}, 422, "at most 1000"),
        (png(size=128), {}, 400, "image: 128 x 128 pixels, at most 0.01 megapixels"),
        (b"x" * 2**20, {}, 413, "more than 1 MiB"),
        (None, {"threshold": 2}, 422, "less than 1"),
        (None, {"mask": "svg"}, 422, "'png' or 'rle'"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(client, content, words, code, message):
    answer = ask(client, content, **words)
    assert answer.status_code == code
    assert message in answer.text


def test_a_client_sees_nothing_of_an_error_inside_and_the_service_goes_on(client, maker, monkeypatch):
    real = MaskMaker.answer

    def fail(*args: Any, **words: Any) -> Any:
        raise RuntimeError("secret/path")

    monkeypatch.setattr(MaskMaker, "answer", fail)
    answer = ask(client)
    assert answer.status_code == 500
    assert answer.json() == {"detail": "the model failed on this image; the log of the service says why"}
    monkeypatch.setattr(MaskMaker, "answer", real)
    assert ask(client).status_code == 200


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A model that waits: set when an answer has begun, and to be set so that it goes on."""
    begun, go_on, real = threading.Event(), threading.Event(), MaskMaker.answer

    def answer(*args: Any, **words: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return real(*args, **words)

    monkeypatch.setattr(MaskMaker, "answer", answer)
    return begun, go_on


def wait_for(waiting: int, health: Callable[[], Any]) -> None:
    late = time.monotonic() + 10
    while health().json()["waiting"] != waiting:
        assert time.monotonic() < late


def test_too_many_that_wait_are_sent_away(maker, slow):
    begun, go_on = slow
    with TestClient(make_app(maker, "nano", replace(LIMITS, waiting=1))) as client, ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, client, png(0))
        assert begun.wait(30)
        second = pool.submit(ask, client, png(1))
        wait_for(1, lambda: client.get("/health"))
        refused = ask(client, png(2))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        go_on.set()
        assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_a_client_that_leaves_gives_its_place_back(maker, slow, monkeypatch):
    begun, go_on = slow
    monkeypatch.setattr(service, "LOOK", 0.01)
    port = free_port()
    with served(make_app(maker, "nano", replace(LIMITS, waiting=1)), port), ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{port}"
        first = pool.submit(httpx.post, f"{url}/segment", files={"image": png(0)}, timeout=60)
        assert begun.wait(30)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/segment", files={"image": png(1)}, timeout=0.5)
        wait_for(0, lambda: httpx.get(f"{url}/health"))
        go_on.set()
        assert first.result().status_code == 200


def test_one_bad_prompt_spoils_no_other_and_grey_has_the_models_window(maker, monkeypatch):
    limits, jobs = replace(LIMITS, waiting=8), []

    async def answered() -> list[Any]:
        desk = service.Desk(replace(maker, grey=GreyWindow(0, 4095)), limits)
        jobs.extend(service.Job(deep, prompt, 0.5, "rle") for prompt in (PROMPT, "<image> segment <image> it."))
        return desk._computed(jobs)

    grey = np.random.default_rng(0).integers(0, 4096, (40, 50)).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    deep = file.getvalue()
    good, bad = asyncio.run(answered())
    assert isinstance(bad, ValueError)
    expected = maker.answer(as_image(grey, GreyWindow(0, 4095)), PROMPT)
    assert np.array_equal(coco.decode(good["mask"]).astype(bool), expected.mask)


def test_a_body_of_unknown_length_and_two_images_in_words_are_refused(client):
    assert client.post("/segment", content=iter([b"x"])).status_code == 411
    assert ask(client, prompt="<image> and <image>").status_code == 400


def test_a_token_is_asked_of_all_but_health(maker):
    with TestClient(make_app(maker, "nano", LIMITS, token="geheim")) as client:
        assert ask(client).status_code == 401
        client.headers["Authorization"] = "Bearer wrong"
        assert ask(client).status_code == 401
        client.headers["Authorization"] = "Bearer geheim"
        assert ask(client).status_code == 200
        assert client.get("/health", headers={"Authorization": ""}).json()["status"] == "ok"
        assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


def test_other_computers_need_a_token_and_a_missing_package_is_named(monkeypatch):
    monkeypatch.delenv(serve.TOKEN, raising=False)
    with pytest.raises(ValueError, match=rf"--host 0\.0\.0\.0: .*set {serve.TOKEN}"):
        serve.main(serve.Args(host="0.0.0.0"))
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"serve needs fastapi.*pip install -e '\.\[serve\]'"):
        serve.main(serve.Args())
