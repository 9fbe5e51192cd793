"""Step 2: what is decided, on tables without a model; training, report and use on a tiny model; killed and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from stable_baselines3 import PPO

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli import evaluate, segment
from rl_reward_network.cli import prompts as command
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.flags import parse
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import describe_run, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.ppo import prompts as stage
from rl_reward_network.ppo.baselines import LAST, POLICY, RIDGE, compare
from rl_reward_network.ppo.contexts import load_tables, ridge_choices, table_of
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.ppo.prompts import (
    decide_prompts,
    fit,
    has_network,
    judged_samples,
    labels_used,
    policy_plan,
    run_policy_stage,
    run_settings,
    train_prompt_policy,
)
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.ppo.train import RolloutCurves
from rl_reward_network.reward_training import stage as reward_stage
from rl_reward_network.reward_training.stage import reward_plan
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.table import MASK_REWARDS
from rl_reward_network.run import POLICY_RUN, REWARD_RUN, Run
from rl_reward_network.segment.maker import load_maker
from tests.conftest import FEW_STEPS, load_shared, tiny_reward_plan, tube_image, write_tiny_data
from tests.ppo.toys import toy_contexts

PLAN, LONGER = policy_plan("quick", ppo=FEW_STEPS), replace(FEW_STEPS, total_timesteps=72)


def entries(count, seed, scores="true", labelled=True):
    """Images of one patient each; two prompts suit half of them each. Scores: the Dice, random, or all equal."""
    rng, made = np.random.default_rng(seed), []
    for context in toy_contexts(count, seed):
        dice = context.metrics["dice"]
        given = {"true": dice, "random": rng.random(len(dice), np.float32), "constant": np.full_like(dice, 0.5)}
        metrics = dict.fromkeys(MASK_REWARDS, dice) if labelled else {}
        name = context.sample_id
        made.append(PromptContext(name, context.features, given[scores], metrics, name))
    return made


def test_ppo_is_deployed_with_the_36_patients_of_a_first_user():
    """11 of the split `policy` and 5 of `val`: the latter alone can prove nothing."""
    found = decide_prompts({"policy": entries(11, 0), "val": entries(5, 1)}, policy_plan("quick", reward="dice"))
    assert (found.choice, found.patients) == ("policy", 16)
    too_few = decide_prompts({"policy": entries(3, 0), "val": entries(2, 1)}, policy_plan("quick"))
    assert (too_few.choice, too_few.policy_gain) == ("as it is", None)


@pytest.mark.parametrize("reward", ["net", "dice"])
def test_a_patient_who_judges_has_neither_trained_nor_chosen(reward, monkeypatch):
    tables = {"policy": entries(8, 0), "val": entries(6, 1)}
    seen = []
    judged = []

    def training(contexts, val, *rest):
        seen.append({context.sample_id for context in (*contexts, *val)})
        return train_prompt_policy(contexts, val, *rest)

    def choosing(model, held, *rest):
        if isinstance(model, PPO):  # of the validation
            judged.append({context.sample_id for context in held})
        return choose_prompts(model, held, *rest)

    monkeypatch.setattr(stage, "train_prompt_policy", training)
    monkeypatch.setattr(stage, "choose_prompts", choosing)
    decide_prompts(tables, policy_plan("quick", reward=reward, ppo=FEW_STEPS))
    everybody = {entry.group_id for part in tables.values() for entry in part}
    assert [ids | held for ids, held in zip(seen, judged, strict=True)] == [everybody] * 3
    assert not any(ids & held for ids, held in zip(seen, judged, strict=True))
    assert set.union(*judged) == everybody


def judged_on_test(tables, steps, run):
    test, plan = entries(60, 2), policy_plan("quick", ppo=PPOSettings(total_timesteps=steps))
    picks = choose_prompts(fit(tables, plan, run), test)
    val, rows = ([table_of(entry) for entry in part] for part in (tables["val"], test))
    return compare(val, rows, {POLICY: picks, LAST: picks, RIDGE: picks}, decide_prompts(tables, plan), 0)


@pytest.mark.parametrize("scores", ["random", "constant"])
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels of policy patients"])
def test_a_useless_reward_network_is_neither_deployed_nor_better(scores, labelled, tmp_path):
    tables = {"policy": entries(20, 10, scores, labelled), "val": entries(20, 20, scores)}
    comparison = judged_on_test(tables, 400, tmp_path)
    assert comparison.deployment.choice != "policy"
    assert comparison.verdict.label != "better"


def test_a_useful_reward_network_is_both_although_no_policy_patient_is_labelled(tmp_path):
    comparison = judged_on_test({"policy": entries(20, 10, labelled=False), "val": entries(20, 20)}, 1200, tmp_path)
    assert (comparison.deployment.choice, comparison.verdict.label) == ("policy", "better")


def test_labels_are_named_by_what_they_chose():
    tables = {"policy": [*entries(4, 0, labelled=False), *entries(2, 1)], "val": entries(3, 2)}
    chosen = {"policy": 2, "val": 3}
    expected = {
        "net": {"reward": {}, "weights": {"val": 3}, "deployment": chosen},
        "net_and_dice": {"reward": {"policy": 2}, "weights": {"val": 3}, "deployment": chosen},
        "dice": {"reward": {"policy": 2}, "weights": {}, "deployment": chosen},
    }
    assert {reward: labels_used(tables, policy_plan("quick", reward=reward)) for reward in expected} == expected
    bare = {"policy": entries(4, 0, labelled=False), "val": entries(3, 2, labelled=False)}
    assert labels_used(bare, PLAN) == {"reward": {}, "weights": {}, "deployment": {}}


@pytest.fixture(scope="module", autouse=True)
def load_segmenter_once(load_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_reward_network.segment.maker.load_sa2va_model", load_shared)
        yield


@pytest.fixture
def reward_net(reward_run):
    return reward_run / "best_reward_net"


def trained(inputs, reward_net, folder, **settings):
    run = Run(folder, POLICY_RUN)
    of_stage = {name: settings.pop(name) for name in ("reward", "preset", "shuffle_rewards") if name in settings}
    run_policy_stage(inputs, policy_plan("quick", **of_stage, ppo=replace(FEW_STEPS, **settings)), reward_net, run)
    return run


@pytest.fixture
def run_copy(policy_run):
    """A copy of the finished run beside it, which may be damaged."""
    folder = policy_run.path.with_name("sa2va_rl_finetune_2")
    yield Run(shutil.copytree(policy_run.path, folder), POLICY_RUN)
    shutil.rmtree(folder)


def evaluated(run):
    evaluate.main(evaluate.Args(model_path=(str(run / "final_model"),)))
    return dict(read_json(run / "evaluation" / "eval.json"))


def segmented(run, folder, capsys):
    Image.fromarray(np.full((50, 70, 3), 120, np.uint8)).save(folder / "new.png")
    capsys.readouterr()
    segment.main(segment.Args((folder / "new.png",), str(run.path), device="cpu"))
    with Image.open(folder / "new_mask.png") as mask:
        assert mask.size == (70, 50)
    for path in folder.glob("new*"):
        path.unlink()
    return capsys.readouterr().out


def deploy(run, choice):
    """Change the decision by hand, to reach every way."""
    config = read_json(run / "final_model" / "config.json")
    config["deployment"]["choice"] = choice
    write_json(run / "final_model" / "config.json", config)
    return config


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": "dice"},
        {"reward": "net_and_dice", "max_steps": 2},
        {"reward": "net", "max_steps": 2},
        {"preset": "published", "learning_rate": 3e-4},
    ],
)
def test_every_way_of_training_ends_in_a_report_and_a_mask(tiny_inputs, reward_net, tmp_path, capsys, settings):
    folder = tiny_inputs.config.output_dir / "_".join(map(str, settings.values()))
    run = trained(tiny_inputs, reward_net, folder, **settings)
    config = deploy(run, "policy")
    assert config["vision_features"] == (0 if "preset" in settings else 32)
    named = config["reward_net_info"]["named"]
    assert named.startswith("../reward_net_1/best_reward_net, of 20"), "where it came from and when it was trained"
    summary = evaluated(run)
    assert summary["config"]["reward network"] == f"quick, seed 0, {named}"
    patients = "patients: reward 4, policy 3, val 2, test 3"
    assert summary["config"]["data"] == f"12 annotated images, 12 with a mask; {patients}"
    rows = {row["name"]: row for row in summary["rows"]}
    learned = settings.get("reward", "net") in ("net", "net_and_dice")
    more = ["PPO, last weights"] if learned else []
    assert list(rows)[4:] == ["ridge per prompt", *more, "PPO", "deployed", "oracle"]
    assert rows["PPO"]["prompts_asked_per_image"] == settings.get("max_steps", 1)
    assert rows["deployed"]["means"] == rows["PPO"]["means"]
    used = {name: len(tables) for name, tables in load_tables(run / "tables.json").items()}
    assert config["labels"]["deployment"] == used
    page = (run / "evaluation" / "report.html").read_text()
    assert f"{used['policy']} of policy and {used['val']} of val chose the best fixed choice" in page
    assert ("which no label has chosen" in page) == learned
    assert config["peak_memory_gib"] > 0
    assert segmented(run, tmp_path, capsys).split("prompt: ")[1].splitlines()[0] in config["prompts"]


def test_one_prompt_is_used_where_it_is_deployed(run_copy, tmp_path, capsys):
    config = read_json(run_copy / "final_model" / "config.json")
    assert config["deployment"]["choice"] == "as it is"
    assert "5 labelled patients outside the test split: below 6 no test can tell" in config["deployment"]["reason"]
    for choice, row, prompt in (
        ("as it is", "default prompt", 0),
        ("fixed", "best fixed prompt", config["deployment"]["best_fixed"]),
    ):
        deploy(run_copy, choice)
        rows = {row["name"]: row for row in evaluated(run_copy)["rows"]}
        assert rows["deployed"]["means"] == rows[row]["means"]
        output = segmented(run_copy, tmp_path, capsys)
        assert f"{row}" in output
        assert f"prompt: {config['prompts'][prompt]}" in output


def test_a_second_run_calls_sa2va_never_and_equals_the_first(tiny_inputs, reward_net, policy_run, tmp_path):
    again = open_inputs(tiny_inputs.config)
    second = trained(again, reward_net, tmp_path / "second")
    tables = load_tables(second / "tables.json")
    assert (again.bank.computed, again.bank.encoded) == (0, 0)
    assert again.bank.reused == 11 * (len(tables["policy"]) + len(tables["val"]))
    for name in ("tables.json", "metrics.jsonl"):
        assert (second / name).read_text() == (policy_run / name).read_text()


def test_unlabelled_data_train_and_are_evaluated_without_dice(tiny_checkpoint, reward_net, tmp_path, capsys):
    data = write_tiny_data(tmp_path / "data", images=28, size=64)
    records = json.loads((data / "annotations.json").read_text())
    bare = [{key: value for key, value in record.items() if key != "mask_png"} for record in records[12:]]
    (data / "annotations.json").write_text(json.dumps(bare))  # other patients than the reward network's
    inputs = open_inputs(RunConfig(str(tiny_checkpoint), data, tmp_path / "outputs", gpu=-1))
    run = trained(inputs, reward_net, tmp_path / "bare")
    curves = (run / "metrics.jsonl").read_text()
    assert "custom/val_score" in curves
    assert "dice" not in curves
    summary = evaluated(run)
    assert (summary["labelled"], summary["verdict"]["label"]) == (False, "unlabelled")
    assert [list(row["means"]) for row in summary["rows"]] == [["reward_net_score"]] * 7
    assert any("unlabelled: there are no Dice columns" in note for note in summary["notes"])
    assert summary["deployment"]["fixed_by"].startswith("the reward net on ")
    assert summary["deployment"]["reason"].startswith("no labelled patient outside the test split")
    assert "Dice" not in (run / "evaluation" / "report.html").read_text().split('<ul class="notes">')[0]
    segmented(run, tmp_path, capsys)
    with pytest.raises(ValueError, match=r"no labelled images in the policy split .*; .* or use --reward net"):
        trained(inputs, reward_net, tmp_path / "impossible", reward="dice")


def found(inputs, plan=PLAN, network=None, steps=2):
    """The run that `--resume` continues."""
    of_network = has_network(inputs, tiny_reward_plan(inputs, steps=steps), network)
    return Run.find(POLICY_RUN, inputs.config.output_dir, run_settings(inputs, plan), also=of_network)


def test_a_killed_run_is_found_and_ends_in_the_same_table(tiny_inputs, reward_net, policy_run, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    assert found(tiny_inputs) == found(tiny_inputs, network=reward_net) == policy_run
    for other in (policy_plan("quick", ppo=LONGER), policy_plan("quick", seed=1, ppo=FEW_STEPS)):
        assert found(tiny_inputs, other) is None
    assert found(tiny_inputs, steps=3) is None, "its reward network was trained otherwise"
    cut = Run(policy_run.path.with_name("sa2va_rl_finetune_3"), POLICY_RUN)
    with monkeypatch.context() as patch:
        patch.setattr(RolloutCurves, "_on_training_end", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(tiny_inputs, reward_net, cut.path)
    assert found(tiny_inputs) == cut
    assert not (cut / "final_model").exists()
    with cut.lock(), pytest.raises(ValueError, match="another process is working on this run"):
        run_policy_stage(tiny_inputs, PLAN, reward_net, cut)
    run_policy_stage(tiny_inputs, PLAN, reward_net, cut)
    assert evaluated(policy_run)["rows"] == evaluated(cut)["rows"]
    configs = [read_json(run / "final_model" / "config.json") for run in (policy_run, cut)]
    assert [config["resumed"] for config in configs] == [False, True]
    assert configs[0]["deployment"] == configs[1]["deployment"]
    shutil.rmtree(cut.path)


def test_a_run_goes_on_with_the_settings_and_the_reward_network_it_began_with(
    tiny_inputs, reward_net, run_copy, tmp_path
):
    shutil.rmtree(run_copy / "final_model")
    (run_copy / "done.json").unlink()
    other = RewardNetwork.from_pretrained(reward_net)
    next(other.parameters()).data += 1
    other.save_pretrained(tmp_path / "other")
    for plan, network, message in (
        (PLAN, tmp_path / "other", r"\(reward_net\b"),
        (policy_plan("quick", ppo=LONGER), reward_net, r"ppo\.total_timesteps was 64, now 72"),
        (policy_plan("quick", "published", ppo=FEW_STEPS), reward_net, "preset was default, now published"),
    ):
        with pytest.raises(ValueError, match=rf"--resume: .*{message}"):
            run_policy_stage(tiny_inputs, plan, network, run_copy)
    assert found(tiny_inputs, network=tmp_path / "other") is None
    config = read_json(run_copy / "config.json")
    config["settings"]["ppo"]["stop"] = False  # as version 0.12 wrote it
    write_json(run_copy / "config.json", config)
    assert found(tiny_inputs) == run_copy


def test_in_the_control_ppo_and_ridge_get_the_rewards_of_other_images(tiny_inputs, reward_net, tmp_path, monkeypatch):
    """The tables stay true, so that the best fixed prompt is the same."""
    given = []

    def train(contexts, *rest):
        given.append(contexts)
        return train_prompt_policy(contexts, *rest)

    def ridge(train, new, reward):
        given.append(train)
        return ridge_choices(train, new, reward)

    monkeypatch.setattr(stage, "train_prompt_policy", train)
    monkeypatch.setattr("rl_reward_network.ppo.evaluate.ridge_choices", ridge)
    run = trained(tiny_inputs, reward_net, tmp_path / "control", shuffle_rewards=True, reward="dice")
    assert evaluated(run)["config"]["reward"] == "dice, exchanged between images (control)"
    true = {entry.sample_id: entry.features for entry in load_tables(run / "tables.json")["policy"]}
    assert [len(contexts) for contexts in given] == [len(true)] * 2
    for context in (*given[0], *given[1]):
        assert not np.array_equal(context.features, true[context.sample_id])


def test_the_command_goes_on_with_step_1_says_so_and_never_begins_by_itself(tiny_inputs, tmp_path, monkeypatch, capsys):
    """Both stages are replaced: what is tested is the folders that they get, and the output."""
    given = []

    def step_1(inputs, plan, run):
        given.append(run)
        RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2)).save_pretrained(run / "best_reward_net")

    monkeypatch.setattr("rl_reward_network.reward_training.stage.run_reward_stage", step_1)
    monkeypatch.setattr(command, "show_agreement", lambda folder: None)
    monkeypatch.setattr(stage, "run_policy_stage", lambda inputs, plan, network, run: given.append(run))
    config = tiny_inputs.config
    flags = ["--model_path", config.model_path, "--data_root", str(config.data_root), "--gpu", "-1"]

    def call(*more):
        words = ["quick", *flags, "--output_dir", str(tmp_path), "--reward_steps", "2", *more]
        command.main(parse(command.Args, words))
        return capsys.readouterr().out.splitlines()

    with pytest.raises(ValueError, match=r"no sa2va_rl_finetune run of these .*none at all"):
        call("--resume")
    cut_off = Run(tmp_path / "reward_net_1", REWARD_RUN)
    plan = reward_plan(config, "quick", 2)
    describe_run(cut_off, tiny_inputs, reward_stage.run_settings(tiny_inputs, plan), {"seed": 0})
    output = call("--resume", "--gamma", "0.9")
    assert (given[0], given[1].state) == (cut_off, "new"), "step 2 itself begins"
    for line in (
        f"run folder: {given[1]}",
        "data: 12 annotated images, 12 with a mask; patients: reward 4, policy 3, val 2, test 3",
        "--gamma: no effect while episodes have one prompt; --max_steps sets more",
        f"step 1, run folder: {cut_off}, no checkpoint yet: it begins anew",
    ):
        assert line in output
    assert any(line.startswith(f"reward network: {cut_off}/best_reward_net, of 20") for line in output)
    experiment_1 = call("--reward", "dice", "--reward_net", str(cut_off / "best_reward_net"))
    assert any("/sa2va_rl_finetune_experiment1_20" in line for line in experiment_1)


def test_an_evaluation_refuses_what_it_cannot_mean(run_copy):
    final_model = run_copy / "final_model"
    args = evaluate.Args(model_path=(str(final_model),))
    with pytest.raises(ValueError, match="images is 0, expected 1 or more"):
        evaluate.main(replace(args, images=0))
    with pytest.raises(ValueError, match="the policy chooses the prompt; give one"):
        load_maker(None, "the rib", final_model)
    split = read_json(run_copy / "split.json")
    groups = split["groups"]
    everybody = [name for names in groups.values() for name in names]
    of_all = {"reward": everybody, "policy": [], "val": [], "test": []}
    for file, change, message in (
        ("final_model/config.json", {"model_fingerprint": "other"}, r"model_fingerprint is other, .*\(cpu\)"),
        ("split.json", {"groups": of_all}, "each split needs a list of group ids"),
        ("split.json", {"groups": {**groups, "test": ["0" * 12]}}, r"are in no split; the split is of other data"),
        ("split.json", {"groups": {**groups, "val": groups["test"]}}, r"leak: group\(s\) .* appear more than once"),
    ):
        whole = read_json(run_copy / file)
        write_json(run_copy / file, {**whole, **change})
        with pytest.raises(ValueError, match=rf"{Path(file).name}: .*{message}"):
            evaluate.main(args)
        write_json(run_copy / file, whole)
    (run_copy / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot be read"):
        evaluate.main(args)


def write_new_patients(folder, count=6):
    write_tiny_data(folder, images=count, size=64)
    records = json.loads((folder / "annotations.json").read_text())
    for number, record in enumerate(records):
        Image.fromarray(tube_image(64, 500 + number)[0]).save(folder / "images" / record["image"])
        record["group"] = f"new {number}"
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


@pytest.fixture(scope="module")
def with_new(tiny_inputs, tmp_path_factory):
    folder = write_new_patients(tmp_path_factory.mktemp("new") / "new")
    return open_inputs(replace(tiny_inputs.config, unlabelled_root=folder, output_dir=folder.parent / "outputs"))


@pytest.fixture(scope="module")
def run_with_new(with_new, reward_run):
    assert with_new.config.unlabelled_root is not None
    masks = {mask: mask.read_bytes() for mask in with_new.config.unlabelled_root.glob("masks/*.png")}
    assert len(masks) == 6
    for mask in masks:
        mask.write_bytes(b"no picture")  # training never reads them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardNetwork, "outside", lambda *_: None)
        run = trained(with_new, reward_run / "best_reward_net", with_new.config.output_dir / "sa2va_rl_finetune_1")
    for mask, content in masks.items():
        mask.write_bytes(content)
    return run


def test_half_of_the_training_images_are_unlabelled(with_new, run_with_new):
    new = {sample.sample_id for sample in with_new.samples if sample.joined}
    tables = read_json(run_with_new / "tables.json")
    used = [entry for entry in tables["policy"] if entry["sample_id"] in new]
    assert len(used) == 6
    assert len(tables["policy"]) == len(with_new.pick("policy", 100)) > 6
    assert [sample.sample_id in new for sample in with_new.pick("policy", 4)][-2:] == [True] * 2, "half of them"
    assert not new & {sample.sample_id for sample in with_new.pick("policy", 100, labelled=True)}
    assert all(entry["metrics"] is None for entry in used)
    assert not new & {entry["sample_id"] for entry in tables["val"]}
    facts = read_json(run_with_new / "final_model" / "config.json")["domain"]
    assert facts == {"images": len(tables["policy"]), "outside": 0, "reason": None}
    assert "6 unlabelled images of 6 groups" in with_new.summary


def test_a_resumed_run_has_the_same_unlabelled_images(with_new, run_with_new):
    run_with_new.check_same(run_settings(with_new, PLAN))
    with pytest.raises(ValueError, match=r"--resume: it began with other settings .*unlabelled"):
        run_with_new.check_same(run_settings(replace(with_new, unlabelled=None), PLAN))


def test_images_outside_the_domain_are_left_out(with_new, reward_net, monkeypatch):
    network = RewardNetwork.from_pretrained(reward_net)
    samples = {"policy": with_new.pick("policy", 4), "val": with_new.pick("val", 9)}
    own = [sample.load_image().mean() for sample in samples["policy"][:2]]

    def left():
        found, _ = judged_samples(PLAN, samples, ForegroundMaps(network))  # keeps why an image is outside
        assert found["val"] == samples["val"]
        return found["policy"]

    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: None)
    assert left() == samples["policy"]
    monkeypatch.setattr(RewardNetwork, "outside", lambda _, image, maps: None if image.mean() in own[:1] else "new")
    assert left() == samples["policy"][:1], "images of the data are left out, too"
    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: "new")
    with pytest.raises(ValueError, match=r"no training image is left: .* the first: new"):
        left()


@pytest.mark.parametrize("reward", ["dice", "net_and_dice"])
def test_a_reward_that_needs_masks_is_refused(reward, tmp_path):
    with pytest.raises(ValueError, match=f"--unlabelled_root has no masks, but --reward {reward}"):
        command.check(command.Args("quick", RunConfig(unlabelled_root=tmp_path), reward=reward))
