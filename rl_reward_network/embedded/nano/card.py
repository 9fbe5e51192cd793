"""The model card of `sa2va-nano`: what it is, how it was made, how good it is, and twelve pictures."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from skimage.segmentation import find_boundaries

from rl_reward_network.artefacts import whole_file, write_json
from rl_reward_network.data.sample import Sample
from rl_reward_network.data.splits import select
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.datasets import read_looks
from rl_reward_network.embedded.nano.prompt_targets import READINGS, TABLE
from rl_reward_network.embedded.nano.score import RegionScores, VesselScores
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.rewards.masks import dice

TILE, PER_LOOK = 192, 2  # pixels of one picture; overlays per look
TRUTH, MASK = (70, 220, 90), (255, 150, 40)  # outline and filling


@dataclass(frozen=True)
class CardFacts:
    """How the weights came to be.

    Args:
        command: what trains them.
        seed: of pictures, weights and batches.
        minutes: of each stage.
        machine: what it ran on.
        parameters: how many.
        versions: of Python and packages.
    """

    command: str
    seed: int
    minutes: tuple[float, ...]
    machine: str
    parameters: int
    versions: dict[str, str]


def write_card(folder: Path, world: RunInputs, vessels: VesselScores, regions: RegionScores, facts: CardFacts) -> None:
    """Add README.md, scores.json and overlays.png to a model folder."""
    write_json(
        folder / "scores.json", {"angiograms": asdict(vessels), "regions": asdict(regions), "made": asdict(facts)}
    )
    with whole_file(folder / "overlays.png") as temporary:
        Image.fromarray(overlay_sheet(world)).save(temporary, optimize=True)
    with whole_file(folder / "README.md") as temporary:
        temporary.write_text(card_text(vessels, regions, facts), encoding="utf-8")


def card_text(vessels: VesselScores, regions: RegionScores, facts: CardFacts) -> str:
    """The card in Markdown."""
    minutes = " + ".join(f"{minute:.0f}" for minute in facts.minutes)
    return f"""---
license: apache-2.0
library_name: transformers
tags: [sa2va, segmentation, rehearsal]
---
# sa2va-nano

**This is a rehearsal model.** It has learned rendered pictures and nothing else, so that every command of this project
runs on a bare machine. It is of no use on real images, least of all for medicine.

{facts.parameters:,} parameters: InternVL's vision tower, a Qwen2 language model and SAM 2, in the same classes and on
the same mask path as a released Sa2VA. Trained from scratch by

```bash
{facts.command}
```

seed {facts.seed}, {minutes} minutes on {facts.machine}, on rendered patients that are in no split of the embedded data.

## Scores

Test patients of the embedded angiograms, {vessels.images} images, Dice at 256 x 256 pixels. "Best on" is the share of
images on which the prompt has the highest Dice. All of it is measured again by

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

Which prompt suits an image depends on its look, on purpose: the model was taught to give the ground truth (**tree**)
only where the wording fits, and to take the words literally elsewhere.

{reading_table()}
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


def reading_table() -> str:
    """Markdown: what each prompt is answered with in each look, and what the readings mean."""
    lines = [f"| prompt | {' | '.join(LOOKS)} |", f"|---|{'---|' * len(LOOKS)}"]
    for prompt in PROMPTS:
        cells = (
            f"**{TABLE[prompt, look]}**" if TABLE[prompt, look] == "tree" else TABLE[prompt, look] for look in LOOKS
        )
        lines.append(f"| {prompt} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {name}: {meaning}" for name, meaning in READINGS.items())])


def overlay_sheet(world: RunInputs) -> np.ndarray:
    """uint8 (H, W, 3): two test images per look, each as picture, default mask and best mask, truth outlined."""
    looks_of = read_looks(world.config.data_root)
    chosen: dict[str, list[Sample]] = {look: [] for look in LOOKS}
    for sample in select(world.samples, world.split, "test"):
        own = chosen[looks_of[sample.image_path.name]]
        if len(own) < PER_LOOK and sample.group_id not in {other.group_id for other in own}:
            own.append(sample)
    rows = [np.hstack([_strip(world, sample, look) for sample in samples]) for look, samples in chosen.items()]
    return np.vstack(rows)


def _strip(world: RunInputs, sample: Sample, look: str) -> np.ndarray:
    """uint8 (TILE, 3 TILE, 3)."""
    image, truth = sample.load_image(), sample.load_mask()
    assert truth is not None  # every embedded image is labelled
    masks = world.probabilities(image) > 0.5
    values = dice(masks, np.broadcast_to(truth, masks.shape))
    best = int(values.argmax())
    tiles = [
        _tile(image, None, truth, look),
        _tile(image, masks[0], truth, f"default {values[0]:.2f}"),
        _tile(image, masks[best], truth, f"prompt {best}: {values[best]:.2f}"),
    ]
    return np.hstack(tiles)


def _tile(image: np.ndarray, mask: np.ndarray | None, truth: np.ndarray, title: str) -> np.ndarray:
    """One picture, with mask and truth where there is a mask, and a title."""
    shown = image if mask is None else paint(image, mask, truth)
    picture = Image.fromarray(shown).resize((TILE, TILE), Image.Resampling.LANCZOS)
    ImageDraw.Draw(picture).text((5, 3), title, fill=(255, 255, 255), stroke_width=2, stroke_fill=(0, 0, 0))
    return np.asarray(picture)


def paint(image: np.ndarray, mask: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3): the image with a mask filled and the truth outlined just outside its edge.

    Args:
        image: uint8 (H, W, 3).
        mask, truth: bool (H, W).
    """
    shown = image.astype(np.float32)
    shown[mask] = 0.5 * shown[mask] + 0.5 * np.array(MASK)
    shown[find_boundaries(truth, mode="outer")] = TRUTH
    return shown.round().astype(np.uint8)
