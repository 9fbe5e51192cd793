"""Step 2, its report and its use on a new image, on a tiny model: every reward, several prompts, no labels, resume."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tyro
from PIL import Image

from rl_reward_network.artefacts import read_json
from rl_reward_network.cli import evaluate as evaluate_rl_finetuned_sa2va
from rl_reward_network.cli import prompts as finetune_sa2va_with_rl
from rl_reward_network.cli import segment
from rl_reward_network.curves import save_checkpoint
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, describe_run, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo.callbacks import RolloutCurves
from rl_reward_network.ppo.config import PPOSettings
from rl_reward_network.ppo.ppo import train_prompt_policy
from rl_reward_network.ppo.stage import check_settings, find_policy_run, policy_plan, run_policy_stage
from rl_reward_network.ppo.tables import load_tables, ridge_choices
from rl_reward_network.reward_training.stage import RewardPlan, origin, reward_plan, run_reward_stage
from rl_reward_network.run import POLICY_RUN, REWARD_RUN, Run
from tests.conftest import write_tiny_data
from tests.reward_training.test_stage import plan_of


@pytest.fixture(scope="module", autouse=True)
def load_once() -> Iterator[None]:
    """Load each model once: no test here changes its weights."""
    load = cache(load_sa2va_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_reward_network.inputs.segmenter.load_sa2va_model", load)
        patch.setattr("rl_reward_network.segment.loading.load_sa2va_model", load)
        yield


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = tmp_path_factory.mktemp("world")
    data = write_tiny_data(folder / "data", images=12, size=64)
    return open_inputs(RunConfig(str(tiny_checkpoint), data, folder / "outputs", gpu=-1))


@pytest.fixture(scope="module")
def reward_net(inputs: RunInputs) -> Path:
    run = inputs.config.output_dir / "reward_net_1"
    run_reward_stage(inputs, plan_of(inputs), Run(run, REWARD_RUN))
    return run / "best_reward_net"


def trained(inputs: RunInputs, reward_net: Path, name: str, **settings: Any) -> Path:
    run = inputs.config.output_dir / name
    stage = {name: settings.pop(name) for name in ("reward", "preset", "shuffle_rewards") if name in settings}
    plan = policy_plan("quick", **stage, ppo=PPOSettings(**{"total_timesteps": 64, **settings}))
    run_policy_stage(inputs, plan, reward_net, run)
    return run


def evaluated(run: Path) -> dict[str, Any]:
    evaluate_rl_finetuned_sa2va.main(evaluate_rl_finetuned_sa2va.Args(model_path=(str(run / "final_model"),)))
    return dict(read_json(run / "evaluation" / "eval.json"))


def segmented(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    Image.fromarray(np.full((50, 70, 3), 120, np.uint8)).save(folder / "new.png")
    capsys.readouterr()
    segment.main(segment.Args((folder / "new.png",), policy=run / "final_model", device="cpu"))
    assert Image.open(folder / "new_mask.png").size == (70, 50)
    return capsys.readouterr().out


class Killed(Exception):
    """Stands for a process that is gone."""


def deploy(run: Path, choice: str) -> dict[str, Any]:
    """Change the decision by hand, to reach every way."""
    config = read_json(run / "final_model" / "config.json")
    config["deployment"]["choice"] = choice
    (run / "final_model" / "config.json").write_text(json.dumps(config))
    return dict(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": "net"},
        {"reward": "dice"},
        {"reward": "iou"},
        {"reward": "mix", "max_steps": 2},
        {"reward": "net", "max_steps": 2},
        {"preset": "published"},
        {"reward": "dice+recall", "stop": True, "total_timesteps": 96},
    ],
)
def test_every_way_of_training_ends_in_a_report_and_a_mask(
    inputs: RunInputs, reward_net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    run = trained(inputs, reward_net, "_".join(map(str, settings.values())), **settings)
    config = deploy(run, "policy")
    published = settings.get("preset") == "published"
    assert config["plan"]["ppo"]["learning_rate"] == (3e-4 if published else 1e-3), "quick's own is faster"
    assert config["vision_features"] == (0 if published else 32)
    named = config["reward_net_info"]["named"]
    assert named.startswith("../reward_net_1/best_reward_net, of 20"), "where it came from and when it was trained"
    assert (run / "logs").exists()
    summary = evaluated(run)
    assert summary["config"]["reward network"] == f"quick, seed 0, {named}"
    assert summary["config"]["data"] == "12 annotated images, 12 with a mask"
    rows = {row["name"]: row for row in summary["rows"]}
    stop = settings.get("stop", False)
    learned = settings.get("reward", "net") in ("net", "mix")
    more = (["bandit"] if stop else []) + (["PPO, last weights"] if learned else [])
    assert list(rows)[4:] == ["ridge per prompt", *more, "PPO", "deployed", "oracle"]
    assert rows["PPO"]["prompts_asked_per_image"] == settings.get("max_steps", 1), "with stop the last one alone"
    used = {name: len(entries) for name, entries in load_tables(run / "tables.json").items()}
    assert config["labels"] == {
        "reward": {} if settings.get("reward", "net") == "net" else {"policy": used["policy"]},
        "weights": {"val": used["val"]} if learned else {},
        "deployment": used,
    }
    page = (run / "evaluation" / "report.html").read_text()
    assert f"{used['policy']} of policy and {used['val']} of val chose the best fixed choice" in page
    assert ("The reward network paid" in page) == ("which no label has chosen" in page) == learned
    assert config["peak_memory_gib"] > 0
    assert rows["deployed"]["means"] == rows["PPO"]["means"]
    prompt = segmented(run, tmp_path, capsys).split("prompt: ")[1].splitlines()[0]
    assert prompt in config["prompts"]


def test_one_prompt_is_used_where_it_is_deployed(
    inputs: RunInputs, reward_net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(inputs, reward_net, "fixed")
    config = read_json(run / "final_model" / "config.json")
    assert config["deployment"]["choice"] == "as it is"
    assert "5 labelled patients outside the test split: below 6 no test can tell" in config["deployment"]["reason"]
    for choice, row, prompt in (
        ("as it is", "default prompt", 0),
        ("fixed", "best fixed prompt", config["deployment"]["best_fixed"]),
    ):
        deploy(run, choice)
        rows = {row["name"]: row for row in evaluated(run)["rows"]}
        assert rows["deployed"]["means"] == rows[row]["means"]
        (tmp_path / choice).mkdir()
        output = segmented(run, tmp_path / choice, capsys)
        assert row in output
        assert ", because 5 labelled patients" in output
        assert f"prompt: {config['prompts'][prompt]}" in output


def test_a_second_run_asks_sa2va_nothing(inputs: RunInputs, reward_net: Path) -> None:
    first = load_tables(trained(inputs, reward_net, "first") / "tables.json")
    again = open_inputs(inputs.config)
    second = load_tables(trained(again, reward_net, "second") / "tables.json")
    assert (again.bank.computed, again.bank.encoded) == (0, 0)
    assert again.bank.reused == 11 * (len(second["policy"]) + len(second["val"]))
    for name, entries in first.items():
        for one, other in zip(entries, second[name], strict=True):
            np.testing.assert_array_equal(one.features, other.features)
            np.testing.assert_array_equal(one.table.scores, other.table.scores)


def test_unlabelled_data_train_and_are_evaluated_without_dice(
    tiny_checkpoint: Path, reward_net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tiny_data(tmp_path / "data", images=28, size=64)
    records = json.loads((data / "annotations.json").read_text())
    bare = [{key: value for key, value in record.items() if key != "mask_png"} for record in records[12:]]
    (data / "annotations.json").write_text(json.dumps(bare))  # other patients than the reward network's
    inputs = open_inputs(RunConfig(str(tiny_checkpoint), data, tmp_path / "outputs", gpu=-1))
    run = trained(inputs, reward_net, "bare")
    assert "custom/val_score" in (run / "metrics.jsonl").read_text()
    assert "dice" not in (run / "metrics.jsonl").read_text()
    summary = evaluated(run)
    assert (summary["labelled"], summary["verdict"]["label"]) == (False, "unlabelled")
    assert [list(row["means"]) for row in summary["rows"]] == [["score"]] * 7
    assert any("unlabelled: there are no Dice columns" in note for note in summary["notes"])
    assert summary["deployment"]["fixed_by"].startswith("the reward net on ")
    assert summary["deployment"]["choice"] == "as it is"
    assert summary["deployment"]["reason"].startswith("no labelled patient outside the test split")
    assert "Dice" not in (run / "evaluation" / "report.html").read_text().split("Note:")[0]
    segmented(run, tmp_path, capsys)
    with pytest.raises(ValueError, match=r"no labelled images in the policy split; .* or use --reward net"):
        trained(inputs, reward_net, "impossible", reward="dice")
    with pytest.raises(ValueError, match=r"no labelled images in the reward split; .* by REWARD_NET"):
        run_reward_stage(inputs, plan_of(inputs), Run(tmp_path / "reward", REWARD_RUN))
    assert not (tmp_path / "reward").exists()


def test_a_cut_off_run_is_found_and_ends_in_the_same_table(
    inputs: RunInputs, reward_net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(inputs, reward_net, "sa2va_rl_finetune_1")
    plan = policy_plan("quick", ppo=PPOSettings(total_timesteps=64))
    published, rewards = policy_plan("quick", "published", ppo=PPOSettings(total_timesteps=64)), plan_of(inputs)
    assert find_policy_run(inputs, plan, rewards) == whole
    assert find_policy_run(inputs, policy_plan("quick", ppo=PPOSettings(total_timesteps=72)), rewards) is None
    assert find_policy_run(inputs, policy_plan("quick", seed=1, ppo=PPOSettings(total_timesteps=64)), rewards) is None
    assert find_policy_run(inputs, plan, plan_of(inputs, steps=3)) is None, "its reward network was trained otherwise"
    with monkeypatch.context() as patch:
        patch.setattr(RolloutCurves, "_on_training_end", lambda self: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            trained(inputs, reward_net, "sa2va_rl_finetune_2")
    cut = inputs.config.output_dir / "sa2va_rl_finetune_2"
    assert find_policy_run(inputs, plan, rewards) == cut
    assert not (cut / "final_model").exists()
    with Run(cut, POLICY_RUN).lock(), pytest.raises(ValueError, match="another process is working on this run"):
        run_policy_stage(inputs, plan, reward_net, cut, resume=True)
    with pytest.raises(ValueError, match="holds a run already; give a new folder"):
        run_policy_stage(inputs, plan, reward_net, cut)
    with pytest.raises(ValueError, match=r"preset was default, now published; .*ppo\.learning_rate was"):
        run_policy_stage(inputs, published, reward_net, cut, resume=True)
    run_policy_stage(inputs, plan, reward_net, cut, resume=True)
    first, second = (evaluated(run)["rows"] for run in (whole, cut))
    assert first == second
    configs = [read_json(run / "final_model" / "config.json") for run in (whole, cut)]
    assert [config["resumed"] for config in configs] == [False, True]
    assert configs[0]["deployment"] == configs[1]["deployment"]


@pytest.mark.parametrize("actions", [12, 11], ids=["in PPO", "in the bandit"])
def test_a_cut_off_run_with_stop_ends_in_the_same_table(
    inputs: RunInputs, reward_net: Path, monkeypatch: pytest.MonkeyPatch, actions: int
) -> None:
    settings: dict[str, Any] = {"reward": "dice", "stop": True, "max_steps": 3, "total_timesteps": 96}
    whole = trained(inputs, reward_net, f"stop_{actions}", **settings)
    cut = inputs.config.output_dir / f"stop_{actions}_cut"
    real = RolloutCurves._on_rollout_end

    def killed(self: RolloutCurves) -> None:
        if self.training_env.action_space == gym.spaces.Discrete(actions) and len(self.curves.rows) >= 3:
            raise Killed
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutCurves, "_on_rollout_end", killed)
        with pytest.raises(Killed):
            trained(inputs, reward_net, cut.name, **settings)
    assert not (cut / "final_model").exists()
    ppo = PPOSettings(total_timesteps=96, stop=True, max_steps=3)
    with pytest.raises(ValueError, match=r"--resume: .*ppo\.stop was True, now False"):
        run_policy_stage(
            inputs, policy_plan("quick", reward="dice", ppo=replace(ppo, stop=False)), reward_net, cut, True
        )
    run_policy_stage(inputs, policy_plan("quick", reward="dice", ppo=ppo), reward_net, cut, resume=True)
    assert evaluated(whole)["rows"] == evaluated(cut)["rows"]


def test_in_the_control_ppo_bandit_and_ridge_get_the_rewards_of_other_images(
    inputs: RunInputs, reward_net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables stay true, so that the best fixed prompt is the same."""
    settings: dict[str, Any] = {"reward": "dice", "stop": True, "max_steps": 2, "total_timesteps": 64}
    given: list[list[PromptContext]] = []
    real_train, real_ridge = train_prompt_policy, ridge_choices

    def train(contexts: Any, *rest: Any) -> Any:
        given.append(contexts)
        return real_train(contexts, *rest)

    def ridge(train: Any, new: Any, reward: Any) -> Any:
        given.append([entry.context for entry in train])
        return real_ridge(train, new, reward)

    monkeypatch.setattr("rl_reward_network.ppo.stage.train_prompt_policy", train)
    monkeypatch.setattr("rl_reward_network.ppo.evaluate.ridge_choices", ridge)
    run = trained(inputs, reward_net, "control", shuffle_rewards=True, **settings)
    summary = evaluated(run)
    true = {entry.context.sample_id: entry.features for entry in load_tables(run / "tables.json")["policy"]}
    assert len(given) == 3
    for contexts in given:
        assert len(contexts) == len(true)
        assert not any(np.array_equal(context.features, true[context.sample_id]) for context in contexts)
    assert summary["config"]["reward"] == "dice, exchanged between images (control)"


