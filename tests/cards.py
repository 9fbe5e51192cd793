"""Running the Python lines of a model card."""

import re
from pathlib import Path
from typing import Any


def card_code(card: str, folder: Path, image: Path) -> list[str]:
    """The Python blocks of a card, with its placeholders filled in."""
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    return [block.replace("<this folder>", str(folder)).replace("image.png", str(image)) for block in blocks]


def run_card(card: str, folder: Path, image: Path) -> list[dict[str, Any]]:
    """The names that each Python block of a card leaves behind."""
    results = []
    for code in card_code(card, folder, image):
        names: dict[str, Any] = {}
        exec(code, names)
        results.append(names)
    return results
