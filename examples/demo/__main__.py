"""Try a model in the browser: masks, soft masks, predicted quality, all prompts side by side, captions of regions.

    pip install -e '.[demo]'
    python -m examples.demo                                # the small embedded model
    python -m examples.demo --model_path MODEL --reward_net outputs/reward_net_<time>/best_reward_net
    python -m examples.demo --policy outputs/sa2va_rl_finetune_<time>
    SA2VA_DEMO_AUTH=user:password python -m examples.demo --share    # a public link, for those who know the password

The page is served on this computer alone, unless --share is given. Uploaded images are deleted after an hour or two,
and nothing is sent anywhere.
"""

import os
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from rl_reward_network.cli.app import run

AUTH = "SA2VA_DEMO_AUTH"


@dataclass(frozen=True)
class Args:
    """Try a model in the browser."""

    model_path: str | None = None
    """Sa2VA folder or hub id; by default the one the policy was trained on, without a policy the small embedded one."""
    policy: Path | None = None
    """A run of step 2, or its final_model folder, that can choose the prompt."""
    reward_net: Path | None = None
    """Reward network that predicts the quality of masks; by default the policy's own."""
    device: str | None = None
    """cpu, cuda:0, ...; by default the first GPU if there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Number format of Sa2VA's weights: auto is bfloat16 on a GPU and float32 on the CPU."""
    port: int | None = None
    """Port of the page; by default the first free one from 7860 on."""
    share: bool = False
    """Also open a public link, through servers of Gradio; needs a password."""
    auth: str | None = None
    """user:password, asked of whoever opens the page. Other users of this computer can read the flags of a command;
    they cannot read SA2VA_DEMO_AUTH, the environment variable in its place."""


def main(args: Args) -> None:
    """Load the models, and serve the page; uploads are kept in a temporary folder.

    Raises:
        ValueError: Gradio is not installed, a public link has no password, or a port, device, model, policy or reward
            network is refused.
    """
    if find_spec("gradio") is None:
        raise ValueError("the demo needs Gradio, which is not installed: pip install -e '.[demo]'")
    auth = read_auth(args.auth, args.share)
    for name in ("SIGTERM", "SIGHUP"):  # end as an exception does, so that uploads are deleted
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    with TemporaryDirectory() as folder:
        serve(args, auth, Path(folder))


def serve(args: Args, auth: tuple[str, str] | None, folder: Path) -> None:
    """Load the models, and serve the page until the process is stopped; uploads are kept in `folder`."""
    from examples.demo.answers import load_answers, write_examples

    answers = load_answers(folder, args.model_path, args.policy, args.reward_net, args.device, args.dtype)
    os.environ |= {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}  # read by the import below
    from examples.demo.page import launch, make_page

    launch(make_page(answers, write_examples(folder / "examples")), args.share, args.port, auth)


def read_auth(flag: str | None, share: bool) -> tuple[str, str] | None:
    """User and password from the flag or the environment, None without either.

    Raises:
        ValueError: they cannot be read (the message does not repeat them), or a public link would have none.
    """
    given = os.environ.get(AUTH) if flag is None else flag
    if given is None and share:
        raise ValueError(f"--share opens the page to everybody who finds the link: set {AUTH}=user:password")
    if given is None:
        return None
    user, _, password = given.partition(":")
    if not user or not password:
        raise ValueError(f"{AUTH if flag is None else '--auth'} is not of the form user:password, both not empty")
    return user, password


if __name__ == "__main__":
    run(main, Args)
