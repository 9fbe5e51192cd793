"""GRPO through its shell file, as a new user runs it: 8 small scenes, two steps, the table and the report."""

from pathlib import Path

import pytest

from rl_reward_network.embedded.regions import LAMPLIGHT, write_regions
from tests.conftest import shell

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "--batch_size 8 --max_steps 2 --eval_steps 2 --max_regions 24 --mask_policy gaussian"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, installed: None) -> tuple[Path, str]:
    """The user's folder, and what was printed."""
    folder = tmp_path_factory.mktemp("user")
    write_regions(folder / "regions", 8, 5, light=LAMPLIGHT)
    environment = {"DATA_ROOT": "regions", "OUTPUT_DIR": "outputs", "SEED": "3"}
    done = shell(["bash", str(ROOT / "run_rl_train.sh"), "quick", *FLAGS.split()], folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_it_ends_in_a_model_a_table_and_a_report(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    (run,) = (folder / "outputs").glob("sa2va_grpo_*")
    report, _, log = printed.strip().splitlines()[-3:]
    assert (folder / report.removeprefix("report: ")) == run / "evaluation" / "report.html"
    assert "METEOR (" in printed, "the table names the variant"
    for text in ("IoU of mask'", "cIoU", f"fine-tuned model: {Path('outputs') / run.name / 'final_model'}"):
        assert text in printed
    assert report in (folder / log.removeprefix("log: ")).read_text()
    for name in ("final_model/config.json", "final_model/trainable/trainable.safetensors", "evaluation/eval.csv"):
        assert (run / name).stat().st_size > 0
