"""The HTTP service of `sa2va-rl serve`: an image and words in, a mask, the answer and the predicted Dice out.

One request after the other is computed, in the order they came; those that wait and have the same image are answered
with it, so that it is encoded once. What is too large, or comes when too many wait, is refused before it is read.
"""

import asyncio
import base64
import io
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, File, HTTPException, Request, UploadFile
from fastapi import Form as FormField
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.types import ASGIApp, Receive, Scope, Send

from rl_reward_network import __version__
from rl_reward_network.data.images import as_image
from rl_reward_network.data.masks import to_rle
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER
from rl_reward_network.segment.maker import NO_PROMPT, Answered, Maker, MaskMaker, predicted_quality
from rl_reward_network.segment.results import soft_dice

Form = Literal["png", "rle"]
TOGETHER = 16  # prompts of one image that are decoded at once
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP")  # Pillow gives others to programs outside of it
LONGEST_PROMPT = 1000  # letters
LOOK = 0.5  # seconds between two looks whether a client that waits is still there
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What is accepted."""

    mebibytes: float  # of a request
    megapixels: float  # of an image
    waiting: int  # requests


class Unusable(ValueError):
    """A request that cannot be answered, in a sentence for the client."""


@dataclass(eq=False)
class Job:
    """A request that waits for its answer."""

    file: bytes  # of the image
    prompt: str | None
    threshold: float
    form: Form
    answer: "asyncio.Future[dict[str, Any]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Desk:
    """Answers jobs one after the other, those about one image together."""

    def __init__(self, maker: Maker, limits: Limits) -> None:
        self.maker, self.limits = maker, limits
        self.waiting: deque[Job] = deque()
        self.came = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether no further job is taken."""
        return len(self.waiting) >= self.limits.waiting

    async def run(self) -> None:
        """Answer until the task is cancelled."""
        while True:
            await self.came.wait()
            jobs = self._next()
            for job, found in zip(jobs, await asyncio.to_thread(self._computed, jobs), strict=True):
                if job.answer.cancelled():
                    continue
                if isinstance(found, Exception):
                    job.answer.set_exception(found)
                else:
                    job.answer.set_result(found)

    def _next(self) -> list[Job]:
        """The job that waits longest, and others about its image."""
        chosen = [job for job in self.waiting if job.file == self.waiting[0].file][:TOGETHER]
        self.waiting = deque(job for job in self.waiting if job not in chosen)
        if not self.waiting:
            self.came.clear()
        return chosen

    def _computed(self, jobs: list[Job]) -> list[dict[str, Any] | Exception]:
        """The answer to each job about one image, or why there is none."""
        if not jobs:
            return []
        try:
            image = decoded(jobs[0].file, self.maker, self.limits)
            if len(jobs) > 1 and isinstance(self.maker, MaskMaker) and self.maker.policy is None:
                found = self.maker.answer_prompts(image, [job.prompt or self.maker.prompt for job in jobs])
                return [described(self.maker, one, job) for one, job in zip(found, jobs, strict=True)]
            return [described(self.maker, self.maker.answer(image, job.prompt), job) for job in jobs]
        except Exception as error:  # of any kind: it goes to those who asked, and the desk goes on
            if len(jobs) > 1:  # one prompt may spoil the answers to the others
                return [self._computed([job])[0] for job in jobs]
            return [Unusable(str(error)) if NO_PROMPT in str(error) else error]


