"""Try a model in the browser: masks, soft masks, predicted quality, all prompts side by side, captions of regions.

    pip install -e '.[demo]'
    sa2va-rl demo                                          # the small embedded model
    sa2va-rl demo --model_path MODEL --reward_net outputs/reward_net_<time>/best_reward_net
    sa2va-rl demo --policy outputs/sa2va_rl_finetune_<time>
    SA2VA_DEMO_AUTH=user:password sa2va-rl demo --share    # a public link, for those who know the password

The page is served on this computer alone, unless --share is given. Uploaded images are deleted after an hour or two,
and nothing is sent anywhere.
"""

import os
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

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
    """Load the models, and serve the page.

    Raises:
        ValueError: Gradio is not installed, a public link has no password, or a port, device, model, policy or reward
            network is refused.
    """
    if find_spec("gradio") is None:
        raise ValueError("the demo needs Gradio, which is not installed: pip install -e '.[demo]'")
    read_auth(args.auth, args.share)
    check_port(args.port)
    check_demo_device(args.device)
    stop_on_signals()
    with TemporaryDirectory() as folder:
        serve(args, Path(folder))


def serve(args: Args, folder: Path) -> None:
    """Load the models, and serve the page until the process is stopped; uploads are kept in `folder`."""
    from rl_reward_network.demo.answers import load_answers
    from rl_reward_network.demo.examples import write_examples

    answers = load_answers(folder, args.model_path, args.policy, args.reward_net, args.device, args.dtype)
    os.environ |= {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}  # read by the import below
    from rl_reward_network.demo.page import launch, make_page

    page = make_page(answers, write_examples(folder / "examples"))
    launch(page, args.share, args.port, read_auth(args.auth, args.share))


def read_auth(flag: str | None, share: bool) -> tuple[str, str] | None:
    """User and password from the flag or the environment, None without either.

    Raises:
        ValueError: they cannot be read (the message does not repeat them), or a public link would have none.
    """
    given = os.environ.get(AUTH) if flag is None else flag
    if given is None:
        if share:
            raise ValueError(
                f"--share opens the page to everybody who finds the link: set {AUTH}=user:password, or give --auth"
            )
        return None
    user, _, password = given.partition(":")
    if not user or not password:
        raise ValueError(f"{AUTH if flag is None else '--auth'} is not of the form user:password, both not empty")
    return user, password


def check_port(port: int | None) -> None:
    """Raise a ValueError for a port that cannot be served, before a model is loaded for minutes."""
    if port is None:
        return
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            trial.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port is {port} ({error}), expected a free port of 1 to 65535; leave it out") from None


def check_demo_device(device: str | None) -> None:
    """Raise a ValueError for a device that PyTorch does not have."""
    from rl_reward_network.models.sa2va.loading_sa2va import check_device

    try:
        check_device("cpu" if device is None else device)
    except ValueError as error:
        reason = str(error).split(";")[0].removeprefix("device ")  # its remedy names a flag of other commands
        raise ValueError(f"--device {reason}; give cpu or an available cuda:INDEX, or leave it out") from None


def stop_on_signals() -> None:
    """Let `kill` and a closed terminal end the process as an exception does, so that uploads are deleted."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda received, _: sys.exit(128 + received))
