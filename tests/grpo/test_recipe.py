"""GRPO prepares a model as the official supervised fine-tuning does, but for what `MEANT` and `PARTS` list.

The recipe is written down here; it is not computed by the code that is compared with it.
Source: bytedance/Sa2VA@9832e1a, training configurations of the models with a Qwen2 language model; @06912e2, those of
the models on a Qwen-VL. Differences that are meant:

- LoRA dropout is 0, not 0.05: with dropout, log-probabilities of one caption differ at random. Small models have a
  smaller rank; alpha is twice the rank in both.
- RL adds no token, so the embeddings and the head of an InternVL stay frozen.
- The prompt encoder of SAM 2 is a part of the mask path, which RL trains; what no loss reaches is frozen by a run.
- Images are one tile by default, not up to 12 and a thumbnail. A Qwen-VL's image is resized twice, as in the official
  prediction, not once as in its training, unless `image_resize` says so; its folder may have a system turn.
- A question has no line break behind the image, as in the official prediction.
- What is frozen may be bfloat16; what trains is float32 in both.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

from benchmarks.random_checkpoint import CHAT, write_random_checkpoint
from rl_reward_network.atomic_io import read_json
from rl_reward_network.grpo.image_context import make_question
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.prompts import segment_question
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint, tensor_shapes, to_original
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import GOLDEN, SHARED, needs_golden
from tests.grpo.nano import config, regions, rewards
from tests.qwen_vl import QWEN3, QWEN25, SYSTEM, write_tiny_qwen

RANK, ALPHA = 128, 256
CHATML = ("<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n")
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEMPLATES = {  # instruction, suffix, separator; a format without a suffix ends its answers with the eos token
    "qwen_chat": CHATML,
    "internlm2_chat": CHATML,
    "phi3_chat": ("<|user|>\n{input}<|end|>\n<|assistant|>\n", "<|end|>", "\n"),
    "vicuna": ("USER: {input} ASSISTANT:", "", "\n"),
    "llama3_chat": (LLAMA.format("user") + "{input}<|eot_id|>" + LLAMA.format("assistant"), "<|eot_id|>", "\n"),
}
IMAGE = ("<img>", "<IMG_CONTEXT>", "</img>")  # before an image's features, in the place of each, behind them
IMAGE_QWEN_VL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
QUESTION = "\nPlease segment the red circle in this image."
TURNS = (("<image>" + QUESTION, "Sure, it is [SEG]."), ("What is region1?", "It is a small round object."))
TRAINED = {  # part -> whether the recipe trains it, whether we do: an InternVL, a Qwen-VL
    "vision tower": (False, False, False),
    "mlp1": (True, True, None),
    "merger": (False, None, False),  # of a Qwen-VL, in place of mlp1
    "language model": (False, False, False),
    "embeddings": (True, False, True),
    "LoRA": (True, True, True),
    "lm_head": (True, False, True),
    "text_hidden_fcs": (True, True, True),
    "SAM 2 image encoder": (False, False, False),
    "SAM 2 prompt encoder": (False, True, True),
    "SAM 2 mask decoder": (True, True, True),
    "SAM 2 memory": (False, False, False),
}
TOKENS = {QWEN3: {"training": 425, "prediction": 400}, QWEN25: {"training": 532, "prediction": 551}}  # of 301 x 199


def reference_conversation(
    tokenizer: Any, template: tuple[str, str, str], tokens: int, image: tuple[str, str, str] = IMAGE, turns: Any = TURNS
) -> tuple[list[int], list[int]]:
    """Ids and labels of `turns` with an image of so many tokens, piece by piece as the reference tokenises them.

    Labels are -100 except on answers and their end tokens; the separator before the next turn is not labelled.
    """
    instruction, suffix, separator = template
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    labels = [-100 for _ in ids]
    for question, answer in turns:
        end = [] if suffix else [tokenizer.eos_token_id]
        request = instruction.replace("{input}", question.replace("<image>", image[0] + image[1] * tokens + image[2]))
        pieces = (request, answer + suffix, separator)
        prompt, reply, gap = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        ids += [*prompt, *reply, *end, *gap]
        labels += [*(-100 for _ in prompt), *reply, *end, *(-100 for _ in gap)]
    return ids, labels


def check_texts(processor: Sa2VAProcessor, template: str) -> None:
    """A conversation in training, and the question of a rollout, have the ids and labels of the recipe."""
    tokens = 425 if processor.patches else processor.tokens_per_tile
    image = IMAGE_QWEN_VL if processor.patches else IMAGE
    ids, labels = reference_conversation(processor.tokenizer, TEMPLATES[template], tokens, image)
    used = processor.tokenize_conversation(TURNS, tokens)
    assert used["input_ids"].tolist() == ids
    assert used["labels"].tolist() == labels
    question = make_question(processor, 0, tokens, QUESTION)
    system = processor.token_ids(processor.system_turn) if processor.patches else []
    prompt = ids[: next(n for n, label in enumerate(labels) if label >= 0)]
    assert question.prefix_ids + question.suffix_ids == system + prompt
    assert segment_question("a red circle in this image.") == QUESTION.strip()


def check_parts(model: Any, ours: int) -> None:
    """LoRA on every linear layer of the language model's blocks; other parts train or not by `TRAINED`."""
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (RANK, ALPHA, 0)
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    inside = {name for name in linear for layer in adapted if name.startswith(f"{layer}.")}
    assert {name for name in adapted | linear - inside if name.startswith("model.language_model.")} == adapted
    words = model.get_input_embeddings().weight
    counts = {part: [total, trained] for part, total, trained in parameter_table(model)}
    assert sum(total for total, _ in counts.values()) == sum(p.numel() for p in model.parameters())
    counts["embeddings"] = [words.numel(), words.numel() * words.requires_grad]
    both = zip(counts["language model"], counts["embeddings"], strict=True)
    counts["language model"] = [all_ - some for all_, some in both]
    trained = {part: some == total for part, (total, some) in counts.items() if total}
    assert all(some in (0, total) for total, some in counts.values()), "parts train as a whole, or not at all"
    assert trained == {part: row[ours] for part, row in TRAINED.items() if part in trained}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("source", ["tiny", pytest.param("golden", marks=needs_golden)])
