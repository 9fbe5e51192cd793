"""What a converted folder holds, and what is refused; that its tensors are equal, test_checkpoint_sa2va.py proves."""

import json
from pathlib import Path

import pytest

from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_tokenizer_files_are_copied_and_other_files_are_not(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "modeling_sa2va_chat.py").write_text("raise SystemExit('remote code')")
    assert convert_checkpoint(str(source), tmp_path / "ours")[0] == "ours"
    assert convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")[0] == "official layout"
    tokenizer = {name for name in names(tiny_checkpoint) if "token" in name}
    assert tokenizer
    assert names(tmp_path / "ours") == tokenizer | {"config.json", "model.safetensors"}
    assert names(tmp_path / "back") == names(tiny_checkpoint)


def test_an_existing_target_is_refused_and_kept(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep")
    with pytest.raises(ValueError, match=f"target {tmp_path} exists"):
        convert_checkpoint(str(tiny_checkpoint), tmp_path)
    assert names(tmp_path) == {"letter.txt"}


def test_a_model_without_an_official_layout_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    convert_checkpoint(str(tiny_checkpoint), tmp_path / "ours")
    file = tmp_path / "ours" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"original_config": None}))
    with pytest.raises(ValueError, match=r"config\.json: original_config"):
        convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")
    assert not (tmp_path / "back").exists()
