"""Prompt templates and stop words of the released models, the tokens of an image, and transformers' messages.

No template here has a system message. A Qwen-VL has a chat template in its folder, which may have one.

    [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Segment the vessel."}]}]

An image of a message is a PIL image, an array, a path or an address, under one of the keys `IMAGE_KEYS`.

Source: bytedance/Sa2VA@9832e1a (training configurations and prediction set-up).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.image_utils import load_image

from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike

IMAGE_CONTEXT = "<IMG_CONTEXT>"
REGION_START, REGION_END, SEG = "<vp>", "</vp>", "[SEG]"
IMAGE_PLACEHOLDER = "<image>"  # marks the image's place in a user's turn
IMAGE_KEYS = ("image", "url", "path", "base64")


@dataclass(frozen=True)
class ImageTokens:
    """The tokens that hold an image's place in a text, and others that generation must not produce either."""

    start: str
    context: str
    end: str
    others: tuple[str, ...] = (REGION_START, REGION_END)

    def text(self, count: int) -> str:
        """The place of an image with this number of feature rows."""
        return self.start + self.context * count + self.end

    @property
    def never_sampled(self) -> tuple[str, ...]:
        """All of them: an answer must not hold one."""
        return (self.start, self.end, self.context, *self.others)


INTERNVL_TOKENS = ImageTokens("<img>", IMAGE_CONTEXT, "</img>")
QWEN_VL_TOKENS = ImageTokens(
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", ("<|video_pad|>", REGION_START, REGION_END)
)

# The five answers to a request for one mask in Sa2VA's training data.
SEG_ANSWERS = (
    *("It is [SEG].", "Sure, [SEG].", "Sure, it is [SEG]."),
    *("Sure, the segmentation result is [SEG].", "[SEG]."),
)


@dataclass(frozen=True)
class Template:
    """One chat format."""

    instruction: str  # a user's turn, with `{input}` at the text's place
    # Text after an answer in training; it is labelled and serves as the end of sequence. "" in a template whose answers
    # end with the tokenizer's eos token.
    suffix: str
    separator: str  # text between an answer and the next turn; not labelled
    stop_words: tuple[str, ...]  # an answer ends when its text ends with one of these

    def user_turn(self, text: str) -> str:
        """The user's text in this chat format, up to the beginning of the answer."""
        return self.instruction.replace("{input}", text)


_IM = "<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n"
_LLAMA3 = (
    "<|start_header_id|>user<|end_header_id|>\n\n{input}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
TEMPLATES = {
    "qwen_chat": Template(_IM, "<|im_end|>", "\n", ("<|im_end|>", "<|endoftext|>")),
    "internlm2_chat": Template(_IM, "<|im_end|>", "\n", ("<|im_end|>",)),
    "phi3_chat": Template("<|user|>\n{input}<|end|>\n<|assistant|>\n", "<|end|>", "\n", ("<|end|>",)),
    "vicuna": Template("USER: {input} ASSISTANT:", "", "\n", ()),
    "llama3_chat": Template(_LLAMA3, "<|eot_id|>", "\n", ("<|eot_id|>",)),
}


def chat_instruction(tokenizer: PreTrainedTokenizerBase) -> str:
    """A user's turn in a Qwen-VL's chat template, with `{input}` for image and text, in this order, or a ValueError."""
    if not tokenizer.chat_template:
        raise ValueError(f"{tokenizer.name_or_path}: the chat template is missing; copy chat_template.jinja again")
    contents: list[dict[str, str]] = [{"type": "text", "text": "{input}"}]
    plain, shown = (
        str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))  # type: ignore[arg-type]
        for turn in ([{"role": "user", "content": parts}] for parts in (contents, [{"type": "image"}, *contents]))
    )
    if shown != plain.replace("{input}", QWEN_VL_TOKENS.text(1) + "{input}") or plain.count("{input}") != 1:
        raise ValueError(
            f"{tokenizer.name_or_path}: the chat template does not put {QWEN_VL_TOKENS.text(1)} in front of a text; "
            "copy chat_template.jinja from the released model again"
        )
    return plain


def kept_ids(config: Mapping[str, Any], image_tokens: ImageTokens) -> dict[str, int]:
    """Ids of special tokens in a config.json of ours, by token; older ones hold fewer."""
    ids = dict(zip(image_tokens.never_sampled, config.get("never_sampled_ids") or (), strict=False))
    ids |= {image_tokens.context: config.get("image_token_id"), SEG: config.get("seg_token_id")}
    ids |= config.get("added_token_ids") or {}
    return {token: number for token, number in ids.items() if number is not None}


def region_sentence(cells: Tensor | None) -> str:
    """The sentence that holds the placeholders of regions bool (N, g, g); "" without regions."""
    if cells is None:
        return ""
    contexts = [IMAGE_CONTEXT * int(cell.sum()) for cell in cells]
    regions = [f"region{i}{REGION_START}{context}{REGION_END}" for i, context in enumerate(contexts, start=1)]
    return f"\nThere are {len(regions)} part regions in the picture: {', '.join(regions)}.\n"


def read_chat(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str], ImageLike | None]:
    """Questions, answers and the image of messages in transformers' chat format.

    There is one answer less than questions, or as many: then the last answer is to be continued. An image's place is
    marked in the first question. A ValueError for roles that do not alternate from `user` on, or an image that is not
    the only one, in the first turn.
    """
    found = [message.get("role") for message in messages]
    if not messages or found != [("user", "assistant")[number % 2] for number in range(len(messages))]:
        raise ValueError(
            f"the messages have the roles {found}; expected user, assistant, user, ... (Sa2VA has no system message)"
        )
    texts: list[str] = []
    image: ImageLike | None = None
    for number, message in enumerate(messages):
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        images = [part for part in parts if part.get("type") == "image"]
        if other := [part.get("type") for part in parts if part.get("type") not in ("text", "image")]:
            raise ValueError(f"messages[{number}]: content of the type {other[0]!r}, expected text or image")
        if len(images) > (number == 0):
            raise ValueError(f"messages[{number}]: {len(images)} images; Sa2VA takes one, in the first message")
        text = "".join(part["text"] for part in parts if part.get("type") == "text")
        if images:
            source = next((images[0][key] for key in IMAGE_KEYS if images[0].get(key) is not None), None)
            if source is None:
                raise ValueError(f"messages[{number}]: the image has none of the keys {IMAGE_KEYS}")
            image = source if isinstance(source, np.ndarray) else load_image(source)
            text = text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER + text
        texts.append(text)
    return texts[::2], texts[1::2], image
