"""Messages in the chat format of transformers, as one prompt and at most one image.

    [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Segment the vessel."}]}]

An image is a PIL image, an array, a path or an address, under `image`, `url` or `path`, and belongs to the first turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.image_utils import load_image

from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER

Message = Mapping[str, Any]
IMAGE_KEYS = ("image", "url", "path", "base64")


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Args:
        turns: (question, answer) of the earlier turns.
        question: the last one; an image's place is marked in the first question.
        image: of the first turn; None without one.
        begun: the beginning of the answer to the last question, which is to be continued.
    """

    turns: tuple[tuple[str, str], ...]
    question: str
    image: ImageLike | None
    begun: str = ""


def read_chat(messages: Sequence[Message]) -> Chat:
    """A conversation from its messages; a last one of the assistant is to be continued.

    Raises:
        ValueError: roles that do not alternate from `user` on, or an image that is not the only one, in the first turn.
    """
    expected = [("user", "assistant")[number % 2] for number in range(len(messages))]
    if not messages or [message.get("role") for message in messages] != expected:
        found = [message.get("role") for message in messages]
        raise ValueError(
            f"the messages have the roles {found}; expected user, assistant, user, ... (Sa2VA has no system message)"
        )
    read = [_read(message, number) for number, message in enumerate(messages)]
    images, texts = [image for image, _ in read if image is not None], [text for _, text in read]
    questions, answers = texts[::2], texts[1::2]
    begun = answers.pop() if len(messages) % 2 == 0 else ""
    turns = tuple(zip(questions[:-1], answers, strict=True))
    return Chat(turns, questions[-1], images[0] if images else None, begun)


def _read(message: Message, number: int) -> tuple[ImageLike | None, str]:
    """Image and text of a message."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    texts = [part["text"] for part in parts if part.get("type") == "text"]
    images = [part for part in parts if part.get("type") == "image"]
    if other := [part.get("type") for part in parts if part.get("type") not in ("text", "image")]:
        raise ValueError(f"messages[{number}]: content of the type {other[0]!r}, expected text or image")
    if len(images) > (number == 0):
        raise ValueError(f"messages[{number}]: {len(images)} images; Sa2VA takes one, in the first message")
    text = "".join(texts)
    if not images:
        return None, text
    source = next((images[0][key] for key in IMAGE_KEYS if images[0].get(key) is not None), None)
    if source is None:
        raise ValueError(f"messages[{number}]: the image has none of the keys {IMAGE_KEYS}; name it by one of them")
    image = source if isinstance(source, np.ndarray) else load_image(source)
    return image, text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER + text