def test_a_run_goes_on_with_the_reward_network_it_began_with(
    inputs: RunInputs, reward_net: Path, tmp_path: Path
) -> None:
    run = trained(inputs, reward_net, "sa2va_rl_finetune_7")
    shutil.rmtree(run / "final_model")
    other = RewardNetwork.from_pretrained(reward_net)
    next(other.parameters()).data += 1
    other.save_pretrained(tmp_path / "other")
    plan = policy_plan("quick", ppo=PPOSettings(total_timesteps=64))
    with pytest.raises(ValueError, match=r"--resume: .*\(reward_net\)"):
        run_policy_stage(inputs, plan, tmp_path / "other", run, resume=True)
    with pytest.raises(ValueError, match=r"ppo\.total_timesteps was 64, now 72\)"):
        check_settings(run, inputs, policy_plan("quick", ppo=PPOSettings(total_timesteps=72)))
    with pytest.raises(ValueError, match="nowhere holds no run"):
        check_settings(tmp_path / "nowhere", inputs, plan)
    assert find_policy_run(inputs, plan, plan_of(inputs), tmp_path / "other") is None
    newest = find_policy_run(inputs, plan, plan_of(inputs), reward_net)
    assert newest == run
    (inputs.config.output_dir / "sa2va_rl_finetune_9").mkdir()
    (inputs.config.output_dir / "sa2va_rl_finetune_9" / "config.json").write_text("[1]")
    with pytest.warns(UserWarning, match="passed over: .*sa2va_rl_finetune_9"):
        assert find_policy_run(inputs, plan, plan_of(inputs), reward_net) == newest
    shutil.rmtree(inputs.config.output_dir / "sa2va_rl_finetune_9")
    shutil.rmtree(run)  # other tests look for the newest run


