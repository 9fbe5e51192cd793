"""Images whose best operation is known: bright masks lack their rim, dark ones have too much of it."""

import numpy as np

from rl_reward_network.env.observation import EdgeFeatures
from rl_reward_network.env.operations import OPERATIONS, EditedImage, apply_operation

SIDE = 48
DILATE, ERODE = OPERATIONS.index("dilate"), OPERATIONS.index("erode")


def known_image(number: int, reward: str = "dice") -> EditedImage:
    """Even numbers: dilate is right, and the image is bright. Odd numbers: erode is right, and it is dark."""
    rng = np.random.default_rng(number)
    truth = np.zeros((SIDE, SIDE), bool)
    top, left = rng.integers(8, 16, 2)
    truth[top : top + 18, left : left + 14] = True
    bright = number % 2 == 0
    guide = EdgeFeatures(np.full((SIDE, SIDE, 3), 200 if bright else 60, np.uint8))
    wrong = apply_operation("erode" if bright else "dilate", guide, truth.astype(np.float32))
    soft = np.where(wrong > 0.5, np.float32(0.95), np.float32(0.05))
    features = np.array([1.0 if bright else 0.0, rng.normal()], np.float32)
    return EditedImage(f"image {number}", f"patient {number}", guide, soft, features, truth, None, reward)


def known_images(count: int, first: int = 0) -> list[EditedImage]:
    return [known_image(number) for number in range(first, first + count)]


class LikesLarge:
    """A reward network whose score is the area of the mask."""

    def quality(self, masks: np.ndarray) -> dict[str, np.ndarray]:
        return {"score": masks.mean(axis=(1, 2))}
