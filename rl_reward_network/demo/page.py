"""The page: what its buttons call, and its server."""

import html
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np

from rl_reward_network.demo.answers import Answers
from rl_reward_network.demo.components import Parts, make_parts
from rl_reward_network.demo.uploads import open_layer

TITLE = "Sa2VA: prompts, masks, predicted quality"
GUIDE = "Upload an image or pick an example, choose a prompt, then press Segment; draw over an object to describe it."
KEPT_SECONDS = 3600  # how often uploads are deleted, and how old they are then; what is shown needs its file
MESSAGE_SECONDS = 10
UNLOCKED = nullcontext()
FONT = ("system-ui", "sans-serif")  # of the user's computer: nothing is loaded from elsewhere
CSS = """
.grid-wrap { max-height: none !important; height: auto !important; }
.grid-container { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) !important; padding-top: 1.5rem; }
.caption-label { white-space: normal !important; max-width: 100% !important; }
"""  # all prompts are shown, with all their words


def make_page(answers: Answers, examples: list[Path]) -> gr.Blocks:
    """The page of a model.

    Args:
        answers: the model.
        examples: image files to pick from.
    """
    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(KEPT_SECONDS, KEPT_SECONDS)) as page:
        gr.Markdown(f"# {TITLE}\n{GUIDE} Model: `{Path(answers.model_path).name}`.")
        _connect(answers, make_parts(answers, examples))
    return page


def _connect(answers: Answers, parts: Parts) -> None:
    """Let the components call the model, one call at a time of all users: the model is one."""
    lock = threading.Lock()

    def segment(*asked: Any) -> tuple[Any, ...]:
        shown = answers.segment(*asked)
        return shown.overlay, shown.soft, shown.errors, shown.fused, shown.words

    def describe(path: str | None, drawing: dict[str, Any] | None) -> str:
        return answers.caption(path, drawn_region(drawing, answers.folder))

    asked = [parts.image, parts.prompt, parts.by_policy, parts.weight]
    shown = [parts.overlay, parts.soft, parts.errors, parts.fused, parts.words]
    hidden: dict[str, Any] = {"api_visibility": "private"}
    running = [
        parts.start.click(guarded(segment, lock), asked, shown, **hidden),
        parts.every.click(guarded(answers.all_prompts, lock), [parts.image], [parts.gallery], **hidden),
        parts.ask.click(guarded(describe, lock), [parts.image, parts.drawing], [parts.caption], **hidden),
    ]
    last = gr.State()
    changed = image_change(answers, len(parts.answers))
    parts.image.change(changed, [parts.image, last], [last, *parts.answers], cancels=running, **hidden)
    parts.prompt.input(lambda: False, None, [parts.by_policy], queue=False, **hidden)  # the user has chosen


def image_change(answers: Answers, count: int) -> Callable[..., Any]:
    """What happens with another image: answers about the last one disappear, and the new one can be drawn on.

    Args:
        answers: the model.
        count: of components that show answers; the drawing is the last.
    """

    def changed(path: str | None, last: str | None) -> Any:
        if path == last:  # for Gradio, an upload in place of another image is two changes
            return gr.skip()
        picture = None
        try:
            picture = guarded(answers.open)(path) if path else None
        except gr.Error as error:  # as a warning, since nothing disappears after an error
            gr.Warning(error.message, duration=MESSAGE_SECONDS)
        return [path, *[None] * (count - 1), picture]

    return changed


def guarded(call: Callable[..., Any], lock: AbstractContextManager[Any] = UNLOCKED) -> Callable[..., Any]:
    """The call, with errors of the user and of the device as messages on the page, which shows them as HTML.

    Args:
        call: what a button does.
        lock: held meanwhile.
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
        raise gr.Error(html.escape(message), duration=MESSAGE_SECONDS, print_exception=False)

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


def launch(page: gr.Blocks, share: bool, port: int | None) -> None:
    """Serve the page until the process is stopped; on this computer alone, unless `share`."""
    page.queue(default_concurrency_limit=4, api_open=False)
    _, address, public = page.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=share,
        theme=gr.themes.Default(font=FONT, font_mono=("monospace",)),
        css=CSS,
        max_file_size="64mb",
        footer_links=[],
        show_error=False,  # messages of unexpected errors are not escaped; the terminal has them
        run_history=False,
        quiet=True,
        prevent_thread_lock=True,
    )
    if share:
        address = f"{public} and {address}" if public else f"{address}; the public link could not be opened"
    print(f"the page is at {address} (Ctrl-C stops it)", flush=True)
    page.block_thread()
