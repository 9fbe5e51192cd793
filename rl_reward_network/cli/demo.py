"""Try a model in the browser: masks, soft masks, predicted quality, all prompts side by side, captions of regions.

    pip install -e '.[demo]'
    sa2va-rl demo                                          # the small embedded model
    sa2va-rl demo --model_path MODEL --reward_net outputs/reward_net_<time>/best_reward_net
    sa2va-rl demo --policy outputs/sa2va_rl_finetune_<time>

The page is served on this computer alone, unless --share is given. Uploaded images are deleted after an hour or two,
and nothing is sent anywhere.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal


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
    """Also open a public link, through servers of Gradio: everybody who knows it can use the page."""


def main(args: Args) -> None:
    """Load the models, and serve the page.

    Raises:
        ValueError: Gradio is not installed, or a model, policy or reward network is refused.
    """
    if find_spec("gradio") is None:
        raise ValueError("the demo needs Gradio, which is not installed: pip install -e '.[demo]'")
    from rl_reward_network.demo.answers import load_answers
    from rl_reward_network.demo.examples import write_examples

    answers = load_answers(args.model_path, args.policy, args.reward_net, args.device, args.dtype)
    with TemporaryDirectory() as folder:
        os.environ |= {"GRADIO_TEMP_DIR": folder, "GRADIO_ANALYTICS_ENABLED": "False"}  # read by the import below
        from rl_reward_network.demo.page import launch, make_page

        examples = write_examples(Path(folder) / "examples")
        launch(make_page(answers, examples), args.share, args.port)
