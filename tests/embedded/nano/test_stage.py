"""The command from nothing to a scored model, at its smallest."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.artefacts import read_json
from rl_reward_network.cli.nano import Args, main
from rl_reward_network.embedded.nano import card as nano_card
from rl_reward_network.embedded.nano import stage as nano_stage
from rl_reward_network.embedded.nano.train import Stage
from rl_reward_network.inputs.config import PromptConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model

STAGES = (
    Stage(steps=2, learning_rate=1e-3, vessels=1, phrases=1, descriptions=1, by_codes=True, prompts=1),
    Stage(steps=2, learning_rate=1e-3, vessels=1, phrases=1, descriptions=1, watched=2, prompts=1),
)
SMALLEST = Args(output_dir=Path("somewhere"), angiograms=6, scenes=3, stages=2, gpu=-1)


@pytest.fixture(autouse=True)
def small_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "PATIENTS", 24)
    monkeypatch.setattr(embedded, "FRAMES", 1)
    monkeypatch.setattr(nano_stage, "STAGES", STAGES)
    monkeypatch.setattr(nano_stage, "TEST_SCENES", (1, 2))
    short = PromptConfig(max_new_tokens=4)  # an untrained model never ends its answer
    monkeypatch.setattr(nano_stage, "open_inputs", partial(nano_stage.open_inputs, prompt_config=short))
    monkeypatch.setattr(nano_card, "PER_LOOK", 1)


def test_it_ends_in_a_model_with_a_card_that_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALLEST)
    final = Path("somewhere/sa2va-nano")
    assert capsys.readouterr().out.splitlines()[-1] == f"model and card: {final}"
    model, _ = load_sa2va_model(final)
    made = read_json(final / "scores.json")["made"]
    assert made["command"] == "sa2va-rl nano --angiograms 6 --scenes 3 --stages 2"
    assert made["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert len(made["minutes"]) == 2
    assert "somewhere" not in (final / "README.md").read_text()
    assert {path.name for path in Path("somewhere").glob("stage_*")} >= {"stage_1", "stage_2"}


def test_wrong_settings_are_refused_before_anything_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for changes, message in (({"gpu": 0}, "cuda:0.*0 GPUs"), ({"stages": 3}, "stages is 3")):
        with pytest.raises(ValueError, match=message):
            main(replace(SMALLEST, **changes))
    Path("data/angiograms").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"data/angiograms: .*not rendered"):
        main(SMALLEST)
    assert not Path("somewhere").exists()
