"""The page: its components, what its buttons call, and its server."""

import html
import threading
from abc import ABCMeta
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from examples.demo.answers import Answers, open_layer

TITLE = "Sa2VA: prompts, masks, predicted quality"
GUIDE = """Upload an image or pick an example, choose a prompt or type one, then press **Segment**.
To get a description of an object, draw over it at the bottom of the page, then press **Describe the region**."""
KEPT_SECONDS = 3600  # how often uploads are deleted, and how old they are then; what is shown needs its file
MESSAGE_SECONDS = 10
UNLOCKED = nullcontext()
UNCHANGED = gr.skip()
BUTTONS: Any = ["download", "fullscreen"]  # not the one that sends a picture to the hub
COLOURS: Any = [(f"rgb({rgb})", 0.5) for rgb in ("204, 50, 50", "50, 112, 204", "50, 204, 112")]  # see-through
FONT = ("system-ui", "sans-serif")  # of the user's computer: nothing is loaded from elsewhere
CSS = """
.grid-wrap { max-height: none !important; min-height: 6rem !important; height: auto !important; }
.grid-container { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) !important; padding-top: 1.5rem; }
.thumbnail-item { aspect-ratio: auto !important; height: auto !important; }
.thumbnail-item > img { aspect-ratio: 1; height: auto !important; }
.caption-label { position: static !important; white-space: normal !important; max-width: 100% !important; }
.upload-container:has(> .image-frame) { min-height: 9rem; }
.image-frame { box-sizing: border-box; padding-top: 1.75rem; }
@media (max-width: 640px) { .toolbar-wrap { left: 0 !important; } }
"""  # all prompts are shown, with all their words; no label and no tool lies over a picture
PRIVATE: dict[str, Any] = {"api_visibility": "private"}


def make_page(answers: Answers, examples: list[Path]) -> gr.Blocks:
    """The page of a model, with image files to pick from."""
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(KEPT_SECONDS, KEPT_SECONDS)) as page:
        gr.Markdown(f"# {TITLE}\n{GUIDE} Model: `{Path(answers.model_path).name}`.")
        fill_page(answers, examples)
    return page


def fill_page(answers: Answers, examples: list[Path]) -> dict[str, Any]:
    """Lay out the components inside `gr.Blocks`, and connect them; returns those that a test looks at, by name."""
    policy, scored = answers.maker.policy is not None, answers.maker.network is not None
    with gr.Row():
        with gr.Column(scale=1):
            image = undecoded(gr.Image, preprocess=lambda _, payload: payload and payload.path)(
                type="filepath", image_mode=None, sources=["upload", "clipboard"], label="Image"
            )
            gr.Examples([[str(example)] for example in examples], [image], label="Examples", **PRIVATE)
            prompts, first = list(answers.prompts), answers.first_prompt
            prompt = gr.Dropdown(prompts, value=first, allow_custom_value=True, label="Prompt: choose or type")
            by_policy = gr.Checkbox(policy, label="Let the policy choose the prompt", visible=policy)
            start, every = gr.Button("Segment", variant="primary"), gr.Button("All prompts side by side")
            weight = gr.Slider(
                0, 1, 0.5, step=0.05, visible=scored, label="Weight of the reward network in the fused mask"
            )
        with gr.Column(scale=2):
            words = gr.Textbox(label="Answer", interactive=False, lines=5, max_lines=20)
            with gr.Row():
                overlay, soft = _picture("Mask"), _picture("Soft mask (white: 1)")
            save = gr.DownloadButton("Download the mask (PNG)", interactive=False)
            with gr.Row(visible=scored):
                errors, fused = _picture("Expected errors (yellow: 1)"), _picture("Fused mask")
    label = "All prompts, with predicted Dice" if scored else "All prompts"
    gallery = gr.Gallery(label=label, format="png", object_fit="contain", height="auto", buttons=BUTTONS)
    with gr.Row():
        brush = gr.Brush(colors=COLOURS, default_color=COLOURS[0])
        options: dict[str, Any] = {"sources": [], "layers": False, "transforms": [], "eraser": gr.Eraser()}
        editor = undecoded(gr.ImageEditor, convert_and_format_image=_as_sent)
        drawing = editor(label="Draw here", format="png", brush=brush, **options)
        with gr.Column():
            describe = gr.Button("Describe the region")
            caption = gr.Textbox(label="Description", interactive=False)

    lock = threading.Lock()  # one call at a time of all users: the model is one

    def segment(*given: Any) -> tuple[Any, ...]:
        shown = answers.segment(*given)
        file = gr.update(value=shown.file, interactive=shown.file is not None)
        return file, shown.overlay, shown.soft, shown.errors, shown.fused, shown.words

    def caption_of(path: str | None, drawn: dict[str, Any] | None) -> str:
        return answers.caption(path, drawn_region(drawn, answers.folder))

    shown = [overlay, soft, errors, fused, words]
    running = [
        start.click(guarded(segment, lock), [image, prompt, by_policy, weight], [save, *shown], **PRIVATE),
        every.click(guarded(answers.all_prompts, lock), [image], [gallery], **PRIVATE),
        describe.click(guarded(caption_of, lock), [image, drawing], [caption], **PRIVATE),
    ]
    last, cleared = gr.State(), [*shown, gallery, caption, drawing]
    changed = image_change(answers, len(cleared))
    image.change(changed, [image, last], [last, image, save, *cleared], cancels=running, **PRIVATE)
    prompt.input(lambda: False, None, [by_policy], queue=False, **PRIVATE)  # the user has chosen
    return {"image": image, "prompt": prompt, "by_policy": by_policy, "gallery": gallery, "drawing": drawing}


