"""
1. From a folder of images to a verdict and a mask
==================================================

You have images, masks of the object in some of them, and a Sa2VA. This tutorial shows how to check the data, train a
prompt policy, read its verdict and segment a new image.
"""

# %%
# A folder of images and masks
# ----------------------------
#
# The data are a folder with ``images/`` and ``masks/`` whose files have equal names. Here they are rendered
# angiograms of 24 patients. **For your own data, leave out this cell and set** ``folder = Path("/data/vessels")``.

import csv
import io
import json
import shlex
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from rl_reward_network.cli.main import main
from rl_reward_network.embedded.angiograms import LOOKS, TREE, render_series

scratch = tempfile.TemporaryDirectory()  # for all files of this tutorial; it is removed at the end
work = Path(scratch.name)
folder = work / "vessels"
(folder / "images").mkdir(parents=True)
(folder / "masks").mkdir()
looks = list(LOOKS)
rows = []
for patient in range(24):
    look = looks[patient % len(looks)]
    frames = 2 if patient % 4 == 0 else 1
    for number, frame in enumerate(render_series(np.random.default_rng(patient), look, frames)):
        name = f"scan_{patient:02d}_{number}.png"
        mask = Image.fromarray((frame.parts & TREE > 0).astype(np.uint8) * 255)
        Image.fromarray(frame.image).reduce(2).save(folder / "images" / name)  # 128 x 128 pixels: this is to be fast
        mask.reduce(2).point(lambda share: 255 * (share > 127)).save(folder / "masks" / name)
        rows.append([name, f"patient {patient}"])

# %%
# Two images of one patient are nearly equal. If one of them trains and the other one tests, the result is too good.
# So the project wants to know the patient of each image. A table with two columns says it:

with open(work / "patients.csv", "w", newline="") as file:
    csv.writer(file).writerows([["image", "group"], *rows])

names = [row[0] for row in rows]
figure, axes = plt.subplots(2, 4, figsize=(8, 4.2))
for column, name in zip(axes.T, names[1:], strict=False):
    for axis, part in zip(column, ("images", "masks"), strict=True):
        axis.imshow(Image.open(folder / part / name), cmap="gray")
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


sa2va_rl("doctor --data_root vessels --patients_csv patients.csv", lines=40)

# %%
# The table says what is missing, with the remedy. It also decodes every image and mask once, so that a damaged file
# stops you here and not after an hour of training.
#
# Step 1: a network that judges masks
# -----------------------------------
#
# It is trained on the images and masks of some of the patients, and predicts the Dice of any mask of a new image. The
# settings here are for a first look, in seconds: **for results leave out** ``--members`` **and** ``--steps``.

sa2va_rl("reward quick --data_root vessels --patients_csv patients.csv --members 1 --steps 60")

# %%
# Step 2: a policy that chooses the prompt
# ----------------------------------------
#
# Sa2VA is frozen. A small policy learns by PPO which of 11 prompts suits which image; the reward is the Dice that the
# network predicts. Without ``--model_path`` the model is ``sa2va-nano``, the small one of the project; **for yours,
# add** ``--model_path /models/Sa2VA-4B`` **to all commands**.

network = next(work.glob("outputs/reward_net_*/best_reward_net")).relative_to(work)
sa2va_rl(f"prompts quick --data_root vessels --patients_csv patients.csv --reward_net {network} --total_timesteps 800")

# %%
# Evaluate it on patients that nothing has seen
# ---------------------------------------------

(run,) = work.glob("outputs/sa2va_rl_finetune_*")
sa2va_rl(f"evaluate --model_path {run.relative_to(work)}/final_model --split test", lines=30)

# %%
# Read the verdict first. It is about the difference between the policy and the best single prompt, with a 95 %
# interval over patients. With few test patients it often is *cannot tell*: p is above 0.05. That is an
# answer, too: more labelled patients are needed, or nothing is to be gained. ``outputs/.../evaluation/report.html``
# has the same table, with pictures of the best, the median and the worst image.

verdict = json.loads((run / "evaluation" / "eval.json").read_text())["verdict"]
print(verdict)

# %%
# Segment a new image
# -------------------
#
# ``--policy`` uses what the run has deployed: the policy, one prompt for all images, or, where nothing has beaten it,
# the model as it is.

(frame,) = render_series(np.random.default_rng(1000), "faint", frames=1)
Image.fromarray(frame.image).reduce(2).save(work / "new.png")
sa2va_rl(f"segment new.png --policy {run.relative_to(work)}")

figure, axes = plt.subplots(1, 3, figsize=(8, 2.9))
pictures = {"image": "new.png", "mask": "new_mask.png", "over the image": "new_overlay.png"}
for axis, (title, file) in zip(axes, pictures.items(), strict=True):
    axis.imshow(Image.open(work / file), cmap="gray")
    axis.set_title(title)
    axis.set_axis_off()
figure.tight_layout()

# %%
# What next
# ---------
#
# - ``DATA_ROOT=/data/vessels bash run_step2_finetune.sh quick`` runs all of these steps with their usual settings, in
#   six minutes on two cores.
# - If the best prompt is not good enough, no choice among prompts helps. Train the weights:
#   ``sa2va-rl grpo quick --objective supervised --data_root vessels``.
# - Which of these is worth it is the subject of the third tutorial.
