"""The command lines of the original specification: each is parsed, with the meaning that it has there."""

import copy
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import tyro
from torch.utils.data import DataLoader

from rl_reward_network import specification
from rl_reward_network.cli import evaluate as evaluate_rl_finetuned_sa2va
from rl_reward_network.cli import grpo as train_sa2va_rl
from rl_reward_network.cli import prompts as finetune_sa2va_with_rl
from rl_reward_network.cli import reward as train_reward_network
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.grpo.final_model import card_text
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import check_config, open_grpo_inputs
from rl_reward_network.grpo.plan import make_plan
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RegionConfig, RunConfig
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.metrics import meteor
from rl_reward_network.run import POLICY_RUN

ROOT = Path(__file__).resolve().parents[1]
GRPO = "--model_path M/4B --data_dir D --output_dir O"
LINES = {
    "document A": f"{GRPO} --batch_size 4 --num_generations 4 --learning_rate 1e-5 --num_epochs 1 --use_llm_judge "
    "--llm_judge_base_url http://127.0.0.1:8000/v1",
    "document A, loop 2": f"{GRPO} --batch_size 4 --num_generations 4 --learning_rate 1e-5 --num_epochs 1 "
    "--use_llm_judge --use_llm_judge_loop2 --llm_judge_base_url http://127.0.0.1:8000/v1",
    "document B": "--model_path M/4B --dataset_name HaochenWang/Grasp-Any-Region-Dataset --output_dir O --num_epochs 2 "
    "--num_generations 4",
    "document B, knobs": f"{GRPO} --per_device_batch_size 8 --kl_coef 0.1 --clip_range 0.2 --learning_rate 1e-6 "
    "--mask_to_caption_weight 1.0 --caption_to_mask_weight 0.5 --warmup_steps 100 --max_grad_norm 0.5 "
    "--gradient_checkpointing --temperature 0.9 --entropy_coef 0.01 --use_flash_attn",
}
STEP_2 = (
    "quick --model_path M --data_dir D --total_timesteps 2000 --n_envs 2 --learning_rate 3e-4 --gamma 0.9 "
    "--gae_lambda 0.8 --clip_range 0.1 --ent_coef 0.01 --vf_coef 0.4 --batch_size 64 --n_epochs 7"
)


def grpo(line: str) -> Any:
    return tyro.cli(train_sa2va_rl.Args, args=shlex.split(line))


def checked(line: str) -> tuple[RunConfig, RegionConfig]:
    args = grpo(line)
    return check_config(args.inputs, args.regions)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "regions"
    write_regions(folder, 4, 5)
    return folder


@pytest.mark.parametrize("name", LINES)
def test_every_line_of_grpo_is_taken_and_runs_in_full(name: str) -> None:
    args = grpo(LINES[name])
    assert (args.mode, args.inputs.model_path, args.inputs.output_dir) == ("full", "M/4B", Path("O"))
    assert args.grpo.num_generations == 4
    assert args.rewards.use_llm_judge == ("judge" in LINES[name])
    assert args.rewards.use_llm_judge_loop2 == ("loop2" in LINES[name])


def planned(line: str, scenes: Path) -> GRPOPlan:
    args = grpo(line.replace("--data_dir D", f"--data_dir {shlex.quote(str(scenes))}").replace("--use_flash_attn", ""))
    return make_plan(args, open_grpo_inputs(args.inputs, args.regions), None)


