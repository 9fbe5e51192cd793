"""What mistakes do to the final mask: the tolerance of the golden tests tells each of them from the right way."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from tests.golden_qwen import Case, after_norm, entering, needs_golden_qwen, read

pytestmark = needs_golden_qwen

MOST_PIXELS = 0.0005
Q3, Q25 = "case_q3", "case_q25"


def differing(
    case: Case,
    *,
    processor: Any = None,
    text: str = "",
    image: Any = None,
    inputs: Callable[[dict[str, Any]], Any] = lambda spliced: None,
    state: Callable[[Case, Tensor, Tensor, int], Tensor] = lambda case, states, last, seg: states[seg],
    embed: Callable[[Tensor], Tensor] = lambda embedding: embedding,
    sam: str = "sam",
    upsample: Callable[[Tensor, tuple[int, int]], Tensor] = upsample_mask_logits,
) -> float:
    """Share of the final mask's pixels that differ after a change, with the expected answer teacher-forced.

    Args:
        processor, text, image: in place of the case's; the image of the language model alone.
        inputs: changes the language model's inputs in place.
        state: picks the `[SEG]` state from the states (T, D), those before the final norm, and its index.
        embed: changes SAM 2's prompt.
        sam: the image features to take from the case.
        upsample: from the decoder's grid to the image.
    """
    model, processor = case["model"], processor or case["processor"]
    made = processor(text or case["meta"]["text"], image or case["image"])
    ids = torch.cat([made["input_ids"], case["expected"]["response_ids"][None]], dim=1)
    vision = model.model.get_vision_features(made["pixel_values"], made["image_grid_thw"])
    spliced = model.model.splice(ids, vision)
    inputs(spliced)
    with entering([model.model.language_model.norm]) as last:
        states = model.model(**spliced).last_hidden_state
    (seg,) = (ids[0] == processor.seg_token_id).nonzero()[:, 0].tolist()
    embedding = embed(model.text_hidden_fcs(state(case, states[0], last[0][0], seg))[None])
    logits = upsample(model.decode_masks(case[sam], embedding).mask_logits, case["image"].size[::-1])
    return ((logits > 0) != case["expected"]["pred_masks"].bool()).float().mean().item()


def changed(case: Case, **attributes: Any) -> Any:
    """The case's processor with other attributes."""
    processor = copy.copy(case["processor"])
    vars(processor).update(attributes)
    return processor


def other_normalisation(case: Case) -> Any:
    other = read(Q25 if case["name"] == Q3 else Q3)["processor"].patches
    patches = copy.copy(case["processor"].patches)
    patches.image_mean, patches.image_std = other.image_mean, other.image_std
    return changed(case, patches=patches)


def other_side(case: Case, states: Tensor, last: Tensor, seg: int) -> Tensor:
    """The state after the norm in Qwen3-VL, the one before it in Qwen2.5-VL."""
    return after_norm(case["model"], states)[seg] if case["name"] == Q3 else last[seg]


def bgr(case: Case) -> Image.Image:
    red, green, blue = case["image"].split()
    return Image.merge("RGB", (blue, green, red))


def one_step(logits: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(logits[:, None], size=size, mode="bilinear")[:, 0]


MISTAKES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "nothing": lambda case: {},
    "one resize": lambda case: {"processor": changed(case, image_resize="training")},
    "1-D positions": lambda case: {"inputs": lambda spliced: spliced.pop("position_table")},
    "other side of the norm": lambda case: {"state": other_side},
    "state that predicts [SEG]": lambda case: {"state": lambda case, states, last, seg: states[seg - 1]},
    "no deepstack": lambda case: {"inputs": lambda spliced: spliced.pop("deepstack_visual_embeds")},
    "newline after the image": lambda case: {"text": case["meta"]["text"].replace("<image>", "<image>\n")},
    "no system turn": lambda case: {"processor": changed(case, chat=case["processor"].template.instruction)},
    "other family's mean and std": lambda case: {"processor": other_normalisation(case)},
    "BGR": lambda case: {"image": bgr(case)},
    "SAM constants not rounded": lambda case: {"sam": "sam_unrounded"},
    "one-step upsampling": lambda case: {"upsample": one_step},
    "zero [SEG] embedding": lambda case: {"embed": torch.zeros_like},
}
# (mistake, case, share of pixels): from a table made by the official code, with two exceptions.
SHARES = [
    ("nothing", Q3, 0.0),
    ("nothing", Q25, 0.0),
    ("one resize", Q3, 0.0169),
    ("one resize", Q25, 0.0118),
    ("1-D positions", Q3, 0.603),
    ("1-D positions", Q25, 0.048),  # see below
    ("other side of the norm", Q3, 0.544),
    ("other side of the norm", Q25, 0.040),
    ("state that predicts [SEG]", Q3, 0.556),
    ("state that predicts [SEG]", Q25, 0.134),
    ("no deepstack", Q3, 0.580),
    ("newline after the image", Q3, 0.0123),
    ("newline after the image", Q25, 0.0190),
    ("no system turn", Q25, 0.072),
    ("other family's mean and std", Q3, 0.593),
    ("other family's mean and std", Q25, 0.113),  # 0.091 in the official code's table
    ("BGR", Q3, 0.0095),
    ("BGR", Q25, 0.0225),
    ("SAM constants not rounded", Q3, 0.0009),
    ("SAM constants not rounded", Q25, 0.0008),
    ("one-step upsampling", Q3, 0.0064),
    ("one-step upsampling", Q25, 0.0070),
    ("zero [SEG] embedding", Q3, 0.449),
    ("zero [SEG] embedding", Q25, 0.599),
]


@pytest.mark.parametrize(("mistake", "name", "share"), SHARES)
@torch.no_grad()
def test_a_mistake_flips_as_many_pixels_as_in_the_reference(mistake: str, name: str, share: float) -> None:
    case = read(name)
    found = differing(case, **MISTAKES[mistake](case))
    print(f"{name}, {mistake}: {found:.5f}, {share}")  # shown by -rP
    assert (found > MOST_PIXELS) == (share > MOST_PIXELS)
    assert found == pytest.approx(share, rel=0.1, abs=1e-4)


def test_one_dimensional_positions_change_the_answer_too() -> None:
    """Of Qwen2.5-VL, so the share of the table is that of another answer's mask."""
    case = read(Q25)
    body, asked = case["model"].model, {"text": case["meta"]["text"], "processor": case["processor"]}
    splice = body.splice

    def without_table(*args: Any) -> dict[str, Any]:
        return {name: value for name, value in splice(*args).items() if name != "position_table"}

    with patch.object(body, "splice", without_table):
        result = case["model"].predict_forward(image=case["image"], max_new_tokens=40, **asked)
    assert result["prediction"] != case["meta"]["prediction"]
    different = result["prediction_masks"][0] != case["expected"]["pred_masks"].numpy().astype(bool)
    assert different.mean() == pytest.approx(0.076, rel=0.1)