def test_the_command_goes_on_with_step_1_says_so_and_never_begins_by_itself(
    inputs: RunInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both stages are replaced: what is tested is the folders that they get, and the output."""
    finetune, given = finetune_sa2va_with_rl, []

    def step_1(inputs: RunInputs, plan: RewardPlan, run: Run) -> None:
        given.append(run)
        RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2)).save_pretrained(run / "best_reward_net")

    monkeypatch.setattr("rl_reward_network.reward_training.stage.run_reward_stage", step_1)
    monkeypatch.setattr(finetune, "show_agreement", lambda folder: None)
    monkeypatch.setattr(
        "rl_reward_network.ppo.stage.run_policy_stage",
        lambda *given_to, resume: given.append((given_to[3], resume)),
    )
    flags = ["--model_path", inputs.config.model_path, "--data_root", str(inputs.config.data_root), "--gpu", "-1"]

    def call(*more: str) -> str:
        args = ["quick", *flags, "--output_dir", str(tmp_path), "--reward_steps", "2", *more]
        finetune.main(tyro.cli(finetune.Args, args=args))
        return capsys.readouterr().out

    with pytest.raises(ValueError, match=r"no sa2va_rl_finetune run of these .*none at all"):
        call("--resume")
    cut_off, plan = Run(tmp_path / "reward_net_1", REWARD_RUN), reward_plan(inputs.config, "quick", 2)
    describe_run(cut_off, inputs, origin(inputs, plan), {"seed": 0})
    save_checkpoint(cut_off / "checkpoint.pt", {"step": 1})
    output = call("--resume", "--gamma", "0.9").splitlines()
    assert given[0] == cut_off
    assert not given[1][1], "step 2 itself begins"
    for line in (
        f"run folder: {given[1][0]}",
        "data: 12 annotated images, 12 with a mask",
        "--gamma: no effect while episodes have one prompt; --max_steps sets more",
        f"step 1, run folder: {cut_off}, resumed from step 1",
    ):
        assert line in output
    assert any(line.startswith(f"reward network: {cut_off}/best_reward_net, of 20") for line in output)
    (cut_off / "agreement.json").write_text("{}")
    cut_off.finish()
    with pytest.raises(ValueError, match=r"there is none at all: leave it out to begin one"):
        call("--resume")


def test_a_plan_takes_what_the_user_changed() -> None:
    plan = policy_plan("quick", ppo=PPOSettings(n_envs=1, n_steps=16))
    assert (plan.ppo.batch_size, plan.images, plan.vision_features) == (16, 20, True)
    assert policy_plan("full", "published", vision_features=True).vision_features
    full = policy_plan("full", seed=3)
    assert full == replace(full, images=100, ppo=replace(full.ppo, total_timesteps=10000, n_envs=4, seed=3))
    with pytest.raises(ValueError, match="n_envs is 0"):
        policy_plan("quick", ppo=PPOSettings(n_envs=0))


def test_an_evaluation_refuses_what_it_cannot_mean(inputs: RunInputs, reward_net: Path) -> None:
    run = trained(inputs, reward_net, "refused")
    args = evaluate_rl_finetuned_sa2va.Args(model_path=(str(run / "final_model"),))
    for images in (0, -1):
        with pytest.raises(ValueError, match=f"images is {images}, expected 1 or more"):
            evaluate_rl_finetuned_sa2va.main(replace(args, images=images))
    with pytest.raises(ValueError, match="the policy chooses the prompt; give one"):
        segment.main(segment.Args((Path(__file__),), policy=run / "final_model", prompt="the rib"))
    config = read_json(run / "final_model" / "config.json")
    config["model_fingerprint"] = "other"
    (run / "final_model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model_fingerprint is other, .*\(cpu\)"):
        evaluate_rl_finetuned_sa2va.main(args)
    whole = read_json(run / "split.json")
    everybody = [name for names in whole["groups"].values() for name in names]
    for groups, message in (
        ({"reward": everybody, "policy": [], "val": [], "test": []}, "each split needs a list of group ids"),
        ({**whole["groups"], "test": ["0" * 12]}, r"are in no split; the split is of other data"),
        ({**whole["groups"], "val": whole["groups"]["test"]}, r"leak: group\(s\) .* appear more than once"),
    ):
        (run / "split.json").write_text(json.dumps({**whole, "groups": groups}))
        with pytest.raises(ValueError, match=rf"split\.json: .*{message}"):
            evaluate_rl_finetuned_sa2va.main(args)
    (run / "split.json").write_text(json.dumps(whole))
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read"):
        evaluate_rl_finetuned_sa2va.main(args)
