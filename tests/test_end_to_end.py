"""The main job at its smallest, through the shell file, as a new user runs it, without the network."""

import csv
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_reward_network.cli.main import main
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.reward_training.masks import SEGMENTER, SOURCES
from tests.conftest import SMALLEST, refusing, shell, write_tiny_data

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"MODEL_PATH": "model", "DATA_ROOT": "data", "OUTPUT_DIR": "outputs"}  # relative to the user's folder


@pytest.fixture(scope="module")
def finished(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, installed: None) -> Path:
    """A folder with a model, data, and the outputs of one whole run, started from that folder with relative paths."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(tiny_checkpoint, folder / "model")
    write_tiny_data(folder / "data")
    network = tmp_path_factory.mktemp("network")
    command = ["bash", str(ROOT / "run_step2_finetune.sh"), "quick", *SMALLEST]
    done = shell(command, folder, **ENVIRONMENT, **refusing(network))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (network / "calls").exists(), (network / "calls").read_text()
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def the_run(finished: Path) -> Path:
    (run,) = (finished / "outputs").glob("sa2va_rl_finetune_*")
    return run


def test_every_stage_left_its_artefacts(finished: Path) -> None:
    run = the_run(finished)
    for name in (
        "config.json",
        "split.json",
        "tables.json",
        "metrics.jsonl",
        "final_model/policy.zip",
        "final_model/config.json",
        "evaluation/eval.json",
        "evaluation/eval.csv",
        "evaluation/eval_patients.csv",
        "evaluation/report.html",
    ):
        assert (run / name).stat().st_size > 0, name
    (reward,) = (finished / "outputs").glob("reward_net_*")
    assert {entry.name for entry in (reward / "best_reward_net").iterdir()} == {
        "config.json",
        "model.safetensors",
        "trained_on",
    }
    assert len(list((finished / "outputs" / "mask_bank").glob("*.safetensors"))) == 8


def test_the_screen_ends_with_where_the_results_are(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text().strip().splitlines()
    unchanged, curves, report, use, log = printed[-5:]
    assert unchanged.startswith("No weight of Sa2VA was changed. Where some images have masks")
    tensorboard = shlex.split(curves.removeprefix("curves of all runs: "))
    inspected = subprocess.run([*tensorboard, "--inspect", "--tag", "custom/gt_dice"], capture_output=True, text=True)
    assert inspected.returncode == 0, inspected.stderr
    assert "custom/gt_dice" in inspected.stdout
    assert any("mean over patients" in line for line in printed)
    assert any("recall" in line for line in printed)
    assert (finished / report.removeprefix("report: ")) == the_run(finished) / "evaluation" / "report.html"
    assert use == f"segment new images: sa2va-rl segment IMAGES --model_path {the_run(finished).relative_to(finished)}"
    text = (finished / log.removeprefix("log: ")).read_text()
    assert "pre-flight" in text
    assert report in text


def test_sa2va_ran_once_per_image_and_prompt(finished: Path) -> None:
    """8 images x 11 prompts in all stages together: the evaluation reads what training and step 1 computed."""
    printed = (finished / "printed.txt").read_text()
    assert "masks computed by Sa2VA: 88, read from the bank: 0; images encoded: 8" in printed, "by both steps"
    assert re.search(r"evaluation: masks computed / read, images encoded: 0 / \d+, 0\n", printed)
    evaluation = json.loads((the_run(finished) / "evaluation" / "eval.json").read_text())
    assert evaluation["config"]["evaluation: masks computed / read, images encoded"].startswith("0 / ")


def test_no_patient_is_in_two_splits_and_no_name_is_written(finished: Path) -> None:
    groups = json.loads((the_run(finished) / "split.json").read_text())["groups"]
    flat = [group for ids in groups.values() for group in ids]
    assert len(flat) == len(set(flat)) == 8
    for file in (path for path in (finished / "outputs").rglob("*") if path.is_file()):
        assert b"_frame_000001" not in file.read_bytes(), file
        assert b"_1_frame_" not in file.read_bytes(), file


def test_the_table_agrees_with_the_masks(finished: Path) -> None:
    """The default prompt's Dice, made again from the bank and the true masks; and every row below the oracle."""
    folder = the_run(finished) / "evaluation"
    rows = {row["name"]: row["means"]["dice"]["mean"] for row in json.loads((folder / "eval.json").read_text())["rows"]}
    assert list(rows) == [
        "random prompt",
        "default prompt",
        "best fixed prompt",
        "argmax of the reward net",
        "ridge per prompt",
        "PPO, last weights",
        "PPO",
        "deployed",
        "oracle",
    ]
    assert max(rows.values()) == rows["oracle"]
    with (folder / "eval.csv").open() as file:
        images = {image["sample_id"] for image in csv.DictReader(file)}
    assert len(images) == 2  # 8 patients: 2 test
    inputs = open_inputs(RunConfig(str(finished / "model"), finished / "data", finished / "outputs"))
    dices = []
    for sample in (sample for sample in inputs.samples if sample.sample_id in images):
        mask = inputs.probabilities(sample.load_image())[0] > 0.5
        truth = sample.load_mask()
        dices.append(2 * (mask & truth).sum() / (mask.sum() + truth.sum()))
    assert inputs.bank.computed == 0
    assert np.mean(dices) == pytest.approx(rows["default prompt"], abs=1e-9)


