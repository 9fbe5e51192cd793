"""What `render` of both environments shows: the image of the episode with the mask of the last action."""

from typing import Any

import numpy as np

METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}
TINT = (255, 128, 0)  # RGB, half and half with the image


def check_render_mode(render_mode: str | None) -> None:
    """Raise a ValueError for another mode than None and rgb_array."""
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"render_mode is {render_mode!r}, expected None or 'rgb_array'")


def tinted(image: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """uint8 (H, W, 3): an RGB image of that kind, tinted where the mask, bool (H, W), is; None is no mask yet."""
    frame = image.copy()
    if mask is not None:
        inside = mask > 0
        frame[inside] = (0.5 * frame[inside] + 0.5 * np.array(TINT)).astype(np.uint8)
    return frame
