"""Which reward network a run may use: its own kind, finished, and never one that knows the patients it will judge."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import write_tiny_data

from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.training.reward_stage import check_no_leak, find_reward_network, run_reward_stage
from rl_reward_network.training.world import World, WorldConfig, open_world


@pytest.fixture(scope="module")
def world(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    data = write_tiny_data(folder / "data", size=64)
    return open_world(WorldConfig(str(tiny_checkpoint), data, folder / "outputs", gpu=-1))


@pytest.fixture(scope="module")
def trained(world: World) -> Path:
    run = world.config.output_dir / "reward_net_20260101_000000"
    run_reward_stage(world, "quick", run, steps=2)
    return run


def test_a_run_finds_the_network_it_would_train_again_and_no_other(world: World, trained: Path) -> None:
    assert find_reward_network(world, "quick", steps=2) == trained / "best_reward_net"
    assert find_reward_network(world, "quick") is None, "other steps"
    assert find_reward_network(world, "full", steps=2) is None, "full never uses quick"
    for change in (
        {"prompts": ("a", "b")},
        {"split": replace(world.split, seed=1)},
        {"split": replace(world.split, fingerprint="x")},
        {"segmenter": replace(world.segmenter, fingerprint="x")},
    ):
        assert find_reward_network(replace(world, **change), "quick", steps=2) is None, change


def test_unfinished_and_damaged_networks_are_passed_over(world: World, trained: Path, tmp_path: Path) -> None:
    elsewhere = replace(world, config=replace(world.config, output_dir=tmp_path))
    copy = tmp_path / "reward_net_1"
    shutil.copytree(trained, copy)
    assert find_reward_network(elsewhere, "quick", steps=2) == copy / "best_reward_net"
    (copy / "best_reward_net" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="passed over"):
        assert find_reward_network(elsewhere, "quick", steps=2) is None
    shutil.rmtree(copy)
    shutil.copytree(trained, copy)
    (copy / "agreement.json").unlink()  # written last: training was cut off
    assert find_reward_network(elsewhere, "quick", steps=2) is None


@pytest.mark.parametrize(
    ("field", "split", "refused"),
    [
        ("train_groups", "reward", False),
        ("train_groups", "policy", True),
        ("train_groups", "val", True),
        ("train_groups", "test", True),
        ("val_groups", "val", False),
        ("val_groups", "policy", True),
        ("val_groups", "test", True),
    ],
)
def test_no_patient_is_judged_by_a_network_that_knows_it(world: World, field: str, split: str, refused: bool) -> None:
    info: dict[str, Any] = {"train_groups": [], "val_groups": [], field: [world.split.groups[split][0]]}
    network = RewardNetwork(training_info=info)
    if refused:
        with pytest.raises(ValueError, match=f"on 1 patients of the {split} split"):
            check_no_leak(world, network, Path("net"))
    else:
        check_no_leak(world, network, Path("net"))


def test_a_network_that_does_not_say_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="does not say which patients"):
        check_no_leak(world, RewardNetwork(), Path("net"))


def test_agreement_on_test_patients_is_written(trained: Path) -> None:
    rows = json.loads((trained / "agreement.json").read_text())
    assert list(rows) == ["reward network", "predict the mean"]
    assert 0 <= rows["reward network"]["mae"] <= 1


def test_several_kinds_of_object_in_one_folder_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", size=64)
    records = json.loads((data / "annotations.json").read_text())
    records[0]["text"] = ["catheter"]
    (data / "annotations.json").write_text(json.dumps(records))
    with pytest.raises(ValueError, match="text holds 2 different phrases"):
        open_world(WorldConfig(str(tiny_checkpoint), data))


def test_labelled_images_are_picked_first(world: World) -> None:
    unlabelled = [replace(sample, mask_parts=None) for sample in world.samples[:4]]
    mixed = replace(
        world,
        samples=unlabelled + world.samples[4:],
        split=replace(
            world.split,
            groups={"policy": tuple(sample.group_id for sample in world.samples), "reward": (), "val": (), "test": ()},
        ),
    )
    assert all(sample.labelled for sample in mixed.pick("policy", 4))
    assert sum(sample.labelled for sample in mixed.pick("policy", 6)) == 4
    assert len(mixed.pick("policy", 6, labelled=True)) == 4