def test_what_the_lines_of_document_a_mean(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = planned(LINES["document A"].split(" --use_llm_judge")[0], scenes).settings
    named = ("per_device_train_batch_size", "num_generations", "learning_rate", "num_train_epochs", "max_steps")
    assert [getattr(settings, name) for name in named] == [4, 4, 1e-5, 1.0, -1]


def test_what_the_knobs_of_document_b_mean(scenes: Path) -> None:
    settings = planned(LINES["document B, knobs"], scenes).settings
    expected = {
        "per_device_train_batch_size": 8,
        "beta": 0.1,
        "mask_beta": 0.1,
        "epsilon": 0.2,
        "learning_rate": 1e-6,
        "mask_to_caption_weight": 1.0,
        "caption_to_mask_weight": 0.5,
        "warmup_steps": 100,
        "max_grad_norm": 0.5,
        "activation_checkpointing": True,
        "temperature": 0.9,
        "entropy_coef": 0.01,
    }
    assert {name: getattr(settings, name) for name in expected} == expected
    assert grpo(LINES["document B, knobs"]).regions.use_flash_attn


@pytest.mark.parametrize("name", ["auto", "gar", "dam", "annotations"])
def test_dataset_name_takes_a_kind(name: str) -> None:
    config, regions = checked(f"--data_root D --dataset_name {name}")
    assert (regions.dataset_name, config.data_root) == (name, Path("D"))


def test_dataset_name_takes_a_hub_id_or_a_folder(tmp_path: Path) -> None:
    hub = "HaochenWang/Grasp-Any-Region-Dataset"
    for name in (hub, str(tmp_path)):
        for line in (f"--dataset_name {name}", f"--dataset_name {name} --data_root {name}"):
            config, regions = checked(f"{line} --model_path M")
            assert (regions.dataset_name, config.data_root) == ("auto", Path(name)), line
        with pytest.raises(ValueError, match=rf"^dataset_name is {name}, but data_root is D"):
            checked(f"--dataset_name {name} --data_root D")
    with pytest.raises(
        ValueError, match=r"^dataset_name is 'gra', expected one of auto, gar, dam, names, annotations, a hub id"
    ):
        checked("--dataset_name gra")


def test_a_model_of_ones_own_never_works_on_rendered_data_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_reward_network.grpo.inputs.embedded_regions", lambda *_: pytest.fail("rendered"))
    message = r"^model_path is M, .*DATA_ROOT or --data_root"
    for line in ("--model_path M", "--model_path M --dataset_name gar"):
        args = grpo(line)
        for call in (train_sa2va_rl.check, train_sa2va_rl.main):
            with pytest.raises(ValueError, match=message):
                call(args)
    for command in (finetune_sa2va_with_rl, train_reward_network):
        args = tyro.cli(command.Args, args=["quick", "--model_path", "M"])
        for call in (command.check, command.main):
            with pytest.raises(ValueError, match=message):
                call(args)
        command.check(tyro.cli(command.Args, args=["quick", "--model_path", "M", "--data_root", "data/angiograms"]))
    train_sa2va_rl.check(grpo(f"--model_path M --data_root {DEFAULT_REGIONS}"))
    train_sa2va_rl.check(grpo(""))


def test_a_gpu_that_is_not_there_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    message = r"^device is 'cuda:0', but 0 GPUs .*--gpu"
    for command, line in (
        (train_sa2va_rl, "--data_root nowhere --gpu 0"),
        (finetune_sa2va_with_rl, "quick --data_root nowhere --gpu 0"),
        (train_reward_network, "quick --data_root nowhere --gpu 0"),
    ):
        for call in (command.check, command.main):
            with pytest.raises(ValueError, match=message):
                call(tyro.cli(command.Args, args=line.split()))


def test_flash_attention_needs_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"use_flash_attn .*device='cpu'; leave it out"):
        checked("--use_flash_attn --gpu -1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("rl_reward_network.models.sa2va.loading_sa2va.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"use_flash_attn: .*pip install flash-attn"):
        checked("--use_flash_attn --gpu 0")


def test_the_settings_of_step_2(capsys: pytest.CaptureFixture[str]) -> None:
    args = tyro.cli(finetune_sa2va_with_rl.Args, args=STEP_2.split())
    ppo = finetune_sa2va_with_rl.check(args)[0].ppo
    assert (ppo.gamma, ppo.gae_lambda, ppo.clip_range, ppo.vf_coef, ppo.n_epochs) == (0.9, 0.8, 0.1, 0.4, 7)
    assert (args.inputs.data_root, ppo.total_timesteps, ppo.batch_size) == (Path("D"), 2000, 64)
    usual = finetune_sa2va_with_rl.check(tyro.cli(finetune_sa2va_with_rl.Args, args=["quick"]))[0].ppo
    assert (usual.gamma, usual.gae_lambda, usual.clip_range, usual.vf_coef, usual.n_epochs) == (
        0.99,
        0.95,
        0.2,
        0.5,
        10,
    )


def test_runs_of_experiment_1_have_a_name_of_their_own() -> None:
    """It begins like step 2's, which are found by it."""
    for line, more in (("quick", ""), ("quick --reward dice", "_experiment1")):
        args = tyro.cli(finetune_sa2va_with_rl.Args, args=line.split())
        assert finetune_sa2va_with_rl.check(args)[0].kind.prefix == f"{POLICY_RUN.prefix}{more}"


def test_the_evaluation() -> None:
    line = "--model_path outputs/RUN/final_model --split test"
    assert tyro.cli(evaluate_rl_finetuned_sa2va.Args, args=line.split()).split == "test"


# ---- names that its users import --------------------------------------------------------------------------------