def _picture(label: str) -> Any:
    width = 300  # pixels; a phone has room for one in a row, and for its whole label
    return gr.Image(label=label, format="png", interactive=False, buttons=BUTTONS, min_width=width)


def _as_sent(_: Any, file: Any, flatten_on_white: bool = False) -> str | bytes | None:
    """The path or the bytes of a layer; of nothing else, since Gradio flattens the picture below and the whole."""
    return None if file is None or flatten_on_white else getattr(file, "path", file)


def undecoded(component: Any, **methods: Any) -> Any:
    """A component of Gradio with methods that leave files as they are.

    Gradio's own would decode files of any size, and fail with messages that name their folder. Its metaclass is left
    out: for each subclass it writes a .pyi beside this file.
    """
    return ABCMeta.__new__(type(component), component.__name__, (component,), methods)


def image_change(answers: Answers, count: int) -> Callable[..., Any]:
    """What happens with another image: answers about the last one disappear, and the new one can be drawn on.

    An image that is refused disappears, too.

    Args:
        answers: the model.
        count: of components that show answers; the drawing is the last.
    """

    def changed(path: str | None, last: str | None) -> Any:
        if path == last:  # for Gradio, an upload in place of another image is two changes
            return gr.skip()
        picture = guarded(answers.open, otherwise=None)(path) if path else None
        shown = gr.skip() if picture is not None or path is None else None
        save = gr.update(value=None, interactive=False)
        return [None if picture is None else path, shown, save, *[None] * (count - 1), picture]

    return changed


def guarded(
    call: Callable[..., Any], lock: AbstractContextManager[Any] = UNLOCKED, otherwise: Any = UNCHANGED
) -> Callable[..., Any]:
    """The call, with errors of the user and of the device as messages on the page, which shows them as HTML.

    They are warnings to Gradio: its errors would cover every answer that is on the page.

    Args:
        call: what a button does.
        lock: held meanwhile.
        otherwise: returned after a message.
    """

    def called(*given: Any) -> Any:
        try:
            with lock:
                return call(*given)
        except (ValueError, OSError) as error:
            message = str(error)
        except (RuntimeError, MemoryError) as error:  # out of memory, most often
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"the model failed ({reason}); a smaller image or a shorter prompt needs less memory"
        gr.Warning(html.escape(message), duration=MESSAGE_SECONDS)
        return otherwise

    return called


def drawn_region(drawing: dict[str, Any] | None, folder: Path) -> np.ndarray | None:
    """bool (H, W): where the user has drawn; None without a drawing.

    Args:
        drawing: of the editor; its layers are paths or bytes of PNG files.
        folder: of uploads.

    Raises:
        ValueError: as `open_layer`, or layers of different sizes.
    """
    layers = [open_layer(layer, folder) for layer in (drawing or {}).get("layers") or [] if layer is not None]
    if len({layer.shape for layer in layers}) > 1:
        raise ValueError("the drawing has layers of different sizes: draw it again")
    return np.logical_or.reduce(layers) if layers else None


def launch(page: gr.Blocks, share: bool, port: int | None, auth: tuple[str, str] | None) -> None:
    """Serve the page until the process is stopped; on this computer alone, unless `share`.

    Args:
        page: to be served.
        share: open a public link, too.
        port: None is the first free one from 7860 on.
        auth: user and password; None asks for none.

    Raises:
        ValueError: the port cannot be served.
    """
    page.queue(default_concurrency_limit=4, api_open=False)
    try:
        _, address, public = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=share,
            auth=auth,
            theme=gr.themes.Default(font=FONT, font_mono=("monospace",)),
            css=CSS,
            max_file_size="64mb",
            footer_links=[],
            show_error=False,  # messages of unexpected errors are not escaped; the terminal has them
            run_history=False,
            quiet=True,
            prevent_thread_lock=True,
        )
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port}: {error}; give a free port, or leave it out") from None
    if share:
        address = f"{public} and {address}" if public else f"{address}; the public link could not be opened"
    print(f"the page is at {address} (Ctrl-C stops it)", flush=True)
    page.block_thread()
