"""No command uses the network by default, and nothing is unpickled."""

import ast
import json
from pathlib import Path

import pytest

from tests.conftest import SMALLEST, refusing, shell

ROOT = Path(__file__).resolve().parents[1]


def test_a_network_call_is_refused_and_written_down(tmp_path: Path) -> None:
    """What test_end_to_end.py runs its commands under."""
    code = "import urllib.request as u; u.urlopen('http://example.org')"
    done = shell(["python", "-c", code], tmp_path, **refusing(tmp_path))
    assert "no network in this test" in done.stderr
    assert "example.org" in (tmp_path / "calls").read_text()


@pytest.mark.slow  # test_end_to_end.py runs it on a tiny model, without the network, too
def test_the_main_job_runs_with_nothing_set_and_without_the_network(installed: None, tmp_path: Path) -> None:
    """On the embedded model and angiograms; the working folder is left as it was."""
    user = tmp_path / "user"
    user.mkdir()
    nothing = {"MODEL_PATH": "", "DATA_ROOT": "", "OUTPUT_DIR": "runs"}
    done = shell(
        ["bash", str(ROOT / "run_step2_finetune.sh"), "quick", *SMALLEST], user, **nothing, **refusing(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in user.iterdir()] == ["runs"]
    assert not (tmp_path / "calls").exists(), (tmp_path / "calls").read_text()
    (file,) = (user / "runs").glob("sa2va_rl_finetune_*/evaluation/eval.json")
    evaluation = json.loads(file.read_text())
    assert evaluation["config"]["Sa2VA"] == "sa2va-nano"
    means = {row["name"]: row["means"]["dice"]["mean"] for row in evaluation["rows"]}
    assert 0.65 <= means["default prompt"] <= 0.80
    assert means["oracle"] >= means["best fixed prompt"] + 0.05


def test_the_hub_library_sends_no_telemetry() -> None:
    code = "import rl_reward_network.cli.doctor; from huggingface_hub import constants; "
    code += "print(constants.HF_HUB_DISABLE_TELEMETRY)"
    assert shell(["python", "-P", "-c", code], ROOT, PYTHONPATH=str(ROOT)).stdout.strip() == "True"


def test_nothing_is_unpickled_and_no_remote_code_runs() -> None:
    """Every `torch.load` reads weights only; pickle, SB3's own `load` and `trust_remote_code=True` are not used."""
    for file in [*(ROOT / "rl_reward_network").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called, flags = ast.unparse(node.func), {flag.arg: ast.unparse(flag.value) for flag in node.keywords}
            where = f"{file.name}:{node.lineno}: {called}"
            if called == "torch.load":
                assert flags.get("weights_only") == "True", where
            assert called not in ("pickle.load", "pickle.loads", "PPO.load", "joblib.load", "eval", "exec"), where
            assert flags.get("trust_remote_code") != "True", where
            assert not (called == "np.load" and flags.get("allow_pickle") == "True"), where
