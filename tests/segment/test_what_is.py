"""One loader for everything that makes masks: what a path is, the masks of each kind, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import write_json
from rl_reward_network.bit_depth import DATA_SET, GreyWindow
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.identity import thumbnail
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.domain import STATISTICS, Domain
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import BEST_REWARD_NET, Run
from rl_reward_network.segment.files import targets
from rl_reward_network.segment.maker import (
    OWN_MASKS,
    Fusion,
    MaskMaker,
    PlainSegmenter,
    load_maker,
    predicted_quality,
    trained_on,
    what_is,
)
from rl_reward_network.segment.predictions import read_predictions
from rl_reward_network.segment.results import segment_image
from tests.conftest import tube_image, write_tiny_data

IMAGE = tube_image(64, 3)[0]
QUESTION = "Please segment the rib."


def save_network(folder: Path, **changes: Any) -> RewardNetwork:
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2, members=2, **changes))
    network.save_pretrained(folder)
    return network.eval()


def deploy(folder: Path, *members: str, **changes: Any) -> Path:
    """A folder with `deployed.json`."""
    saved = {"format_version": 1, "prompt": QUESTION, "members": list(members), "reward_net": None}
    write_json(folder / "deployed.json", saved | changes)
    return folder


@pytest.fixture
def parts(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A folder with a Sa2VA, `model`, and two reward networks, `one` and `two`."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    for name in ("one", "two"):
        save_network(tmp_path / name)
    return tmp_path


def test_a_path_is_what_its_files_say(
    parts: Path, tiny_checkpoint: Path, reward_run: Run, policy_run: Run, tmp_path: Path
) -> None:
    run, question = tmp_path / "sa2va_grpo_1", {"stage": "grpo", "inputs": {"segment_question": QUESTION}}
    shutil.copytree(tiny_checkpoint, run / "merged")
    write_json(run / "config.json", question)
    (tmp_path / "improve_1").mkdir()
    improved = deploy(tmp_path / "improve_1" / "improved", ".")
    shutil.copytree(tiny_checkpoint, improved, dirs_exist_ok=True)
    for path, kind, folder, prompt in (
        ("sa2va-nano", "Sa2VA", "sa2va-nano", PROMPTS[0]),
        ("owner/name", "Sa2VA", "owner/name", PROMPTS[0]),
        (parts / "model", "Sa2VA", parts / "model", PROMPTS[0]),
        (parts / "one", "plain segmenter", parts / "one", OWN_MASKS),
        (reward_run.path, "plain segmenter", reward_run / BEST_REWARD_NET, OWN_MASKS),
        (policy_run.path, "policy", policy_run / "final_model", None),
        (policy_run / "final_model", "policy", policy_run / "final_model", None),
        (run, "Sa2VA", run / "merged", QUESTION),
        (run / "merged", "Sa2VA", run / "merged", QUESTION),
        (tmp_path / "improve_1", "fusion", improved, QUESTION),
        (improved, "fusion", improved, QUESTION),
    ):
        assert what_is(path) == (kind, str(folder), prompt), path


def test_a_folder_of_something_else_says_what_it_holds(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"stage": "grpo"})
    for number in range(9):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(ValueError, match=r"here makes masks; it holds 0\.txt, .*7\.txt, 2 more, expected a Sa2VA"):
        what_is(tmp_path)
    for saved, message in (
        ({"format_version": 2}, r"deployed\.json: format_version is 2, this version reads 1"),
        ({"members": []}, "field members is missing"),
        ({"members": ["gone"]}, "members: gone is no folder here"),
        ({"members": [1]}, "members: 1 is no folder here"),
        ({"members": "."}, "members is '.', expected a list of folders"),
    ):
        with pytest.raises(ValueError, match=message):
            what_is(deploy(tmp_path / "net", ".", **saved))
    with pytest.raises(ValueError, match=r"deployed\.json: a file, expected a folder"):
        what_is(tmp_path / "net" / "deployed.json")
    with pytest.raises(ValueError, match="is neither a Sa2VA nor a reward network"):
        load_maker(str(deploy(tmp_path / "net", ".")), device="cpu")


def test_a_reward_network_is_a_plain_segmenter(parts: Path) -> None:
    made, network = load_maker(str(parts / "one"), device="cpu"), RewardNetwork.from_pretrained(parts / "one")
    assert isinstance(made, PlainSegmenter)
    found = made.answer(IMAGE)
    np.testing.assert_array_equal(found.soft, ImageScorer(network, IMAGE).foreground_prob)
    assert (found.prompt, found.answer, found.segs, found.scorer) == (OWN_MASKS, "", None, None)
    for call in (lambda: made.answer(IMAGE, "x"), lambda: load_maker(str(parts / "one"), "x", device="cpu")):
        with pytest.raises(ValueError, match="prompt 'x': the masks of this model do not depend on a prompt; leave it"):
            call()
    with pytest.raises(ValueError, match="one: max_tiles is for a Sa2VA, and this is a plain segmenter; leave it out"):
        load_maker(str(parts / "one"), device="cpu", max_tiles=2)
    with pytest.raises(ValueError, match="device is 'cuda:99', but"):
        load_maker(str(parts / "one"), device="cuda:99")


def test_a_plain_segmenter_is_judged_by_another_network_or_by_itself_with_the_interval_of_its_own_masks(
    parts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intervals = {"own segmentation": DiceInterval(-1.0, 1.0, 0.1, 40)}
    save_network(tmp_path / "sure", intervals=intervals)
    given = {}
    for segmenter in ("sure", "one"):
        made = load_maker(str(tmp_path / segmenter), device="cpu", reward_net=tmp_path / "sure")
        assert made.network is not None
        found = made.answer(IMAGE)
        assert found.scorer is not None
        given[segmenter] = predicted_quality(made.network, found.scorer, found.mask, found.source)
    assert given["sure"].low is not None
    assert given["one"].dice is not None
    assert given["one"].low is None
    assert capsys.readouterr().out.count("intervals are left out") == 1


def test_a_plain_segmenter_says_that_it_does_not_know_an_image(tmp_path: Path) -> None:
    limits = dict.fromkeys(STATISTICS, (0.0, 1e9)) | {"brightness": (2.0, 3.0)}
    save_network(tmp_path / "net", domain=Domain((32, 512), limits, 0.0, empty=False, images=12))
    assert "mean grey level" in str(load_maker(str(tmp_path / "net"), device="cpu").answer(IMAGE).outside)


def test_the_soft_mask_of_a_fusion_is_the_mean_of_its_members(parts: Path) -> None:
    made = load_maker(str(deploy(parts, "model", "one", "two", reward_net="one")), device="cpu", max_tiles=1)
    assert isinstance(made, Fusion)
    assert made.network is not None
    model, processor = load_sa2va_model(parts / "model")
    processor.max_tiles = 1
    own = [ImageScorer(RewardNetwork.from_pretrained(parts / name), IMAGE).foreground_prob for name in ("one", "two")]
    for prompt in (None, "The wire."):
        answer = model.segment([IMAGE], [prompt or QUESTION], processor)[0][0]
        found = made.answer(IMAGE, prompt)
        np.testing.assert_allclose(found.soft, np.mean([answer.probabilities().max(axis=0), *own], axis=0), atol=1e-6)
        assert (found.prompt, found.answer, found.segs) == (prompt or QUESTION, answer.answer, None)


def test_the_only_member_of_a_fusion_is_that_model(parts: Path) -> None:
    alone = load_maker(str(deploy(parts / "model", ".", reward_net="../one")), device="cpu", max_tiles=1)
    assert isinstance(alone, MaskMaker)
    assert (alone.prompt, alone.network is None, alone.answer(IMAGE).prompt) == (QUESTION, False, QUESTION)
    segmenter = load_maker(str(deploy(parts, "one")), device="cpu")
    assert isinstance(segmenter, PlainSegmenter)
    assert segmenter.answer(IMAGE).prompt == OWN_MASKS == what_is(parts).prompt


@pytest.mark.parametrize("members", [["one"], ["one", "two"]])
def test_new_images_are_seen_in_the_grey_window_of_the_training(members: list[str], parts: Path) -> None:
    folder = str(deploy(parts, *members, grey_levels={DATA_SET: [10, 900]}))
    assert load_maker(folder, device="cpu").grey == GreyWindow(10, 900)
    with pytest.raises(ValueError, match=r"--bit_depth 12: it was trained or measured where .*; leave it out"):
        load_maker(folder, device="cpu", bit_depth=12)


def test_the_folder_of_a_policy_is_enough(policy_run: Run, tiny_checkpoint: Path) -> None:
    for path in (policy_run.path, policy_run / "final_model"):
        made = load_maker(str(path), device="cpu")
        assert isinstance(made, MaskMaker)
        assert made.trained["stage"] == "prompt policy"
    with pytest.raises(ValueError, match=r"prompt 'x' and .*final_model: the policy chooses the prompt; give one"):
        load_maker(str(policy_run.path), "x", device="cpu")


def test_masks_of_images_that_the_model_has_learned_say_so(parts: Path, tmp_path: Path) -> None:
    network, others = RewardNetwork.from_pretrained(parts / "one"), [tube_image(64, seed)[0] for seed in (8, 9)]
    network.pictures = {"train": np.stack([thumbnail(others[0]), thumbnail(IMAGE)])}
    network.save_pretrained(parts / "known")
    assert trained_on(str(parts / "two")) is None
    trained = trained_on(str(deploy(parts, "known", "two")))
    assert trained is not None
    assert len(trained) == 2
    write_tiny_data(tmp_path / "data", images=2, size=64)
    samples = read_annotations(tmp_path / "data")
    for sample, image in zip(samples, (IMAGE, others[1]), strict=True):
        Image.fromarray(image).save(sample.image_path)
    found = [one.image_path for one in samples]
    maker = load_maker(str(parts / "one"), device="cpu")
    for target in targets(found, tmp_path / "masks", None):
        segment_image(maker, target, None, 0.5, False, trained)
    notes = read_predictions(tmp_path / "masks", samples, tmp_path / "data", tmp_path / "data").notes
    assert "the model has seen 1 of these 2 images in training" in notes[-1]
