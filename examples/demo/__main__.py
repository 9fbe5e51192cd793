"""Try a model in the browser: masks, soft masks, predicted quality, all prompts side by side, captions of regions.

    pip install -e '.[demo]'
    python -m examples.demo                                # the small embedded model
    python -m examples.demo --model_path MODEL --reward_net outputs/reward_net_<time>/best_reward_net
    python -m examples.demo --policy outputs/sa2va_rl_finetune_<time>
    SA2VA_DEMO_AUTH=user:password python -m examples.demo --share    # a public link, for those who know the password

The page is served on this computer alone, unless --share is given. Uploaded images are deleted after an hour or two,
and nothing is sent anywhere.
"""

import html
import os
import signal
import sys
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from examples.demo.answers import Answers, drawn_region, load_answers, write_examples
from rl_reward_network.cli.app import run

AUTH = "SA2VA_DEMO_AUTH"
TITLE = "Sa2VA: prompts, masks, predicted quality"
GUIDE = """Upload an image or pick an example, choose a prompt or type one, then press **Segment**.
To get a description of an object, draw over it at the bottom of the page, then press **Describe the region**."""
KEPT_SECONDS = 3600  # how often uploads are deleted, and how old they are then; what is shown needs its file
BUTTONS: Any = ["download", "fullscreen"]  # not the one that sends a picture to the hub
COLOURS: Any = [(f"rgb({rgb})", 0.5) for rgb in ("204, 50, 50", "50, 112, 204", "50, 204, 112")]  # see-through
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
MODEL = PRIVATE | {"concurrency_id": "model", "concurrency_limit": 1}  # one call at a time of all users


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
    """Load the models, and serve the page; uploads are kept in a temporary folder."""
    if find_spec("gradio") is None:
        raise ValueError("the demo needs Gradio, which is not installed: pip install -e '.[demo]'")
    auth = read_auth(args.auth, args.share)
    for name in ("SIGTERM", "SIGHUP"):  # end as an exception does, so that uploads are deleted
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    with TemporaryDirectory() as folder:
        serve(args, auth, Path(folder))


def read_auth(flag: str | None, share: bool) -> tuple[str, str] | None:
    """User and password from the flag or the environment, None without either; no message repeats them."""
    given = os.environ.get(AUTH) if flag is None else flag
    if given is None and share:
        raise ValueError(f"--share opens the page to everybody who finds the link: set {AUTH}=user:password")
    if given is None:
        return None
    user, _, password = given.partition(":")
    if not user or not password:
        raise ValueError(f"{AUTH if flag is None else '--auth'} is not of the form user:password, both not empty")
    return user, password


