"""The page: components, buttons and what they call."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from rl_reward_network.demo.answers import Answers

TITLE = "Sa2VA: prompts, masks, predicted quality"
BUTTONS = ["download", "fullscreen"]  # not the one that sends a picture to the hub
KEPT_SECONDS = 3600  # how often uploads are deleted, and how old they are then; what is shown needs its file
FONT = ("system-ui", "sans-serif")  # of the user's computer: nothing is loaded from elsewhere


def make_page(answers: Answers, examples: list[Path]) -> gr.Blocks:
    """The page of a model.

    Args:
        answers: the model.
        examples: image files to pick from.
    """
    one_at_a_time = threading.Lock()  # of all users: the model is one

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with errors of the user as messages on the page."""

        def called(*words: Any) -> Any:
            try:
                with one_at_a_time:
                    return call(*words)
            except (ValueError, OSError) as error:
                raise gr.Error(str(error), duration=None, print_exception=False) from None

        return called

    def segment(path: str | None, prompt: str, by_policy: bool, weight: float) -> tuple[Any, ...]:
        shown = answers.segment(path, prompt, by_policy, weight)
        return shown.overlay, shown.soft, shown.errors, shown.fused, shown.words

    def describe(path: str | None, drawing: dict[str, Any] | None) -> str:
        return answers.caption(path, drawn_region(drawing))

    has_network = answers.maker.network is not None
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(KEPT_SECONDS, KEPT_SECONDS)) as page:
        gr.Markdown(f"# {TITLE}\nModel: `{Path(answers.model_path).name}`")
        with gr.Row():
            with gr.Column(scale=1):
                image = gr.Image(type="filepath", image_mode=None, sources=["upload", "clipboard"], label="image")
                gr.Examples([[str(example)] for example in examples], [image], label="examples")
                prompt = gr.Dropdown(
                    list(answers.prompts), value=answers.prompts[0], allow_custom_value=True, label="prompt"
                )
                by_policy = gr.Checkbox(
                    label="let the policy choose the prompt", visible=answers.maker.policy is not None
                )
                weight = gr.Slider(
                    0, 1, 0.5, step=0.05, visible=has_network, label="weight of the reward network in the fused mask"
                )
                start = gr.Button("Segment", variant="primary")
                every = gr.Button("All prompts side by side")
            with gr.Column(scale=2):
                words = gr.Markdown()
                with gr.Row():
                    overlay = gr.Image(label="mask", interactive=False, buttons=BUTTONS)
                    soft = gr.Image(label="soft mask: black 0, white 1", interactive=False, buttons=BUTTONS)
                with gr.Row(visible=has_network):
                    errors = gr.Image(label="expected errors: black 0, yellow 1", interactive=False, buttons=BUTTONS)
                    fused = gr.Image(label="fused mask", interactive=False, buttons=BUTTONS)
        gallery = gr.Gallery(label="all prompts", columns=4, object_fit="contain", height="auto", buttons=BUTTONS)
        with gr.Row():
            drawing = gr.ImageEditor(
                label="draw over an object", sources=[], layers=False, transforms=[], eraser=gr.Eraser()
            )
            with gr.Column():
                ask = gr.Button("Describe the region")
                caption = gr.Textbox(label="caption", interactive=False)
        image.change(guarded(lambda path: answers.open(path) if path else None), [image], [drawing])
        start.click(guarded(segment), [image, prompt, by_policy, weight], [overlay, soft, errors, fused, words])
        every.click(guarded(answers.all_prompts), [image], [gallery])
        ask.click(guarded(describe), [image, drawing], [caption])
    return page


def drawn_region(drawing: dict[str, Any] | None) -> np.ndarray | None:
    """bool (H, W): where the user has drawn; None without a drawing."""
    layers = (drawing or {}).get("layers") or []
    return np.logical_or.reduce([np.asarray(layer)[..., 3] > 0 for layer in layers]) if layers else None


def launch(page: gr.Blocks, share: bool, port: int | None) -> None:
    """Serve the page until the process is stopped; on this computer alone, unless `share`."""
    theme = gr.themes.Default(font=FONT, font_mono=("monospace",))
    page.queue(default_concurrency_limit=4, api_open=False)
    page.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=share,
        theme=theme,
        max_file_size="64mb",
        footer_links=[],
        show_error=True,
        run_history=False,
    )
