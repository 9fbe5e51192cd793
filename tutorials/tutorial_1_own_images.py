"""
1. From a folder of images to better masks
==========================================

You have images, masks of the object in a few of them, and a Sa2VA whose masks are poor. One command trains what pays,
measures it on patients that it has not seen, and leaves a model that segments new images.
"""

# %%
# A folder of images and masks
# ----------------------------
#
# The data are a folder with ``images/`` and ``masks/`` whose files have equal names. Here they are drawn: roots of
# plants in soil, of which the small model of this project, ``sa2va-nano``, has never seen one. Ten of them have a mask.
# **For your own data, leave out this cell and set** ``folder = Path("/data/roots")``.

import io
import json
import shlex
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

import cv2
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from rl_reward_network import load
from rl_reward_network.cli.main import main

SIDE = 128  # pixels: this is to be fast


def draw_roots(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An image, uint8 (SIDE, SIDE, 3), and the true mask, uint8 of 0 and 255."""
    soil = cv2.GaussianBlur(rng.normal(size=(SIDE, SIDE, 3)), (0, 0), 1.5) * 60 + (70, 52, 40)
    for _ in range(60):  # stones
        centre, radius = rng.integers(0, SIDE, 2).tolist(), int(rng.integers(1, 6))
        cv2.circle(soil, centre, radius, (np.array([95, 85, 75]) + rng.normal(0, 25)).tolist(), -1)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for _ in range(int(rng.integers(3, 6))):
        heading = np.pi / 2 + np.cumsum(rng.normal(0, 0.16, 90))
        steps = np.cumsum(np.column_stack([np.cos(heading), np.sin(heading)]) * 1.4, axis=0)
        points = np.round(steps + np.array([rng.uniform(20, SIDE - 20), 0])).astype(np.int32)
        cv2.polylines(mask, [points], False, 255, int(rng.integers(3, 6)))
    light = rng.uniform(60, 95)
    image = soil + light * cv2.GaussianBlur(mask.astype(float), (0, 0), 0.8)[..., None] / 255
    return (image + rng.normal(0, 6, image.shape)).clip(0, 255).astype(np.uint8), mask


scratch = tempfile.TemporaryDirectory()  # for all files of this tutorial; it is removed at the end
work = Path(scratch.name)
folder = work / "roots"
for part in ("images", "masks"):
    (folder / part).mkdir(parents=True)
rng = np.random.default_rng(0)
for plant in range(10):
    image, mask = draw_roots(rng)
    Image.fromarray(image).save(folder / "images" / f"plant_{plant:02d}.png")
    Image.fromarray(mask).save(folder / "masks" / f"plant_{plant:02d}.png")

figure, axes = plt.subplots(2, 4, figsize=(8, 4.2))
for column, name in zip(axes.T, sorted((folder / "images").iterdir()), strict=False):
    for axis, part in zip(column, ("images", "masks"), strict=True):
        axis.imshow(Image.open(folder / part / name.name), cmap="gray")
        axis.set_axis_off()
figure.tight_layout()

# %%
# Check the data
# --------------
#
# All commands are those of a terminal: ``sa2va_rl("doctor ...")`` is ``sa2va-rl doctor ...``.


def sa2va_rl(line: str, lines: int = 12) -> None:
    """Run a command as a terminal in the folder `work` does, and show the last lines that it prints."""
    with chdir(work), redirect_stdout(io.StringIO()) as printed:
        main(shlex.split(line))
    print("\n".join(printed.getvalue().splitlines()[-lines:]))


sa2va_rl("doctor --data_root roots", lines=30)

# %%
# The table says what is missing, with the remedy. It also decodes every image and mask once, so that a damaged file
# stops you here and not after an hour of training. Each image counts as a patient here, since no name tells more.
# **Where several images are of one patient, say so**, by their names, by folders or by a table: else one of them may
# train and the other one judge, and the result is too good.
#
# Improve
# -------
#
# A plain segmenter and Sa2VA with a side network learn the masks. Ten patients are too few to keep some apart, so two
# models are trained, each judged by the patients of the other, and then one on all. **For results leave out**
# ``--steps``; **with your own model add** ``--model_path /models/Sa2VA-4B``; **if you have images without masks, add**
# ``--unlabelled_root /data/more``.

sa2va_rl("improve quick --data_root roots --steps 20", lines=12)

# %%
# The verdict is on patients that no judged model has seen. What has not beaten the model as it was would not be
# deployed. ``report.html`` in the run's folder begins with that, and shows the best, the median and the worst image.

(run,) = work.glob("outputs/improve_*")
facts = json.loads((run / "eval.json").read_text())
print("deployed:", facts["chosen"])
for name, means in facts["judged"].items():
    print(f"{name:14} Dice {means['dice']['mean']:.2f}")

# %%
# Segment a new image
# -------------------
#
# The folder of the run is a model for ``sa2va-rl segment IMAGES --model_path RUN``, and for Python:

image, truth = draw_roots(np.random.default_rng(1000))
before = load("sa2va-nano").segment(image, "Please segment the root.").mask
after = load(run).segment(image).mask

figure, axes = plt.subplots(1, 4, figsize=(8, 2.3))
for axis, (title, picture) in zip(
    axes, {"image": image, "before": before, "after": after, "truth": truth}.items(), strict=True
):
    axis.imshow(picture, cmap="gray")
    axis.set_title(title)
    axis.set_axis_off()
figure.tight_layout()

# %%
# What next
# ---------
#
# - ``sa2va-rl improve full`` trains longer, and with images without masks by a mean teacher, too.
# - Segment a folder: ``sa2va-rl segment new/ --model_path RUN --output masks`` leaves masks, a table and a sheet.
# - Score masks of any tool: ``sa2va-rl evaluate --predictions masks --data_root roots``.
# - Where no image has a mask, a reward network and a prompt policy are what is left: the second tutorial.
