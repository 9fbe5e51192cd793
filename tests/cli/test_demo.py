"""`sa2va-rl demo`: what is refused before a page is served."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_reward_network.cli import demo

ROOT = Path(__file__).resolve().parents[2]


def test_a_missing_gradio_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Gradio.*pip install -e '\.\[demo\]'"):
        demo.main(demo.Args())


def test_a_missing_model_is_refused_before_the_server_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="no such folder"):
        demo.main(demo.Args(model_path=str(tmp_path / "missing")))


def test_a_port_that_cannot_be_served_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    monkeypatch.setattr(demo, "serve", lambda *_: pytest.fail("a model would be loaded"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        used = other.getsockname()[1]
        for port in (used, -1, 65536):
            with pytest.raises(ValueError, match=rf"--port is {port} .*expected a free port of 1 to 65535"):
                demo.main(demo.Args(port=port))
    demo.check_port(used)  # free again


def test_a_missing_gpu_is_named_with_the_flag_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"--device is 'cuda:0', but 0 GPUs are visible; give cpu") as error:
        demo.main(demo.Args(device="cuda:0"))
    assert "--gpu" not in str(error.value)
    with pytest.raises(ValueError, match=r"--device is 'tpus', expected cpu"):
        demo.main(demo.Args(device="tpus"))


@pytest.mark.parametrize("device", ["mps", "gpu", "cuda:-1", "cuda:x", "CUDA", "cpu:1", "meta", ""])
def test_what_is_no_device_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    message = f"--device is '{device}', expected cpu, cuda or cuda:INDEX; give cpu or an available cuda:INDEX"
    with pytest.raises(ValueError, match=message):
        demo.main(demo.Args(device=device))


def test_a_public_link_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    monkeypatch.setattr(demo, "serve", lambda *_: pytest.fail("a model would be loaded"))
    monkeypatch.delenv("SA2VA_DEMO_AUTH", raising=False)
    with pytest.raises(ValueError, match=r"^--share .*: set SA2VA_DEMO_AUTH=user:password, or give --auth$"):
        demo.main(demo.Args(share=True))
    for auth in ("secret", "me:", ":secret", ""):
        with pytest.raises(ValueError, match=r"^--auth is not of the form user:password") as error:
            demo.main(demo.Args(share=True, auth=auth))
        assert "secret" not in str(error.value)
    assert demo.read_auth("me:a:b", share=True) == ("me", "a:b")
    assert demo.read_auth(None, share=False) is None
    monkeypatch.setenv("SA2VA_DEMO_AUTH", "")
    with pytest.raises(ValueError, match=r"^SA2VA_DEMO_AUTH is not of the form"):
        demo.main(demo.Args())
    monkeypatch.setenv("SA2VA_DEMO_AUTH", "me:secret")
    assert demo.read_auth(None, share=True) == ("me", "secret")
    assert demo.read_auth("you:other", share=True) == ("you", "other")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signals_remove_the_folder_of_uploads(name: str, tmp_path: Path) -> None:
    script = (
        "import signal, time\n"
        f"signal.signal(signal.{name}, signal.SIG_DFL)\n"  # nohup, under which tests may run, ignores SIGHUP
        "from rl_reward_network.cli import demo\n"
        "demo.find_spec = lambda name: object()\n"
        "def serve(args, folder):\n"
        "    (folder / 'upload.png').touch()\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(60)\n"
        "demo.serve = serve\n"
        "demo.main(demo.Args())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().decode().strip())
        assert (folder / "upload.png").exists()
        server.send_signal(getattr(signal, name))
        assert server.wait(20) == 128 + getattr(signal, name)
    assert folder.parent == tmp_path
    assert not folder.exists()
