"""The HTTP service of `sa2va-rl serve`: an image and words in, a mask, the answer and the predicted Dice out.

One request after the other is computed, in the order they came; those that wait and have the same image are answered
with it, so that it is encoded once. What is too large, or comes when too many wait, is refused before it is decoded.
"""

import asyncio
import base64
import hashlib
import io
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, File, Form, Header, HTTPException, Request, UploadFile
from fastapi.responses import JSONResponse
from PIL import Image

from rl_reward_network import __version__
from rl_reward_network.data.images import as_image
from rl_reward_network.data.masks import to_rle
from rl_reward_network.segment.maker import Answered, Maker, MaskMaker, predicted_quality
from rl_reward_network.segment.results import soft_dice

TOGETHER = 16  # prompts of one image that are decoded at once
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What is accepted."""

    mebibytes: float  # of a request
    megapixels: float  # of an image
    waiting: int  # requests


@dataclass(eq=False)
class Job:
    """A request that waits for its answer."""

    digest: str  # of the image's file
    image: np.ndarray  # uint8 (H, W, 3)
    prompt: str | None
    answer: "asyncio.Future[Answered]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Desk:
    """Answers jobs one after the other, those about one image together."""

    def __init__(self, maker: Maker, most: int) -> None:
        self.maker, self.most = maker, most
        self.waiting: deque[Job] = deque()
        self.came = asyncio.Event()

    async def answer(self, job: Job) -> Answered:
        """The answer to a job; HTTP 503 where too many wait."""
        if len(self.waiting) >= self.most:
            raise HTTPException(503, f"{self.most} requests are waiting; try again later", {"Retry-After": "1"})
        self.waiting.append(job)
        self.came.set()
        return await job.answer

    async def run(self) -> None:
        """Answer until the task is cancelled."""
        while True:
            await self.came.wait()
            jobs, found = self._next(), list[Answered]()
            error: Exception | None = None
            try:
                found = await asyncio.to_thread(self._computed, jobs)
            except Exception as raised:  # of any kind: it goes to those who asked, and the desk goes on
                error = raised
            for row, job in enumerate(jobs):
                if job.answer.cancelled():
                    continue
                if error is not None:
                    job.answer.set_exception(error)
                else:
                    job.answer.set_result(found[row])

    def _next(self) -> list[Job]:
        """The job that waits longest, and others about its image; those whose client has left are dropped."""
        kept = [job for job in self.waiting if not job.answer.cancelled()]
        chosen = [job for job in kept if job.digest == kept[0].digest][:TOGETHER]
        self.waiting = deque(job for job in kept if job not in chosen)
        if not self.waiting:
            self.came.clear()
        return chosen

    def _computed(self, jobs: list[Job]) -> list[Answered]:
        prompts = [job.prompt for job in jobs]
        if len(jobs) > 1 and isinstance(self.maker, MaskMaker) and self.maker.policy is None:
            return self.maker.answer_prompts(jobs[0].image, [prompt or self.maker.prompt for prompt in prompts])
        return [self.maker.answer(job.image, job.prompt) for job in jobs]


def make_app(maker: Maker, name: str, limits: Limits, token: str | None = None) -> FastAPI:
    """The application of a model; with a `token` every request but /health has to show it."""
    desk = Desk(maker, limits.waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(desk.run())
        yield
        task.cancel()

    def known(authorization: Annotated[str, Header()] = "") -> None:
        if token is not None and not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "give the token of this service: Authorization: Bearer TOKEN")

    app = FastAPI(title="sa2va-rl", version=__version__, lifespan=lifespan)

    @app.middleware("http")
    async def bounded(request: Request, call: Callable[[Request], Awaitable[Any]]) -> Any:
        length = request.headers.get("content-length", "")
        if request.method == "POST" and not length.isdigit():
            return JSONResponse({"detail": "the request has no Content-Length; send the image whole"}, 411)
        if length.isdigit() and int(length) > limits.mebibytes * MIB:
            return JSONResponse({"detail": f"more than {limits.mebibytes:g} MiB; send a smaller image"}, 413)
        return await call(request)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "the model failed on this image; the log of the service says why"}, 500)

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"status": "ok", "model": name, "version": __version__, "waiting": len(desk.waiting)}

    @app.post("/segment", dependencies=[Depends(known)])
    async def segment(
        image: Annotated[UploadFile, File(description="a picture: PNG, JPEG, TIFF, ...")],
        prompt: Annotated[str | None, Form(description="by default that of the model's training")] = None,
        mask: Annotated[Literal["png", "rle"], Form(description="PNG of 0 and 255 in base64, or COCO RLE")] = "png",
        threshold: Annotated[
            float, Form(gt=0, lt=1, description="probability above which a pixel belongs to it")
        ] = 0.5,
    ) -> dict[str, Any]:
        content = await image.read()
        try:
            pixels = await asyncio.to_thread(decoded, content, limits)
            found = await desk.answer(Job(hashlib.sha256(content).hexdigest(), pixels, prompt or None))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return described(maker, found, threshold, mask)

    return app


def decoded(content: bytes, limits: Limits) -> np.ndarray:
    """uint8 (H, W, 3) of an uploaded picture; a ValueError for what is none, or too large."""
    try:
        picture = Image.open(io.BytesIO(content))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError("image: not a picture that can be read; send a PNG, JPEG or TIFF") from error
    if picture.width * picture.height > limits.megapixels * 1e6:
        raise ValueError(f"image: {picture.width} x {picture.height} pixels, at most {limits.megapixels:g} megapixels")
    try:
        return as_image(picture)
    except OSError as error:
        raise ValueError("image: damaged; send it again") from error


def described(maker: Maker, found: Answered, threshold: float, form: Literal["png", "rle"]) -> dict[str, Any]:
    """The answer as JSON; `mask` is null where the answer has no `[SEG]`."""
    mask, predicted = found.soft > threshold, None
    if maker.network is not None and found.scorer is not None and found.segs != 0:
        predicted = predicted_quality(maker.network, found.scorer, mask, found.source)
    return {
        "prompt": found.prompt,
        "text": found.answer,
        "size": list(mask.shape),
        "mask": None if found.segs == 0 else to_rle(mask) if form == "rle" else png_of(mask),
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
