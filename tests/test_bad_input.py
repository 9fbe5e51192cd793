"""What a user can get wrong, command by command: one line that names the file, the field, what came and the remedy."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rl_reward_network.cli import doctor, segment
from rl_reward_network.cli import evaluate as evaluate_rl_finetuned_sa2va
from rl_reward_network.cli import prompts as finetune_sa2va_with_rl
from rl_reward_network.cli import reward as train_reward_network
from rl_reward_network.cli.app import run
from rl_reward_network.data.splits import make_split
from rl_reward_network.inputs.loading import read_samples
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from tests.conftest import write_tiny_data

COMMANDS: dict[str, Any] = {
    "doctor": doctor,
    "train": train_reward_network,
    "finetune": finetune_sa2va_with_rl,
    "evaluate": evaluate_rl_finetuned_sa2va,
    "segment": segment,
}
FIRST = "P0000(0000000000)_1_frame_000001.png"
RECORD = f"data/annotations.json: record 0 (image '{FIRST}'): "
STANDARD = ("--model_path", "model", "--data_root", "data", "--gpu", "-1")
Refused = Callable[..., str]


@pytest.fixture
def refused(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """A command line that must be refused: its one message. Nothing may have been written. The working folder holds a
    good `model` and good `data`, for the test to spoil.
    """

    def call(command: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            run(COMMANDS[command].main, COMMANDS[command].Args)
        assert stop.value.code == 2
        assert sorted(tmp_path.rglob("*")) == before, "nothing may be half-written"
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        return said[said.find("error: ") :] if "error: " in said else said

    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    write_tiny_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return call


# ---- data ----------------------------------------------------------------------------------------------------------

ANNOTATIONS = Path("data/annotations.json")
IMAGE, MASK = Path("data/images") / FIRST, Path("data/masks/0.png")


def set_mask(*masks: Any) -> None:
    """Give the first records these masks in place of their PNGs."""
    records = json.loads(ANNOTATIONS.read_text())
    for record, mask in zip(records, masks, strict=False):
        del record["mask_png"]
        record["mask"] = mask
    ANNOTATIONS.write_text(json.dumps(records))


def set_group(*groups: str | None) -> None:
    """Give the records these patients, in turn."""
    records = json.loads(ANNOTATIONS.read_text())
    for number, record in enumerate(records):
        record["group"] = groups[number % len(groups)]
    ANNOTATIONS.write_text(json.dumps(records))


def animate(path: Path) -> None:
    frames = [Image.new("RGB", (96, 96), (shade, 0, 0)) for shade in (0, 99)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


def take_names_away() -> None:
    """File names that say nothing about the patient."""
    records = json.loads(ANNOTATIONS.read_text())
    for number, record in enumerate(records):
        Path("data/images", record["image"]).rename(f"data/images/scan_{number}.png")
        record["image"] = f"scan_{number}.png"
    ANNOTATIONS.write_text(json.dumps(records))


DATA: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "missing": (ANNOTATIONS.unlink, ("data: no annotations.json", "masks are masks/0.png", "rename")),
    "not JSON": (
        lambda: ANNOTATIONS.write_text('[{"image": 1,}]'),
        ("data/annotations.json: not valid JSON (", "line 1 column 14", "correct it there"),
    ),
    "not a list": (
        lambda: ANNOTATIONS.write_text('{"images": []}'),
        ("data/annotations.json: expected a list of records {image, mask, text}, got dict",),
    ),
    "no records": (lambda: ANNOTATIONS.write_text("[]"), ("expected a list of records", "got an empty list; see")),
    "image missing": (IMAGE.unlink, (RECORD, f"{IMAGE}: image file not found; put it there, or delete its record")),
    "image of 0 bytes": (
        lambda: IMAGE.write_bytes(b""),
        (RECORD, f"{IMAGE}: not a readable image (the file is empty); copy or download it again"),
    ),
    "not an image": (
        lambda: IMAGE.write_text("hello"),
        (RECORD, f"{IMAGE}: not a readable image (UnidentifiedImageError", "save it again as PNG or JPEG"),
    ),
    "image truncated": (
        lambda: truncate(IMAGE),
        (f"{IMAGE}: not a readable image (OSError: image file is truncated", "save it again as PNG or JPEG"),
    ),
    "image animated": (
        lambda: animate(IMAGE),
        (RECORD, f"{IMAGE}: holds 2 frames, expected one; save each frame as its own PNG or JPEG"),
    ),
    "polygon of odd length": (
        lambda: set_mask([[1, 2, 3, 4, 5, 6, 7]]),
        (RECORD, "`mask`: a polygon has 7 numbers, expected pairs x, y; a coordinate is missing"),
    ),
    "polygon with NaN": (
        lambda: set_mask([[1, 2, 3, float("nan"), 5, 6]]),
        (RECORD, "`mask`: a polygon holds nan, expected finite numbers in a flat list [x1, y1, x2, y2, ...]"),
    ),
    "polygon with words": (
        lambda: set_mask([[1, 2, 3, "4", 5, 6]]),
        (RECORD, "`mask`: a polygon holds '4', expected finite numbers"),
    ),
    "polygon outside": (
        lambda: set_mask([[1, 2, 300, 4, 5, 6]]),
        (RECORD, "`mask`: a polygon reaches x 1..300, y 2..6, but the image is 96 x 96", "rescale it to this image"),
    ),
    "mixed nesting": (
        lambda: set_mask([[1, 2, 3, 4, 5, 6]], [[[1, 2, 3, 4, 5, 6]]]),
        ("record 1", "2 levels (user format) in record 0 and 3 levels (official format) in record 1; write the whole"),
    ),
    "RLE of another sum": (
        lambda: set_mask({"size": [96, 96], "counts": [10, 20]}),
        (RECORD, "`mask`: RLE runs must be >= 0 and sum to H * W = 9216, got a sum of 30; export it again"),
    ),
    "mask of another size": (
        lambda: Image.new("L", (40, 50)).save(MASK),
        (RECORD, f"{MASK}: mask is 40 x 50 (width x height), but its image is 96 x 96", "resize the mask"),
    ),
    "mask truncated": (lambda: truncate(MASK), (f"{MASK}: not a readable image (", "save it again")),
    "one group": (
        lambda: set_group("7"),
        ("data/annotations.json: 1 labelled patient(s) with 8 image(s), but reward", "--group_regex"),
    ),
    "three groups": (
        lambda: set_group("7", "8", "9"),
        ("data/annotations.json: 3 labelled patient(s) with 8 image(s), but reward", "more patients"),
    ),
    "no group": (
        lambda: (take_names_away(), set_group("7", "8", "9", None)),
        ("record 3 (image 'scan_3.png'): no group (patient) in the file name, nor a field `group`", "--group_regex"),
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data(refused: Refused, case: str) -> None:
    spoil, parts = DATA[case]
    spoil()
    message = refused("train", "quick", *STANDARD)
    assert message.startswith("error: ")
    assert all(part in message for part in parts), message


def test_the_doctor_finds_it_too(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit status is 1, so the shell file stops."""
    for path in sorted(Path("data/images").iterdir())[:2]:
        truncate(path)
    with pytest.raises(SystemExit) as stop:
        doctor.main(doctor.Args("model", Path("data")))
    assert stop.value.code == 1
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "data and split missing" in said
    assert "image file is truncated" in said
    assert "(and 1 more of " in said


