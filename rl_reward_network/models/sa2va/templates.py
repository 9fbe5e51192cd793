"""Prompt templates and stop words of the released models; none has a system message.

Source: bytedance/Sa2VA@9832e1a (training configurations and prediction set-up).
"""

from dataclasses import dataclass

IMAGE_START, IMAGE_END, IMAGE_CONTEXT = "<img>", "</img>", "<IMG_CONTEXT>"
REGION_START, REGION_END, SEG = "<vp>", "</vp>", "[SEG]"
IMAGE_PLACEHOLDER = "<image>"  # marks the image's place in a user's turn
NEVER_SAMPLED = (IMAGE_START, IMAGE_END, IMAGE_CONTEXT, REGION_START, REGION_END)

# The five answers to a request for one mask in Sa2VA's training data.
SEG_ANSWERS = (
    "It is [SEG].",
    "Sure, [SEG].",
    "Sure, it is [SEG].",
    "Sure, the segmentation result is [SEG].",
    "[SEG].",
)


@dataclass(frozen=True)
class Template:
    """One chat format.

    Args:
        instruction: a user's turn, with `{input}` at the text's place.
        suffix: text after an answer in training; it is labelled and serves as the end of sequence.
        separator: text between an answer and the next turn; not labelled.
        stop_words: an answer ends when its text ends with one of these.
    """

    instruction: str
    suffix: str
    separator: str
    stop_words: tuple[str, ...]

    def user_turn(self, text: str) -> str:
        """The user's text in this chat format, up to the begin of the answer."""
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


def template_name(name: str | None) -> str:
    """The template's key: dashes become underscores, as in the reference."""
    return (name or "").replace("-", "_")
