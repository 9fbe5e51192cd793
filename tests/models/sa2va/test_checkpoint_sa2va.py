"""Folders of both layouts: read, converted there and back bit for bit, and refused where they are damaged."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.sa2va.checkpoint_sa2va import first_few, open_checkpoint, to_original, to_ours
from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint, load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import GOLDEN, needs_golden
from tests.golden_qwen import CASES, FOLDERS, needs_golden_qwen
from tests.internlm2 import VIT_6B, write_tiny_internlm2
from tests.qwen_vl import QWEN3, QWEN3_SAM3, QWEN25, write_tiny_qwen

POINT = "grounding_encoder.sam2_model.sam_prompt_encoder.point_embeddings.2.weight"
SAM3 = "grounding_encoder.sam2_model.backbone.vision_backbone."
TINY = ("internvl", "internlm2", "internlm2 26B", QWEN3, QWEN25, QWEN3_SAM3)
OFFICIAL = (
    pytest.param(GOLDEN, marks=needs_golden),
    *(pytest.param(FOLDERS[name], marks=needs_golden_qwen) for name in CASES),
)


@pytest.fixture(scope="module")
def written(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The official folder of a kind at toy size, written once; tests must not change it."""
    root = tmp_path_factory.mktemp("official")

    def write(kind: str) -> Path:
        if kind == "internvl":
            return tiny_checkpoint
        if (root / kind).exists():
            return root / kind
        if kind.startswith("internlm2"):
            return write_tiny_internlm2(root / kind, VIT_6B if kind.endswith("26B") else None)
        return write_tiny_qwen(root / kind, kind)

    return write


@pytest.fixture(params=TINY)
def folder(request: pytest.FixtureRequest, written: Callable[[str], Path]) -> Path:
    return written(request.param)


@pytest.fixture
def broken(request: pytest.FixtureRequest, written: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written(getattr(request, "param", "internvl")), tmp_path / "broken"))


