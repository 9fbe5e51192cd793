import pytest
import torch
import torch.nn.functional as F

from rl_reward_network.models.sa2va.pixels_sa2va import tile_grid, upsample_mask_logits


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (420, 380, (1, 1)),
        (700, 640, (2, 2)),  # a near-square photo above 401,408 px
        (634, 633, (1, 1)),  # 401,322 px: just below
        (951, 951, (3, 3)),  # above 903,168 px
        (640, 480, (4, 3)),
        (1280, 720, (4, 2)),
        (100, 1200, (1, 12)),
        (999, 960, (3, 3)),
    ],
)
def test_tile_grid_follows_the_reference(width: int, height: int, grid: tuple[int, int]) -> None:
    assert tile_grid(width, height) == grid


def test_upsampling_goes_over_sam2s_square() -> None:
    logits = torch.randn(2, 32, 32)
    square = F.interpolate(logits[:, None], size=(128, 128), mode="bilinear")
    expected = F.interpolate(square, size=(70, 90), mode="bilinear")[:, 0]
    assert torch.equal(upsample_mask_logits(logits, (70, 90), sam_image_size=128), expected)
