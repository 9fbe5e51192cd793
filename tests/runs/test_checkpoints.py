from pathlib import Path

import pytest
import torch

from rl_reward_network.runs.checkpoints import load_checkpoint, save_checkpoint


def test_tensors_and_plain_values_come_back(tmp_path: Path) -> None:
    state = {"weights": {"a": torch.randn(3)}, "step": 7, "rows": [{"loss": 0.5}], "best": None}
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert torch.equal(loaded.pop("weights")["a"], state.pop("weights")["a"])
    assert loaded == state
    assert load_checkpoint(tmp_path / "none.pt") == {}


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """What a pickle would call on loading."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "touched",)  # type: ignore[return-value]

    torch.save({"x": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint\.pt: damaged \(.*delete it"):
        load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut off"])
def test_a_damaged_checkpoint_is_named_with_the_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt: damaged \("):
        load_checkpoint(tmp_path / "checkpoint.pt")