def serve(args: Args, auth: tuple[str, str] | None, folder: Path) -> None:
    """Load the models, and serve the page until the process is stopped; on this computer alone, unless --share."""
    answers = load_answers(folder, args.model_path, args.policy, args.reward_net, args.device, dtype=args.dtype)
    os.environ |= {"GRADIO_TEMP_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}  # read when it is imported
    import gradio as gr

    with gr.Blocks(analytics_enabled=False, title=TITLE, delete_cache=(KEPT_SECONDS, KEPT_SECONDS)) as page:
        gr.Markdown(f"# {TITLE}\n{GUIDE} Model: `{Path(answers.model_path).name}`.")
        fill_page(answers, write_examples(folder / "examples"))
    launch(page, args.share, args.port, auth)


def fill_page(answers: Answers, examples: list[Path]) -> dict[str, Any]:
    """Lay out the components inside `gr.Blocks`, and connect them; returns those that a test looks at, by name."""
    import gradio as gr

    def picture(label: str) -> Any:
        width = 300  # pixels; a phone has room for one in a row, and for its whole label
        return gr.Image(label=label, format="png", interactive=False, buttons=BUTTONS, min_width=width)

    policy, scored = answers.maker.policy is not None, answers.maker.network is not None
    first = answers.prompts[0] if policy else answers.maker.prompt  # where a run deploys the best fixed prompt, that
    with gr.Row():
        with gr.Column(scale=1):
            image = undecoded(gr.Image, preprocess=lambda _, payload: payload and payload.path)(
                type="filepath", image_mode=None, sources=["upload", "clipboard"], label="Image"
            )
            gr.Examples([[str(example)] for example in examples], [image], label="Examples", **PRIVATE)
            choices: Any = {"choices": list(answers.prompts), "value": first, "allow_custom_value": True}
            prompt = gr.Dropdown(label="Prompt: choose or type", **choices)
            by_policy = gr.Checkbox(policy, label="Let the policy choose the prompt", visible=policy)
            start, every = gr.Button("Segment", variant="primary"), gr.Button("All prompts side by side")
            label = "Weight of the reward network in the fused mask"
            weight = gr.Slider(0, 1, 0.5, step=0.05, visible=scored, label=label)
        with gr.Column(scale=2):
            words = gr.Textbox(label="Answer", interactive=False, lines=5, max_lines=20)
            with gr.Row():
                overlay, soft = picture("Mask"), picture("Soft mask (white: 1)")
            save = gr.DownloadButton("Download the mask (PNG)", interactive=False)
            with gr.Row(visible=scored):
                errors, fused = picture("Expected errors (yellow: 1)"), picture("Fused mask")
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

    def segment(*given: Any) -> tuple[Any, ...]:
        file, *pictures = answers.segment(*given)
        return gr.update(value=file, interactive=file is not None), *pictures

    def caption_of(path: str | None, drawn: dict[str, Any] | None) -> str:
        return answers.caption(path, drawn_region(drawn, answers.folder))

    shown, asked = [overlay, soft, errors, fused, words], [image, prompt, by_policy, weight]
    running = [
        start.click(guarded(segment), asked, [save, *shown], **MODEL),
        every.click(guarded(answers.all_prompts), [image], [gallery], **MODEL),
        describe.click(guarded(caption_of), [image, drawing], [caption], **MODEL),
    ]
    last, cleared = gr.State(), [*shown, gallery, caption, drawing]
    changed = image_change(answers, len(cleared))
    image.change(changed, [image, last], [last, image, save, *cleared], cancels=running, **PRIVATE)
    prompt.input(lambda: False, None, [by_policy], queue=False, **PRIVATE)  # the user has chosen
    return {"image": image, "prompt": prompt, "by_policy": by_policy, "gallery": gallery, "drawing": drawing}


def _as_sent(_: Any, file: Any, flatten_on_white: bool = False) -> str | bytes | None:
    """The path or the bytes of a layer; of nothing else, since Gradio flattens the picture below and the whole."""
    return None if file is None or flatten_on_white else getattr(file, "path", file)


def undecoded(component: Any, **methods: Any) -> Any:
    """A component of Gradio with methods that leave files as they are, where its own would decode any size.

    Its metaclass is left out: for each subclass it writes a .pyi beside this file.
    """
    return ABCMeta.__new__(type(component), component.__name__, (component,), methods)


def image_change(answers: Answers, count: int) -> Callable[..., Any]:
    """With another image, `count` components are cleared, and it can be drawn on in the last; a refused one goes."""
    import gradio as gr

    def changed(path: str | None, last: str | None) -> Any:
        if path == last:  # for Gradio, an upload in place of another image is two changes
            return gr.skip()
        picture, _ = guarded(answers.open, otherwise=(None, ""))(path) if path else (None, "")
        shown = gr.skip() if picture is not None or path is None else None
        save = gr.update(value=None, interactive=False)
        return [None if picture is None else path, shown, save, *[None] * (count - 1), picture]

    return changed


def guarded(call: Callable[..., Any], **otherwise: Any) -> Any:
    """The call, with errors as messages on the page; after one, the page stays as it is, or gets `otherwise`.

    They are warnings to Gradio: its errors would cover every answer that is on the page.
    """
    import gradio as gr

    def called(*given: Any) -> Any:
        try:
            return call(*given)
        except (ValueError, OSError) as error:
            message = str(error)
        except (RuntimeError, MemoryError) as error:  # out of memory, most often
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"the model failed ({reason}); a smaller image or a shorter prompt needs less memory"
        gr.Warning(html.escape(message), duration=10)
        return otherwise.get("otherwise", gr.skip())

    return called


def launch(page: Any, share: bool, port: int | None, auth: tuple[str, str] | None) -> None:
    """Serve the page until the process is stopped; ValueError for a port that cannot be served."""
    import gradio as gr

    page.queue(default_concurrency_limit=4, api_open=False)
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("monospace",)}  # nothing is loaded from elsewhere
    look: dict[str, Any] = {"theme": gr.themes.Default(**fonts), "css": CSS, "footer_links": [], "run_history": False}
    look["show_error"] = False  # messages of unexpected errors are not escaped; the terminal has them
    where: dict[str, Any] = {"server_name": "127.0.0.1", "server_port": port, "share": share, "auth": auth}
    try:
        _, address, public = page.launch(**where, **look, max_file_size="64mb", quiet=True, prevent_thread_lock=True)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port}: {error}; give a free port, or leave it out") from None
    if share:
        address = f"{public} and {address}" if public else f"{address}; the public link could not be opened"
    print(f"the page is at {address} (Ctrl-C stops it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    run(main, Args)
