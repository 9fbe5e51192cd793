"""One table of mask rewards for PPO, GRPO and the evaluation; and rewards as functions of columns."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro

from rl_reward_network.cli.prompts import Args
from rl_reward_network.env.sa2va_finetune_env import Sa2VAFinetuneEnv, prompt_rewards
from rl_reward_network.grpo.plan import RewardArgs
from rl_reward_network.grpo.rewards import _mask_reward_terms
from rl_reward_network.ppo.contexts import load_tables, save_tables
from rl_reward_network.report.metrics import measure_sample
from rl_reward_network.rewards import table
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.table import (
    IMAGE_REWARDS,
    MASK_REWARDS,
    PROMPT_REWARDS,
    confidence_reward,
    iou_reward,
    judge_reward,
    judged_caption_reward,
    learned_reward,
    mask_reward,
    meteor_reward,
    needs_truth,
    own_rewards,
    prompt_reward,
)
from tests.env.test_sa2va_finetune_env import make_contexts

LINE = np.zeros((20, 20), dtype=bool)
LINE[10] = True
HALF_LINE = LINE.copy()
HALF_LINE[10, 10:] = False
BLACK = np.zeros((20, 20, 3), dtype=np.uint8)
# the skeleton of the half line is inside the line (1), half of the line's skeleton is inside the half line (1 / 2)
CLDICE, DICE = 2 * 1 * 0.5 / (1 + 0.5), 2 * 10 / (10 + 20)


def test_prompt_rewards_in_closed_form():
    scores, metrics = np.array([0.25, 0.5], dtype=np.float32), {"dice": np.array([0.5, 1.0]), "cldice": np.zeros(2)}
    values = prompt_reward("net_and_dice", scores, metrics)
    assert (values.dtype, values.tolist()) == (np.float32, [0.375, 0.75])
    rng = np.random.default_rng(0)
    scores, dice = rng.random(1000, dtype=np.float32), rng.random(1000)
    mixed = prompt_reward("net_and_dice", scores, {"dice": dice})
    np.testing.assert_array_equal(mixed, ((scores + dice) / 2).astype(np.float32), "to the last bit")


def test_missing_labels_and_rewards_with_a_flag_of_their_own_raise():
    for name in PROMPT_REWARDS.keys() - {"net"}:
        with pytest.raises(ValueError, match="needs labelled images"):
            prompt_reward(name, np.zeros(2), {})
    for name in ("iou", "speed"):
        with pytest.raises(ValueError, match=rf"'{name}'.*cldice.*--loop2_iou_weight"):
            _mask_reward_terms({name: 1.0})


def test_cldice_rewards_ppo_and_grpo():
    table = measure_sample("a", "g", np.zeros(2), np.stack([LINE, HALF_LINE]), LINE)
    context = replace(make_contexts(count=1, prompts=2)[0], metrics=table.metrics)
    env = Sa2VAFinetuneEnv([context], reward="cldice")
    rewards = []
    for prompt in (0, 1):
        env.reset(seed=0)
        rewards.append(env.step(prompt)[1])
    assert rewards == pytest.approx([1, CLDICE])
    terms = _mask_reward_terms({"cldice": 0.5, "dice": 2.0})
    columns = {"predicted_masks": [LINE, HALF_LINE, None, LINE], "masks": [LINE, LINE, LINE, None], "prompts": [""] * 4}
    assert terms["cldice"].function(**columns) == [1.0, pytest.approx(CLDICE), 0.0, None]
    assert terms["dice"].function(**columns) == [1.0, pytest.approx(DICE), 0.0, None]
    assert [term.weight for term in terms.values()] == [0.5, 2.0]


def test_a_reward_of_the_image_alone_rewards_ppo_and_grpo_without_labels(monkeypatch, tmp_path):
    def bright(masks, image):
        return (masks * image[..., 0]).sum(axis=(1, 2)) / 255 / LINE.sum()

    image = np.full((20, 20, 3), 255, np.uint8)
    monkeypatch.setitem(IMAGE_REWARDS, "bright", bright)
    monkeypatch.setitem(PROMPT_REWARDS, "bright", {"bright": 1.0})
    assert not needs_truth("bright")
    assert all(needs_truth(name) == (name not in ("net", *IMAGE_REWARDS)) for name in PROMPT_REWARDS)
    masks = np.stack([LINE, HALF_LINE])
    entry = replace(make_contexts(count=1, prompts=2)[0], metrics={"bright": bright(masks, image)})
    assert prompt_rewards(entry, "bright").tolist() == [1, 0.5]
    save_tables(tmp_path / "tables.json", {"policy": [entry]})
    (again,) = load_tables(tmp_path / "tables.json")["policy"]
    assert prompt_rewards(again, "bright").tolist() == [1, 0.5]
    terms = _mask_reward_terms({"bright": 1.0})
    columns = {"predicted_masks": [LINE, HALF_LINE, None], "masks": [None] * 3, "images": [image] * 3}
    assert terms["bright"].function(**columns) == [1.0, 0.5, 0.0]


def test_the_commands_take_every_reward_of_the_table(capsys):
    for name in PROMPT_REWARDS:
        assert tyro.cli(Args, args=["quick", "--reward", name]).reward == name
    for name in MASK_REWARDS.keys() - {"iou"}:
        args = tyro.cli(RewardArgs, args=["--mask_rewards", name, "0.5", "--loop2_mask_rewards", name, "2"])
        assert (args.mask_rewards, args.loop2_mask_rewards) == ({name: 0.5}, {name: 2.0})
    for command, args in ((Args, ["quick", "--reward", "best"]), (RewardArgs, ["--mask_rewards", "iou", "1"])):
        with pytest.raises(SystemExit):
            tyro.cli(command, args=args)
        assert "cldice" in capsys.readouterr().err


def test_the_table_imports_nothing_heavy():
    heavy = {"torch", "transformers", "skimage"}
    code = f"import sys, rl_reward_network.rewards.table; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- a file of the user's own ----------------------------------------------------------------------------------------

OWN = """
import numpy as np

