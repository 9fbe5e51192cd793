"""The command line of GRPO: what flags become, under either name, and what does not go together."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli.grpo import Args, check, main
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import Chosen, make_plan
from rl_reward_network.grpo.settings import FLAGS, GRPOPlan
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RunConfig
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.rewards.judge import JudgeConfig
from rl_reward_network.run import RUN_FILE, Run
from tests.conftest import write_tiny_data
from tests.rewards.judge_server import Reply, judge_server, listing

JUDGE_SETTINGS = {"llm_judge_base_url": "http://x/v1", "llm_judge_model": "m", "llm_judge_cache": "off"}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "regions"
    write_regions(folder, 6, 5)
    return folder


def planned(data: Path, *flags: str, mode: str = "quick", network: RewardNetwork | None = None) -> GRPOPlan:
    args = tyro.cli(Args, args=[mode, "--data_root", str(data), *flags])
    return make_plan(args, open_grpo_inputs(args.inputs, args.regions), network)


def test_the_original_names_are_flags_of_the_libraries_settings(scenes: Path) -> None:
    flags = "--kl_coef 0.1 --clip_range 0.3 --batch_size 12 --num_epochs 2 --num_iterations 2"
    settings = planned(scenes, *flags.split()).settings
    assert (settings.epsilon, settings.per_device_train_batch_size, settings.num_train_epochs) == (0.3, 12, 2)
    assert planned(scenes, "--clip_range", "0.1").settings.epsilon == 0.1, "also where it does not act"
    assert settings.beta == settings.mask_beta == 0.1
    assert settings.max_steps == -1, "epochs that are asked for count, not the preset's steps"
    named = tyro.cli(Args, args=["quick", "--data_dir", str(scenes), "--max_tiles", "3"])
    assert (named.inputs.data_root, named.regions.max_dynamic_patch) == (scenes, 3)


def test_defaults_on_the_embedded_and_on_a_real_model(scenes: Path, tmp_path: Path) -> None:
    small, real = planned(scenes), planned(scenes, "--model_path", "owner/Sa2VA-4B", mode="full")
    assert (small.lora_r, small.settings.learning_rate, small.settings.max_steps) == (16, 1e-3, 140)
    assert (real.lora_r, real.lora_alpha, real.settings.learning_rate) == (128, 256, 1e-5)
    assert (real.settings.num_train_epochs, real.settings.max_steps) == (1.0, -1)
    for plan in (small, real):
        assert plan.settings.num_generations == 4
        assert (plan.weights.iou, plan.weights.caption) == (1.0, 1.0)
        assert (plan.weights.loop2_caption, plan.weights.loop2_iou, plan.weights.learned) == (1.0, 1.0, 0.0)
    shutil.copy(EMBEDDED["sa2va-nano"] / "config.json", tmp_path)
    assert planned(scenes, "--model_path", str(tmp_path)) == small, "a copy or a merged model has its presets"
    summed = planned(scenes, "--scale_rewards", "batch").settings
    assert (small.settings.multi_objective_aggregation, small.settings.scale_rewards) == ("normalize_then_sum", None)
    assert (summed.multi_objective_aggregation, summed.scale_rewards) == ("sum_then_normalize", "batch")
    assert (small.settings.bce_weight, small.settings.dice_weight) == (2.0, 0.5)
    images = planned(write_tiny_data(tmp_path / "data"), "--objective", "supervised", "--bce_weight", "0.5").settings
    assert (images.bce_weight, images.dice_weight) == (0.5, 2.0)
    assert planned(scenes, "--lora_r", "8").lora_alpha == 16


def test_what_does_not_go_together_is_refused(scenes: Path, tmp_path: Path) -> None:
    images = write_tiny_data(tmp_path)
    for data, kind, flag, value in (
        (scenes, "captioned regions", "--group_regex", "(?P<group>.)"),
        (scenes, "captioned regions", "--segment_question", "Where?"),
        (images, "annotated images", "--max_regions", "8"),
        (images, "annotated images", "--describe_question", "What?"),
    ):
        with pytest.raises(ValueError, match=f"{flag} is for other data, but .* holds {kind}"):
            planned(data, flag, value)
    with pytest.raises(ValueError, match=r"no captions .*--reward_net"):
        planned(images)
    plan = planned(images, "--loop2_iou_weight", "1")
    assert plan.settings.mask_to_caption_weight == 0
    assert plan.weights.loop2_caption == 0


SUPERVISED, TEACHER = "--objective supervised", "--objective mean_teacher"
TRUTH = "--objective dpo --preferred_by truth"
NO_LOOP2 = "--caption_to_mask_weight 0"
IDLE = {  # settings that do nothing -> (data, the other flags of the run), and where they act
    "temperature 0.5": [("images", "--loop2_iou_weight 1"), ("regions", "--mask_to_caption_weight 0")],
    "entropy_coef 0.1": [("images", "--loop2_iou_weight 1"), ("regions", SUPERVISED)],
    "epsilon 0.1": [("images", "--loop2_iou_weight 1"), ("regions", SUPERVISED)],
    "caption_weight 1": [("images", "--loop2_iou_weight 1")],
    "mask_rewards dice 1": [("images", SUPERVISED)],
    "use_llm_judge": [("images", "--loop2_iou_weight 1"), ("regions", "--mask_to_caption_weight 0")],
    "mask_to_caption_weight 2": [("images", "--loop2_iou_weight 1")],
    "max_completion_length 30": [("images", SUPERVISED)],
    "caption_to_mask_weight 0.5": [("images", TEACHER), ("images", TRUTH)],
    "beta 0.1": [("regions", SUPERVISED)],
    "log_completions": [("regions", SUPERVISED)],
    "shuffle_rewards": [("regions", SUPERVISED), ("images", TRUTH)],
    "pathwise_weight 1": [("images", SUPERVISED)],
    "scale_rewards batch": [("regions", SUPERVISED)],
    "num_mask_generations 4": [("regions", NO_LOOP2), ("images", SUPERVISED)],
    "mask_policy gaussian": [("regions", NO_LOOP2), ("images", SUPERVISED)],
    "ema_decay 0.9": [("images", "--loop2_iou_weight 1"), ("regions", SUPERVISED)],
    "loop2_iou_weight 2": [("regions", NO_LOOP2), ("images", TRUTH)],
    "confidence_weight 1": [("regions", NO_LOOP2), ("regions", SUPERVISED)],
    "loop2_mask_rewards dice 1": [("regions", NO_LOOP2)],
    "loop2_caption_weight 2": [("images", "--loop2_iou_weight 1"), ("regions", NO_LOOP2)],
    "use_llm_judge_loop2": [("images", "--loop2_iou_weight 1"), ("regions", NO_LOOP2)],
    **{f"{name} {value}": [("regions", "")] for name, value in JUDGE_SETTINGS.items()},
    "bce_weight 1": [("regions", ""), ("regions", f"{SUPERVISED} {NO_LOOP2}")],
    "dice_weight 1": [("images", "--loop2_iou_weight 1")],
    "cldice_weight 1": [("regions", ""), ("network", "--pathwise_weight 0"), ("images", TRUTH)],
    "contrast_weight 0.5": [("images", SUPERVISED), ("regions", SUPERVISED), ("images", TEACHER), ("images", TRUTH)],
    "max_labelled 5": [("images", "--loop2_iou_weight 1"), ("images", TRUTH)],
    "consistency_weight 0.5": [("images", SUPERVISED)],
    "preferred_by truth": [("images", SUPERVISED)],
    "side_learning_rate 0.01": [("images", SUPERVISED), ("regions", "")],
    "freeze_embeddings": [("regions", ""), ("images", SUPERVISED)],
    "max_dynamic_patch 4": [("regions", "--model_path QWEN"), ("images", f"{SUPERVISED} --model_path QWEN")],
}
ACTING = (
    ("regions", "--temperature 0.5 --entropy_coef 0.1 --epsilon 0.1 --scale_rewards batch --beta 0.1"),
    ("regions", "--max_completion_length 30 --caption_weight 2 --mask_rewards dice 1 --ema_decay 0.9"),
    ("regions", f"{SUPERVISED} --mask_to_caption_weight 2 --caption_to_mask_weight 2 --bce_weight 1"),
    ("regions", "--model_path QWEN --freeze_embeddings"),
    ("regions", "--model_path owner/Sa2VA-4B --freeze_embeddings --max_dynamic_patch 4"),
    ("regions", "--mask_policy gaussian --num_mask_generations 4 --confidence_weight 1"),
    ("regions", "--loop2_caption_weight 2 --loop2_mask_rewards dice 1 --shuffle_rewards"),
    ("network", f"{NO_LOOP2} --cldice_weight 1 --num_mask_generations 4"),
    ("network", "--mask_policy bernoulli --side_network --side_learning_rate 0.1"),
    ("images", f"{SUPERVISED} --cldice_weight 1 --max_labelled 5 --dice_weight 1 --encoder full"),
    ("images", f"{TEACHER} --ema_decay 0.9 --consistency_weight 2 --max_labelled 5 --bce_weight 2"),
    ("images", f"{TRUTH} --bce_weight 2 --num_mask_generations 4"),
)


def value_of(words: list[str]) -> Any:
    """What the words of a flag mean, without the parser, which takes a tenth of a second."""
    if len(words) == 2:
        return {words[0]: float(words[1])}
    return yaml.safe_load(words[0]) if words else True


def with_values(settings: Any, values: dict[str, Any]) -> Any:
    """Settings with the values of their fields, and of the fields of settings inside them."""
    nested = {field.name: getattr(settings, field.name) for field in fields(settings)}
    inner = {name: with_values(part, values) for name, part in nested.items() if is_dataclass(part)}
    return replace(settings, **inner, **{name: values[name] for name in nested.keys() & values.keys()})


@pytest.fixture(scope="module")
def plan_on(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GRPOPlan]:
    """A plan of some flags, on captioned regions, on images, or on images with a reward network."""
    images = write_tiny_data(tmp_path_factory.mktemp("data"))
    network = RewardNetwork(RewardNetworkConfig(channels=(8,), packing=2))
    of_images, of_regions = (open_grpo_inputs(RunConfig(data_root=root, gpu=-1)) for root in (images, scenes))

    qwen = tmp_path_factory.mktemp("qwen")
    write_json(qwen / "config.json", {"text_config": {"model_type": "qwen3_vl_text", "hidden_size": 2048}})

    def plan(data: str, flags: str) -> GRPOPlan:
        words = [part.split() for part in flags.replace("QWEN", str(qwen)).split("--")[1:]]
        args = with_values(Args("quick"), {name: value_of(values) for name, *values in words})
        return make_plan(args, of_regions if data == "regions" else of_images, network if data == "network" else None)

    return plan


def test_every_setting_that_would_do_nothing_is_refused(plan_on: Callable[..., GRPOPlan]) -> None:
    """By its name, its value, and what would make it act; where it acts it is not."""
    flags_of_table = {name for names in Chosen(Args(), False).acting() for name in names.split()}
    assert {flag.split()[0] for flag in IDLE} == flags_of_table
    for flag, runs in IDLE.items():
        for data, others in runs:
            name = FLAGS.get(flag.split()[0], flag.split()[0])
            with pytest.raises(ValueError, match=f"^--{name}\\b.* does nothing in this run: it acts "):
                plan_on(data, f"{others} --{flag}")
    for data, flags in ACTING:
        assert plan_on(data, flags)


def test_a_reward_network_pays_on_images_and_its_gradient_is_followed(scenes: Path, tmp_path: Path) -> None:
    images, network = write_tiny_data(tmp_path), RewardNetwork(RewardNetworkConfig(channels=(8,), packing=2))
    plan = planned(images, network=network)
    assert (plan.weights.learned, plan.weights.loop2_iou, plan.settings.pathwise_weight) == (1.0, 0.0, 1.0)
    assert plan.settings.mask_policy == "gaussian"
    for flags in (["--pathwise_weight", "0"], ["--shuffle_rewards"], ["--objective", "supervised"]):
        assert planned(images, *flags, network=network).settings.pathwise_weight == 0
    assert planned(scenes, network=network).settings.pathwise_weight == 0
    for model in ("sa2va-nano", "ByteDance/Sa2VA-4B"):
        assert planned(scenes, "--model_path", model).settings.mask_policy == "bernoulli"


def test_rewards_by_name_and_loops_of_a_judge(scenes: Path, tmp_path: Path) -> None:
    both = ["--mask_rewards", "dice", "0.5", "--loop2_mask_rewards", "cldice", "2", "recall", "1"]
    assert planned(scenes, *both).mask_rewards == {"loop1": {"dice": 0.5}, "loop2": {"cldice": 2.0, "recall": 1.0}}
    images = write_tiny_data(tmp_path)
    assert planned(images, *both[3:]).mask_rewards == {"loop2": {"cldice": 2.0, "recall": 1.0}}
    assert (planned(scenes).mask_rewards, planned(scenes).judge) == (None, None)
    one, two = "--use_llm_judge", "--use_llm_judge_loop2"
    for flags, loops in (([one], ["loop1"]), ([two], ["loop2"]), ([one, two], ["loop1", "loop2"])):
        facts = planned(scenes, *flags, "--llm_judge_model", "m", "--llm_judge_base_url", "http://x/v1").judge
        assert facts == {"base_url": "http://x/v1", "model": "m", "loops": loops}
    assert planned(scenes, one, "--llm_judge_cache", "off") == planned(scenes, one), "this changes no run"


@pytest.mark.parametrize(
    ("flag", "models"), [("--use_llm_judge", listing("the-only-one")), ("--use_llm_judge_loop2", None)]
)
def test_a_judge_from_the_command_line(
    scenes: Path, tmp_path: Path, flag: str, models: Reply | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def no_training(inputs: GRPOInputs, plan: GRPOPlan, run: Run, judge: Any, *_: Any) -> None:
        calls.append((plan, judge))
        write_json(run / "final_model" / "config.json", {})

    monkeypatch.setattr("rl_reward_network.grpo.stage.run_grpo_stage", no_training)
    extra = [flag, "--output_dir", str(tmp_path)]
    for name, value in (JUDGE_SETTINGS if models is None else {}).items():
        extra += [f"--{name}", value]
    with judge_server(lambda prompt: "A", models) as server:
        main(tyro.cli(Args, args=["quick", "--data_root", str(scenes), *extra, "--llm_judge_base_url", server.url]))
    ((plan, judge),) = calls
    name, loop, cache = ("m", "loop2", None) if models is None else ("the-only-one", "loop1", tmp_path / "llm_judge")
    assert plan.judge == {"base_url": server.url, "model": name, "loops": [loop]}
    assert judge.config == JudgeConfig(server.url, name, cache_path=cache)
    assert cache or not list(tmp_path.glob("llm_judge"))


@pytest.mark.parametrize("masks", [True, False])
def test_what_nothing_can_judge_is_left_to_no_evaluation(
    masks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell file evaluates a run that is named to it; without masks and a network it would end in an error."""
    trained = "rl_reward_network.grpo.stage.run_grpo_stage"
    monkeypatch.setattr(trained, lambda _, __, run, *___: write_json(run / "final_model" / "config.json", {}))
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "named"))
    data = write_tiny_data(tmp_path / "data")
    if not masks:
        records = [{**one, "mask_png": None} for one in read_json(data / "annotations.json")]
        write_json(data / "annotations.json", records)
    flags = ["--loop2_iou_weight", "0", "--confidence_weight", "1", "--output_dir", str(tmp_path / "out")]
    main(tyro.cli(Args, args=["quick", "--data_root", str(data), *flags]))
    assert (tmp_path / "named").exists() == masks
    assert ("no evaluation: none of " in capsys.readouterr().out) != masks


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--per_device_batch_size 1", (4, 1)),
        ("--batch_size 2", (4, 1)),
        ("--batch_size 3 --gradient_accumulation_steps 4", (4, 3)),
        ("--batch_size 1 --gradient_accumulation_steps 8", (4, 2)),
        ("--batch_size 2 --gradient_accumulation_steps 3", (4, 2)),
        ("--batch_size 4 --num_generations 8 --gradient_accumulation_steps 2", (8, 1)),
        ("--batch_size 2 --objective supervised", (4, 1)),
        ("--batch_size 4 --gradient_accumulation_steps 2", (4, 2)),
    ],
)
def test_a_batch_smaller_than_a_group_is_a_whole_one(scenes: Path, flags: str, expected: tuple[int, int]) -> None:
    settings = planned(scenes, *flags.split()).settings
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch_size", "6"], "batch_size is 6 generations, not divisible by num_generations 4"),
        (["--gpu", "3"], "gpu is 3, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES=3"),
        (["--pathwise_weight", "1"], r"pathwise_weight is 1.0, but there is no reward network; give --reward_net"),
        (["--num_iterations", "3"], "save_steps is 50, not a multiple of num_iterations 3"),
        (["--batch_size", "400"], "training prompts, but one optimisation step takes 100; lower batch_size"),
        (["--dataset_name", "dam"], "dataset_name is 'dam'"),
        (
            ["--use_llm_judge", "--llm_judge_model", "m", "--llm_judge_base_url", "http://127.0.0.1:9/v1"],
            r"LLM judge http://127\.0\.0\.1:9/v1, model 'm': no connection .*; check that the server runs",
        ),
        (["--max_steps", "3", "--num_epochs", "1"], "--num_epochs and --max_steps"),
        (["--max_labelled", "5"], "--max_labelled 5 does nothing in this run: it acts with --objective supervised"),
        (["--mask_to_caption_weight", "0", "--caption_to_mask_weight", "0"], "are both 0: nothing would be trained"),
        (["--objective", "supervised", "--bce_weight", "0", "--dice_weight", "0"], "bce_weight and dice_weight are bo"),
        (["--batch_size", "1", "--gradient_accumulation_steps", "-1"], "gradient_accumulation_steps is -1"),
        (["--shuffle_rewards", "--pathwise_weight", "1"], "--shuffle_rewards .* --pathwise_weight"),
    ],
)
def test_bad_flags_end_before_anything_is_written(
    scenes: Path, tmp_path: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(ValueError, match=message):
        main(tyro.cli(Args, args=["quick", "--data_root", str(scenes), "--output_dir", str(tmp_path / "out"), *flags]))
    assert not list((tmp_path / "out").glob("sa2va_grpo_*"))


@pytest.mark.parametrize("package", [None, "openai"])
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_is_read(
    tmp_path: Path, package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shell file asks first (`check`), and the command itself; no data are there."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if package is not None:
        monkeypatch.setitem(sys.modules, package, None)
    no_package = "the package openai; in the project folder: "
    message = no_package if package else r"127\.0\.0\.1:9/v1.*\(--llm_judge_base_url\)"
    words = ["full", "--data_root", str(DEFAULT_REGIONS), "--output_dir", str(tmp_path / "out"), "--use_llm_judge"]
    args = tyro.cli(Args, args=[*words, "--llm_judge_base_url", "http://127.0.0.1:9/v1"])
    monkeypatch.setattr("rl_reward_network.grpo.inputs.open_grpo_inputs", lambda *_: pytest.fail("read"))
    for call in (check, main):
        with pytest.raises(ValueError, match=message):
            call(args)
    assert not list(tmp_path.iterdir())


def test_a_reward_network_that_may_know_the_patients_is_refused(tmp_path: Path) -> None:
    images = write_tiny_data(tmp_path / "data")
    RewardNetwork(RewardNetworkConfig(channels=(8,), packing=2)).save_pretrained(tmp_path / "net")
    flags = ["quick", "--data_root", str(images), "--reward_net", str(tmp_path / "net"), "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match=r"net: train_groups is missing.*; train"):
        main(tyro.cli(Args, args=flags))
    assert not list(tmp_path.glob("sa2va_grpo_*"))


def test_a_run_from_the_command_line_ends_in_a_model_and_goes_on(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["quick", "--data_root", str(scenes), "--output_dir", str(tmp_path)]
    flags += ["--batch_size", "8", "--max_steps", "2", "--eval_steps", "0", "--save_steps", "1"]
    main(tyro.cli(Args, args=flags))
    output = capsys.readouterr().out
    (folder,) = tmp_path.glob("sa2va_grpo_*")
    model = f"fine-tuned model: {folder / 'final_model'}"
    assert output.rstrip().endswith(f"{model}\nsegment new images: sa2va-rl segment IMAGES --model_path {folder}")
    assert output.startswith(f"run folder: {folder}\ndata: Grasp-Any-Region, 1 shard")
    assert "\nbatch_size 8 counts captions, not regions: 2 x 4 captions per process and forward pass\n" in output
    main(tyro.cli(Args, args=[*flags, "--resume"]))
    output = capsys.readouterr().out
    assert "nothing to resume: this run is finished" in output
    assert f"run folder: {folder}, finished\n" in output
    message = rf"(?s)--resume: no sa2va_grpo run .*{folder}: finished; differs in seed was 0, now 1$"
    with pytest.raises(ValueError, match=message):
        main(tyro.cli(Args, args=[*flags, "--resume", "--seed", "1"]))
    with pytest.raises(ValueError, match=r"--resume: .*nowhere"):
        main(tyro.cli(Args, args=[*flags, "--resume", "--run_folder", str(tmp_path / "nowhere")]))
    assert len(list(tmp_path.glob("sa2va_grpo_*"))) == 1
