"""The shell files, with a `python` that only notes how it is called: what runs, in which order, and what is refused."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scripts import gains
from tests.conftest import STAMP, stamp_line

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    "run_experiment1.sh": "prompts",
    "run_experiment2.sh": "operations",
    "run_experiment3.sh": "reward",
    "run_compare.sh": "compare",
    "run_step2_finetune.sh": "prompts",
    "run_rl_train.sh": "grpo",
}
FAKE = """#!/usr/bin/env bash
[[ "$*" != *environment.py* ]] || { echo -n "${LACKING:-}"; exit; }
[[ "$1" != -I ]] || { echo 3.11; exit; }  # is the environment whole?
words="$*"
check="${SA2VA_RL_ONLY_CHECK:-}"
called="${SA2VA_RL_CALLED_AS:-}"
printf '%s|%s|%s|%s|%s|%s\\n' "$words" "$check" "${LOCAL_RANK:-}" "$called" "${CUDA_VISIBLE_DEVICES-unset}" \\
  "${SA2VA_RL_TYPED:-}" >> "$CALLS"
[[ "$words" != *"pip install"* || -z "${NO_NETWORK:-}" ]] || exit 1
[[ "$words" != *"benchmarks.speed gpu"* ]] || printf 'bar: 5%%|#\r%s %s\n' "$HOME/mine" "$VIRTUAL_ENV/lib"
[[ "$words" != *"benchmarks.speed real_size"* || -z "${SLOW:-}" ]] || exec sleep 60
[[ "$words" != *--wrong* ]] || { echo "error: --wrong" >&2; exit 2; }
[[ -z "${SA2VA_RL_RUN_FILE:-}" || -n "$check" ]] || echo out/run > "$SA2VA_RL_RUN_FILE"
"""
Called = Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]]


@pytest.fixture
def called(tmp_path: Path) -> Called:
    """Run a shell file: what it said, and each call of `python`."""
    binaries, calls = tmp_path / "venv" / "bin", tmp_path / "calls"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(FAKE)
    (binaries / "python").chmod(0o755)
    (tmp_path / "venv" / STAMP).write_text(stamp_line("3.11") + "\n")

    def call(file: str, *words: str, **environment: str) -> tuple[Any, list[dict[str, str]]]:
        own = {"PATH": f"{binaries}:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path / "venv"), "CALLS": str(calls)}
        calls.write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / file), *words], cwd=tmp_path, env=own | environment, capture_output=True, text=True
        )
        if done.stdout.strip().splitlines()[-1:] and (log := done.stdout.strip().splitlines()[-1]).startswith("log: "):
            (tmp_path / log.removeprefix("log: ")).unlink()
        names = ("words", "check", "rank", "called_as", "visible", "typed")
        return done, [dict(zip(names, line.split("|"), strict=True)) for line in calls.read_text().splitlines()]

    return call


def modules(calls: list[dict[str, str]]) -> list[str]:
    """The command of each call, with a star where only the flags are looked at; or another module."""
    words = [call["words"].removeprefix("-m rl_reward_network.cli ").removeprefix("-m ") for call in calls]
    return [own.split()[0] + "*" * bool(call["check"]) for own, call in zip(words, calls, strict=True)]


@pytest.mark.parametrize("file", COMMANDS)
def test_help_is_that_of_the_command_and_does_nothing_else(called: Called, file: str) -> None:
    for words, shown in (
        ("--help", "--help"),
        ("quick -h", "quick --help"),
        ("full --seed 3 --help-all", "full --help-all"),
    ):
        done, calls = called(file, *words.split())
        assert (done.returncode, [call["words"].split("cli ")[1] for call in calls]) == (
            0,
            [f"{COMMANDS[file]} {shown}"],
        )
    assert f"bash {file} " in called(file, "--help")[0].stdout
    done, calls = called(file, "--help", LACKING="torch", SA2VA_RL_INSTALL_INTO_ACTIVE="1")
    assert (done.returncode, calls) == (0, []), "help installs no package"
    assert "as soon as the first run has installed the packages" in done.stdout


@pytest.mark.parametrize("file", COMMANDS)
def test_wrong_flags_are_refused_before_anything_is_made(called: Called, tmp_path: Path, file: str) -> None:
    before = sorted(tmp_path.iterdir())
    done, calls = called(file, "quick", "--wrong", SEED="3", OUTPUT_DIR="elsewhere/runs")
    assert (done.returncode, modules(calls), done.stderr) == (2, [f"{COMMANDS[file]}*"], "error: --wrong\n")
    assert "--seed 3 --wrong" in calls[0]["words"]
    assert calls[0]["called_as"] == f"bash {ROOT / file}"
    assert calls[0]["typed"] == f"OUTPUT_DIR=elsewhere/runs SEED=3 bash {ROOT / file} quick --wrong"
    assert sorted({*tmp_path.iterdir()} - {tmp_path / "calls"}) == before


def test_what_each_shell_file_runs_and_where_its_log_lies(called: Called, tmp_path: Path) -> None:
    for file, command in COMMANDS.items():
        done, calls = called(file, "quick", OUTPUT_DIR="elsewhere/runs")
        assert done.returncode == 0, done.stderr
        evaluated = [] if command in ("reward", "compare") else ["evaluate"]
        assert modules(calls) == [f"{command}*", "data", "doctor", command, *evaluated]
        trained = [call["words"] for call in calls if f"cli {command} " in call["words"]]
        assert len(set(trained)) == 1, "what was checked is what is run"
        assert done.stdout.splitlines()[-1].startswith("log: elsewhere/runs/logs/")
        assert (tmp_path / "elsewhere" / "runs" / "logs").is_dir()


@pytest.mark.parametrize(
    ("words", "rewards"),
    [([], ["dice"]), (["--reward", "dice+recall"], ["dice+recall"]), (["--reward_net", "net"], ["dice"])],
)
def test_experiment_1_is_rewarded_by_dice_unless_a_reward_is_named(
    called: Called, words: list[str], rewards: list[str]
) -> None:
    done, calls = called("run_experiment1.sh", "quick", *words)
    assert done.returncode == 0, done.stderr
    given = [call["words"] for call in calls if "cli prompts quick " in call["words"]][-1].split()
    assert [value for flag, value in pairwise(given) if flag == "--reward"] == rewards


@pytest.mark.parametrize(("words", "mode"), [([], "full"), (["--max_steps", "3"], "full"), (["quick"], "quick")])
def test_grpo_is_full_where_no_mode_is_named(called: Called, words: list[str], mode: str) -> None:
    done, calls = called("run_rl_train.sh", *words)
    assert done.returncode == 0
    assert calls[0]["words"].startswith(f"-m rl_reward_network.cli grpo {mode} --output_dir ")


@pytest.mark.parametrize("file", COMMANDS)
def test_a_file_of_settings_names_data_and_folders_unless_variables_do(called: Called, file: str) -> None:
    mode, given = ([], "") if file == "run_rl_train.sh" else (["quick"], "quick ")
    variables = {"OUTPUT_DIR": "out", "MODEL_PATH": "m"}
    for environment, flags in (({}, ""), (variables, "--output_dir out --model_path m ")):
        _, calls = called(file, *mode, "--config", "run.yaml", SA2VA_RL_ONLY_CHECK="1", **environment)
        assert calls[0]["words"] == f"-m rl_reward_network.cli {COMMANDS[file]} {given}{flags}--config run.yaml"


def test_several_processes_train_and_one_does_all_else(called: Called) -> None:
    done, calls = called("run_rl_train.sh", "full", "--save_steps", "5", NPROC="8", EVAL_IMAGES="7")
    assert done.returncode == 0, done.stderr
    train = "torch.distributed.run"
    assert modules(calls) == [
        *("grpo*", "data", "doctor"),
        *(train, "evaluate"),
    ]
    checked, _, _, trained, evaluated = (call["words"] for call in calls)
    assert trained == f"-m {train} --standalone --nproc_per_node 8 {checked}"
    assert calls[0]["rank"] == "7", "the last process needs a GPU, too"
    assert evaluated.endswith("--model_path out/run --split test --images 7")


@pytest.mark.parametrize(
    ("words", "environment", "embedded"),
    [
        ([], {}, True),
        (["--dataset_name", "gar"], {}, True),
        (["--model_path", "sa2va-nano"], {}, True),
        (["--model_path", "M"], {}, False),
        (["--model_path=M", "--dataset_name", "gar"], {}, False),
        ([], {"MODEL_PATH": "M"}, False),
        (["--dataset-name", "owner/data"], {}, False),
        (["--data_dir", "D"], {}, False),
        (["--data-root=D"], {}, False),
        (["--dataset_path", "D"], {}, False),
        ([], {"DATA_ROOT": "D", "MODEL_PATH": "M"}, False),
    ],
)
def test_embedded_data_are_for_the_embedded_model_or_whom_names_them(
    called: Called, words: list[str], environment: dict[str, str], embedded: bool
) -> None:
    done, calls = called("run_rl_train.sh", "quick", *words, **environment)
    assert done.returncode == 0, done.stderr
    assert ("data" in modules(calls)) == embedded
    assert (f"--data_root {ROOT}/data/regions_lamplight" in calls[0]["words"]) == embedded
    assert ("--data_root D" in calls[0]["words"]) == ("DATA_ROOT" in environment)


@pytest.mark.parametrize(
    ("gpu", "visible", "flag", "alone"),
    [
        ("1", "4,5", "1", "5"),  # as under SLURM
        ("cuda:1", "4, 5", "1", "5"),
        ("cuda", "4,5", "0", "4,5"),
        ("0", None, "0", None),
        ("2", None, "2", "2"),
        ("02", None, "2", "2"),
        ("1", "GPU-aa,MIG-bb", "1", "MIG-bb"),
        ("-1", "4,5", "-1", "4,5"),
        ("cpu", "", "-1", ""),
        ("", "4,5", None, "4,5"),
        ("GPU-8932f937-d72c", "4,5", "0", "GPU-8932f937-d72c"),  # by its UUID it is the only one
    ],
)
def test_the_card_that_gpu_names(
    called: Called, gpu: str, visible: str | None, flag: str | None, alone: str | None
) -> None:
    """`flag`: what --gpu is given, an index among the visible ones; GRPO and the comparison see that card alone."""
    hidden = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    for file in ("run_experiment3.sh", "run_rl_train.sh", "run_compare.sh"):
        done, calls = called(file, "quick", GPU=gpu, **hidden)
        assert done.returncode == 0, done.stderr
        one = file != "run_experiment3.sh"
        given = "0" if one and flag not in (None, "-1") else flag
        words = calls[0]["words"].split()
        assert (words[words.index("--gpu") + 1] if "--gpu" in words else None) == given
        expected = alone if one or gpu.startswith("GPU-") else visible
        assert {call["visible"] for call in calls} == {"unset" if expected is None else expected}


NO_GPU = "expected one GPU: its index from 0 on, cuda:INDEX, a UUID"
SHOWN = "GPU=2, but CUDA_VISIBLE_DEVICES='{}' shows {} GPUs, counted from 0"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        *(
            ({"NPROC": wrong}, f"NPROC is '{wrong}', expected the number of processes, 1 or more")
            for wrong in ("0", "two")
        ),
        *(
            ({"NPROC": "2", "GPU": gpu}, "GPU=1 names one GPU, but NPROC=2 takes one for each process; unset GPU")
            for gpu in ("1", "cuda:1")
        ),
        *(({"GPU": gpu}, f"GPU is '{gpu}', {NO_GPU}") for gpu in ("0,1", "-2", "gpu", "cuda:", "cuda:x", "1.5", "all")),
        *(
            ({"GPU": "2", "CUDA_VISIBLE_DEVICES": visible}, SHOWN.format(visible, count))
            for visible, count in (("4,5", 2), ("", 0), ("GPU-a", 1))
        ),
    ],
)
def test_gpus_and_processes_that_make_no_sense_are_refused_in_one_line(
    called: Called, environment: dict[str, str], message: str
) -> None:
    done, calls = called("run_rl_train.sh", "full", **environment)
    assert (done.returncode, calls, done.stderr.count("\n")) == (2, [], 1)
    assert message in done.stderr


REAL = ("supervised", "side_network", "mean_teacher", "grpo")


def write_real_run(run: Path, gain: float) -> None:
    (run / "evaluation").mkdir(parents=True)
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6, "groups": 30}
    dice = {"metric": "dice", "before": estimate, "after": estimate, "gain": estimate | {"mean": gain}}
    config = {"Sa2VA": "Sa2VA-4B", "data": "annotated images, 9 images", "training: minutes": "12.5"}
    report = {"rows": [{"metric": "iou"}, dice | {"verdict": "better"}], "config": config}
    (run / "evaluation" / "eval.json").write_text(json.dumps(report))
    (run / "cost.json").write_text('{"peak_memory_gib": 7.25}')
    for name in ("evaluation/eval.csv", "evaluation/report.html", "metrics.jsonl", "timings.jsonl", "done.json"):
        (run / name).write_text(name)


def test_a_run_on_real_data_trains_what_is_missing_and_shares_numbers_alone(called: Called, tmp_path: Path) -> None:
    (tmp_path / "vessels").mkdir()
    place = tmp_path / "outputs" / "real_Sa2VA-4B_vessels_quick"
    for number, name in enumerate(REAL):
        write_real_run(place / name, number / 10)
    (place / "grpo" / "done.json").unlink()
    (place / "grpo" / "config.json").write_text("{}")
    done, calls = called("run_real.sh", "owner/Sa2VA-4B", "vessels", "quick", SEED="3")
    assert done.returncode == 0, done.stderr
    assert modules(calls) == ["doctor", "env", "merge", "grpo", "scripts.gains"]
    words = calls[3]["words"]
    assert "grpo quick --data_root vessels" in words
    assert "--seed 3" in words
    assert words.endswith("side_network/merged --loop2_iou_weight 1 --resume")
    shared = {str(path.relative_to(place / "share")) for path in (place / "share").rglob("*") if path.is_file()}
    files = ("eval.json", "eval.csv", "metrics.jsonl", "timings.jsonl", "cost.json")
    assert shared == {"versions.txt", *(f"{name}/{file}" for name in REAL for file in files)}
    gains.main(place / "share")
    table = (place / "share" / "README.md").read_text()
    row = "| side network, then mean teacher | 0.500 [0.400, 0.600] | 0.500 [0.400, 0.600] | +0.200 [+0.400, +0.600] |"
    assert f"{row} better | 12.5 | 7.2 |" in table
    assert "Sa2VA-4B on annotated images, 9 images" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [(("model",), "bash run_real.sh MODEL DATA"), (("model", "nowhere"), "nowhere: no such folder; give a folder")],
)
def test_a_run_on_real_data_without_data_is_refused(called: Called, words: tuple[str, ...], message: str) -> None:
    done, calls = called("run_real.sh", *words)
    assert (done.returncode, calls) == (2, [])
    assert message in done.stdout + done.stderr


def test_they_can_be_started_as_programs() -> None:
    for file in (*COMMANDS, "run_real.sh", "run_tests.sh"):
        listed = subprocess.run(["git", "ls-files", "-s", file], cwd=ROOT, capture_output=True, text=True).stdout
        if not listed:
            pytest.skip("not a git checkout, which keeps the mode")
        assert listed.startswith("100755"), file


@pytest.fixture
def on_cpu(tmp_path: Path) -> dict[str, str]:
    """The environment of a rehearsal."""
    (tmp_path / "work").mkdir()
    return {"GPU_CHECK_DEVICE": "cpu", "TMPDIR": str(tmp_path / "work"), "HOME": str(tmp_path / "home")}


def test_the_check_of_a_gpu_goes_on_after_a_part_that_fails(
    called: Called, tmp_path: Path, on_cpu: dict[str, str]
) -> None:
    done, calls = called("scripts/gpu_check.sh", GPU_CHECK_SIZES="--wrong 1b", **on_cpu)
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("gpu_check_*.txt")
    assert done.stdout.splitlines()[-1] == f"report: {report}"
    text = report.read_text()
    assert "error: --wrong\n-- failed, 0 s, exit status 2" in text
    for title in ("machine", "training in one process, --wrong 1b", "number formats", "batched prompts", "GRPO, quick"):
        assert f"== {title}" in text
    summary = text.partition("== summary\n")[2].splitlines()
    failed = [line.split(":")[0] for line in summary if "failed" in line.split(": ")[-1]]
    assert "stages, --wrong" in failed
    assert len(failed) < len(summary)
    assert len(summary) == text.count("\n-- "), "a line for each part"
    words = [call["words"] for call in calls]
    assert any("benchmarks.speed gpu_training --device cpu --sizes --wrong 1b" in line for line in words)
    assert any("benchmarks.speed grpo_step --device cpu" in line for line in words)
    assert not any((tmp_path / "work").iterdir())


def test_the_report_names_no_folder_and_has_no_bars(called: Called, tmp_path: Path, on_cpu: dict[str, str]) -> None:
    called("scripts/gpu_check.sh", GPU_CHECK_SIZES="tiny", **on_cpu)
    (report,) = tmp_path.glob("gpu_check_*.txt")
    text = report.read_text()
    assert "~/mine VENV/lib\n" in text
    assert "--folder WORK/real_size" in text
    assert "%|" not in text
    assert not [name for name in (str(ROOT), str(tmp_path)) if name in text]


def test_the_check_of_a_gpu_knows_none_of_the_users_settings(called: Called, on_cpu: dict[str, str]) -> None:
    mine = {"SEED": "77", "MODEL_PATH": "mine", "DATA_ROOT": "mine", "REWARD_NET": "mine", "OUTPUT_DIR": "mine"}
    _, calls = called("scripts/gpu_check.sh", GPU_CHECK_SIZES="tiny", NPROC="2", EVAL_IMAGES="77", **mine, **on_cpu)
    assert modules(calls).count("grpo") == 1
    assert not [call["words"] for call in calls if "mine" in call["words"] or "77" in call["words"]]


def test_ctrl_c_ends_the_check_of_a_gpu_with_a_report(called: Called, tmp_path: Path, on_cpu: dict[str, str]) -> None:
    called("scripts/gpu_check.sh", "--help")  # for the environment
    environment = {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(tmp_path / "venv"), **on_cpu}
    process = subprocess.Popen(
        ["bash", str(ROOT / "scripts/gpu_check.sh")],
        cwd=tmp_path,
        env=environment | {"CALLS": str(tmp_path / "calls"), "SLOW": "yes"},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("stages, 1b"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=20)[0]
    assert process.returncode == 130
    (report,) = tmp_path.glob("gpu_check_*.txt")
    assert report.read_text().splitlines()[-1].startswith("stages, 1b: interrupted, ")
    assert rest.splitlines()[-1] == f"report: {report}"
    assert not any((tmp_path / "work").iterdir())


def test_a_part_that_was_killed_late_ran_out_of_time() -> None:
    script = (ROOT / "scripts" / "gpu_check.sh").read_text()
    function = script[script.index("result() {") : script.index("part() {")]
    calls = "; ".join(f"result {words}" for words in ("0 9 60", "1 9 60", "124 60 60", "137 80 60", "137 9 60"))
    done = subprocess.run(["bash", "-c", f"stopped=\n{function}\n{calls}"], capture_output=True, text=True, check=True)
    killed = "failed (killed; did main memory run out?)"
    assert done.stdout.splitlines() == ["ok", "failed", "out of time", "out of time", killed]