# ---- model, prompts, flags -----------------------------------------------------------------------------------------


def other_architecture() -> None:
    Path("model/config.json").write_text(json.dumps({"model_type": "llava", "architectures": ["Llava"]}))


def other_language_model() -> None:
    file = Path("model/config.json")
    config = json.loads(file.read_text())
    config["llm_config"]["architectures"] = ["Phi3ForCausalLM"]
    file.write_text(json.dumps(config))


def no_words_in(text: str) -> Callable[[], Any]:
    return lambda: Path("prompts.txt").write_text(text)


def nothing() -> None:
    """The mistake is in the command line."""


FLAGS: dict[str, tuple[Callable[[], Any], tuple[str, ...], tuple[str, ...]]] = {
    "model missing": (
        nothing,
        ("--model_path", "models/Sa2VA"),
        ("models/Sa2VA: no such folder, and not a hub id that can be fetched; give a model folder",),
    ),
    "no model in the folder": (
        Path("model/config.json").unlink,
        (),
        ("model/config.json: file not found",),
    ),
    "other architecture": (
        other_architecture,
        (),
        ("model/config.json: model_type is 'llava', expected 'sa2va_chat' (an original Sa2VA) or 'sa2va'",),
    ),
    "other language model": (
        other_language_model,
        (),
        ("model/config.json: llm_config.architectures is 'Phi3ForCausalLM'; supported are Sa2VA",),
    ),
    "weights truncated": (
        lambda: truncate(Path("model/model.safetensors")),
        (),
        ("model/model.safetensors: not a whole safetensors file (", "download or copy it again"),
    ),
    "weights missing": (
        Path("model/model.safetensors").unlink,
        (),
        ("model: no .safetensors file; pickled weights are not read, convert them first",),
    ),
    "index of weights damaged": (
        lambda: Path("model/model.safetensors.index.json").write_text("{}"),
        (),
        ("model/model.safetensors.index.json: field weight_map is missing",),
    ),
    "tokenizer missing": (
        lambda: [path.unlink() for path in Path("model").glob("*token*")],
        (),
        ("model: ", "tokenizer"),
    ),
    "config incomplete": (
        lambda: Path("model/config.json").write_text(json.dumps({"model_type": "sa2va", "text_config": "qwen"})),
        (),
        ("model/config.json: vision_config is missing", "download or copy the folder again"),
    ),
    "prompts missing": (
        nothing,
        ("--prompts", "prompts.txt"),
        ("prompts.txt: cannot be read as UTF-8 text (", "give one prompt per line"),
    ),
    "prompts empty": (
        no_words_in("\n\n"),
        ("--prompts", "prompts.txt"),
        ("prompts.txt: 0 prompts found; at least 2 are needed",),
    ),
    "prompts twice": (
        no_words_in("Segment the vessel.\nx\nsegment  the vessel.\n"),
        ("--prompts", "prompts.txt"),
        ("prompts.txt: line 3: 'segment the vessel.' is already there at line 1; remove one of them",),
    ),
    "GPU absent": (
        nothing,
        ("--gpu", "7"),
        ("device is 'cuda:7', but 0 GPUs are visible; give -1, the CPU, as GPU or --gpu",),
    ),
    "n_envs 0": (nothing, ("--n_envs", "0"), ("n_envs is 0",)),
    "negative steps": (nothing, ("--total_timesteps", "-5"), ("total_timesteps is -5",)),
    "negative steps of step 1": (nothing, ("--reward_steps", "-5"), ("steps=-5:",)),
    "segment_batch 0": (nothing, ("--segment_batch", "0"), ("segment_batch is 0",)),
    "group_regex without a group": (
        nothing,
        ("--group_regex", "(.+)"),
        ("group_regex '(.+)' has no named group 'group'; write it as (?P<group>...)",),
    ),
    "reward network missing": (
        nothing,
        ("--reward_net", "nowhere"),
        ("nowhere: no reward network here (config.json not found); train one with `sa2va-rl reward quick`",),
    ),
    "output folder is a file": (
        nothing,
        ("--output_dir", "data/annotations.json"),
        (
            "data/annotations.json/",
            "cannot be written (Not a directory); name a folder in which you may write",
        ),
    ),
    "run folder holds a run": (
        lambda: Path("data/config.json").write_text("{}"),
        ("--run_folder", "data"),
        ("data: holds a run already; give a new folder, or go on with it by --resume",),
    ),
    "run folder is no run": (
        nothing,
        ("--resume", "--run_folder", "data"),
        ("--resume: data holds no run; leave --resume out to begin one there",),
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_model_prompts_and_flags(refused: Refused, case: str) -> None:
    spoil, flags, parts = FLAGS[case]
    if case == "GPU absent" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has a GPU 7")
    spoil()
    message = refused("finetune", "quick", *STANDARD, *flags)
    assert message.startswith("error: ")
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("command", "arguments", "choice", "choices"),
    [
        ("finetune", ("fast", *STANDARD), "'fast' for argument 'mode'", "('quick', 'full')"),
        (
            "evaluate",
            ("--model_path", "x", "--split", "valid"),
            "'valid' for argument '--split'",
            "('",  # in any order
        ),
        (
            "finetune",
            ("quick", *STANDARD, "--reward", "gold"),
            "'gold' for argument '--reward'",
            "('net', 'dice', 'iou'",
        ),
    ],
)
def test_a_word_that_is_no_choice(
    refused: Refused, command: str, arguments: tuple[str, ...], choice: str, choices: str
) -> None:
    assert f"invalid choice {choice}. Expected one of {choices}" in refused(command, *arguments)


def test_no_run_matches(refused: Refused) -> None:
    message = refused("evaluate", "--model_path", "outputs/sa2va_rl_finetune_*/final_model")
    assert all(part in message for part in ("outputs/sa2va_rl_finetune_*/final_model", "sa2va-rl prompts quick"))


def test_a_folder_that_is_no_policy(refused: Refused) -> None:
    for command, flags in (("evaluate", ("--model_path", "data")), ("segment", (IMAGE, "--policy", "data"))):
        message = refused(command, *flags)
        assert all(part in message for part in ("data/config.json: file not found", "final_model"))


# ---- reward network ------------------------------------------------------------------------------------------------


def save_network(train: list[str], val: list[str]) -> None:
    """An untrained reward network that says it has learned from these patients."""
    config = RewardNetworkConfig(channels=(4, 4), packing=2, members=1)
    RewardNetwork(config, {"train_groups": train, "val_groups": val}).save_pretrained("net")


def patients(split: str) -> list[str]:
    return list(make_split(read_samples(Path("data")), 0).groups[split])


@pytest.mark.parametrize("split", ["policy", "test"])
def test_a_reward_network_that_knows_the_patients(refused: Refused, split: str) -> None:
    save_network(patients(split), patients("val"))
    message = refused("finetune", "quick", *STANDARD, "--reward_net", "net")
    assert re.search(rf"net: .*trained on {len(patients(split))} patients .*{split} split", message)
    assert "sa2va-rl reward quick" in message


def test_a_reward_network_chosen_on_test_patients(refused: Refused) -> None:
    save_network(patients("reward"), patients("test"))
    message = refused("finetune", "quick", *STANDARD, "--reward_net", "net")
    assert re.search(rf"net: .*chosen on {len(patients('test'))} patients .*test split", message)


def test_a_reward_network_of_another_version(refused: Refused) -> None:
    save_network(patients("reward"), patients("val"))
    file = Path("net/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    message = refused("finetune", "quick", *STANDARD, "--reward_net", "net")
    assert re.search("net/config.json: field version is 1, this code reads 3; .*sa2va-rl reward quick", message)