def test_tensorboard_tags_are_there_from_the_first_rollout(finished: Path) -> None:
    events = EventAccumulator(str(the_run(finished) / "logs"))
    events.Reload()
    for tag in (
        "rollout/ep_rew_mean",
        "rollout/ep_len_mean",
        "custom/reward_net_score",
        "custom/gt_dice",
        "custom/best_reward",
    ):
        assert len(events.Scalars(tag)) == 8, tag


@pytest.fixture
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, as the working folder of commands that run in this process."""
    monkeypatch.chdir(finished)
    return finished


def test_the_policy_works_on_a_new_image(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.full((50, 70, 3), 120, dtype=np.uint8)).save("new.png")
    policy = the_run(here) / "final_model"
    main(["segment", "new.png", "--model_path", "model", "--policy", str(policy)])
    assert Image.open("new_mask.png").size == (70, 50)
    assert Image.open("new_overlay.png").size == (70, 50)
    chosen = capfd.readouterr().out.split("prompt: ")[1].splitlines()[0]
    assert chosen in json.loads((policy / "config.json").read_text())["prompts"]


def finetune(*flags: str) -> None:
    usual = ["--model_path", "model", "--data_root", "data", "--output_dir", "outputs"]
    main(["prompts", "quick", *usual, *SMALLEST, *flags])


def test_a_second_run_uses_the_reward_network_and_every_mask(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune("--run_folder", "outputs/again")
    assert "masks computed by Sa2VA: 0" in capfd.readouterr().out
    assert len(list((here / "outputs").glob("reward_net_*"))) == 1
    first, second = ((run / "tables.json").read_text() for run in (the_run(here), here / "outputs" / "again"))
    assert first == second
    shutil.rmtree(here / "outputs" / "again")


def test_a_run_is_started_again_by_its_file_of_settings(here: Path) -> None:
    """From another folder; with a name, which ends that of the folder."""
    file, first = the_run(here) / "run.yaml", (the_run(here) / "tables.json").read_text()
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir("/")
        main(["prompts", "--config", str(file), "--name", "once.more"])
    (again,) = (here / "outputs").glob("sa2va_rl_finetune_*_once.more")
    assert (again / "tables.json").read_text() == first
    name = "name: once.more\n"
    assert (again / "run.yaml").read_text().replace(name, "") == file.read_text()
    shutil.rmtree(again)


def test_a_finished_run_is_nothing_to_resume(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune("--resume")
    printed = capfd.readouterr().out
    assert "nothing to resume: this run is finished" in printed
    assert printed.strip().splitlines()[-2] == f"prompt policy: {the_run(Path()) / 'final_model'}"


@pytest.mark.slow  # by the test above, and test_shell_files.py: the policy that is printed is evaluated
def test_the_shell_file_resumes_what_is_finished_by_evaluating_it(finished: Path) -> None:
    command = ["bash", str(ROOT / "run_step2_finetune.sh"), "quick", *SMALLEST, "--resume"]
    done = shell(command, finished, **ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing to resume: this run is finished" in done.stdout
    report = done.stdout.strip().splitlines()[-3]
    assert (finished / report.removeprefix("report: ")) == the_run(finished) / "evaluation" / "report.html"


def test_a_run_is_not_gone_on_with_under_other_settings(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        finetune("--resume", "--run_folder", str(the_run(here)), "--learning_rate", "0.5")
    assert stop.value.code == 2
    assert capfd.readouterr().err.strip().endswith("now 0.5); give the same, or a new run")


def test_step_1_ends_with_where_its_network_is(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["reward", "quick", "--steps", "2", "--model_path", "model", "--data_root", "data", "--output_dir", "one"])
    printed = capfd.readouterr().out
    *_, report, network, use = printed.strip().splitlines()
    assert (here / network.removeprefix("reward network: ") / "model.safetensors").exists()
    html = (here / report.removeprefix("report: ")).read_text()
    shown = [source for source in SOURCES if f"{source}: " in printed.replace("interval, ", "")]
    assert shown == [SEGMENTER], "the report has the others"
    assert all(f"<summary>{source}</summary>" in html for source in SOURCES if source != SEGMENTER)
    assert use.endswith(f"--model_path {Path(network.removeprefix('reward network: ')).parent}")


@pytest.mark.slow  # by the test above, and test_shell_files.py
def test_step_1_has_a_shell_file(finished: Path) -> None:
    done = shell(["bash", str(ROOT / "run_experiment3.sh"), "quick", "--steps", "2"], finished, **ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    (reward,) = re.findall(r"^reward network: (.*best_reward_net)$", done.stdout, flags=re.MULTILINE)
    assert (finished / reward / "model.safetensors").exists()
    shutil.rmtree((finished / reward).parent)


def test_the_other_commands_of_the_readme_run_at_their_smallest(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = str(next(Path("data/images").iterdir()))
    for command, last in (
        (["segment", image, "--model_path", "model", "--prompt", "X", "--output_dir", "o"], "written: "),
        (["convert", "model", "ours"], "ours: "),
        (["evaluate", "--model_path", f"{here}/outputs/sa2va_*/final_model"], "segment new images: "),
    ):
        main(command)
        assert capfd.readouterr().out.strip().splitlines()[-1].startswith(last)
    monkeypatch.setattr(sys, "argv", ["segment", "--model_path", "model", "--image", image, "--repeats", "1"])
    runpy.run_module("benchmarks.segment", run_name="__main__")
    assert capfd.readouterr().out.strip().splitlines()[-1].startswith("mask pixels that")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "usage: bash run_step2_finetune.sh quick|full"),
        (["fast"], {}, "usage: bash run_step2_finetune.sh quick|full"),
        (["quick", "--run_folder", "x"], {}, "name the folder for the runs by OUTPUT_DIR"),
        (["quick"], {"MODEL_PATH": "nowhere", "DATA_ROOT": "data"}, "nowhere: no such folder, and not a hub id"),
        pytest.param(  # the message is tested in test_bad_input.py, that the shell file stops by the case above
            *(["quick"], {"MODEL_PATH": "model", "DATA_ROOT": "nowhere"}, "annotations.json: file not found"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_shell_file_stops_at_the_first_error(
    finished: Path, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    done = shell(["bash", str(ROOT / "run_step2_finetune.sh"), *arguments], finished, OUTPUT_DIR="none", **environment)
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).replace("│", " ").split())
    late = bool(environment)  # the check of flags opens neither a model nor data; the pre-flight check has a log
    assert [path.name for path in (finished / "none").glob("*")] == ["logs"] * late
    shutil.rmtree(finished / "none", ignore_errors=True)