class Judge:
    """Scores that are set, one of them missing."""

    counts: ClassVar[dict[str, int]] = {}

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> list[float | None]:
        assert (list(predictions), list(references)) == (PREDICTED, TRUE), "ours takes predictions first"
        return [-1.0, None]

    def note(self, **counts: int) -> None:
        """Nothing is counted."""


TRUE, PREDICTED = ["a red ball on the left", "a dog"], ["a red ball", "a dog"]


def test_iou_of_two_arrays_and_meteor_in_its_order() -> None:
    left, right = np.zeros((4, 6), np.uint8), np.zeros((4, 6), np.uint8)
    left[:, :4], right[:, 2:] = 1, 1
    assert specification.compute_iou(left, right) == pytest.approx(2 / 6)
    assert specification.compute_iou(torch.from_numpy(left), right * 255) == pytest.approx(2 / 6)
    assert specification.compute_iou(left * 0.9, right * 0.1) == 0
    assert specification.compute_iou(left * 0, right * 0) == 1
    with pytest.raises(ValueError, match=r"got \(1, 4, 6\) and \(1, 4, 5\)"):
        specification.compute_iou(left, right[:, :5])
    assert specification.compute_meteor(TRUE[0], PREDICTED[0]) == pytest.approx(meteor(PREDICTED[:1], TRUE[:1])[0])
    assert specification.compute_meteor(TRUE[0], PREDICTED[0]) != specification.compute_meteor(PREDICTED[0], TRUE[0])
    assert specification.compute_meteor(TRUE[0], "") == 0


def test_caption_rewards_of_both_loops() -> None:
    alone = [float(score) for score in meteor(PREDICTED, TRUE)]
    judged = [0.25 * alone[0] - 0.75, alone[1]]
    given: dict[str, Any] = {"gt_captions": TRUE, "llm_judge": Judge(), "images": "what else TRL passes"}
    combined = specification.combined_caption_reward
    assert combined(TRUE, PREDICTED) == combined(TRUE, PREDICTED, None, use_llm_judge=True) == alone
    assert combined(TRUE, PREDICTED, Judge()) == alone
    assert combined(TRUE, PREDICTED, Judge(), True) == pytest.approx(judged)
    weighted = combined(TRUE, PREDICTED, Judge(), True, meteor_weight=0.5, llm_judge_weight=0.5)
    assert weighted == pytest.approx([0.5 * alone[0] - 0.5, alone[1]])
    assert specification.loop1_caption_reward(None, PREDICTED, **given) == pytest.approx(judged)
    assert specification.loop1_caption_reward(None, PREDICTED, gt_captions=TRUE) == alone
    assert specification.loop2_caption_reward(None, PREDICTED, **given) == alone
    asked = specification.loop2_caption_reward(None, PREDICTED, use_llm_judge_loop2=True, **given)
    assert asked == pytest.approx(judged)


def test_items_and_batches_of_regions(scenes: Path) -> None:
    data = specification.GraspAnyRegionDataset(scenes)
    loader = DataLoader(data, batch_size=3, collate_fn=specification.collate_fn_sa2va_rl)  # type: ignore[arg-type]
    batch = next(iter(loader))
    assert {name: len(values) for name, values in batch.items()} == {"images": 3, "masks": 3, "captions": 3}
    image, mask = data.regions[1].load()
    assert np.array_equal(np.asarray(batch["images"][1]), image)
    assert np.array_equal(batch["masks"][1], mask)
    assert batch["captions"][1] == data.regions[1].caption
    part = specification.GraspAnyRegionDataset(scenes.parent, [scenes.name])
    assert len(part) == len(data) == len(list(part)) > 3


def test_the_average_is_a_model_of_its_own() -> None:
    student = torch.nn.Linear(2, 1, bias=False)
    before = student.weight.detach().clone()
    average = specification.EMAModel(student, decay=0.9)
    with torch.no_grad():
        student.weight.add_(1)
    average.update(student)
    assert torch.allclose(average.weight, before + 0.1)
    assert average.in_features == 2
    assert torch.allclose(average(torch.ones(1, 2)), (before + 0.1).sum())
    assert not average.weight.requires_grad
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = average.no_such_name
    for again in (copy.deepcopy(average), pickle.loads(pickle.dumps(average))):
        assert torch.equal(again.weight, average.weight)
        assert again.decay == 0.9