def edit(file: Path, **changes: Any) -> None:
    file.exists() or file.write_text("{}")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def check_round_trip(original: Path, tmp_path: Path) -> None:
    main(Args(str(original), tmp_path / "ours"))
    main(Args(str(tmp_path / "ours"), tmp_path / "back"))
    assert same(load_file(original / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    configs = [json.loads((path / "config.json").read_text()) for path in (original, tmp_path / "back")]
    before, after = ({name: value for name, value in config.items() if value is not None} for config in configs)
    assert before == after
    for name in ("preprocessor_config.json", "chat_template.jinja", "tokenizer.model"):
        if (original / name).exists():
            assert len({(path / name).read_bytes() for path in (original, tmp_path / "ours", tmp_path / "back")}) == 1
    (model, processor), (ours, other) = (load_sa2va_model(path) for path in (original, tmp_path / "ours"))
    assert same(model.state_dict(), ours.state_dict())
    for name in ("seg_token_id", "image_token_id", "never_sampled_ids"):
        assert getattr(model.config, name) == getattr(ours.config, name)
    assert model.config.text_config.to_dict() == ours.config.text_config.to_dict()
    assert model.config.vision_config.to_dict() == ours.config.vision_config.to_dict()
    text = processor.prompt_text("Seg  the 血管?")
    assert other.prompt_text("Seg  the 血管?") == text
    assert other.token_ids(text) == processor.token_ids(text)
    assert other.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_converted_folders_come_back_bit_for_bit(folder, tmp_path, capsys):
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    (source / "modeling_sa2va_chat.py").write_text("raise SystemExit('remote code')")
    check_round_trip(source, tmp_path)
    assert not list((tmp_path / "ours").glob("*.py"))
    first, second = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(rf"ours: \d+ tensors in {tmp_path / 'ours'}", first)
    assert re.fullmatch(rf"official layout: \d+ tensors in {tmp_path / 'back'}", second)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("official", OFFICIAL)
def test_folders_of_the_official_code_come_back_bit_for_bit(official, tmp_path):
    check_round_trip(official / "checkpoint", tmp_path)


def test_what_save_pretrained_writes_loads_again(folder, tmp_path):
    model, processor = load_sa2va_model(folder)
    model.save_pretrained(tmp_path / "saved")
    processor.save_pretrained(tmp_path / "saved")
    again, other = load_sa2va_model(tmp_path / "saved")
    assert same(again.state_dict(), model.state_dict())
    assert other.chat == processor.chat
    assert other.patches is processor.patches is None or vars(other.patches) == vars(processor.patches)
    if (folder / "tokenizer.model").exists():  # which has no `added_tokens_decoder` then
        convert_checkpoint(str(tmp_path / "saved"), tmp_path / "back")
        assert (tmp_path / "back" / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
        assert not (tmp_path / "back" / "tokenizer.json").exists()
        vocabulary = Sa2VAProcessor.from_pretrained(tmp_path / "back").tokenizer.get_vocab()
        assert vocabulary == processor.tokenizer.get_vocab()


@pytest.mark.parametrize("broken", [QWEN3, QWEN25], indirect=True)
def test_auto_classes_load_our_processor(broken, tmp_path):
    """The base model's files name its own processor, which would be found first."""
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        edit(broken / name, processor_class="Qwen3VLProcessor")
    main(Args(str(broken), tmp_path / "converted"))
    Sa2VAProcessor.from_pretrained(broken).save_pretrained(tmp_path / "saved")
    shutil.copyfile(tmp_path / "converted" / "config.json", tmp_path / "saved" / "config.json")
    for path in (tmp_path / "converted", tmp_path / "saved"):
        assert type(AutoProcessor.from_pretrained(path)) is Sa2VAProcessor


# ---- names of tensors -----------------------------------------------------------------------------------------------


def test_names_map_in_both_directions_in_any_dtype(folder):
    checkpoint = open_checkpoint(folder)
    config, tensors = checkpoint.model_config(), checkpoint.tensors()
    assert any("memory_attention" in key or "transformer.encoder" in key for key in tensors), (
        "the video part must be there to be kept"
    )
    halves = {key: tensor.bfloat16() if "norm" in key else tensor for key, tensor in tensors.items()}
    assert same(to_original(to_ours(halves, config), config), halves)
    ours = to_ours(tensors, config)
    assert ours.keys() == Sa2VAForConditionalGeneration.from_pretrained(folder).state_dict().keys()
    assert first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"
    with pytest.raises(ValueError, match=r"1 keys .*elsewhere\.weight"):
        to_ours({"elsewhere.weight": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match=r"no original name for elsewhere\.weight"):
        to_original({"elsewhere.weight": torch.zeros(1)}, config)
    if config.family.body == "qwen_vl":
        head = "lm_head.norm.weight" if config.text_config.model_type == QWEN3 else "model.language_model.norm.weight"
        assert torch.equal(ours[head], tensors["model.model.language_model.norm.weight"])
        assert torch.equal(ours["lm_head.weight"], tensors["model.lm_head.weight"])


def test_what_sam3_does_not_read_may_be_left_out_and_is_zero_on_the_way_back(written, tmp_path):
    """The detector's neck and the class token's position; rotations are those that transformers computes."""
    folder = Path(shutil.copytree(written(QWEN3_SAM3), tmp_path / "sam3"))
    model, _ = load_sa2va_model(folder)
    original = load_file(folder / "model.safetensors")
    unread = {key for key in original if key.startswith(SAM3 + "convs.") or key.endswith("freqs_cis")}
    assert len(unread) == 2 * (4 + 3 + 2 + 2) + 3, "weight and bias of the neck's layers, and three layers"
    change_tensors(folder, lambda tensors: [tensors.pop(key) for key in unread])
    again, _ = load_sa2va_model(folder)
    assert same(again.state_dict(), model.state_dict())
    assert not original[SAM3 + "trunk.pos_embed"][:, 0].any()
    for number, layer in enumerate(model.grounding_encoder.vision_encoder.backbone.layers):
        cos, sin = layer.rotary_emb(torch.zeros(1), layer.position_ids)
        kept = original[SAM3 + f"trunk.blocks.{number}.attn.freqs_cis"]
        assert kept.shape == ((64 if number == 1 else 16), 4)
        torch.testing.assert_close(torch.complex(cos, sin)[0, :, ::2], kept, atol=1e-6, rtol=1e-6)


# ---- damaged folders and relatives ----------------------------------------------------------------------------------


def change_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def unfit(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[POINT]
    tensors |= {"something.else": torch.zeros(1), "mlp1.0.bias": torch.zeros(3)}


def add_key(key: str) -> Callable[[Path], None]:
    return lambda path: change_tensors(path, lambda tensors: tensors.update({key: torch.zeros(1)}))


def shard(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in files.items():
        save_file({key: tensors[key] for key in keys}, path / file)
    index = {"weight_map": {key: file for file, keys in files.items() for key in keys}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", **changes)


def cut(name: str, keep: int) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])


def drop(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def spoil(*values: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[POINT] = tensors[POINT].to(dtype)
        tensors[POINT].view(-1)[: len(values)] = torch.tensor(values).to(dtype)

    return lambda path: change_tensors(path, change)


def renamed_tokens(path: Path, names: dict[str, str]) -> None:
    """Added tokens of tokenizer.json under other names; without a name they are lost."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokens = [token | {"content": names.get(token["content"], token["content"])} for token in tokenizer["added_tokens"]]
    tokenizer["added_tokens"] = [token for token in tokens if token["content"]]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def again(path: Path) -> None:
    shard(path)
    (path / "model.safetensors.index.json").unlink()
    save_file({POINT: torch.zeros(1)}, path / "c.safetensors")


def unlisted(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    shard(path)
    save_file(tensors, path / "model.safetensors")


def listed(name: str | None) -> Callable[[Path], None]:
    """An index that puts a tensor into another file, or does not know it."""

    def change(path: Path) -> None:
        shard(path)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        index["weight_map"] |= {POINT: name}
        index["weight_map"] = {key: file for key, file in index["weight_map"].items() if file}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def pointer(name: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


PICKLED = r"\.safetensors file; pickled"
DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("internvl", lambda path: change_tensors(path, unfit), re.escape(POINT)),
    ("internvl", lambda path: change_tensors(path, unfit), r"mlp1\.0\.bias \(3,\).*\(128,\)"),
    ("internvl", cut("model.safetensors", 5000), r"model\.safetensors: "),
    ("internvl", lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), PICKLED),
    ("internvl", lambda path: [shard(path), drop("b.safetensors")(path)], r"index\.json: .*b\.safetensors"),
    ("internvl", spoil(torch.nan, torch.nan, torch.inf), rf"{POINT} holds NaN \(2 of 32\) and infinity \(1 of 32\);"),
    ("internvl", spoil(-1e5, dtype=torch.float16), rf"{POINT} holds infinity \(1 of 32\)"),
    ("internvl", pointer("model.safetensors"), r"model\.safetensors: a Git LFS pointer, .* git lfs pull"),
    ("internvl", pointer("config.json"), r"config\.json: a Git LFS pointer"),
    ("internvl", again, rf"{POINT} is in .\.safetensors and in c\.safetensors"),
    ("internvl", unlisted, r"is in .\.safetensors and in model\.safetensors; delete the old file"),
    ("internvl", listed("b.safetensors"), rf"index\.json: says that {POINT} is in b.*, but it is in a.* \(1 such"),
    ("internvl", listed(None), rf"index\.json: says that {POINT} is in no file, but it is in a\.safetensors"),
    ("internvl", lambda path: renamed_tokens(path, {"[SEG]": ""}), r"no file of the tokenizer has an id for '\[SEG\]'"),
    (
        "internvl",
        lambda path: edit(path / "added_tokens.json", **{"[SEG]": 5}),
        r"json: '.*' has the id .*, but has the id .* when",
    ),
    (QWEN3, lambda path: renamed_tokens(path, {"[SEG]": "[X]"}), r"no file of the tokenizer has an id for '\[SEG\]'"),
    ("internvl", config(model_type="llava"), r"model_type.*llava.*sa2va_chat"),
    ("internlm2", cut("tokenizer.model", 1000), r"tokenizer\.model: not a whole sentencepiece file"),
    (QWEN3, add_key("mlp1.0.bias"), r"1 not expected: mlp1\.0\.bias"),
    (QWEN25, drop("preprocessor_config.json"), r"preprocessor_config\.json: is missing; a Qwen-VL needs it"),
    (
        QWEN3,
        lambda path: edit(path / "preprocessor_config.json", patch_size=12),
        "patch_size is 12, the model's is 16;",
    ),
    (QWEN3, drop("chat_template.jinja"), "broken.*: the chat template is missing; copy chat_template.jinja again"),
    (QWEN3, config(text_config={"model_type": "x"}), r"text_config\.model_type is 'x'; supported are .*Qwen3-VL"),
    (QWEN3, config(vision_config={"model_type": "x"}), r"vision_config\.model_type is 'x', expected 'qwen"),
    (QWEN3_SAM3, add_key(SAM3 + "trunk.blocks.0.ls1.gamma"), r"1 not expected: .*ls1\.gamma"),
    (QWEN3_SAM3, lambda path: edit(path / "sam3_sizes.json", depth=2), r"not expected: .*trunk\.blocks\.2"),
    (QWEN3, add_key("grounding_encoder.sam2_model.sam_mask_decoder_modified.iou_token.weight"), "this is Sa2VA-i, "),
    (QWEN3, config(architectures=["Sa2VAChatModelLlava"]), r"config\.json: Sa2VA on LLaVA is not supported"),
    (QWEN3, config(auto_map={"AutoModel": "modeling_sa2va_llava.Sa2VAChatModel"}), "Sa2VA on LLaVA is not supported"),
    (QWEN3, config(auto_map={"AutoModel": "modeling_sasasa2va_chat.X"}), r"config\.json: SaSaSa2VA .*not supported"),
]


@pytest.mark.parametrize(("broken", "damage", "message"), DAMAGES, indirect=["broken"])
def test_a_damaged_folder_or_a_relative_is_refused_in_one_line(broken, damage, message, tmp_path):
    damage(broken)
    for load in (load_sa2va_model, lambda path: main(Args(str(path), tmp_path / "out"))):
        with pytest.raises(ValueError, match=message) as error:
            load(broken)
        assert len(str(error.value).splitlines()) == 1
        assert str(broken) in str(error.value)
    assert not (tmp_path / "out").exists()
    if "preprocessor" in message:
        with pytest.raises(ValueError, match=message):
            Sa2VAProcessor.from_pretrained(broken)


def test_files_that_nobody_reads_may_be_pointers(broken):
    for name in ("optimizer.pt", "pytorch_model.bin", "teaser.png"):
        pointer(name)(broken)
    assert open_checkpoint(broken).tensors()


@pytest.mark.parametrize("names", [("[SEG]", "<p>"), ("<p>", "</p>"), ("<img>", "<IMG_CONTEXT>")])
def test_our_layout_knows_the_ids_of_its_tokens(tiny_checkpoint, tmp_path, names):
    """Where all files of the tokenizer agree on another order of the same tokens."""
    convert_checkpoint(str(tiny_checkpoint), tmp_path / "ours")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "ours" / file).read_text()
        first, second = map(json.dumps, names)
        (tmp_path / "ours" / file).write_text(text.replace(first, "@@").replace(second, first).replace("@@", second))
    with pytest.raises(ValueError, match=r"config\.json: '.*' has the id \d+, but has the id \d+ when loaded"):
        load_sa2va_model(tmp_path / "ours")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(broken):
    tokenizer = Sa2VAProcessor.from_pretrained(broken).tokenizer
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(broken)
    with pytest.raises(ValueError, match=r"'<new>' has the id \d+, but the model has \d+ tokens"):
        load_sa2va_model(broken)


@pytest.mark.parametrize("path", ["no/such/folder", "./nowhere", "owner/name-that-is-not-cached"])
def test_a_path_that_is_neither_folder_nor_hub_id(path):
    with pytest.raises(ValueError, match=re.escape(path)):
        open_checkpoint(path)


def test_targets_that_exist_and_models_without_an_official_layout_are_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "letter.txt").write_text("keep")
    with pytest.raises(ValueError, match=f"target {tmp_path} exists"):
        convert_checkpoint(str(tiny_checkpoint), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    convert_checkpoint(str(tiny_checkpoint), tmp_path / "ours")
    edit(tmp_path / "ours" / "config.json", original_config=None)
    with pytest.raises(ValueError, match=r"config\.json: original_config"):
        convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_loading_on_a_terminal_asks_nothing(tiny_checkpoint):
    """An original config.json names remote code; transformers' Auto classes would ask whether to run it."""
    code = (
        "import sys; from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model; "
        "assert sys.stdin.isatty() and sys.stdout.isatty(); load_sa2va_model(sys.argv[1]); print('LOADED')"
    )
    main_end, child_end = pty.openpty()
    words = [sys.executable, "-c", code, str(tiny_checkpoint)]
    process = subprocess.Popen(words, stdin=child_end, stdout=child_end, stderr=child_end)
    os.close(child_end)
    output = b""
    while process.poll() is None or output[-1:] != b"\n":
        try:
            chunk = os.read(main_end, 4096)
        except OSError:  # the terminal is gone with its last process
            break
        output += chunk
        assert b"[y/N]" not in output, output.decode()
    assert process.wait(timeout=60) == 0, output.decode()
    assert b"LOADED" in output


@pytest.mark.parametrize("trained", [".", "final_model", "checkpoint-12"])
def test_what_grpo_trained_is_no_model(tmp_path, trained):
    (tmp_path / trained / "trainable").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "trainable").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"sa2va-rl merge --model_path {re.escape(str(tmp_path / trained))} --output"):
        open_checkpoint(str(tmp_path))


def test_shards_are_read_and_values_must_be_finite_in_the_format_asked_for(broken):
    tensors = load_file(broken / "model.safetensors")
    spoil(1e5)(broken)
    with pytest.raises(ValueError, match=rf"{POINT} holds 100000, which is infinite in torch\.float16"):
        open_checkpoint(broken).tensors(torch.float16)
    assert open_checkpoint(broken).tensors(torch.bfloat16)
    save_file(tensors, broken / "model.safetensors")
    shard(broken)
    assert same(open_checkpoint(broken).tensors(), tensors)