def test_a_prepared_internvl_trains_as_its_recipe(source: str, tiny_checkpoint: Path) -> None:
    folder = open_checkpoint(tiny_checkpoint if source == "tiny" else GOLDEN / "checkpoint")
    model, processor = load_sa2va_model(folder.path)
    state = {name: tuple(tensor.shape) for name, tensor in to_original(model.state_dict(), model.config).items()}
    assert state == tensor_shapes(folder.path), "every tensor of the checkpoint is loaded, and no other"
    prepare_model(model, RANK, ALPHA)
    check_parts(model, 1)
    check_texts(processor, "qwen_chat")


@pytest.mark.parametrize(("kind", "chat"), [(QWEN3, CHAT), (QWEN25, SYSTEM + CHAT)])
def test_a_prepared_qwen_vl_trains_as_its_recipe(kind: str, chat: str, tmp_path: Path) -> None:
    model, processor = load_sa2va_model(write_tiny_qwen(tmp_path / "model", kind, chat))
    prepare_model(model, RANK, ALPHA)
    check_parts(model, 2)
    check_texts(processor, "qwen_chat")
    for how, tokens in TOKENS[kind].items():
        processor.set_image_resize(how)
        _, (found,) = processor.vision_inputs([np.zeros((199, 301, 3), dtype=np.uint8)])
        assert found == tokens


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_are_the_recipes_in_every_chat_format(tiny_processor: Any, template: str) -> None:
    check_texts(Sa2VAProcessor(tiny_processor.tokenizer, template), template)


@pytest.mark.parametrize("mask_policy", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("kind", ["tiny", "tiny-qwen2.5-vl"])
def test_a_run_freezes_of_the_recipes_parts_only_those_that_no_loss_reaches(
    kind: str, mask_policy: str, tmp_path: Path
) -> None:
    """The gradient of gaussian masks ends at the [SEG] embedding, of bernoulli masks in the mask head."""
    write_random_checkpoint(tmp_path / "model", kind)
    model, processor = load_sa2va_model(tmp_path / "model")
    prepare_model(model, RANK, ALPHA)
    settings, prompt = config(tmp_path / "run", mask_policy=mask_policy), regions(1)[0]
    items = [prompt] * settings.prompts_per_step
    Sa2VAGRPOTrainer(model, processor, settings, items, rewards(loop2_iou=1.0)).freeze_unreached([prompt])
    counts = {part: (total, trained) for part, total, trained in parameter_table(model)}
    for part in ("LoRA", "text_hidden_fcs", *(["lm_head"] if "qwen" in kind else ["mlp1"])):
        assert counts[part][0] == counts[part][1] > 0
    total, trained = counts["SAM 2 mask decoder"]
    assert trained == 0 if mask_policy == "gaussian" else 0 < trained < total


@needs_golden
def test_the_conversation_is_the_references_own() -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    tokenizer = Sa2VAProcessor.from_pretrained(GOLDEN / "checkpoint").tokenizer
    ids, labels = reference_conversation(tokenizer, TEMPLATES["qwen_chat"], 256)
    assert ids == expected["train_conversation_input_ids"].tolist()
    assert labels == expected["train_conversation_labels"].tolist()


@needs_golden
@pytest.mark.parametrize("case", ["case_q3", "case_q25"])
def test_the_conversation_of_a_qwen_vl_is_the_references_own(case: str) -> None:
    folder = SHARED / "golden" / case
    expected = load_file(folder / "expected.safetensors")
    said = [turn["value"] for turn in read_json(folder / "train_conversation.json")["conversation"]]
    tokenizer = Sa2VAProcessor.from_pretrained(folder / "checkpoint").tokenizer
    tokens = int(expected["train_image_grid_thw"].prod()) // 4
    turns = list(zip(said[::2], said[1::2], strict=True))
    ids, labels = reference_conversation(tokenizer, TEMPLATES["qwen_chat"], tokens, IMAGE_QWEN_VL, turns)
    assert ids == expected["train_input_ids"].flatten().tolist()
    assert labels == expected["train_labels"].flatten().tolist()


def test_the_reference_by_hand(tiny_processor: Any) -> None:
    """Each piece by itself; answer and suffix are labelled, the line break behind them is not."""
    ids, labels = reference_conversation(tiny_processor.tokenizer, CHATML, 4)
    asked = TURNS[0][0].replace("<image>", "<img>" + 4 * "<IMG_CONTEXT>" + "</img>")
    said = tiny_processor.text([label for label in labels if label >= 0])
    assert said == "Sure, it is [SEG].<|im_end|>It is a small round object.<|im_end|>"
    assert tiny_processor.text(ids) == (
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\nSure, it is [SEG].<|im_end|>\n"
        "<|im_start|>user\nWhat is region1?<|im_end|>\n<|im_start|>assistant\nIt is a small round object.<|im_end|>\n"
    )
    plain = reference_conversation(tiny_processor.tokenizer, TEMPLATES["vicuna"], 4)[1]
    assert plain.count(tiny_processor.tokenizer.eos_token_id) == 2