def test_the_average_has_the_students_running_statistics() -> None:
    student = torch.nn.Sequential(torch.nn.BatchNorm2d(2)).train()
    average = specification.EMAModel(student, decay=0.9)
    images = torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 5 + 20
    with torch.no_grad():
        for _ in range(100):
            student(images)
            average.update(student)
        assert torch.equal(average(images), student.eval()(images))
    assert average.get_buffer("0.running_mean").min() > 19


def test_its_other_names_are_ours() -> None:
    assert specification.Sa2VADataPreprocessor is Sa2VAProcessor
    assert specification.create_model_card is card_text
    assert Sa2VAGRPOConfig(output_dir="unused", use_cpu=True).learning_rate == 1e-5
    assert len((ROOT / "rl_reward_network" / "specification.py").read_text().splitlines()) <= 130
    assert {getattr(specification, name).__name__ for name in ("setup_lora", "wrap_llm_lora")} == {"setup_lora"}
    assert specification.iou_reward_batch([np.eye(2), np.zeros((2, 2))], [np.ones((2, 2)), np.eye(2)]) == [0.5, 0]
    words = [float(score) for score in meteor(PREDICTED, TRUE)]
    assert specification.meteor_reward_batch(TRUE, PREDICTED) == words
    assert specification.compute_caption_reward(TRUE[0], PREDICTED[0], meteor_weight=0.5) == words[0]
    assert specification.evaluate_caption_similarity("a", "b", SimpleNamespace(scores=lambda p, r: [(p, r)])) == (
        *(["b"], ["a"]),
    )
    ids = (SimpleNamespace(bos_token_id=bos, eos_token_id=eos) for bos, eos in ((None, 7), (1, [2, 3])))
    assert [specification.get_bos_eos_token_ids(one) for one in ids] == [([], [7]), ([1], [2, 3])]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = specification.no_such_name


def test_the_model_is_returned_alone_with_the_parts_under_their_names() -> None:
    """They are properties: nothing is trained, saved or counted twice."""
    model = specification.load_sa2va_model("sa2va-nano", device="cpu")
    parts = ("vision_model", "language_model", "mlp1", "text_hidden_fcs")
    sam = [getattr(model.grounding_encoder, name) for name in ("image_encoder", "mask_decoder", "prompt_encoder")]
    modules = [*(getattr(model, name) for name in parts), *sam, model.model, model.grounding_encoder]
    everything = set(map(id, model.modules()))
    assert all(id(module) in everything and any(True for _ in module.parameters()) for module in modules)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert not [name for name in names if any(part in name.split(".") for part in ("image_encoder", "mlp1"))]
    again = copy.deepcopy(model).grounding_encoder
    assert again.image_encoder is again.vision_encoder is not model.grounding_encoder.vision_encoder
    for parameter in model.grounding_encoder.image_encoder.parameters():
        parameter.requires_grad_(False)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "grounding_encoder.vision_encoder" in n)
    processor = Sa2VAProcessor.from_pretrained("sa2va-nano")
    example = {"conversation": [{"input": "<image>What is it?", "output": "It is [SEG]."}]}
    encoded = specification.video_lisa_encode_fn(example, processor, image_tokens=4)
    assert torch.equal(encoded["labels"][encoded["labels"] != -100], torch.tensor(processor.answer_ids("It is [SEG].")))
    with pytest.raises(ValueError, match=r"device is 'cuda:99', .*device='cpu'"):
        specification.load_sa2va_model("sa2va-nano", "cuda:99")


# ---- docs/reference/specification.md ---------------------------------------------------------------------------------


def names_of_ours() -> set[str]:
    """What the second column of its tables calls by name."""
    page = (ROOT / "docs/reference/specification.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line[:1] == "|"]
    return {name for row in rows[2:] for name in re.findall(r"`([^`]+)`", row[2])}


def test_every_name_of_ours_in_the_table_exists() -> None:
    files = [*(ROOT / "rl_reward_network").rglob("*.py"), *(ROOT / "scripts").iterdir(), *ROOT.glob("run_*.sh")]
    source = "\n".join(path.read_text() for path in files if path.is_file())
    paths = {path.relative_to(ROOT).as_posix() for path in files}
    assert len(names_of_ours()) > 40
    for name in names_of_ours():
        known = name.split("(")[0].removeprefix("--")
        wanted = re.escape(known).replace("_", "[-_]")
        assert any(path.endswith(known) for path in paths) or re.search(rf"(?<!\w){wanted}(?!\w)", source), name


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "scripts").glob("*_*.py"))])
def test_a_launcher_starts_from_the_root_of_the_project(name: str) -> None:
    done = subprocess.run([sys.executable, name, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"usage: python {name} "), done.stderr
