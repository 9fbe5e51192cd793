"""Images shared among processes: none twice, none lost after an interruption, and the results of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_reward_network.cli import segment
from rl_reward_network.segment import maker, shares
from rl_reward_network.segment.shares import Share, own_share
from tests.conftest import ROOT, tube_image

COUNT = 6


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for seed in range(COUNT):
        Image.fromarray(tube_image(48, seed)[0]).save(folder / f"{seed}.png")
    return folder


def run(images: Path, output: Path, **flags: Any) -> None:
    segment.main(segment.Args((images,), output=output, device="cpu", **flags))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def test_shares_are_those_of_the_flag_or_of_torchrun(monkeypatch):
    assert own_share(None) == Share(1, 1)
    assert own_share("3/16") == Share(3, 16)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert own_share(None) == Share(2, 4)
    for flag in ("0/4", "5/4", "4", "a/b"):
        with pytest.raises(ValueError, match=r"--shard .*: expected NUMBER/OF"):
            own_share(flag)


@pytest.mark.parametrize("classes", [False, True])
def test_two_shares_write_what_one_process_writes(images, tmp_path, capsys, monkeypatch, classes):
    flags: dict[str, Any] = {"format": "coco"}
    if classes:
        named = [
            {"name": name, "phrases": [f"the {name}"], "held_out": f"every {name}"} for name in ("vessel", "catheter")
        ]
        (tmp_path / "classes.json").write_text(json.dumps(named))
        flags["classes"] = tmp_path / "classes.json"
    run(images, tmp_path / "one", **flags)
    run(images, tmp_path / "two", shard="2/2", **flags)
    assert "share 2/2: 3 images; 3 of other shares are not finished yet" in capsys.readouterr().out
    assert "results.csv" not in contents(tmp_path / "two")
    run(images, tmp_path / "two", shard="1/2", **flags)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not list((tmp_path / "one").glob(f"{shares.FOLDER}*"))
    monkeypatch.setattr(maker, "load_maker", lambda *_, **__: pytest.fail("all is finished"))
    run(images, tmp_path / "two", shard="2/2", **flags)
    assert "6 of 6 images are finished already" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_and_other_settings_or_images_do_not_count(images, tmp_path, capsys, monkeypatch):
    real, calls = maker.MaskMaker.answer, []

    def answer(self: Any, image: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, image, *args, **kwargs)

    monkeypatch.setattr(maker.MaskMaker, "answer", answer)
    with pytest.raises(KeyboardInterrupt):
        run(images, tmp_path / "out")
    (record,) = (tmp_path / "out").glob(f"{shares.FOLDER}*/*.jsonl")
    with record.open("a") as file:
        file.write('["cut')
    Image.fromarray(tube_image(48, 9)[0]).save(images / "0.png")  # is another image now
    kept = shutil.copytree(tmp_path / "out", tmp_path / "other")
    capsys.readouterr()
    run(images, tmp_path / "out")
    assert f"3 of {COUNT} images are finished already" in capsys.readouterr().out
    assert len(calls) == 5 + 3
    run(images, Path(kept), threshold=0.4)
    assert len(calls) == 5 + 3 + COUNT
    monkeypatch.setattr(maker.MaskMaker, "answer", real)
    run(images, tmp_path / "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_a_mask_that_was_replaced_or_deleted_is_made_anew(images, tmp_path, capsys):
    run(images, tmp_path / "out", shard="1/2")
    run(images, tmp_path / "out", threshold=0.05)  # in the same place, and to the end
    capsys.readouterr()
    run(images, tmp_path / "out", shard="1/2")
    assert "finished already" not in capsys.readouterr().out
    first = tmp_path / "out" / "0_mask.png"
    first.unlink()
    run(images, tmp_path / "out", shard="1/2")
    assert "2 of 6 images are finished already" in capsys.readouterr().out
    assert first.exists()
    run(images, tmp_path / "out", shard="2/2")
    run(images, tmp_path / "one")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_links_to_one_image_are_images_of_their_own(images, tmp_path, capsys):
    (images / "link.png").symlink_to(images / "0.png")
    run(images, tmp_path / "out")
    assert "not finished" not in capsys.readouterr().out
    assert {"0_mask.png", "link_mask.png", "results.csv"} <= contents(tmp_path / "out").keys()


def test_masks_inside_a_models_folder_do_not_change_the_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    before = shares.settings_of("flags", tmp_path)
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "a_mask.png").write_bytes(b"x")
    assert shares.settings_of("flags", tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert shares.settings_of("flags", tmp_path) != before


def test_processes_of_torchrun_share_and_a_killed_one_loses_nothing(images, tmp_path):
    """A process is killed after its first image; the same command then ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "rl_reward_network.cli", "segment", str(images), "--output", str(tmp_path / "out")]
    words = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--device", "cpu"], cwd=ROOT, env=words, start_new_session=True) as running:
        while running.poll() is None and not list((tmp_path / "out").glob("*_mask.png")):
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGKILL)
    subprocess.run([*command, "--device", "cpu"], cwd=ROOT, env=words, check=True, capture_output=True)
    run(images, tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "out")
