"""The command line of GRPO: what flags become, under either name, and what does not go together."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tyro

from rl_reward_network.artefacts import write_json
from rl_reward_network.cli.grpo import Args, main
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import make_plan
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.rewards.judge_client import JudgeConfig
from rl_reward_network.run import Run
from tests.conftest import write_tiny_data
from tests.rewards.judge_server import Reply, judge_server, listing

JUDGE_SETTINGS = {
    "llm_judge_base_url": "http://x/v1",
    "llm_judge_model": "m",
    "llm_judge_timeout": "7",
    "llm_judge_retries": "3",
    "llm_judge_concurrency": "2",
    "llm_judge_cache": "off",
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "regions"
    write_regions(folder, 6, 5)
    return folder


def planned(data: Path, *flags: str, mode: str = "quick", network: RewardNetwork | None = None) -> GRPOPlan:
    args = tyro.cli(Args, args=[mode, "--data_root", str(data), *flags])
    return make_plan(args, world_of(args), network)


def world_of(args: Any) -> GRPOInputs:
    return open_grpo_inputs(args.inputs, args.regions)


def test_the_original_names_and_those_of_the_libraries_mean_the_same(scenes: Path) -> None:
    twice = "--num_iterations 2"
    theirs = planned(scenes, *f"--kl_coef 0.1 --clip_range 0.3 --batch_size 12 --num_epochs 2 {twice}".split())
    ours = "--beta 0.1 --epsilon 0.3 --per_device_train_batch_size 12 --num_train_epochs 2"
    assert planned(scenes, *f"{ours} {twice}".split()) == theirs
    assert planned(scenes, "--clip_range", "0.1").settings.epsilon == 0.1, "also where it does not act"
    assert theirs.settings.beta == theirs.settings.mask_beta == 0.1
    assert theirs.settings.max_steps == -1, "epochs that are asked for count, not the preset's steps"
    named = tyro.cli(Args, args=["quick", "--data_dir", str(scenes), "--max_tiles", "3"])
    assert (named.inputs.data_root, named.regions.max_dynamic_patch) == (scenes, 3)


def test_defaults_on_the_embedded_and_on_a_real_model(scenes: Path, tmp_path: Path) -> None:
    small, real = planned(scenes), planned(scenes, "--model_path", "owner/Sa2VA-4B", mode="full")
    assert (small.lora_r, small.settings.learning_rate, small.settings.max_steps) == (16, 1e-3, 140)
    assert (real.lora_r, real.lora_alpha, real.settings.learning_rate) == (128, 256, 1e-5)
    assert (real.settings.num_train_epochs, real.settings.max_steps) == (3.0, -1)
    for plan in (small, real):
        assert plan.settings.num_generations == 4
        assert (plan.weights.iou, plan.weights.caption) == (1.0, 1.0)
        assert (plan.weights.loop2_caption, plan.weights.loop2_iou, plan.weights.learned) == (1.0, 1.0, 0.0)
    shutil.copy(EMBEDDED["sa2va-nano"] / "config.json", tmp_path)
    assert planned(scenes, "--model_path", str(tmp_path)) == small, "a copy or a merged model has its presets"
    assert planned(scenes, "--no_ema").settings.ema_decay == 0
    assert (small.settings.bce_weight, small.settings.dice_weight) == (2.0, 0.5)
    images = planned(write_tiny_data(tmp_path / "data"), "--objective", "supervised", "--bce_weight", "0.5").settings
    assert (images.bce_weight, images.dice_weight) == (0.5, 2.0)
    assert planned(scenes, "--lora_r", "8").lora_alpha == 16


def test_what_does_not_go_together_is_refused(scenes: Path, tmp_path: Path) -> None:
    for name, value in JUDGE_SETTINGS.items():
        with pytest.raises(ValueError, match=f"--{name} does nothing without --use_llm_judge or --use_llm_judge_loop2"):
            planned(scenes, f"--{name}", value)
    for flag, weight in (("use_llm_judge", "mask_to_caption"), ("use_llm_judge_loop2", "caption_to_mask")):
        with pytest.raises(ValueError, match=f"--{flag} does nothing in a loop that --{weight}_weight 0 leaves out"):
            planned(scenes, f"--{flag}", f"--{weight}_weight", "0")
    for flags in (["--group_regex", "(?P<group>.)"], ["--segment_question", "Where?"]):
        with pytest.raises(ValueError, match=f"{flags[0]} is for other data, but .* holds captioned regions"):
            planned(scenes, *flags)
    with pytest.raises(ValueError, match="--objective supervised has no rewards"):
        planned(scenes, "--objective", "supervised", "--iou_weight", "2")
    images = write_tiny_data(tmp_path)
    for flags in (["--max_regions", "8"], ["--describe_question", "What?"]):
        with pytest.raises(ValueError, match=f"{flags[0]} is for other data, but .* holds annotated images"):
            planned(images, *flags)
    for flags in (["--mask_to_caption_weight", "2"], ["--iou_weight", "2"]):
        with pytest.raises(ValueError, match=f"no loop 1: leave out {flags[0]}"):
            planned(images, "--loop2_iou_weight", "1", *flags)
    with pytest.raises(ValueError, match=r"no captions .*--reward_net"):
        planned(images)
    for words in ("--use_llm_judge", "--use_llm_judge_loop2", "--caption_weight 1", "--loop2_caption_weight 0.5"):
        with pytest.raises(ValueError, match=r"no captions: .*--use_llm_judge"):
            planned(images, "--loop2_iou_weight", "1", *words.split())
    plan = planned(images, "--loop2_iou_weight", "1")
    assert plan.settings.mask_to_caption_weight == 0
    assert plan.weights.loop2_caption == 0


def test_mask_rewards_by_name(scenes: Path, tmp_path: Path) -> None:
    both = ["--mask_rewards", "dice", "0.5", "--loop2_mask_rewards", "cldice", "2", "recall", "1"]
    assert planned(scenes, *both).mask_rewards == {"loop1": {"dice": 0.5}, "loop2": {"cldice": 2.0, "recall": 1.0}}
    assert planned(scenes).mask_rewards is None, "runs of older versions have none either"
    images = write_tiny_data(tmp_path)
    assert planned(images, *both[3:]).mask_rewards == {"loop2": {"cldice": 2.0, "recall": 1.0}}
    with pytest.raises(ValueError, match=r"no loop 1.*--mask_rewards"):
        planned(images, *both)


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


def test_loops_of_a_judge(scenes: Path) -> None:
    one, two, both = ["--use_llm_judge"], ["--use_llm_judge_loop2"], ["--use_llm_judge", "--use_llm_judge_loop2"]
    for flags, loops in ((one, ["loop1"]), (two, ["loop2"]), (both, ["loop1", "loop2"])):
        facts = planned(scenes, *flags, "--llm_judge_model", "m", "--llm_judge_base_url", "http://x/v1").judge
        assert facts == {"base_url": "http://x/v1", "model": "m", "loops": loops}
    assert planned(scenes).judge is None
    patient = ["--llm_judge_timeout", "5", "--llm_judge_retries", "0", "--llm_judge_cache", "off"]
    assert planned(scenes, *one, *patient) == planned(scenes, *one), "how it is asked changes no run"


@pytest.mark.parametrize(
    ("flag", "models"), [("--use_llm_judge", listing("the-only-one")), ("--use_llm_judge_loop2", None)]
)
def test_a_judge_from_the_command_line(
    scenes: Path, tmp_path: Path, flag: str, models: Reply | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run is told: the model that was found, and the judge with the settings of the flags."""
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
    config = judge.config
    if models is None:
        assert plan.judge == {"base_url": server.url, "model": "m", "loops": ["loop2"]}
        assert (config.timeout_s, config.max_retries, config.max_concurrency, config.cache_path) == (7, 3, 2, None)
        assert not list(tmp_path.glob("llm_judge"))
    else:
        assert plan.judge == {"base_url": server.url, "model": "the-only-one", "loops": ["loop1"]}
        assert config == JudgeConfig(server.url, "the-only-one", cache_path=tmp_path / "llm_judge")


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
        (["--lora_dropout", "0.05"], "lora_dropout is 0.05, expected 0: with dropout, old, reference and new"),
        (["--gpu", "3"], "gpu is 3, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES=3"),
        (["--use_llm_judge", "--llm_judge_base_url", "http://127.0.0.1:9/v1"], r"LLM judge .*:9/v1: no connection"),
        (
            ["--use_llm_judge_loop2", "--llm_judge_timeout", "0"],
            r"the judge's timeout_s is 0.0, expected 0.001 or more",
        ),
        (["--pathwise_weight", "1"], r"pathwise_weight is 1.0, but there is no reward network; give --reward_net"),
        (["--learned_weight", "1"], r"learned_weight is 1.0, but there is no reward network; give --reward_net"),
        (["--num_iterations", "3"], "save_steps is 50, not a multiple of num_iterations 3"),
        (["--batch_size", "400"], "training prompts, but one optimisation step takes 100; lower batch_size"),
        (["--wandb"], r"--wandb: the package is not installed; pip install -e '\.\[tracking\]'"),
        (["--dataset_name", "dam"], "dataset_name is 'dam'"),
        (
            ["--use_llm_judge", "--llm_judge_model", "m", "--llm_judge_base_url", "http://127.0.0.1:9/v1"],
            r"LLM judge http://127\.0\.0\.1:9/v1, model 'm': no connection .*; check that the server runs",
        ),
        (["--lora_r", "0"], "r is 0"),
        (["--max_steps", "3", "--num_epochs", "1"], "--num_train_epochs and --max_steps"),
        (["--no_ema", "--ema_decay", "0.9"], r"--no_ema .*--ema_decay 0\.9"),
        (["--objective", "supervised", "--shuffle_rewards"], "--objective supervised"),
        (["--max_labelled", "5"], "--max_labelled does nothing without --objective supervised"),
        (["--dice_weight", "1"], "--dice_weight does nothing without --objective supervised"),
        (["--contrast_weight", "1"], "--contrast_weight does nothing without --objective supervised"),
        (["--objective", "supervised", "--max_labelled", "0"], "max_labelled is 0, expected 1 or more"),
        (["--objective", "supervised", "--bce_weight", "0", "--dice_weight", "0"], "bce_weight and dice_weight are bo"),
        (["--batch_size", "1", "--gradient_accumulation_steps", "-1"], "gradient_accumulation_steps is -1"),
        (["--objective", "supervised", "--clip_range", "0.1"], "samples nothing, so --epsilon does nothing"),
        (["--shuffle_rewards", "--pathwise_weight", "1"], "--shuffle_rewards .* --pathwise_weight"),
    ],
)
def test_bad_flags_end_before_anything_is_written(
    scenes: Path, tmp_path: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr("rl_reward_network.cli.grpo.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        main(tyro.cli(Args, args=["quick", "--data_root", str(scenes), "--output_dir", str(tmp_path / "out"), *flags]))
    assert not list((tmp_path / "out").glob("sa2va_grpo_*"))


def test_two_loops_of_weight_0_are_refused_before_data_are_read(tmp_path: Path) -> None:
    flags = ["--data_root", str(tmp_path / "nowhere"), "--mask_to_caption_weight", "0", "--caption_to_mask_weight", "0"]
    for more in ([], ["--objective", "supervised"]):
        with pytest.raises(ValueError, match="are both 0: nothing would be trained"):
            main(tyro.cli(Args, args=["quick", *flags, *more]))


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
    assert output.rstrip().endswith(f"fine-tuned model: {folder / 'final_model'}")
    assert output.startswith(f"run folder: {folder}\ndata: Grasp-Any-Region, 1 shard")
    assert "\nbatch_size 8 counts captions, not regions: 2 x 4 captions per process and forward pass\n" in output
    main(tyro.cli(Args, args=[*flags, "--resume"]))
    output = capsys.readouterr().out
    assert "nothing to resume: this run is finished" in output
    assert f"run folder: {folder}, finished\n" in output
    with pytest.raises(
        ValueError, match=rf"(?s)--resume: no sa2va_grpo run .*{folder}: finished; differs in seed was 0, now 1$"
    ):
        main(tyro.cli(Args, args=[*flags, "--resume", "--seed", "1"]))
    with pytest.raises(ValueError, match=r"--resume: .*nowhere"):
        main(tyro.cli(Args, args=[*flags, "--resume", "--run_folder", str(tmp_path / "nowhere")]))
    assert len(list(tmp_path.glob("sa2va_grpo_*"))) == 1
