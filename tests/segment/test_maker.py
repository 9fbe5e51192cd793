"""What `sa2va-rl segment` loads, where masks go, and what they never replace."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import write_json
from rl_reward_network.cli import segment
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.run import REWARD_NET
from rl_reward_network.segment.files import check_free, image_files, targets, write_mask
from rl_reward_network.segment.maker import default_model, load_mask_maker, load_reward_network
from tests.conftest import tube_image


def test_a_named_reward_network_is_used_before_that_of_the_run(tmp_path: Path) -> None:
    policy = tmp_path / "run" / "final_model"
    assert default_model(None) == DEFAULT_MODEL
    assert load_reward_network(None, None, "cpu") is None
    assert load_reward_network(None, policy, "cpu") is None
    for folder, members in ((tmp_path / "run" / REWARD_NET, 2), (tmp_path / "named", 3)):
        RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2, members=members)).save_pretrained(folder)
    for path, members in ((None, 2), (tmp_path / "named", 3)):
        network = load_reward_network(path, policy, "cpu")
        assert network is not None
        assert network.config.members == members


def test_the_grey_window_is_printed(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grey = np.linspace(0, 1000, 64 * 64).astype(np.uint16).reshape(64, 64)
    grey[5, 5] = 65535
    Image.fromarray(grey).save(tmp_path / "x.png")
    segment.main(segment.Args((tmp_path / "x.png",), str(tiny_checkpoint), device="cpu", max_tiles=1))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "8 bit" in line)
    assert line.startswith("x.png: ")
    assert "black is 0, white is 999," in line
    assert "--bit_depth" in line
    overlay = np.asarray(Image.open(tmp_path / "x_overlay.png").convert("L"))
    assert overlay.mean() > 100, "not black"
    segment.main(segment.Args((tmp_path / "x.png",), str(tiny_checkpoint), device="cpu", max_tiles=1, bit_depth=16))
    assert "white is 65535\n" in capsys.readouterr().out


def test_an_answer_without_seg_writes_no_mask_and_removes_the_one_before(tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / f"{name}.png")
    one, both = (tmp_path / "a.png",), (tmp_path / "a.png", tmp_path / "b.png")
    segment.main(segment.Args(one, device="cpu"))
    assert (tmp_path / "a_mask.png").exists()
    monkeypatch.setattr("rl_reward_network.segment.maker.NO_POLICY", {"max_tiles": None, "max_new_tokens": 1})
    for images in (one, both):
        with pytest.raises(ValueError, match=r"a\.png: no \[SEG\] in the answer; there is no mask"):
            segment.main(segment.Args(images, device="cpu"))
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "b.png", "contact_sheet.png", "results.csv"}
    assert "mask:   none" in capsys.readouterr().out


def test_a_row_of_a_report_is_no_policy_to_use(tmp_path: Path) -> None:
    fields = ("prompts", "inputs", "observation", "vision_features", "net_arch", "plan")
    write_json(tmp_path / "run" / "bandit" / "config.json", {name: {} for name in fields} | {"deployment": {}})
    (tmp_path / "run" / "bandit" / "policy.zip").touch()
    with pytest.raises(ValueError, match=r"bandit: a row of a report, not a policy"):
        load_mask_maker(None, "Segment it", policy=tmp_path / "run" / "bandit")


def test_nothing_is_written_over_that_is_not_of_this_prompt(tmp_path: Path) -> None:
    (target,) = targets([tmp_path / "x.png"], None, None)
    image, mask = tube_image(32, 0)
    check_free(target, "this")
    write_mask(target, image, mask, "this: Gef\u00e4\u00df")
    np.testing.assert_array_equal(np.asarray(Image.open(target.mask)), 255 * mask)
    check_free(target, "this: Gef\u00e4\u00df")
    with pytest.raises(ValueError, match=r"x_mask\.png: .*another prompt, 'this: Gef.+'; .*--output"):
        check_free(target, "that")
    for damage in (lambda: Image.fromarray(image).save(target.mask), lambda: target.mask.write_text("not an image")):
        damage()
        with pytest.raises(ValueError, match=r"x_mask\.png: .*already(?!.*another prompt).*--output"):
            check_free(target, "this: Gef\u00e4\u00df")


def test_names_that_two_masks_would_share_are_refused(tmp_path: Path) -> None:
    twins = [tmp_path / "1" / "x.png", tmp_path / "2" / "x.png"]
    assert [target.mask.parent.name for target in targets(twins, None, None)] == ["1", "2"]
    with pytest.raises(ValueError, match=r"1/x\.png, .*2/x\.png: .*out/x_mask\.png"):
        targets(twins, tmp_path / "out", None)
    for output, files in ((tmp_path / "one.png", twins), (tmp_path / "one.jpg", twins[:1])):
        with pytest.raises(ValueError, match=r"--output .*one\.(png|jpg): .*\.png"):
            targets(files, output, None)
    assert targets(twins[:1], None, "?!")[0].mask.name == "x_prompt_mask.png"
    assert len(targets(twins[:1], None, "word " * 100)[0].mask.name) < 80


def test_a_link_to_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to(".git/annex/objects/x.png")
    for path in (tmp_path, tmp_path / "x.png"):
        with pytest.raises(ValueError, match=r"x\.png: a link whose target is missing; .*git annex get"):
            image_files([path])
