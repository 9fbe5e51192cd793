"""Sa2VA-8B and 26B at toy size: the language model's reference outputs, and every path from an official folder on."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.lora import merge_lora, setup_lora
from rl_reward_network.models.sa2va import checkpoint_sa2va
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.internlm2 import join_qkv, split_qkv
from rl_reward_network.models.sa2va.key_map_sa2va import to_original, to_ours
from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, expected_shapes
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import TINY_SAM, smooth_image
from tests.internlm2 import GOLDEN_LLM, VIT_6B, tiny_internlm2_config, write_tiny_internlm2

needs_golden_llm = pytest.mark.skipif(
    not GOLDEN_LLM.exists(), reason="the official InternLM2's reference outputs are not here"
)
CONTEXT = 96  # positions of the reference language model
GAUSSIAN_BUFFER = 256


@pytest.fixture(scope="module", params=[None, VIT_6B], ids=["8B", "26B"])
def official(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_internlm2(tmp_path_factory.mktemp("internlm2") / "official", request.param)


@pytest.fixture(scope="module")
def model(official: Path) -> Sa2VAForConditionalGeneration:
    """Shared: tests must not change its weights."""
    return Sa2VAForConditionalGeneration.from_pretrained(official)


@pytest.fixture(scope="module")
def processor(official: Path) -> Sa2VAProcessor:
    return Sa2VAProcessor.from_pretrained(official, max_tiles=1)


def reference_model() -> Any:
    """A Sa2VA around the reference language model; its other parts are random."""
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
def test_the_language_model_equals_the_official_one(reference: Any) -> None:
    """`long` exceeds the context, so that the rotary embedding scales; `short` follows, and is exact again."""
    model, expected = reference
    for case in ("long", "short"):
        want = {
            name: expected[f"{case}_{name}"]
            for name in ("inputs_embeds", "labels", "hidden_states", "last_hidden_state", "logits", "loss")
        }
        out = model(inputs_embeds=want["inputs_embeds"][None], labels=want["labels"][None], output_hidden_states=True)
        got = {
            "hidden_states": torch.cat(out.hidden_states),
            "last_hidden_state": out.last_hidden_state[0],
            "logits": out.logits[0],
            "loss": out.loss[None],
        }
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
def test_cached_decoding_is_exact_within_the_context_and_not_beyond(reference: Any) -> None:
    """Beyond, earlier keys stay in the cache as they were rotated: so it is in the official code, too."""
    model, expected = reference
    embeds = expected["long_inputs_embeds"]
    with torch.no_grad():
        whole = model.model(inputs_embeds=embeds[None, :CONTEXT]).last_hidden_state[0]
    assert (steps(model, embeds[:CONTEXT], 60) - whole).abs().max() < 1e-4
    error = (steps(model, embeds, 60) - expected["long_last_hidden_state"]).abs().amax(-1)
    assert error[:60].max() > 1e-3, "a full pass of 150 positions rotates the first ones by another base"
    assert error[-1] > 1e-3


def test_rows_of_wqkv_by_hand() -> None:
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


def test_names_and_values_are_kept_in_both_directions(official: Path, model: Any, tmp_path: Path) -> None:
    tensors = load_file(official / "model.safetensors")
    assert any(key.endswith("attention.wqkv.weight") for key in tensors)
    halves = {key: tensor.bfloat16() for key, tensor in tensors.items()}
    assert to_ours(tensors, model.config).keys() == model.state_dict().keys()
    back = to_original(to_ours(halves, model.config), model.config)
    assert back.keys() == halves.keys()
    assert all(torch.equal(back[key], tensor) and back[key].dtype == tensor.dtype for key, tensor in halves.items())


def test_gate_up_and_down_keep_their_roles(official: Path, model: Any) -> None:
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


def test_folders_are_converted_in_both_directions(official: Path, tmp_path: Path, processor: Sa2VAProcessor) -> None:
    convert_checkpoint(str(official), tmp_path / "ours")
    convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")
    names = {path.name for path in official.iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    assert {path.name for path in (tmp_path / "ours").iterdir()} == (names | {"tokenizer.json"}) - {"sam2_sizes.json"}
    for name in names - {"model.safetensors", "config.json", "sam2_sizes.json"}:
        assert (tmp_path / "back" / name).read_bytes() == (official / name).read_bytes(), name
    before, after = (load_file(folder / "model.safetensors") for folder in (official, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (official / "config.json").read_text()
    )
    ours = Sa2VAProcessor.from_pretrained(tmp_path / "ours")
    text = processor.prompt_text("Seg  the 血管?")
    assert ours.prompt_text("Seg  the 血管?") == text
    assert ours.token_ids(text) == processor.token_ids(text)
    assert ours.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_a_merged_model_goes_back_to_the_official_layout(
    official: Path, model: Any, processor: Sa2VAProcessor, tmp_path: Path
) -> None:
    """What `save_pretrained` writes has no `added_tokens_decoder`; the ids come from `added_tokens.json` then."""
    model.save_pretrained(tmp_path / "ours")
    processor.save_pretrained(tmp_path / "ours")
    convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (official / "tokenizer.model").read_bytes()
    assert not (tmp_path / "back" / "tokenizer.json").exists()
    again = Sa2VAProcessor.from_pretrained(tmp_path / "back")
    assert again.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_a_hub_id_brings_the_tokenizer_and_no_code(
    official: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        for path in official.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copyfile(path, tmp_path / path.name)
        assert not any(Path("modeling_internlm2.py").match(pattern) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint_sa2va, "snapshot_download", download)
    assert Sa2VAProcessor.from_pretrained("ByteDance/Sa2VA-8B").prompt_prefix == "<s>"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in official.iterdir()}


def test_a_damaged_tokenizer_is_named_before_weights_are_read(official: Path, tmp_path: Path) -> None:
    shutil.copytree(official, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:1000])
    for load in (Sa2VAForConditionalGeneration.from_pretrained, Sa2VAProcessor.from_pretrained):
        with pytest.raises(ValueError, match=rf"^{file}: not a whole sentencepiece file"):
            load(tmp_path)
    with pytest.raises(ValueError, match=rf"^{file}: not a whole"):
        convert_checkpoint(str(tmp_path), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_another_epsilon_of_the_qk_norm_is_refused() -> None:
    original = tiny_internlm2_config(300, VIT_6B | {"layer_norm_eps": 1e-5})
    with pytest.raises(ValueError, match=r"config\.json: vision_config\.layer_norm_eps is 1e-05, expected 1e-06"):
        config_from_original(original, TINY_SAM, "config.json")


def test_prediction_and_batches(model: Any, processor: Sa2VAProcessor) -> None:
    image, prompts = smooth_image(90, 70), ["the vessel", "Seg the left one, please.", "x"]
    batch = model.segment([image], prompts, processor)[0]
    masks = []
    for prompt, together in zip(prompts, batch, strict=True):
        alone = model.predict_forward(image=image, text=f"<image>{prompt}", processor=processor, max_new_tokens=16)
        assert alone["prediction"] == together.answer == "Sure [SEG].<|im_end|>"
        assert abs(alone["mask_probabilities"][0][0] - together.probabilities()[0]).max() < 1e-4
        masks.append(together.mask_logits)
    assert (masks[0] - masks[1]).abs().max() > 1e-3, "the words must change the mask"
    assert model.predict_forward(text="Hi", processor=processor, max_new_tokens=3)["prediction_masks"] == []


def test_generate_ends_with_the_stop_word_and_agrees(model: Any, processor: Sa2VAProcessor) -> None:
    inputs = processor("<image>Where?", smooth_image(40, 40))
    ids = model.generate(**inputs, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :].tolist()
    assert processor.text(ids) == "Sure [SEG].<|im_end|>"


def test_lora_covers_the_seven_linear_layers_and_merges(official: Path, processor: Sa2VAProcessor) -> None:
    model: Any = Sa2VAForConditionalGeneration.from_pretrained(official)
    torch.manual_seed(0)
    setup_lora(model, r=2, lora_alpha=4, lora_dropout=0.0)
    adapted = [name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    linear = {name.removesuffix(".base_layer") for name in layers if name.startswith("model.language_model.")}
    assert len(adapted) == 2 * 7
    assert set(adapted) == {name for name in linear if "lora_" not in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ids = torch.tensor([processor.token_ids(processor.prompt_text("Hi"))])
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        merge_lora(model)
        merged = model(input_ids=ids).logits
    fresh: Any = Sa2VAForConditionalGeneration.from_pretrained(official)
    with torch.no_grad():
        assert (fresh(input_ids=ids).logits - trained).abs().max() > 1e-2
    assert (trained - merged).abs().max() < 1e-4 * trained.abs().max()


def released(llm: tuple[int, ...], vision: dict[str, Any]) -> Any:
    """The configuration of a released size, vocabulary 92,558."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    original = tiny_internlm2_config(92558, vision)
    original["llm_config"] |= dict(zip(names, llm, strict=True)) | {"max_position_embeddings": 32768}
    return config_from_original(original, HIERA_L, "config.json")


