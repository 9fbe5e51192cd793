"""Pictures and a processor that the tests of nano's training share, and test patients whose masks are known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.splits import make_split
from rl_reward_network.embedded import datasets
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, read_samples
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import tube_series
from tools.nano.conversations import corpus
from tools.nano.model import nano_config, nano_tokenizer
from tools.nano.pictures import Pictures, open_pictures


@pytest.fixture(scope="package")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return open_pictures(tmp_path_factory.mktemp("pictures"), angiograms=6, scenes=3, seed=0)


@pytest.fixture(scope="package")
def processor() -> Sa2VAProcessor:
    tokenizer = nano_tokenizer(corpus())
    return Sa2VAProcessor.from_config(nano_config(tokenizer), tokenizer)


@pytest.fixture(scope="package")
def known_masks(tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    """40 patients; prompt k gives the truth in look k and nothing elsewhere, the rest nothing anywhere."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "FRAMES", 1)
        patch.setattr(datasets, "render_series", tube_series)  # 50 times faster
        datasets.write_angiograms(folder, 40, tuple(LOOKS))
    samples = read_samples(folder)
    looks = read_json(folder / "looks.json")
    known = {
        sample.load_image().tobytes(): (list(LOOKS).index(looks[sample.image_path.name]), sample.load_mask())
        for sample in samples
    }

    def segment(image: np.ndarray, prompts: list[str]) -> FrozenAnswer:
        look, truth = known[image.tobytes()]
        assert truth is not None
        masks = np.full((len(prompts), *truth.shape), -9.0, np.float32)
        masks[look][truth] = 9.0
        return FrozenAnswer(masks, np.zeros(4, np.float32))

    segmenter = SimpleNamespace(upsample=lambda logits, size: torch.from_numpy(logits).sigmoid().numpy())
    bank = MaskBank(folder / "bank", segment, "known", PROMPTS)
    config = RunConfig(data_root=folder)
    return RunInputs(config, samples, make_split(samples, 0), PROMPTS, segmenter, bank)  # type: ignore[arg-type]
