"""Components of the page: what the user gives, and what is shown."""

from abc import ABCMeta
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from rl_reward_network.demo.answers import Answers

BUTTONS = ["download", "fullscreen"]  # not the one that sends a picture to the hub
COLOURS = [
    ("rgb(204, 50, 50)", 0.5),
    ("rgb(50, 112, 204)", 0.5),
    ("rgb(50, 204, 112)", 0.5),
]  # the object shows through


@dataclass(frozen=True)
class Parts:
    """The components that events read or write.

    Args:
        image, prompt, by_policy, weight, drawing: given by the user.
        overlay, soft, errors, fused, words, gallery, caption: shown.
        start, every, ask: buttons.
    """

    image: Any
    prompt: Any
    by_policy: Any
    weight: Any
    start: Any
    every: Any
    words: Any
    overlay: Any
    soft: Any
    errors: Any
    fused: Any
    gallery: Any
    drawing: Any
    ask: Any
    caption: Any

    @property
    def answers(self) -> list[Any]:
        """What shows an answer about the image, the drawing last."""
        return [self.overlay, self.soft, self.errors, self.fused, self.words, self.gallery, self.caption, self.drawing]


def make_parts(answers: Answers, examples: list[Path]) -> Parts:
    """Lay out the components; inside `gr.Blocks`."""
    with gr.Row():
        with gr.Column(scale=1):
            given = _given(answers, examples)
        with gr.Column(scale=2):
            shown = _shown(answers.maker.network is not None)
    scored = ", with predicted Dice" if answers.maker.network is not None else ""
    gallery = gr.Gallery(
        label=f"all prompts{scored}", format="png", object_fit="contain", height="auto", buttons=BUTTONS
    )
    with gr.Row():
        drawing = _drawing()
        with gr.Column():
            ask = gr.Button("Describe the region")
            caption = gr.Textbox(label="caption", interactive=False)
    return Parts(**given, **shown, gallery=gallery, drawing=drawing, ask=ask, caption=caption)


def _given(answers: Answers, examples: list[Path]) -> dict[str, Any]:
    policy, network = answers.maker.policy, answers.maker.network
    image = upload(image_mode=None, sources=["upload", "clipboard"], label="image")
    gr.Examples([[str(example)] for example in examples], [image], label="examples", api_visibility="private")
    prompt = gr.Dropdown(
        list(answers.prompts), value=answers.first_prompt, allow_custom_value=True, label="prompt: choose or type"
    )
    by_policy = gr.Checkbox(policy is not None, label="let the policy choose the prompt", visible=policy is not None)
    start, every = gr.Button("Segment", variant="primary"), gr.Button("All prompts side by side")
    weight = gr.Slider(0, 1, 0.5, step=0.05, visible=network is not None, label="reward network in the fused mask")
    return dict(image=image, prompt=prompt, by_policy=by_policy, start=start, every=every, weight=weight)


def _shown(has_network: bool) -> dict[str, Any]:
    words = gr.Textbox(label="answer", interactive=False, lines=5, max_lines=20)
    with gr.Row():
        overlay, soft = _picture("mask"), _picture("soft mask (white: 1)")
    with gr.Row(visible=has_network):
        errors, fused = _picture("expected errors (yellow: 1)"), _picture("fused mask")
    return dict(words=words, overlay=overlay, soft=soft, errors=errors, fused=fused)


def _picture(label: str) -> Any:
    width = 300  # pixels; a phone has room for one in a row, and for its whole label
    return gr.Image(label=label, format="png", interactive=False, buttons=BUTTONS, min_width=width)


def _drawing() -> Any:
    brush = gr.Brush(colors=COLOURS, default_color=COLOURS[0])
    options = {"sources": [], "layers": False, "transforms": [], "eraser": gr.Eraser(), "brush": brush}
    return _undecoded(gr.ImageEditor, convert_and_format_image=_as_sent)(
        label="draw over an object", format="png", **options
    )


def _as_sent(_: Any, file: Any, flatten_on_white: bool = False) -> str | bytes | None:
    """The path or the bytes of a layer; of nothing else, since Gradio flattens the picture below and the whole."""
    return None if file is None or flatten_on_white else getattr(file, "path", file)


def upload(**options: Any) -> Any:
    """An image of the user, as the path of its file.

    Args:
        options: of `gr.Image`.
    """
    return _undecoded(gr.Image, preprocess=lambda _, payload: payload and payload.path)(type="filepath", **options)


def _undecoded(component: Any, **methods: Any) -> Any:
    """A component of Gradio with methods that leave files as they are.

    Gradio's own would decode files of any size, and fail with messages that name their folder. Its metaclass is left
    out: for each subclass it writes a .pyi beside this file.
    """
    return ABCMeta.__new__(type(component), component.__name__, (component,), methods)
