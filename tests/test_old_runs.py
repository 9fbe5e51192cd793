"""Runs made by version 0.6: a cut-off one is not gone on with, a finished one is evaluated, merged and used."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.artefacts import read_json
from rl_reward_network.cli import evaluate, grpo, merge, prompts, reward, segment
from tests.old_runs import grpo_args, step_1_args, step_2_args

MADE = Path(__file__).parent / "fixtures" / "run_0_6"
COMMANDS: dict[str, tuple[Callable[[Any], None], Callable[..., Any]]] = {
    "sa2va_grpo": (grpo.main, grpo_args),
    "reward_net": (reward.main, step_1_args),
    "sa2va_rl_finetune": (prompts.main, step_2_args),
}
REFUSED = {  # step 1 learns otherwise since 0.9, so its settings differ
    "sa2va_grpo": r"(?s)leave it out.*sa2va_grpo_cut_off: .*version 0\.6 or earlier began it.*evaluated and merged",
    "reward_net": r"(?s)leave it out.*reward_net_cut_off: .*version 0\.6 or earlier began it",
    "sa2va_rl_finetune": r"(?s)leave it out.*sa2va_rl_finetune_cut_off: .*version 0\.6 or earlier began it",
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A project that 0.6 has worked in, at another place: data, and in runs/ one finished and one cut-off run each."""
    shutil.copytree(MADE, tmp_path / "project")
    return tmp_path / "project"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not {"mask_bank", "foreground_maps"} & set(path.parts))


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_cut_off_run_of_an_earlier_version_is_refused_with_the_remedy(old: Path, kind: str) -> None:
    main, args = COMMANDS[kind]
    for name in COMMANDS.keys() - {kind}:
        shutil.rmtree(old / "runs" / f"{name}_cut_off")
    shutil.rmtree(old / "runs" / f"{kind}_finished")
    before = files(old)
    with pytest.raises(ValueError, match=REFUSED[kind]):
        main(args(old, resume=True))
    assert files(old) == before, "neither a new run nor a change of the old one"


@pytest.mark.parametrize("kind", ["sa2va_grpo", "sa2va_rl_finetune"])
def test_it_is_refused_by_name_too(old: Path, kind: str) -> None:
    main, args = COMMANDS[kind]
    with pytest.raises(ValueError, match=r"cut_off: --resume: version 0\.6 or earlier"):
        main(args(old, resume=True, run_folder=old / "runs" / f"{kind}_cut_off"))


def test_step_1_cut_off_inside_step_2_is_refused_too(old: Path) -> None:
    for name in ("reward_net_finished", "sa2va_rl_finetune_finished", "sa2va_rl_finetune_cut_off"):
        shutil.rmtree(old / "runs" / name)
    with pytest.raises(ValueError, match="none at all: leave it out"):
        prompts.main(step_2_args(old, resume=True))


@pytest.mark.parametrize("kind", ["sa2va_grpo", "sa2va_rl_finetune"])
def test_a_finished_one_is_nothing_to_resume(old: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    main, args = COMMANDS[kind]
    main(args(old, resume=True, run_folder=old / "runs" / f"{kind}_finished"))
    assert "nothing to resume: this run is finished" in capsys.readouterr().out


def test_a_finished_grpo_run_evaluates_merges_and_segments(old: Path) -> None:
    run, image = old / "runs" / "sa2va_grpo_finished", old / "image.png"
    card, before = run / "final_model" / "README.md", (run / "final_model" / "README.md").read_text()
    evaluate.main(evaluate.Args((str(run),), images=1))
    assert card.read_text() == before, "a part of the test items proves nothing"
    assert "Not evaluated" in before
    evaluate.main(evaluate.Args((str(run / "final_model"),)))
    found = read_json(run / "evaluation" / "eval.json")
    assert {"iou_of_drawn", "meteor", "dice"} <= {row["metric"] for row in found["rows"]}
    now = card.read_text()
    assert {line for line in before.splitlines() if line.startswith("|")} <= set(now.splitlines()), "the same facts"
    assert found["verdict"]["sentence"] in now
    assert "| IoU of mask' | 0." in now
    assert "peft" not in now, "it cannot read LoRA of that version"
    merge.main(merge.Args(run, old / "merged"))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(image)
    segment.main(segment.Args((image,), str(old / "merged"), device="cpu"))
    assert Image.open(old / "image_mask.png").size == (64, 64)


@pytest.mark.parametrize("name", ["finished", "finished/final_model", "cut_off", "cut_off/checkpoint-2"])
def test_what_grpo_trained_is_no_model_and_no_policy(old: Path, name: str) -> None:
    folder = old / "runs" / f"sa2va_grpo_{name}"
    trained = folder / ({"finished": "final_model", "cut_off": "checkpoint-2"}.get(name, ""))
    image = sorted((old / "tubes" / "images").iterdir())[0]
    message = rf"{re.escape(str(folder))}: .* sa2va-rl merge --model_path {re.escape(str(trained))} --output merged"
    before = files(old)
    for call in (
        lambda: segment.main(segment.Args((image,), str(folder), device="cpu")),
        lambda: segment.main(segment.Args((image,), policy=folder, device="cpu")),
        *(lambda main=main, args=args: main(on_model(args(old), str(folder))) for main, args in COMMANDS.values()),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert files(old) == before


def on_model(args: Any, model_path: str) -> Any:
    return replace(args, inputs=replace(args.inputs, model_path=model_path))


def test_a_finished_prompt_policy_evaluates_and_segments(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = old / "runs" / "sa2va_rl_finetune_finished"
    image = sorted((old / "tubes" / "images").iterdir())[0]
    evaluate.main(evaluate.Args((str(run),)))
    rows = [row["name"] for row in read_json(run / "evaluation" / "eval.json")["rows"]]
    assert {"PPO", "deployed", "oracle"} <= set(rows)
    segment.main(segment.Args((image,), policy=run, output=old / "masks", device="cpu"))
    assert "predicted Dice" in capsys.readouterr().out
    assert Image.open(old / "masks" / f"{image.stem}_mask.png").size == (48, 48)
