"""Parts of a report: a self-contained HTML page, tables, embedded pictures, CSV text, and their files."""

import base64
import csv
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rl_reward_network.artefacts import whole_file

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 0 1rem 3rem; line-height: 1.45; }
.verdict { border-left: .4rem solid #357; background: #eef3f8; padding: .6rem 1rem; font-size: 1.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ccc; text-align: left; white-space: nowrap; }
td:first-child { white-space: normal; }
.wrap td { white-space: normal; overflow-wrap: anywhere; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem; }
figure { margin: 0; flex: 1 1 9rem; max-width: 25rem; }
figcaption { font-size: .9rem; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) { th, td { padding: .25rem .3rem; font-size: .85rem; } .wrap th { white-space: normal; } }
"""


def whole_page(title: str, parts: Iterable[str]) -> str:
    """The HTML file; empty parts are left out."""
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head>"
    )
    return head + "<body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"


def text(value: object) -> str:
    """HTML-escaped text."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Iterable[Iterable[object]], style: str = "scroll") -> str:
    """An HTML table; on a narrow screen it scrolls sideways (style "scroll") or wraps its words (style "wrap")."""
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="{style}"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def image(data: bytes, kind: str, description: str) -> str:
    """An image embedded in the page."""
    encoded = base64.b64encode(data).decode()
    return f'<img src="data:image/{kind};base64,{encoded}" alt="{text(description)}">'


def panels(title: str, pictures: Iterable[tuple[str, bytes]]) -> str:
    """A heading, and JPEG pictures side by side, each with its caption."""
    figures = "".join(
        f"<figure>{image(data, 'jpeg', caption)}<figcaption>{text(caption)}</figcaption></figure>"
        for caption, data in pictures
    )
    return f'<h3>{text(title)}</h3><div class="panels">{figures}</div>'


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines as CSV."""
    file = io.StringIO()
    csv.writer(file).writerows(lines)
    return file.getvalue()


def digits(numbers: np.ndarray) -> list[str]:
    """Six decimals each."""
    return [f"{number:.6f}" for number in numbers]


def write_files(folder: Path, texts: dict[str, str]) -> Path:
    """Write text files in the given order, each whole or not at all; returns the path of the last."""
    for name, content in texts.items():
        with whole_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="")
    return folder / name