VIT_300M = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
REAL_6B = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800}


@pytest.mark.parametrize(
    ("llm", "vision", "keys", "internvl"),
    [
        ((4096, 32, 32, 8, 14336), VIT_300M, 1477, 8_075_365_376),
        ((6144, 48, 48, 8, 16384), REAL_6B | VIT_6B, 1838, 25_514_186_112),
    ],
    ids=["8B", "26B"],
)
def test_real_sizes_have_the_parameters_of_the_released_models(
    llm: tuple[int, ...], vision: dict[str, Any], keys: int, internvl: int
) -> None:
    """Source: InternVL2.5-8B and 26B, which Sa2VA adds SAM 2, `text_hidden_fcs` and five words to."""
    shapes = expected_shapes(released(llm, vision), original=True)
    added = ("grounding_encoder.", "text_hidden_fcs.")
    width, kv_rows = llm[0], (llm[2] + 2 * llm[3]) * llm[0] // llm[2]
    total = sum(math.prod(shape) for key, shape in shapes.items() if not key.startswith(added))
    assert len(shapes) == keys
    assert total - 5 * 2 * width == internvl
    assert shapes["language_model.model.layers.31.attention.wqkv.weight"] == (kv_rows, width)
    assert shapes["language_model.output.weight"] == shapes["language_model.model.tok_embeddings.weight"]
    assert ("vision_model.encoder.layers.0.attn.q_norm.weight" in shapes) == (vision["hidden_size"] == 3200)
    assert ("vision_model.encoder.layers.0.attn.qkv.bias" in shapes) == (vision["hidden_size"] == 1024)


def normalised(values: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last axis."""
    return weight * values / (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def test_queries_and_keys_of_the_26b_tower_are_normalised_over_the_full_width(tmp_path: Path) -> None:
    """A layer by hand from the original tensors: q and k are normalised before the heads are split; no bias of qkv."""
    folder = write_tiny_internlm2(tmp_path / "official", VIT_6B)
    tower: Any = Sa2VAForConditionalGeneration.from_pretrained(folder).model.vision_tower
    prefix = "vision_model.encoder.layers.0."
    w = {
        key.removeprefix(prefix): tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
        if key.startswith(prefix)
    }
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
