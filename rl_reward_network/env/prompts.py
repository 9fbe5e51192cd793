"""The prompts: the actions of the prompt policy. Index 0 is the default that every result is compared with."""

import json
from collections.abc import Iterable
from pathlib import Path

PROMPTS: tuple[str, ...] = (
    "Please segment the blood vessel.",
    "Please segment blood vessel and all its bifurcations.",
    "Please segment the dark vessels.",
    "Please segment the bright vessels.",
    "Please segment the main vessel trunk.",
    "Please segment the thin vessel branches.",
    "Please segment the blood vessel and its surroundings.",
    "Please segment the low contrast vessels.",
    "Please segment the blurred vessels.",
    "Please segment the blood vessel without the catheter.",
    "Please segment the blood vessel and the catheter.",
)


def load_prompts(path: Path | None = None) -> tuple[str, ...]:
    """The prompts in a file, or `PROMPTS` when no file is given. The first one is the default prompt.

    The file is UTF-8 text with one prompt per line (empty lines are skipped), or a JSON list of strings.

    Raises:
        ValueError: the file cannot be read, an entry is empty or not a string, two prompts are equal up to case and
            spaces, or there are fewer than two. The message names the file, the line or entry, and the remedy.
    """
    if path is None:
        return PROMPTS
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error}); give one prompt per line") from None
    if not text.lstrip().startswith("["):
        lines = enumerate(text.splitlines(), 1)
        return _checked(path, [(f"line {number}", line) for number, line in lines if line.strip()])
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not a JSON list ({error.msg}); or give plain lines") from None
    for number, value in enumerate(values, 1):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{path}: entry {number} is {value!r}, expected a string with words")
    return _checked(path, [(f"entry {number}", value) for number, value in enumerate(values, 1)])


def _checked(path: Path, entries: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The prompts with single spaces, at least two and all different."""
    prompts: list[str] = []
    places: dict[str, str] = {}
    for place, entry in entries:
        prompt = " ".join(entry.split())
        first = places.setdefault(prompt.casefold(), place)
        if first != place:
            raise ValueError(f"{path}: {place}: {prompt!r} is already there at {first}; remove one of them")
        prompts.append(prompt)
    if len(prompts) < 2:
        raise ValueError(f"{path}: {len(prompts)} prompts found; at least 2 are needed for a choice")
    return tuple(prompts)
