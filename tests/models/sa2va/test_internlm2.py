"""Sa2VA-8B and 26B at toy size: reference outputs of the language model, the 26B tower by hand, the tokenizer."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.convert_slow_tokenizer import import_protobuf

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.grpo.image_context import make_question
from rl_reward_network.models.sa2va.checkpoint_sa2va import to_ours
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.internlm2 import InternLM2Tokenizer, join_qkv, read_sentencepiece, split_qkv
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import TINY_SAM, smooth_image
from tests.grpo.test_recipe import check_texts
from tests.internlm2 import (
    GOLDEN_LLM,
    RESERVED,
    VIT_6B,
    sentencepiece_bytes,
    tiny_internlm2_config,
    tiny_pieces,
    write_tiny_internlm2,
    write_tokenizer,
)

needs_golden_llm = pytest.mark.skipif(
    not GOLDEN_LLM.exists(), reason="the official InternLM2's reference outputs are not here"
)
CONTEXT = 96  # positions of the reference language model


@pytest.fixture(scope="module", params=[None, VIT_6B], ids=["8B", "26B"])
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_internlm2(tmp_path_factory.mktemp("internlm2") / "official", request.param)


@pytest.fixture(scope="module")
def model(official: Path) -> Sa2VAForConditionalGeneration:
    """Shared: tests must not change its weights."""
    return Sa2VAForConditionalGeneration.from_pretrained(official)


def reference_model() -> Any:
    original = tiny_internlm2_config(0) | {"llm_config": json.loads((GOLDEN_LLM / "llm_config.json").read_text())}
    config = config_from_original(original, TINY_SAM, "config.json")
    model: Any = Sa2VAForConditionalGeneration(config).eval()
    report = model.load_state_dict(to_ours(load_file(GOLDEN_LLM / "llm.safetensors"), config), strict=False)
    assert not report.unexpected_keys
    assert not [key for key in report.missing_keys if key.startswith(("model.language_model.", "lm_head."))]
    return model


@pytest.fixture(scope="module")
def reference() -> tuple[Any, dict[str, Tensor]]:
    return reference_model(), load_file(GOLDEN_LLM / "expected.safetensors")


@needs_golden_llm
@torch.no_grad()
def test_the_language_model_equals_the_official_one(reference):
    """`long` exceeds the context, so that the rotary embedding scales; `short` follows, and is exact again."""
    model, expected = reference
    for case in ("long", "short"):
        names = ("inputs_embeds", "labels", "hidden_states", "last_hidden_state", "logits", "loss")
        want = {name: expected[f"{case}_{name}"] for name in names}
        out = model(inputs_embeds=want["inputs_embeds"][None], labels=want["labels"][None], output_hidden_states=True)
        got = {"last_hidden_state": out.last_hidden_state[0], "logits": out.logits[0], "loss": out.loss[None]}
        got["hidden_states"] = torch.cat(out.hidden_states)
        for name, tensor in got.items():
            worst = float((tensor - want[name]).abs().max())
            print(f"{case} {name}: {worst:.1e} of {float(want[name].abs().max()):.1f}")
            assert worst <= (1e-3 if name == "logits" else 1e-4), (case, name)
        plain = model.get_input_embeddings()(expected[f"{case}_input_ids"])
        differs = (plain - want["inputs_embeds"]).abs().amax(-1) > 0
        assert differs.nonzero()[:, 0].tolist() == list(range(5, 15)), "rows that the official call replaced"


@torch.no_grad()
def steps(model: Any, embeds: Tensor, first: int) -> Tensor:
    """States (T, D) of embeddings (T, D): `first` at once, the rest one by one from the cache."""
    cache, states = DynamicCache(config=model.config.text_config), []
    for chunk in (embeds[:first], *embeds[first:].split(1)):
        seen = cache.get_seq_length()
        mask = torch.ones(1, seen + len(chunk), dtype=torch.long)
        out = model.model(inputs_embeds=chunk[None], attention_mask=mask, past_key_values=cache, use_cache=True)
        states.append(out.last_hidden_state[0])
    return torch.cat(states)


@needs_golden_llm
def test_cached_decoding_is_exact_within_the_context_and_not_beyond(reference):
    """Beyond, earlier keys stay in the cache as they were rotated: so it is in the official code, too."""
    model, expected = reference
    embeds = expected["long_inputs_embeds"]
    with torch.no_grad():
        whole = model.model(inputs_embeds=embeds[None, :CONTEXT]).last_hidden_state[0]
    assert (steps(model, embeds[:CONTEXT], 60) - whole).abs().max() < 1e-4
    error = (steps(model, embeds, 60) - expected["long_last_hidden_state"]).abs().amax(-1)
    assert error[:60].max() > 1e-3, "a full pass of 150 positions rotates the first ones by another base"
    assert error[-1] > 1e-3


def test_rows_of_wqkv_by_hand():
    """Two groups of three query heads, width 2: q q q k v, q q q k v."""
    config = config_from_original(tiny_internlm2_config(300), TINY_SAM, "config.json").text_config
    config.num_key_value_heads, config.head_dim = 2, 2
    key = "language_model.model.layers.7.attention.w{}.weight"
    fused = torch.arange(20.0)[:, None].expand(-1, 3).contiguous()
    split = split_qkv({key.format("qkv"): fused, "other": fused}, config)
    rows = {name: split[key.format(name)][:, 0].int().tolist() for name in "qkv"}
    assert rows == {"q": [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15], "k": [6, 7, 16, 17], "v": [8, 9, 18, 19]}
    assert len({tensor.untyped_storage().data_ptr() for tensor in split.values()}) == 4, "no shared memory"
    joined = join_qkv(split, config)
    assert joined.keys() == {key.format("qkv"), "other"}
    assert torch.equal(joined[key.format("qkv")], fused)


def test_gate_up_and_down_keep_their_roles(official, model):
    """w2 (silu(w1 x) * w3 x): w1 is the gate."""
    tensors, ours = load_file(official / "model.safetensors"), model.state_dict()
    theirs = "language_model.model.layers.1."
    names = {
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention.wo": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for old, new in names.items():
        assert torch.equal(tensors[f"{theirs}{old}.weight"], ours[f"model.language_model.layers.1.{new}.weight"]), old
    assert torch.equal(tensors["language_model.output.weight"], ours["lm_head.weight"])


def normalised(values: Tensor, weight: Tensor) -> Tensor:
    return weight * values / (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def test_queries_and_keys_of_the_26b_tower_are_normalised_over_the_full_width(tmp_path):
    """A layer by hand from the original tensors: q and k are normalised before the heads are split; no bias of qkv."""
    folder = write_tiny_internlm2(tmp_path / "official", VIT_6B)
    tower: Any = Sa2VAForConditionalGeneration.from_pretrained(folder).model.vision_tower
    prefix = "vision_model.encoder.layers.0."
    tensors = load_file(folder / "model.safetensors")
    w = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (normalised(x, w["norm1.weight"]) @ w["attn.qkv.weight"].T).chunk(3, dim=-1)
    q, k = normalised(q, w["attn.q_norm.weight"]), normalised(k, w["attn.k_norm.weight"])
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (q, k, v))
    mixed = ((q @ k.mT / 16**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    x1 = x + w["ls1"] * (mixed @ w["attn.proj.weight"].T + w["attn.proj.bias"])
    inner = torch.nn.functional.gelu(normalised(x1, w["norm2.weight"]) @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"])
    want = x1 + w["ls2"] * (inner @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"])
    got = tower.encoder.layer[0](x)
    assert torch.allclose(got[0] if isinstance(got, tuple) else got, want, atol=1e-5)


needs_sentencepiece = pytest.mark.skipif(
    not importlib.util.find_spec("sentencepiece"), reason="sentencepiece is not installed: pip install -e '.[test]'"
)
SMALL = smooth_image(20, 20)
TEXTS = [
    *("Please segment the vessel", "请在图像中分割血管和导管", "def f(x):\n    return [x] * 3"),
    *("0123 Ångström", "naïve 🙂"),
]
PARTS = [
    *"ab .,!?<>[]()\t\n\r\x00éß漢血管🙂🧠",
    *("    ", "\n\n", "====", "aaaa", "the ", "<s>", "<0x0A>", "👩‍🔬", "a\u0301", "\ufeff"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> InternLM2Tokenizer:
    return InternLM2Tokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pieces_of(tokenizer: InternLM2Tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


def strings(count: int) -> list[str]:
    rng = random.Random(0)

    def made(text: str) -> str:
        kinds = [
            " " * rng.randrange(4) + text + rng.choice(["", " ", "\n", "  \n"]),
            text[rng.randrange(len(text)) :],
            rng.choice(PARTS) * rng.randrange(30),
            "".join(rng.choices(PARTS, k=rng.randrange(30))),
        ]
        return rng.choice(kinds)

    return [made(rng.choice(TEXTS)) for _ in range(count)]


@needs_sentencepiece
@pytest.mark.parametrize("prefix", [False, True], ids=["without dummy prefix", "with dummy prefix"])
def test_ids_and_texts_of_a_thousand_strings_are_those_of_sentencepiece(tmp_path, prefix):
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


def test_pieces_are_merged_by_score_and_unknown_characters_are_bytes(tokenizer):
    assert pieces_of(tokenizer, "seg the") == ["seg", "▁the"]
    assert pieces_of(tokenizer, "the") == ["th", "e"]  # a dummy prefix would make it "▁the"
    assert pieces_of(tokenizer, "     血管\n") == ["▁▁▁▁", "▁", "血管", "\n"]
    assert pieces_of(tokenizer, "é🙂") == ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


def test_added_tokens_take_the_place_of_pieces_in_reserve(tokenizer):
    count = len(tiny_pieces())
    ids = tokenizer.convert_tokens_to_ids(["<s>", "<|im_end|>", "<|im_start|>", "<img>"])
    assert ids == [1, count - 2, count - 1, count]
    assert not set(RESERVED) & set(tokenizer.get_vocab())
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    text = "<s><|im_start|>user\n<img><IMG_CONTEXT></img>Seg  the 血管é.<|im_end|>\n[SEG] <p>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.decode(tokenizer("  two", add_special_tokens=False)["input_ids"]) == " two", "one blank is dropped"


def test_pieces_in_reserve_are_matched_as_a_whole_and_extra_spaces_removed_where_the_file_says_so(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes())
    tokenizer = read_sentencepiece(tmp_path / "tokenizer.model", {})
    assert tokenizer.encode(f"a{RESERVED[0]}b").tokens == ["a", RESERVED[0], "b"]
    spaces = {"remove_extra_whitespaces": True, "add_dummy_prefix": True}
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes(**spaces))
    tokenizer = read_sentencepiece(tmp_path / "tokenizer.model", {})
    assert tokenizer.encode("  a   b ").tokens == ["▁", "a", "▁", "b"]


def test_what_is_saved_reads_the_same_and_suits_the_official_layout(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    InternLM2Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)  # onto itself
    fast = InternLM2Tokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == sentencepiece_bytes()
    (tmp_path / "tokenizer.json").unlink()
    again = InternLM2Tokenizer.from_pretrained(tmp_path)
    text = "<s><|im_start|>seg\n[SEG] 血管<|im_end|>"
    for other in (fast, again):
        assert other.get_vocab() == tokenizer.get_vocab()
        assert other.decode(other(text, add_special_tokens=False)["input_ids"]) == text
        assert other.eos_token_id == 2


def unigram(file: Path) -> None:
    proto = import_protobuf().ModelProto.FromString(sentencepiece_bytes())
    proto.trainer_spec.model_type = 1
    file.write_bytes(proto.SerializeToString())


def without_added_tokens(file: Path) -> None:
    """`<|im_end|>` would be cut into letters: other prompts, and answers without an end."""
    settings = file.with_name("tokenizer_config.json")
    write_json(settings, {name: value for name, value in read_json(settings).items() if name != "added_tokens_decoder"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *(
            (lambda file, content=content: file.write_bytes(content), "tokenizer.model: not a whole sentencepiece file")
            for content in (sentencepiece_bytes()[:-5], sentencepiece_bytes()[:2000], b"", b"no protobuf")
        ),
        (lambda file: file.write_bytes(sentencepiece_bytes(tiny_pieces()[:-3])), "holds 347 pieces, but .* has id 348"),
        (lambda file: file.unlink(), "tokenizer.model is missing"),
        (without_added_tokens, "tokenizer_config.json: missing, or '<.im_end.>' is not in"),
        (lambda file: file.with_name("tokenizer_config.json").unlink(), "tokenizer_config.json: missing, or"),
        (unigram, "tokenizer.model: trainer_spec.model_type is UNIGRAM, expected BPE"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    damage(write_tokenizer(tmp_path) / "tokenizer.model")
    with pytest.raises(ValueError, match=message):
        InternLM2Tokenizer.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def plain(tokenizer: InternLM2Tokenizer) -> Sa2VAProcessor:
    return Sa2VAProcessor(tokenizer, "internlm2_chat", prompt_prefix="<s>")


def test_the_begin_of_a_prompt_is_marked_once(plain):
    first = plain.prompt_text("Hi")
    assert first.startswith("<s><|im_start|>user\n")
    assert plain(["<image>Hi"], [SMALL])["input_ids"][0].tolist().count(1) == 1
    answered = first + "Hello<|im_end|>\n"
    longer = plain.prompt_text("And?", past_text=answered)
    assert longer == plain.prompt_text("And?", past_text=answered.removeprefix("<s>"))
    assert longer.count("<s>") == 1


def test_training_and_rollouts_start_like_a_prompt(plain):
    turns = [("<image>\nSeg.", "Sure [SEG]."), ("And?", "No.")]
    tile = plain.tokens_per_tile
    taught = plain.tokenize_conversation(turns, tile)
    prompt = plain.token_ids(plain.prompt_text(turns[0][0], tile))
    assert taught["input_ids"][: len(prompt)].tolist() == prompt
    assert taught["input_ids"].tolist().count(1) == 1
    assert (taught["labels"][: len(prompt)] == -100).all()
    question = make_question(plain, 0, tile, "\nSeg.")
    assert question.prefix_ids + question.suffix_ids == prompt
    check_texts(plain, "internlm2_chat")
    with pytest.raises(AssertionError):
        check_texts(Sa2VAProcessor(plain.tokenizer, "internlm2_chat"), "internlm2_chat")
