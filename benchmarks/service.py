"""`sa2va-rl serve` under load: how long requests take that many clients send at once, beside the plain call.

python -m benchmarks.service                      # 200 requests of 8 clients, sa2va-nano, a minute on two cores
python -m benchmarks.service --model_path MODEL
"""

import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import httpx
import numpy as np
import uvicorn
from PIL import Image

from benchmarks.common import seconds, show
from rl_reward_network.cli.app import run
from rl_reward_network.embedded.angiograms import render_series
from rl_reward_network.segment.maker import load_maker
from rl_reward_network.segment.service import Limits, make_app


@dataclass(frozen=True)
class Args:
    """Measure the service."""

    model_path: str = "sa2va-nano"
    """What makes the masks."""
    requests: int = 200
    """Of all clients together."""
    clients: int = 8
    """Each sends its next request when it has the answer to the last one."""
    images: int = 20
    """Different ones, of the embedded world."""
    port: int = 8765
    """Of the service, on this computer."""


def main(args: Args) -> None:
    """Print quantiles of the time of a request, and how many were lost."""
    maker = load_maker(args.model_path)
    frames = (next(render_series(np.random.default_rng(seed), "plain", 1)) for seed in range(args.images))
    pictures = [np.stack([frame.image] * 3, axis=-1) for frame in frames]
    plain = [seconds(partial(maker.answer, picture)) for picture in pictures]
    limits = Limits(mebibytes=32, megapixels=50, waiting=args.clients)
    with served(make_app(maker, args.model_path, limits), args.port), httpx.Client(timeout=600) as client:
        url, files = f"http://127.0.0.1:{args.port}/segment", [png(picture) for picture in pictures]
        codes: list[int] = []

        def ask(number: int) -> float:
            file = files[number % len(files)]
            return seconds(lambda: codes.append(client.post(url, files={"image": file}).status_code))

        start = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            asked = list(pool.map(ask, range(args.requests)))
        total = time.perf_counter() - start
    rows = [("plain call", *quantiles(plain), f"{len(plain) / sum(plain):.2f}")]
    rows += [(f"request, {args.clients} clients", *quantiles(asked), f"{args.requests / total:.2f}")]
    show(("", "median s", "95 % s", "a second"), rows)
    print(f"{codes.count(200)} of {args.requests} requests were answered")


@contextmanager
def served(app: object, port: int) -> Iterator[None]:
    """The application in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield
    server.should_exit = True
    thread.join()


def quantiles(times: list[float]) -> tuple[str, str]:
    """Median and 95th percentile."""
    return f"{np.quantile(times, 0.5):.3f}", f"{np.quantile(times, 0.95):.3f}"


def png(picture: np.ndarray) -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    run(main, Args)
