from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.env.observation import IMAGE_FEATURES
from rl_reward_network.ppo.tables import PromptTable, exchange_rewards, load_tables, save_tables
from rl_reward_network.rewards.table import MASK_REWARDS
from tests.report.test_baselines import tables


def entries(labelled: bool) -> list[PromptTable]:
    rng = np.random.default_rng(0)
    found = tables(rng.random((3, 4)), rng.random((3, 4), dtype=np.float32), labelled=labelled)
    return [PromptTable(rng.random(IMAGE_FEATURES, dtype=np.float32) / 3, table) for table in found]


def test_tables_come_back_to_the_last_bit(tmp_path: Path) -> None:
    saved = {"policy": entries(labelled=False), "val": entries(labelled=True)}
    save_tables(tmp_path / "tables.json", saved)
    loaded = load_tables(tmp_path / "tables.json")
    assert list(loaded) == list(saved)
    for name, expected in saved.items():
        for one, other in zip(expected, loaded[name], strict=True):
            np.testing.assert_array_equal(one.features, other.features)
            assert other.features.dtype == other.context.features.dtype == np.float32
            np.testing.assert_array_equal(one.table.scores.astype(np.float32), other.table.scores)
            assert (one.table.metrics is None) == (other.table.metrics is None) == (name == "policy")
            for metric, values in (one.table.metrics or {}).items():
                np.testing.assert_array_equal(values, (other.table.metrics or {})[metric])
            assert set(other.context.metrics) == (set() if name == "policy" else set(MASK_REWARDS))


@pytest.mark.parametrize("text", ["[]", '{"policy": [{"sample_id": "a"}]}', '{"policy": 3}', '{"policy": [[]]}'])
def test_a_file_that_is_no_table_is_named_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "tables.json").write_text(text)
    with pytest.raises(ValueError, match=r"tables\.json: not a table of scores .*run step 2 again"):
        load_tables(tmp_path / "tables.json")


def test_exchanged_rewards_are_of_another_image_and_of_the_same_set() -> None:
    images = entries(labelled=True)
    control = exchange_rewards(images, seed=0)
    for image, other in zip(images, control, strict=True):
        np.testing.assert_array_equal(image.features, other.features)
        assert other.table.sample_id != image.table.sample_id
        np.testing.assert_array_equal(
            other.context.scores, {entry.table.sample_id: entry for entry in images}[other.table.sample_id].table.scores
        )
    assert {entry.table.sample_id for entry in control} == {entry.table.sample_id for entry in images}
    again = exchange_rewards(images, seed=0)
    assert [entry.table.sample_id for entry in again] == [entry.table.sample_id for entry in control]
    with pytest.raises(ValueError, match=r"--shuffle_rewards: got 1 training image"):
        exchange_rewards(images[:1], seed=0)