class Entrance:
    """The middleware that refuses what can be refused before anything of an image is read."""

    def __init__(self, app: ASGIApp, desk: Desk, token: str | None) -> None:
        self.app, self.desk, self.token = app, desk, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or go on."""
        refusal = None
        if scope["type"] == "http" and scope["path"] != "/health":
            refusal = refused(Request(scope), self.desk.limits, self.token)
            if refusal is None and self.desk.full:
                refusal = 503, f"{self.desk.limits.waiting} requests wait; try again later"
        if refusal is None:
            return await self.app(scope, receive, send)
        code, words = refusal
        await JSONResponse({"detail": words}, code, {"Retry-After": "1"} if code == 503 else None)(scope, receive, send)


def make_app(maker: Maker, name: str, limits: Limits, token: str | None = None) -> FastAPI:
    """The application of a model; with a `token` only /health is open to those who do not show it."""
    desk = Desk(maker, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(desk.run())
        yield
        task.cancel()

    closed: dict[str, Any] = {} if token is None else {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="sa2va-rl", version=__version__, lifespan=lifespan, **closed)

    app.add_middleware(Entrance, desk=desk, token=token)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the model failed on this image; the log of the service says why"}, 500)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "model": name, "version": __version__, "waiting": len(desk.waiting)}

    @app.post("/segment")
    async def segment(
        request: Request,
        image: Annotated[UploadFile, File(description="a picture: PNG, JPEG, TIFF, WebP or BMP")],
        prompt: Annotated[str | None, FormField(max_length=LONGEST_PROMPT)] = None,
        mask: Annotated[Form, FormField(description="PNG of 0 and 255 in base64, or COCO RLE")] = "png",
        threshold: Annotated[float, FormField(gt=0, lt=1)] = 0.5,
    ) -> dict[str, Any]:
        if (prompt or "").count(IMAGE_PLACEHOLDER) > 1:
            raise HTTPException(400, f"prompt: holds {IMAGE_PLACEHOLDER} more than once, and there is one image")
        job = Job(await image.read(), prompt or None, threshold, mask)
        if desk.full:  # by others that were read at the same time
            raise HTTPException(503, f"{limits.waiting} requests wait; try again later", {"Retry-After": "1"})
        desk.waiting.append(job)
        desk.came.set()
        while not job.answer.done():
            await asyncio.wait({job.answer}, timeout=LOOK)
            if not job.answer.done() and await request.is_disconnected():
                job.answer.cancel()
                desk.waiting = deque(other for other in desk.waiting if other is not job)
                raise HTTPException(499, "the client has left")
        try:
            return job.answer.result()
        except Unusable as error:
            raise HTTPException(400, str(error)) from error

    return app


def refused(request: Request, limits: Limits, token: str | None) -> tuple[int, str] | None:
    """Status and reason to refuse a request by its head alone; None for one that is read."""
    shown, head = request.headers.get("authorization", ""), request.headers
    if token is not None and not secrets.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        return 401, "give the token of this service: Authorization: Bearer TOKEN"
    if request.method != "POST":
        return None
    length = head.get("content-length", "")
    if not length.isdigit() or "transfer-encoding" in head:
        return 411, "the request has no Content-Length; send the image whole"
    if int(length) > limits.mebibytes * MIB:
        return 413, f"more than {limits.mebibytes:g} MiB; send a smaller image"
    return None


def decoded(file: bytes, maker: Maker, limits: Limits) -> np.ndarray:
    """uint8 (H, W, 3) of an uploaded picture in the model's grey window; `Unusable` for what is none, or too large."""
    try:
        picture = Image.open(io.BytesIO(file), formats=FORMATS)
        size, most = picture.size, limits.megapixels
        image = as_image(picture, maker.grey) if size[0] * size[1] <= most * 1e6 else None
    except Exception as error:  # of Pillow's decoders any kind
        raise Unusable("image: not a picture that can be read; send a PNG, JPEG, TIFF, WebP or BMP") from error
    if image is None:
        raise Unusable(f"image: {size[0]} x {size[1]} pixels, at most {most:g} megapixels")
    return image


def described(maker: Maker, found: Answered, job: Job) -> dict[str, Any]:
    """The answer as JSON; `mask` is null where the answer has no `[SEG]`."""
    mask, predicted = found.soft > job.threshold, None
    if maker.network is not None and found.scorer is not None and found.segs != 0:
        predicted = predicted_quality(maker.network, found.scorer, mask, found.source)
    return {
        "prompt": found.prompt,
        "text": found.answer,
        "size": list(mask.shape),
        "mask": None if found.segs == 0 else to_rle(mask) if job.form == "rle" else png_of(mask),
        "share": float(mask.mean()),
        "confidence": soft_dice(found.soft, mask),
        "predicted_dice": predicted and predicted.dice,
        "predicted_interval": None if predicted is None or predicted.low is None else [predicted.low, predicted.high],
        "outside": found.outside or (predicted and predicted.reason),
    }


def png_of(mask: np.ndarray) -> str:
    """A mask, bool (H, W), as a PNG of 0 and 255 in base64."""
    file = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