def _share(mask):
    return mask.mean()

def share(masks, image):
    return [_share(mask) for mask in masks]
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    return lambda *lines: own_rewards(str(path)) if path.write_text("\n".join(lines)) else {}


def test_the_functions_of_an_own_file_are_rewards(mine):
    rewards = mine(OWN)
    assert list(rewards) == ["share"], "neither imported modules nor private functions"
    values = rewards["share"](np.stack([LINE, HALF_LINE]), BLACK)
    np.testing.assert_array_equal(values, [20 / 400, 10 / 400])
    assert own_rewards(None) == own_rewards("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no function"),
        ("def dice(masks, image): return masks", "dice is the name of a reward"),
        ("def score(masks, image): return masks", "score is the name of a reward"),
        ("import no_such_package", "it cannot be run: ModuleNotFoundError: .*no_such_package"),
        ("def f(masks, *, image): return masks", r"expected the arguments \(masks, image\); let the names of helpers"),
        ("def share(masks): return masks", r"share\(masks\): expected the arguments \(masks, image\)"),
    ],
)
def test_an_own_file_that_cannot_be_used_is_refused_at_once(mine, text, message):
    with pytest.raises(ValueError, match=message):
        mine(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[0, 2.0]", r"share: got 2\.0 for mask 2 of 2, with 20 pixels; expected a number in \[0, 1\]"),
        ("[float('nan'), 0]", "got nan"),
        ("0", r"got shape \(\), expected \(2,\)"),
        ("1 / 0", r"share: ZeroDivisionError in line 1: .* it was given masks bool \(2, 20, 20\) and an image uint8"),
        ("['0.5', '0.5']", r"share: ValueError: it returned \['0.5', '0.5'\], expected numbers"),
        ("[None, 1]", "expected numbers"),
        ("[[1], [1, 2]]", "share: ValueError"),
        ("exit(1)", "share: SystemExit in line 1: 1"),
        ("__import__('torch').ones(2, 2)", r"got shape \(2, 2\)"),
    ],
)
def test_values_of_an_own_reward_are_checked(mine, value, message):
    reward = mine(f"def share(masks, image): return {value}")["share"]
    with pytest.raises(ValueError, match=message):
        reward(np.stack([LINE, LINE]), BLACK)


@pytest.mark.parametrize("value", ["t", "list(t)", "t.detach().bfloat16()", "t.tolist()", "(t > 0) / 2", "[0.5, t[1]]"])
def test_tensors_of_an_own_reward_are_their_values(mine, value):
    lines = ["import torch", "def share(masks, image):", "  t = torch.full((2,), 0.5, requires_grad=True)"]
    assert mine(*lines, f"  return {value}")["share"](np.stack([LINE, LINE]), BLACK).tolist() == [0.5, 0.5]


def test_an_own_reward_that_writes_into_its_arguments_changes_no_mask_and_no_image(mine):
    masks, image = np.stack([LINE, LINE]), BLACK.copy()
    rewards = mine("def share(masks, image):", "  masks[:], image[:] = False, 9", "  return [0, 1]")
    assert rewards["share"](masks, image).tolist() == [0, 1]
    assert ((masks == LINE).all(), image.any()) == (True, False)


