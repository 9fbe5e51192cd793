"""The size of a model from its config.json alone, in both layouts: presets follow it, not the path."""

import json
import shutil
import subprocess
import sys

import pytest

from rl_reward_network.models.default import is_small
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED


@pytest.mark.parametrize(
    ("config", "small"),
    [
        ({"text_config": {"hidden_size": 256}}, True),
        ({"llm_config": {"hidden_size": 64}}, True),
        ({"text_config": {"hidden_size": 896}}, False),
        ({"llm_config": {"hidden_size": 2048}}, False),
        ({"hidden_size": 64}, False),
        ([], False),
    ],
)
def test_the_language_models_width_decides(config, small, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_small(str(tmp_path)) == small


def test_a_copy_is_as_small_as_the_embedded_model_whose_name_another_folder_may_have(tmp_path, monkeypatch):
    shutil.copy(EMBEDDED["sa2va-nano"] / "config.json", tmp_path)
    assert is_small("sa2va-nano")
    assert is_small(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sa2va-nano").mkdir()
    (tmp_path / "sa2va-nano" / "config.json").write_text('{"text_config": {"hidden_size": 1536}}')
    assert not is_small("sa2va-nano")


def test_a_hub_id_is_large_and_a_broken_file_is_named(tmp_path):
    assert not is_small("ByteDance/Sa2VA-4B")
    assert not is_small(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        is_small(str(tmp_path))


def test_it_needs_no_torch():
    code = "import sys, rl_reward_network.models.default as d; d.is_small('x'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
