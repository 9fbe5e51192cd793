"""Experiment 2 as a whole on a tiny model: train, evaluate, report, deploy, resume, controls; what is decided."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli import evaluate
from rl_reward_network.cli import operations as command
from rl_reward_network.flags import parse
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.ppo.deploy import PostPolicy, load_post_policy
from rl_reward_network.ppo.evaluate import PathOverrides
from rl_reward_network.ppo.operations import (
    SEARCHED,
    PostPlan,
    decide_operations,
    edited_images,
    post_plan,
    run_post_stage,
    run_settings,
    searched_images,
    shuffled,
)
from rl_reward_network.ppo.post_evaluate import evaluate_post
from rl_reward_network.ppo.search import best_sequences
from rl_reward_network.run import POST_RUN, Run
from tests.conftest import FEW_OPERATIONS
from tests.env.edited_images import DILATE, ERODE, LikesLarge, known_image, known_images

pytestmark = pytest.mark.usefixtures("load_once")


def plan(**changes: Any) -> PostPlan:
    return post_plan("quick", ppo=replace(FEW_OPERATIONS, **changes))


def test_a_run_is_complete_and_found_again(tiny_inputs: RunInputs, post_run: Run) -> None:
    config = read_json(post_run / "final_model" / "config.json")
    counts = {name: len(tiny_inputs.pick(name, 99, labelled=True)) for name in ("reward", "policy", "val")}
    trained = {name: counts[name] for name in ("reward", "policy")}
    assert config["labels"] == {"reward": trained, "weights": {"val": counts["val"]}, "deployment": counts}
    assert config["peak_memory_gib"] > 0
    assert 0 < config["best_threshold"] < 1
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2))
    output_dir = tiny_inputs.config.output_dir
    assert Run.find(POST_RUN, output_dir, run_settings(tiny_inputs, plan(), network)) == post_run, "it rewards nothing"
    assert Run.find(POST_RUN, output_dir, run_settings(tiny_inputs, plan(max_steps=3))) is None
    settings = run_settings(tiny_inputs, replace(plan(), reward="net"), network)
    assert settings["reward_net"] == network.fingerprint


def test_the_report_holds_every_row_and_what_is_deployed(post_run: Run) -> None:
    evaluate.main(evaluate.Args(model_path=(str(post_run),)))
    result = read_json(post_run / "evaluation" / "eval.json")
    rows = {row["name"]: row["means"]["dice"]["mean"] for row in result["rows"]}
    beside = ["mask as it is", "best threshold", "best fixed sequence", "ridge over sequences"]
    assert list(rows) == [*beside, "PPO", "deployed", "oracle"]
    assert rows["oracle"] >= rows["mask as it is"]
    deployed = {"policy": "PPO", "fixed": "best fixed sequence", "as it is": "mask as it is"}
    assert rows["deployed"] == rows[deployed[result["deployment"]["choice"]]]
    assert result["reward"] == "dice"
    page = (post_run / "evaluation" / "report.html").read_text()
    assert "Deployed:" in page
    assert "PPO is rewarded by true masks (dice)." in page
    assert page.count("<figure>") == 15  # image, truth, as it is, deployed and oracle of three images
    assert len((post_run / "evaluation" / "eval.csv").read_text().splitlines()) == 1 + result["images"] * len(rows)
    with pytest.raises(ValueError, match="--images: got 0"):
        evaluate_post(post_run / "final_model", PathOverrides(), images=0)


def test_what_is_deployed_edits_new_masks(tiny_inputs: RunInputs, post_run: Run, tmp_path: Path) -> None:
    sample = tiny_inputs.samples[0]
    image = sample.load_image()
    edited = edited_images(tiny_inputs, plan(), [sample], None, "one")[0]
    features = edited.features[-len(tiny_inputs.bank.answer(image).vision_features) :]
    config = read_json(post_run / "final_model" / "config.json")
    (tmp_path / "policy.zip").write_bytes((post_run / "final_model" / "policy.zip").read_bytes())

    def deploying(choice: str) -> PostPolicy:
        write_json(tmp_path / "config.json", config | {"deployment": config["deployment"] | {"choice": choice}})
        return load_post_policy(tmp_path)

    fixed = deploying("fixed")
    sequence = tuple(fixed.config["fixed_sequence"])
    assert fixed.operations(image, edited.soft, features) == sequence
    assert deploying("as it is").operations(image, edited.soft, features) == ()
    np.testing.assert_array_equal(fixed.edit_by_sequence(image, edited.soft), edited.edited(sequence))
    policy = deploying("policy")
    operations = policy.operations(image, edited.soft, features)
    assert len(operations) <= 2
    np.testing.assert_array_equal(policy.edit(image, edited.soft, features), edited.edited(operations))
    with pytest.raises(ValueError, match="features of another width"):
        policy.edit(image, edited.soft, features[:-1])


def test_damaged_policies_are_named(post_run: Run, tmp_path: Path) -> None:
    config = read_json(post_run / "final_model" / "config.json")
    with pytest.raises(ValueError, match=r"config\.json.*sa2va-rl operations"):
        load_post_policy(tmp_path)
    write_json(tmp_path / "config.json", config | {"operations": ["sharpen"]})
    with pytest.raises(ValueError, match="of another version"):
        load_post_policy(tmp_path)
    write_json(tmp_path / "config.json", config)
    (tmp_path / "policy.zip").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not the weights"):
        load_post_policy(tmp_path)


def test_what_cannot_be_is_refused(tiny_inputs: RunInputs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --reward_net"):
        run_post_stage(tiny_inputs, post_plan("quick", "net"), None, Run(tmp_path / "run", POST_RUN))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="--reward net has none"):
        post_plan("quick", "net", shuffle_rewards=True)
    with pytest.raises(ValueError, match=r"--shuffle_rewards: 1 training image, expected 2"):
        shuffled(edited_images(tiny_inputs, plan(), tiny_inputs.samples[:1], None, "one"), 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quick --reward net", "give --reward_net"),
        ("quick --max_steps 0", "max_steps is 0"),
        ("quick --unlabelled_root images", "--unlabelled_root does nothing here"),
        ("quick --model_path other", "no data are named for it"),
        ("quick --run_folder .", "holds a run already"),
        ("quick --run_folder nowhere --resume", "nowhere holds no run; leave --resume out"),
    ],
)
def test_flags_that_cannot_be_are_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        command.check(parse(command.Args, words.split()))


def test_the_command_resumes_nothing_of_other_settings(tiny_inputs: RunInputs, post_run: Run) -> None:
    config = tiny_inputs.config
    flags = f"quick --model_path {config.model_path} --data_root {config.data_root} --gpu -1 --resume"
    with pytest.raises(ValueError, match=r"no sa2va_post_process run .*\n.*differs in .*ppo"):
        command.main(parse(command.Args, [*flags.split(), "--output_dir", str(config.output_dir)]))


def test_the_control_is_rewarded_by_other_truths(tiny_inputs: RunInputs, post_run: Run, tmp_path: Path) -> None:
    control = Run(tmp_path / "control", POST_RUN)
    run_post_stage(tiny_inputs, replace(plan(), shuffle_rewards=True), None, control)
    control.check_same(run_settings(tiny_inputs, replace(plan(), shuffle_rewards=True)))
    configs = [read_json(run / "final_model" / "config.json") for run in (post_run, control)]
    assert configs[0]["sequences"] == configs[1]["sequences"], "only PPO is rewarded otherwise"


@pytest.mark.parametrize(("images", "choice"), [(24, "policy"), (5, "as it is")], ids=["many", "too few"])
def test_the_policy_is_deployed_where_it_beats_the_masks_as_they_are(images: int, choice: str) -> None:
    """Dilate is right for half of the images, erode for the others."""
    train, val = known_images(images - images // 3), known_images(images // 3, 100)
    searched = searched_images(train, val)
    long = plan(total_timesteps=6000, n_envs=4, n_steps=32, batch_size=64, max_steps=1)
    found = decide_operations((train, val), searched, list(best_sequences(searched, 1)), long)
    assert found.choice == choice
    assert (found.patients, len(searched)) == (images, images)
    assert f"{images} labelled patients outside the test split" in found.reason


def test_a_sequence_is_deployed_where_it_beats_the_masks_as_they_are() -> None:
    """Dilate is right for all; PPO, which adds nothing, is not deployed. Where no operation helps, nothing is."""
    images = [known_image(2 * number) for number in range(12)]
    short = plan(max_steps=1)
    found = decide_operations((images[:8], images[8:]), images, [(DILATE,), (), (ERODE,)], short)
    assert (found.choice, found.best_fixed, found.fixed_by) == ("fixed", 1, "dilate, by the reward on 12 patients")
    right = [replace(image, soft=image.edited((DILATE,))) for image in images]
    found = decide_operations((right[:8], right[8:]), right, [(DILATE,), (), (ERODE,)], short)
    assert found.choice == "as it is"


def test_unlabelled_images_do_not_judge_even_if_the_reward_network_likes_everything() -> None:
    """One unlabelled validation image used to switch the decision from true masks to the reward network's score."""
    likes: Any = LikesLarge()
    images = [replace(known_image(2 * number), reward="net", scorer=likes) for number in range(12)]
    images[-1] = replace(images[-1], truth=None)
    bare = [replace(image, truth=None) for image in images]
    found = decide_operations((images[:8], images[8:]), images, [(ERODE,), ()], plan(max_steps=1))
    assert (found.choice, found.patients) == ("as it is", 11)
    assert found.fixed_gain is not None
    assert found.fixed_gain.mean < 0, "erode harms"
    found = decide_operations((bare[:8], bare[8:]), bare, [(DILATE,), ()], plan(max_steps=1))
    assert found.choice == "as it is"
    assert found.reason.startswith("no labelled patient outside the test split")


def test_patients_take_turns_in_the_search() -> None:
    train = [replace(image, group_id="one patient") for image in known_images(60)]
    val = known_images(8, 100)
    assert searched_images(train, val)[1:9] == val
    assert len(searched_images(train, val)) == SEARCHED
