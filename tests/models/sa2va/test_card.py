import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va import Sa2VAConfig, Sa2VAForConditionalGeneration, Sa2VAProcessor
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.loading_sa2va import WHOLE_MODEL
from tests.cards import card_code
from tests.conftest import tube_image

NANO = EMBEDDED[DEFAULT_MODEL]
IMAGE, _ = tube_image(64, 0)


def test_transformers_auto_classes_load_our_folders() -> None:
    expected = Sa2VAForConditionalGeneration.from_pretrained(NANO)
    assert type(AutoConfig.from_pretrained(NANO)) is Sa2VAConfig
    for auto_class in (AutoModel, AutoModelForImageTextToText):
        model = auto_class.from_pretrained(NANO)
        assert type(model) is Sa2VAForConditionalGeneration
        assert not model.training
        state = expected.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert AutoModel.from_pretrained(str(NANO), dtype=torch.bfloat16).dtype == torch.bfloat16
    processor = AutoProcessor.from_pretrained(NANO)
    assert type(processor) is Sa2VAProcessor
    assert processor.max_tiles == 1


@pytest.mark.parametrize("auto_class", [AutoModel, AutoProcessor])
def test_an_argument_without_effect_is_refused(auto_class: Any) -> None:
    with pytest.raises(TypeError, match="low_memory"):
        auto_class.from_pretrained(NANO, low_memory=True)


def test_the_embedded_models_card_runs_in_a_new_process_and_asks_nothing(tmp_path: Path) -> None:
    """On a terminal, where transformers would ask whether to run a checkpoint's code."""
    card = (NANO / "README.md").read_text()
    assert WHOLE_MODEL in card
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    (code,) = card_code(card, NANO, tmp_path / "image.png")
    main_end, child_end = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-c", code], stdin=child_end, capture_output=True, text=True, timeout=120, check=False
    )
    os.close(main_end)
    os.close(child_end)
    assert process.returncode == 0, process.stderr
    assert "[y/N]" not in process.stdout + process.stderr
    model, processor = (kind.from_pretrained(NANO) for kind in (Sa2VAForConditionalGeneration, Sa2VAProcessor))
    text = "<image>Please segment the blood vessel."
    expected = model.predict_forward(image=IMAGE, text=text, processor=processor)
    shapes = [np.shape(mask) for mask in expected["prediction_masks"]]
    assert process.stdout.strip().endswith(f"{expected['prediction']} {shapes}")
