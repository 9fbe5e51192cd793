import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, check_checkpoint
from tests.conftest import GOLDEN, needs_golden

POINT = "grounding_encoder.sam2_model.sam_prompt_encoder.point_embeddings.2.weight"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def copy_with(source: Path, target: Path, change) -> Path:
    """A copy of a checkpoint folder whose tensors went through `change(dict)`."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("source", ["tiny", pytest.param("golden", marks=needs_golden)])
def test_converted_folders_load_and_come_back(source: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint if source == "tiny" else GOLDEN / "checkpoint"
    main(Args(str(folder), tmp_path / "ours"))
    main(Args(str(tmp_path / "ours"), tmp_path / "back"))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert same(before, after)
    config, back = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "back"))
    assert {k: v for k, v in config.items() if v is not None} == {k: v for k, v in back.items() if v is not None}
    ours = Sa2VAForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert same(ours.state_dict(), Sa2VAForConditionalGeneration.from_pretrained(folder).state_dict())
    assert ours.config.seg_token_id == Sa2VAForConditionalGeneration.from_pretrained(folder).config.seg_token_id


def test_what_save_pretrained_writes_loads_again(
    tiny_model: Sa2VAForConditionalGeneration, tiny_processor, tmp_path: Path
) -> None:
    tiny_model.save_pretrained(tmp_path)
    tiny_processor.save_pretrained(tmp_path)
    loaded = Sa2VAForConditionalGeneration.from_pretrained(tmp_path)
    assert same(loaded.state_dict(), tiny_model.state_dict())


def test_sharded_folders_are_read_by_their_index(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sharded"
    shutil.copytree(tiny_checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(open_checkpoint(folder).tensors(), tensors)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json: .*b\.safetensors"):
        check_checkpoint(open_checkpoint(folder))


def test_missing_surplus_and_misshapen_tensors_are_named_in_one_error(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[POINT]
        tensors["something.else"] = torch.zeros(1)
        tensors["mlp1.0.bias"] = torch.zeros(3)

    folder = copy_with(tiny_checkpoint, tmp_path / "broken", change)
    with pytest.raises(ValueError) as error:
        Sa2VAForConditionalGeneration.from_pretrained(folder)
    message = str(error.value)
    assert POINT in message
    assert "something.else" in message
    assert re.search(r"mlp1\.0\.bias \(3,\).*\(128,\)", message)


def test_a_truncated_file_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny_checkpoint, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        Sa2VAForConditionalGeneration.from_pretrained(folder)


def test_pickled_weights_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled: .*\.safetensors"):
        Sa2VAForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize("path", ["no/such/folder", "./nowhere", "owner/name-that-is-not-cached"])
def test_a_path_that_is_neither_folder_nor_hub_id(path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(path)):
        open_checkpoint(path)


def test_another_model_is_refused_by_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ValueError, match=r"model_type.*llava.*sa2va_chat"):
        open_checkpoint(tmp_path)


def test_loading_on_a_terminal_asks_nothing(tiny_checkpoint: Path) -> None:
    """An original config.json names remote code; transformers' Auto classes would ask whether to run it."""
    code = (
        "import sys; from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model; "
        "assert sys.stdin.isatty() and sys.stdout.isatty(); load_sa2va_model(sys.argv[1]); print('LOADED')"
    )
    main_end, child_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_checkpoint)], stdin=child_end, stdout=child_end, stderr=child_end
    )
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
