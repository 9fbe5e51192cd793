"""Images to pick from."""

from pathlib import Path

from rl_reward_network.data.images import load_image
from rl_reward_network.demo.examples import LOOKS, write_examples


def test_examples_are_images_that_differ(tmp_path: Path) -> None:
    files = write_examples(tmp_path / "examples")
    assert [file.stem for file in files] == [*LOOKS, "scene"]
    pictures = [load_image(file) for file in files]
    assert all(picture.shape == (256, 256, 3) for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) == len(files)
