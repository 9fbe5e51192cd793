"""Experiment 2 as a whole on a tiny model: train, evaluate, report, deploy, resume, controls; what is decided."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli import evaluate
from rl_reward_network.cli import operations as command
from rl_reward_network.env.observation import IMAGE_FEATURES, MASK_FEATURES, EdgeFeatures, features_of, observe_mask
from rl_reward_network.flags import parse
from rl_reward_network.ppo.contexts import SEARCH, Arms, contexts_from_run, load_tables, with_default_prompt
from rl_reward_network.ppo.evaluate import PathOverrides, run_evaluation_stage
from rl_reward_network.ppo.policy import EditingPolicy, edit, read_policy_config
from rl_reward_network.ppo.prompts import (
    FOUND,
    policy_samples,
    post_plan,
    run_policy_stage,
    run_settings,
    with_search,
)
from rl_reward_network.run import BEST_REWARD_NET, POST_RUN, Run
from tests.conftest import FEW_OPERATIONS

pytestmark = pytest.mark.usefixtures("load_once")


def plan(reward="dice", **changes):
    return post_plan("quick", reward, ppo=replace(FEW_OPERATIONS, **changes))


def test_a_run_is_complete_and_found_again(tiny_inputs, post_run):
    config = read_json(post_run / "final_model" / "config.json")
    counts = {name: len(tiny_inputs.pick(name, 99, labelled=True)) for name in ("reward", "policy", "val")}
    trained = {name: counts[name] for name in ("reward", "policy")}
    decided = {name: counts[name] for name in ("policy", "val")}
    assert config["labels"] == {"reward": trained, "weights": {}, "deployment": decided}
    assert config["peak_memory_gib"] > 0
    assert config["prompts"] == list(tiny_inputs.prompts[:1])
    assert config["sequences"][0] == []
    assert config["sequences"][1][0].startswith("threshold at ")
    assert max(map(len, config["sequences"])) <= 2
    output_dir = tiny_inputs.config.output_dir
    assert Run.find(POST_RUN, output_dir, run_settings(tiny_inputs, plan())) == post_run
    assert Run.find(POST_RUN, output_dir, run_settings(tiny_inputs, plan(max_steps=3))) is None
    searched, policy, val = (
        {context.group_id for context in contexts_from_run(post_run.path, name)} for name in (SEARCH, "policy", "val")
    )
    assert not searched & (policy | val), "patients of the search decide nothing"


def test_the_report_holds_every_row_and_what_is_deployed(post_run, capsys):
    evaluate.main(evaluate.Args(model_path=(str(post_run),)))
    assert "segment new images" not in capsys.readouterr().out, "segment takes policies of prompts alone"
    result = read_json(post_run / "evaluation" / "eval.json")
    rows = {row["name"]: row["means"]["dice"]["mean"] for row in result["rows"]}
    beside = ["random sequence", "mask as it is", "best threshold", "best fixed sequence", "ridge per sequence"]
    assert list(rows) == [*beside, "PPO", "deployed", "oracle"]
    assert rows["oracle"] >= max(rows.values())
    deployed = {"policy": "PPO", "fixed": "best fixed sequence", "as it is": "mask as it is"}
    assert rows["deployed"] == rows[deployed[result["deployment"]["choice"]]]
    assert {row["prompts_asked_per_image"] for row in result["rows"]} == {1, None}
    assert "There is no reward network, so no row of its choice." in result["notes"]
    assert (result["prompts"][0], result["config"]["reward network"]) == ("none", "none")
    page = (post_run / "evaluation" / "report.html").read_text()
    for words in ("Deployed: the mask as it is", "Which sequence suits which image?", "of policy rewarded the policy"):
        assert words in page
    assert page.count("<figure>") >= 3 * 4, "image, truth, as it is and deployed of three images"
    assert len((post_run / "evaluation" / "eval.csv").read_text().splitlines()) == 1 + result["images"] * len(rows)
    with pytest.raises(ValueError, match="--images: got 0"):
        run_evaluation_stage(post_run / "final_model", PathOverrides(), images=0, edits=True)


def test_what_is_deployed_edits_new_masks_as_in_training(tiny_inputs, post_run, tmp_path):
    image = tiny_inputs.samples[0].load_image()
    answer = tiny_inputs.bank.answer(image)
    soft = tiny_inputs.probabilities(image)[0]
    features = features_of(EdgeFeatures(image), answer.vision_features, soft)
    assert len(features) == IMAGE_FEATURES + len(answer.vision_features) + MASK_FEATURES
    np.testing.assert_array_equal(features[-MASK_FEATURES:], observe_mask(EdgeFeatures(image), soft))
    config = read_json(post_run / "final_model" / "config.json")
    (tmp_path / "policy.zip").write_bytes((post_run / "final_model" / "policy.zip").read_bytes())
    sequences = tuple(map(tuple, config["sequences"]))
    masks, seen = Arms(with_default_prompt(tiny_inputs), True, sequences).of(image)
    np.testing.assert_array_equal(seen, features)

    def deploying(choice):
        write_json(tmp_path / "config.json", config | {"deployment": config["deployment"] | {"choice": choice}})
        return EditingPolicy(tmp_path)

    best = config["deployment"]["best_fixed"]
    for choice, index in (("fixed", best), ("as it is", 0)):
        sequence = deploying(choice).deployed(image, soft, None)
        assert sequence == sequences[index]
        np.testing.assert_array_equal(edit(image, soft, sequence) > 0.5, masks[index])
    policy = deploying("policy")
    assert policy.deployed(image, soft, answer.vision_features) in sequences
    with pytest.raises(ValueError, match="features of another width"):
        policy.deployed(image, soft, answer.vision_features[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fixed_sequence": [3]}, "train experiment 2 again"),
        ({"sequences": None}, "field sequences is missing; .*sa2va-rl operations quick"),
        ({"sequences": [[], ["close"]]}, "not the weights"),
        ({"observation": ["grey_mean"]}, "made for other observations"),
    ],
)
def test_other_policies_are_refused(post_run, tmp_path, change, message):
    config = read_json(post_run / "final_model" / "config.json") | change
    (tmp_path / "policy.zip").write_bytes((post_run / "final_model" / "policy.zip").read_bytes())
    write_json(tmp_path / "config.json", {name: value for name, value in config.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        EditingPolicy(tmp_path)
    with pytest.raises(ValueError, match="this policy chooses operations, not prompts"):
        read_policy_config(post_run / "final_model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quick --reward net", "give --reward_net"),
        ("quick --reward net_and_dice", "give --reward_net"),
        ("quick --max_steps 0", "max_steps is 0"),
        ("quick --unlabelled_root images", "--unlabelled_root does nothing here"),
        ("quick --model_path other", "no data are named for it"),
        ("quick --run_folder .", "holds a run already"),
        ("quick --run_folder nowhere --resume", "nowhere holds no run; leave --resume out"),
    ],
)
def test_flags_that_cannot_be_are_refused_early(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        command.check(parse(command.Args, words.split()))


def test_the_command_resumes_nothing_of_other_settings(tiny_inputs, post_run, tmp_path):
    config = tiny_inputs.config
    flags = f"quick --model_path {config.model_path} --data_root {config.data_root} --gpu -1 --resume"
    with pytest.raises(ValueError, match=r"no sa2va_post_process run .*\n.*differs in .*length was 2, now 5"):
        command.main(parse(command.Args, [*flags.split(), "--output_dir", str(config.output_dir)]))
    with pytest.raises(ValueError, match="give --reward_net"):
        run_policy_stage(tiny_inputs, plan("net"), None, Run(tmp_path / "run", POST_RUN))
    assert not (tmp_path / "run").exists()


def test_a_network_rewards_without_labels_and_judges_nothing(tiny_inputs, reward_run, tmp_path):
    run = Run(tiny_inputs.config.output_dir / "post_net", POST_RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_reward_network.models.reward_network.RewardNetwork.outside", lambda *_: None)
        run_policy_stage(tiny_inputs, plan("net"), reward_run / BEST_REWARD_NET, run)
        evaluate.main(evaluate.Args(model_path=(str(run),)))
    tables = load_tables(run / "tables.json")
    count = {name: len(contexts) for name, contexts in tables.items()}
    labels = read_json(run / "final_model" / "config.json")["labels"]
    decided = {name: count[name] for name in ("policy", "val")}
    assert labels == {"reward": {}, "weights": {"val": count["val"]}, "deployment": decided}
    assert count[SEARCH] + count["policy"] == len(tiny_inputs.pick("policy", 99))
    rows = [row["name"] for row in read_json(run / "evaluation" / "eval.json")["rows"]]
    assert rows[4:8] == ["argmax of the reward net", "ridge per sequence", "PPO, last weights", "PPO"]
    shutil.rmtree(run.path)


def test_in_the_control_only_ppo_is_rewarded_otherwise_and_a_resumed_run_searches_no_more(
    tiny_inputs, post_run, tmp_path, monkeypatch
):
    control = Run(tmp_path / "control", POST_RUN)
    shuffled = replace(plan(), shuffle_rewards=True)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rl_reward_network.ppo.prompts.fit", killed)
        with pytest.raises(KeyboardInterrupt):
            run_policy_stage(tiny_inputs, shuffled, None, control)
    monkeypatch.setattr("rl_reward_network.ppo.prompts.search_sequences", killed)
    run_policy_stage(tiny_inputs, shuffled, None, control)
    control.check_same(run_settings(tiny_inputs, shuffled))
    for file in (FOUND, "tables.json"):
        assert (control / file).read_text() == (post_run / file).read_text()
    assert (control / "metrics.jsonl").read_text() != (post_run / "metrics.jsonl").read_text()


def test_half_of_the_patients_are_for_the_search_where_a_network_rewards(tiny_inputs):
    samples = policy_samples(tiny_inputs, plan("net"))
    parts = with_search(samples)
    groups = {name: {sample.group_id for sample in part} for name, part in parts.items()}
    assert not groups[SEARCH] & groups["policy"]
    assert groups[SEARCH] | groups["policy"] == {sample.group_id for sample in samples["policy"]}
    alone = with_search({"policy": samples["policy"][:1], "val": samples["val"]})
    assert alone[SEARCH] == alone["policy"]
