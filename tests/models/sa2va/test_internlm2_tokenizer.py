"""tokenizer.model as a fast tokenizer: the ids of sentencepiece, the official folder's added tokens, and `<s>` once."""

import importlib.util
import random
from pathlib import Path

import pytest

from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.grpo.image_context import make_question
from rl_reward_network.models.sa2va.internlm2 import InternLM2Tokenizer, read_sentencepiece
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import smooth_image
from tests.grpo.test_recipe import check_texts
from tests.internlm2 import RESERVED, sentencepiece_bytes, tiny_pieces, write_tokenizer

needs_sentencepiece = pytest.mark.skipif(
    not importlib.util.find_spec("sentencepiece"), reason="sentencepiece is not installed: pip install -e '.[test]'"
)
SMALL = smooth_image(20, 20)
TEXTS = [
    "Please segment the vessel",
    "请在图像中分割血管和导管",
    "def f(x):\n    return [x] * 3",
    "0123 Ångström",
    "naïve 🙂",
]
PARTS = [
    *"ab .,!?<>[]()\t\n\r\x00éß漢血管🙂🧠",
    "    ",
    "\n\n",
    "====",
    "aaaa",
    "the ",
    "<s>",
    "<0x0A>",
    "👩‍🔬",
    "a\u0301",
    "\ufeff",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> InternLM2Tokenizer:
    return InternLM2Tokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pieces_of(tokenizer: InternLM2Tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


def strings(count: int) -> list[str]:
    """Sentences, pieces of them, runs of one character, and characters at random."""
    rng = random.Random(0)
    made = []
    for _ in range(count):
        text = rng.choice(TEXTS)
        made.append(
            rng.choice(
                [
                    " " * rng.randrange(4) + text + rng.choice(["", " ", "\n", "  \n"]),
                    text[rng.randrange(len(text)) :],
                    rng.choice(PARTS) * rng.randrange(30),
                    "".join(rng.choices(PARTS, k=rng.randrange(30))),
                ]
            )
        )
    return made


@needs_sentencepiece
@pytest.mark.parametrize("prefix", [False, True], ids=["without dummy prefix", "with dummy prefix"])
def test_ids_and_texts_of_a_thousand_strings_are_those_of_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    import sentencepiece

    corpus, model = tmp_path / "corpus.txt", tmp_path / "tokenizer"
    corpus.write_text("\n".join(Path(__file__).read_text().splitlines() + TEXTS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(model),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=RESERVED,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    ours = read_sentencepiece(model.with_suffix(".model"), {})
    bytes_seen = set()
    for text in strings(1000):
        expected = theirs.encode(text)
        assert ours.encode(text).ids == expected, repr(text)
        # sentencepiece drops the blank of a dummy prefix, the official classes the first blank of any text
        assert ours.decode(expected, skip_special_tokens=False) in (text, text.removeprefix(" ")), repr(text)
        bytes_seen |= {number for number in expected if theirs.is_byte(number)}
    assert len(bytes_seen) > 20, "strings with characters that the vocabulary does not have"


def test_pieces_are_merged_by_score_and_unknown_characters_are_bytes(tokenizer: InternLM2Tokenizer) -> None:
    assert pieces_of(tokenizer, "seg the") == ["seg", "▁the"]
    assert pieces_of(tokenizer, "the") == ["th", "e"]  # a dummy prefix would make it "▁the"
    assert pieces_of(tokenizer, "     血管\n") == ["▁▁▁▁", "▁", "血管", "\n"]
    assert pieces_of(tokenizer, "é🙂") == ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


def test_added_tokens_take_the_place_of_pieces_in_reserve(tokenizer: InternLM2Tokenizer) -> None:
    count = len(tiny_pieces())
    assert tokenizer.convert_tokens_to_ids(["<s>", "<|im_end|>", "<|im_start|>", "<img>"]) == [
        1,
        count - 2,
        count - 1,
        count,
    ]
    assert not set(RESERVED) & set(tokenizer.get_vocab())
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    text = "<s><|im_start|>user\n<img><IMG_CONTEXT></img>Seg  the 血管é.<|im_end|>\n[SEG] <p>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_decoding_drops_one_leading_blank(tokenizer: InternLM2Tokenizer) -> None:
    assert tokenizer.decode(tokenizer("  two", add_special_tokens=False)["input_ids"]) == " two"


def test_a_piece_in_reserve_that_no_token_replaces_is_matched_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes())
    tokenizer = read_sentencepiece(tmp_path / "tokenizer.model", {})
    assert tokenizer.encode(f"a{RESERVED[0]}b").tokens == ["a", RESERVED[0], "b"]


def test_extra_spaces_are_removed_where_the_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        sentencepiece_bytes(remove_extra_whitespaces=True, add_dummy_prefix=True)
    )
    tokenizer = read_sentencepiece(tmp_path / "tokenizer.model", {})
    assert tokenizer.encode("  a   b ").tokens == ["▁", "a", "▁", "b"]


def test_what_is_saved_reads_the_same_and_suits_the_official_layout(
    tokenizer: InternLM2Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    fast = InternLM2Tokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == sentencepiece_bytes()
    (tmp_path / "tokenizer.json").unlink()
    again = InternLM2Tokenizer.from_pretrained(tmp_path)
    text = "<s><|im_start|>seg\n[SEG] 血管<|im_end|>"
    for other in (fast, again):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert other.decode(other(text, add_special_tokens=False)["input_ids"]) == text
        assert other.eos_token_id == 2


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = sentencepiece_bytes()
    file = write_tokenizer(tmp_path) / "tokenizer.model"
    for content in (whole[:-5], whole[: len(whole) // 2], b"", b"no protobuf"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer\.model: not a whole sentencepiece file .*again"):
            InternLM2Tokenizer.from_pretrained(tmp_path)
    file.write_bytes(sentencepiece_bytes(tiny_pieces()[:-3]))
    with pytest.raises(ValueError, match=r"tokenizer\.model: holds 347 pieces, but .* has id 348"):
        InternLM2Tokenizer.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.model is missing"):
        InternLM2Tokenizer.from_pretrained(tmp_path)


def test_a_folder_without_its_added_tokens_is_refused(tmp_path: Path) -> None:
    """`<|im_end|>` would be cut into letters: other prompts, and answers without an end."""
    settings = write_tokenizer(tmp_path) / "tokenizer_config.json"
    without = {name: value for name, value in read_json(settings).items() if name != "added_tokens_decoder"}
    for change in (lambda: write_json(settings, without), settings.unlink):
        change()
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: missing, or '<\|im_end\|>' is not in"):
            InternLM2Tokenizer.from_pretrained(tmp_path)


def test_a_tokenizer_is_saved_where_it_was_read(tmp_path: Path) -> None:
    read = InternLM2Tokenizer.from_pretrained(write_tokenizer(tmp_path))
    read.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == sentencepiece_bytes()
    assert InternLM2Tokenizer.from_pretrained(tmp_path)("Seg [SEG]").input_ids == read("Seg [SEG]").input_ids


def test_another_kind_of_vocabulary_is_refused(tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto.FromString(sentencepiece_bytes())
    proto.trainer_spec.model_type = 1
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match=r"tokenizer\.model: trainer_spec\.model_type is UNIGRAM, expected BPE"):
        read_sentencepiece(tmp_path / "tokenizer.model", {})


@pytest.fixture(scope="module")
def processor(tokenizer: InternLM2Tokenizer) -> Sa2VAProcessor:
    return Sa2VAProcessor(tokenizer, "internlm2_chat", prompt_prefix="<s>")


def test_the_begin_of_a_prompt_is_marked_once(processor: Sa2VAProcessor) -> None:
    first = processor.prompt_text("Hi")
    assert first.startswith("<s><|im_start|>user\n")
    assert processor(["<image>Hi"], [SMALL])["input_ids"][0].tolist().count(1) == 1
    answered = first + "Hello<|im_end|>\n"
    longer = processor.prompt_text("And?", past_text=answered)
    assert longer == processor.prompt_text("And?", past_text=answered.removeprefix("<s>"))
    assert longer.count("<s>") == 1


def test_training_and_rollouts_start_like_a_prompt(processor: Sa2VAProcessor) -> None:
    turns = [("<image>\nSeg.", "Sure [SEG]."), ("And?", "No.")]
    tile = processor.tokens_per_tile
    taught = processor.tokenize_conversation(turns, tile)
    prompt = processor.token_ids(processor.prompt_text(turns[0][0], tile))
    assert taught["input_ids"][: len(prompt)].tolist() == prompt
    assert taught["input_ids"].tolist().count(1) == 1
    assert (taught["labels"][: len(prompt)] == -100).all()
    question = make_question(processor, 0, tile, "\nSeg.")
    assert question.prefix_ids + question.suffix_ids == prompt
    check_texts(processor, "internlm2_chat")
    with pytest.raises(AssertionError):
        check_texts(Sa2VAProcessor(processor.tokenizer, "internlm2_chat"), "internlm2_chat")
