"""The model card of `sa2va-nano`: description, training facts, scores, and overlays of twelve test images."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from rl_reward_network.atomic_io import whole_file, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import select
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.datasets import read_looks
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.sa2va.loading_sa2va import WHOLE_MODEL
from rl_reward_network.report.overlays import AFTER, TRUTH, paint_mask
from rl_reward_network.rewards.metrics import dice
from tools.nano.pictures import PROMPT_TARGETS, TARGETS
from tools.nano.score import RegionScores, VesselScores

TILE, PER_LOOK = 192, 2  # pixels of a tile's side; test images per look


def write_card(
    folder: Path, inputs: RunInputs, vessels: VesselScores, regions: RegionScores, made: dict[str, Any]
) -> None:
    """Add README.md, scores.json and overlays.png to a model folder.

    Args:
        folder: of the model.
        inputs: the model and the embedded data.
        vessels, regions: scores.
        made: command, seed, minutes of each stage, machine, parameters, versions.
    """
    write_json(folder / "scores.json", {"angiograms": asdict(vessels), "regions": asdict(regions), "made": made})
    with whole_file(folder / "overlays.png") as temporary:
        Image.fromarray(overlay_sheet(inputs)).save(temporary, optimize=True)
    with whole_file(folder / "README.md") as temporary:
        temporary.write_text(card_text(vessels, regions, made), encoding="utf-8")


def card_text(vessels: VesselScores, regions: RegionScores, made: dict[str, Any]) -> str:
    """The card in Markdown."""
    command, seed, machine, parameters = (made[name] for name in ("command", "seed", "machine", "parameters"))
    minutes = " + ".join(f"{minute:.0f}" for minute in made["minutes"])
    rows = [f"| prompt | {' | '.join(LOOKS)} |", f"|---|{'---|' * len(LOOKS)}"]
    for prompt in PROMPTS:
        cells = ("**tree**" if (target := PROMPT_TARGETS[prompt, look]) == "tree" else target for look in LOOKS)
        rows.append(f"| {prompt} | {' | '.join(cells)} |")
    targets = "\n".join([*rows, "", *(f"- {name}: {meaning}" for name, (_, meaning) in TARGETS.items())])
    return f"""---
license: apache-2.0
library_name: transformers
tags: [sa2va, segmentation]
---
# sa2va-nano

**As it is, it segments nothing of yours.** It was trained on rendered pictures alone, so that every command of this
project runs without a download. It can be trained on your masks: `sa2va-rl improve`. No result of it is fit for medical
decisions.

{parameters:,} parameters: InternVL's vision tower, a Qwen2 language model and SAM 2, in the same classes and with
the same mask decoding as a released Sa2VA. Trained from scratch by

```bash
{command}
```

seed {seed}, {minutes} minutes on {machine}, on rendered patients that are in no split of the embedded data.

## Use

{WHOLE_MODEL}

## Scores

Test patients of the embedded angiograms, {vessels.images} images, Dice at 256 x 256 pixels. "Best on" is the share of
images on which the prompt has the highest Dice. To measure all of it again:

```bash
python -m benchmarks.embedded_world --model_path <this folder>
```

{score_table(vessels)}

Best fixed prompt, chosen on the policy patients: "{vessels.best_fixed}". Oracle - best fixed: {vessels.gap:.3f}. Recall
of the default prompt: {vessels.default_recall:.3f}.

Scenes of coloured objects ({regions.scenes} scenes, {regions.objects} objects): segmentation by phrase, cIoU
{regions.phrase_ciou:.3f}; captions with colour, shape, size and place right: {regions.captions_right:.1%}.

![Twelve test images: picture, default prompt, best prompt](overlays.png)

Two test images of each look: the picture, the default prompt's mask and the best prompt's mask (filled), with the
outline of the ground truth.

## The planted gap

Which prompt is best depends on the look of an image, by design: the training target of a prompt is the ground truth
(**tree**) only in the looks that its wording fits, and a literal reading of the words in the others.

{targets}
"""


def score_table(scores: VesselScores) -> str:
    """Markdown: prompts x looks, and the oracle."""
    looks = list(scores.oracle_dice)
    lines = [f"| prompt | {' | '.join(looks)} | best on |", f"|---|{'---|' * (len(looks) + 1)}"]
    for prompt, row in scores.dice.items():
        cells = " | ".join(f"{row[look]:.3f}" for look in looks)
        lines.append(f"| {prompt} | {cells} | {scores.best_on[prompt]:.0%} |")
    for name, row in (("**oracle**", scores.oracle_dice), ("oracle's recall", scores.oracle_recall)):
        lines.append(f"| {name} | {' | '.join(f'{row[look]:.3f}' for look in looks)} | |")
    return "\n".join(lines)


def overlay_sheet(inputs: RunInputs) -> np.ndarray:
    """uint8 (H, W, 3): two test images per look, each as picture, default mask and best mask, truth outlined."""
    looks_of = read_looks(inputs.config.data_root)
    chosen: dict[str, list[Sample]] = {look: [] for look in LOOKS}
    for sample in select(inputs.samples, inputs.split, "test"):
        same_look = chosen[looks_of[sample.image_path.name]]
        if len(same_look) < PER_LOOK and sample.group_id not in {other.group_id for other in same_look}:
            same_look.append(sample)
    rows = [np.hstack([_strip(inputs, sample, look) for sample in samples]) for look, samples in chosen.items()]
    return np.vstack(rows)


def _strip(inputs: RunInputs, sample: Sample, look: str) -> np.ndarray:
    """uint8 (TILE, 3 TILE, 3): one test image as picture, default mask and best mask."""
    image, truth = sample.load_image(), sample.load_mask()
    assert truth is not None  # every embedded image is labelled
    masks = inputs.probabilities(image) > 0.5
    values = dice(masks, np.broadcast_to(truth, masks.shape))
    best = int(values.argmax())
    tiles = [
        _tile(image, None, truth, look),
        _tile(image, masks[0], truth, f"default {values[0]:.2f}"),
        _tile(image, masks[best], truth, f"prompt {best}: {values[best]:.2f}"),
    ]
    return np.hstack(tiles)


def _tile(image: np.ndarray, mask: np.ndarray | None, truth: np.ndarray, title: str) -> np.ndarray:
    """uint8 (TILE, TILE, 3): the image with its title and, unless `mask` is None, the mask and the outlined truth."""
    if mask is not None:
        image = paint_mask(paint_mask(image, mask, AFTER, opacity=0.5), truth, TRUTH, opacity=0)
    picture = Image.fromarray(image).resize((TILE, TILE), Image.Resampling.LANCZOS)
    ImageDraw.Draw(picture).text((5, 3), title, fill=(255, 255, 255), stroke_width=2, stroke_fill=(0, 0, 0))
    return np.asarray(picture)
