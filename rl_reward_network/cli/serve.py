"""Serve a model to other programs over HTTP: an image and words in, a mask, the text and the predicted Dice out.

    pip install -e '.[serve]'
    sa2va-rl serve --model_path outputs/RUN
    curl -F image=@image.png -F prompt="Please segment the blood vessel." localhost:8000/segment
    SA2VA_SERVE_TOKEN=... sa2va-rl serve --model_path outputs/RUN --host 0.0.0.0     # for other computers

The answer is JSON: mask (a PNG in base64, or with -F mask=rle COCO's RLE), text, share, confidence, predicted_dice. The
page /docs tries it in a browser where no token is asked; /health says that it lives, and how many requests wait.
Nothing is stored.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rl_reward_network.flags import Rare, check_at_least, check_range
from rl_reward_network.models.default import DEFAULT_MODEL

TOKEN = "SA2VA_SERVE_TOKEN"  # environment variable: other users of a computer can read the flags of a command
OWN = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Args:
    """Serve a model over HTTP."""

    model_path: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """What makes the masks, as for sa2va-rl segment; by default the small embedded Sa2VA."""
    prompt: str | None = None
    """Prompt of requests without one; by default that of the model's training."""
    policy: Rare[Path | None] = None
    """A run of step 2 whose policy chooses the prompt of each image."""
    reward_net: Path | None = None
    """Reward network that predicts how good the masks are; by default the policy's own."""
    bit_depth: int | None = None
    """Bits of a grey image above 8 bit, 8 to 16. With a policy, the grey window of its data is used; without either,
    percentiles of the image."""
    host: str = "127.0.0.1"
    """Address to listen at; by default this computer alone. 0.0.0.0 is every network, and needs a token."""
    port: int = 8000
    """Port to listen at."""
    max_waiting: int = 64
    """Requests that may wait; further ones are answered by 503."""
    max_megapixels: float = 50.0
    """Size of the largest image."""
    max_mebibytes: float = 32.0
    """Size of the largest request."""
    device: str | None = None
    """cpu, cuda:0, ...; by default the first GPU if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Number format of Sa2VA's weights: auto is bfloat16 on a GPU and float32 on the CPU."""


def main(args: Args) -> None:
    """Load the model, and serve until the process is stopped."""
    check_at_least(args, 1, "port", "max_waiting")
    check_range(args, "max_megapixels", "max_mebibytes", above=True)
    if missing := [name for name in ("fastapi", "uvicorn", "multipart") if find_spec(name) is None]:
        raise ValueError(f"serve needs {missing[0]}, which is not installed: pip install -e '.[serve]'")
    token = os.environ.get(TOKEN) or None
    if args.host not in OWN and token is None:
        raise ValueError(f"--host {args.host}: whoever reaches this computer could ask; set {TOKEN} to a secret")
    import uvicorn

    from rl_reward_network.segment.maker import load_maker
    from rl_reward_network.segment.service import Limits, make_app

    options = {name: getattr(args, name) for name in ("reward_net", "device", "dtype", "bit_depth")}
    maker = load_maker(args.model_path, args.prompt, args.policy, **options)
    name = Path(args.model_path or DEFAULT_MODEL).name
    limits = Limits(args.max_mebibytes, args.max_megapixels, args.max_waiting)
    print(f"serving {name} at http://{args.host}:{args.port}/segment{' for those with the token' if token else ''}")
    uvicorn.run(make_app(maker, name, limits, token), host=args.host, port=args.port, log_level="warning")