def test_an_own_file_may_import_others_beside_it_and_have_further_arguments(tmp_path, mine):
    (tmp_path / "beside.py").write_text("HALF = 0.5")
    before = list(sys.path)
    rewards = mine("from beside import HALF", "def f(masks, image, value=HALF): return [value] * len(masks)")
    assert rewards["f"](LINE[None], BLACK).tolist() == [0.5]
    assert sys.path == before


def test_a_run_knows_the_file_of_its_own_reward(tmp_path, mine, monkeypatch):
    monkeypatch.setenv("SA2VA_RL_REWARDS", str(tmp_path / "mine.py"))
    monkeypatch.setattr(table, "OWN", mine(OWN))
    first = table.own_fingerprint(["share"])
    assert table.own_fingerprint(["dice"]) == {}, "a run that does not use it is resumed after any change of the file"
    (tmp_path / "mine.py").write_text(OWN + "# another")
    assert table.own_fingerprint(["share"]) != first


def test_every_command_takes_an_own_reward_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv("SA2VA_RL_REWARDS", str(tmp_path / "mine.py"))
    code = (
        "import tyro, rl_reward_network.cli.prompts as p, rl_reward_network.grpo.plan as g\n"
        "print(tyro.cli(p.Args, args=['quick', '--reward', 'share']).reward)\n"
        "print(tyro.cli(g.RewardArgs, args=['--loop2-mask-rewards', 'share', '1']).loop2_mask_rewards)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "share\n{'share': 1.0}\n"
    monkeypatch.setenv("SA2VA_RL_REWARDS", str(tmp_path / "other.py"))
    words = [sys.executable, "-m", "rl_reward_network.cli", "prompts", "--help"]
    refused = subprocess.run(words, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: SA2VA_RL_REWARDS is")
    assert "Traceback" not in refused.stderr


# ---- functions of columns --------------------------------------------------------------------------------------------

TOP = np.array([[True, True], [False, False]])
CORNER = np.array([[True, False], [False, False]])


def test_overlap_rewards():
    columns = {"predicted_masks": [CORNER, None, CORNER], "masks": [TOP, TOP, None], "unknown": [1, 2, 3]}
    assert iou_reward(**columns) == [0.5, 0.0, None]
    assert mask_reward("dice")(**columns) == [pytest.approx(2 / 3), 0.0, None]


class Judge:
    def __init__(self):
        self.counts = Counter()
        self.last_failure = ""

    def scores(self, predictions, references):
        return [{"a red circle": 0.8}.get(text) for text in predictions]

    def note(self, **counts):
        self.counts.update(counts)

    def failing(self):
        return None


def test_caption_rewards_and_a_judge_that_is_away():
    columns = {"completions": ["a red circle", "a circle"], "captions": ["a red circle", "a circle"], "unknown": [1, 2]}
    assert meteor_reward(**columns) == [1.0, 1.0]
    assert judge_reward(Judge())(**columns) == [0.8, None], "missing, and no 0"


def test_what_a_judge_leaves_open_is_filled_and_counted():
    judge = Judge()
    reward = judged_caption_reward(judge)
    scored = np.array([[0.8, 0.4], [0.1, 0.2]])
    np.testing.assert_allclose(reward(np.ones((2, 2)), scored), 0.25 + 0.75 * scored)
    assert judge.counts == {"imputed": 0, "groups_paid_by_meteor": 0}, "so that its curves are there from the start"
    gone = np.array([[0.8, np.nan, np.nan], [np.nan] * 3])
    reward(np.ones((2, 3)), gone)
    reward(np.ones((1, 3)), gone[:1])
    assert judge.counts == {"imputed": 4, "groups_paid_by_meteor": 1}


def test_the_learned_reward_looks_at_each_image_once():
    looked = []

    class Network:
        def foreground_probs(self, image):
            looked.append(image.shape)
            return torch.zeros(1, 1, 1, *image.shape[2:])

        def mask_quality(self, mask, maps):
            share = mask.mean(dim=(1, 2, 3))
            members = {"members": share[None, None].expand(1, 4, -1), "member_scores": share[None]}
            return SimpleNamespace(score=share, dice=share, std=share, **members)

    one, two = np.zeros((2, 2, 3), np.uint8), np.ones((2, 2, 3), np.uint8)
    scores = learned_reward(ForegroundMaps(Network()))(images=[one, one, two], predicted_masks=[TOP, None, CORNER])
    assert scores.values == [0.5, 0.0, 0.25]
    assert scores.members.tolist() == [[0.5], [0.0], [0.25]]
    assert len(looked) == 2


def test_confidence_is_that_inside_the_mask():
    probability = np.array([[0.9, 0.7], [0.1, 0.4]], dtype=np.float32)
    values = confidence_reward(mask_probabilities=[probability, None, probability * 0.1])
    assert values == [pytest.approx(0.6), 0.0, 0.0]
