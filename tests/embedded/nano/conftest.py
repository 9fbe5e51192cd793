"""Pictures and a processor that the tests of nano's training data share."""

import pytest

from rl_reward_network.embedded.nano.conversations import corpus
from rl_reward_network.embedded.nano.model import nano_config, nano_tokenizer
from rl_reward_network.embedded.nano.pictures import Pictures, open_pictures
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor


@pytest.fixture(scope="package")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return open_pictures(tmp_path_factory.mktemp("pictures"), angiograms=12, scenes=4, seed=0)


@pytest.fixture(scope="package")
def processor() -> Sa2VAProcessor:
    tokenizer = nano_tokenizer(corpus())
    return Sa2VAProcessor.from_config(nano_config(tokenizer), tokenizer)
