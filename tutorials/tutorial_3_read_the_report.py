"""
3. Reading the report: which method, and when none
==================================================

``sa2va-rl compare`` trains and measures every method on one split of your data. This tutorial runs a small part of it
and reads the result: which method is better than the model as it is, what it costs, and when the answer is "none".
"""

# %%
# Data and a reward network
# -------------------------
#
# Rendered angiograms of 28 patients, one image of each (``--patients_csv none``). **For your own data, leave out the
# first lines and name your folder in every** ``--data_root``. The reward network is trained for seconds only, as in the
# first tutorial.

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
for part in ("images", "masks"):
    (work / "vessels" / part).mkdir(parents=True)
for patient in range(28):
    (frame,) = render_series(np.random.default_rng(patient), list(LOOKS)[patient % len(LOOKS)], frames=1)
    mask = Image.fromarray((frame.parts & TREE > 0).astype(np.uint8) * 255)
    Image.fromarray(frame.image).reduce(2).save(work / f"vessels/images/{patient}.png")  # 128 x 128 pixels: to be fast
    mask.reduce(2).point(lambda share: 255 * (share > 127)).save(work / f"vessels/masks/{patient}.png")


def sa2va_rl(line: str, lines: int = 12) -> None:
    """Run a command as a terminal in the folder `work` does, and show the last lines that it prints."""
    with chdir(work), redirect_stdout(io.StringIO()) as printed:
        main(shlex.split(line))
    print("\n".join(printed.getvalue().splitlines()[-lines:]))


sa2va_rl("reward quick --data_root vessels --patients_csv none --members 1 --steps 60", lines=6)
network = next(work.glob("outputs/reward_net_*/best_reward_net")).relative_to(work)

# %%
# Compare
# -------
#
# ``--methods prompts fusion`` leaves out what edits masks and what trains weights: those need minutes. A real
# comparison is ``bash run_compare.sh full`` with everything.

sa2va_rl(
    f"compare quick --data_root vessels --patients_csv none --methods prompts fusion --reward_net {network}",
    lines=12,
)

# %%
# The table
# ---------

(report,) = work.glob("outputs/compare_*")
with open(report / "table.csv", newline="") as file:
    rows = list(csv.DictReader(file))
for row in rows:
    interval = " to ".join(f"{float(row[f'dice_{end}']):.2f}" for end in ("low", "high"))
    print(f"{row['title'][:48]:<49}{float(row['dice_mean']):.3f} ({interval})  {row['verdict']}")

# %%
# Each row is a method; ``table.csv`` has more columns. ``report.html`` begins with what is deployed, the verdict, and
# three test images with their masks; costs, plots and further metrics are folded below its table. What decides:
#
# - **Dice** with its 95 % interval over patients: what another patient may have.
# - **less base**: the difference to the model as it is, on the same images. An interval without 0 is a difference.
# - **p**: of that difference, corrected for the number of rows. With ten useless rows and no correction, one
#   would look different by chance in four of ten tables.
# - **labels**, **minutes**, **masks**: what it costs. ``masks`` are answers of Sa2VA for one new image.

rows.sort(key=lambda row: float(row["dice_mean"]))
figure, axis = plt.subplots(figsize=(8, 3.6))
for place, row in enumerate(rows):
    low, mean, high = (float(row[f"dice_{part}"]) for part in ("low", "mean", "high"))
    axis.plot([low, high], [place, place], color="tab:green" if row["verdict"] == "better" else "grey", linewidth=3)
    axis.plot(mean, place, "ko", markersize=4)
axis.set_yticks(range(len(rows)), [row["title"] for row in rows])
axis.set(xlabel="Dice, 95 % interval; green: better than as it is")
figure.tight_layout()

# %%
# Intervals of two rows overlap although one of them is better on almost every image: compare by the difference and
# its *p*, not by the overlap.
#
# The choice
# ----------
#
# The best method is chosen on validation patients, among those that are better on the test patients. The cheapest is
# the one with the fewest minutes among those that are shown to be less than 0.01 worse.

summary = json.loads((report / "eval.json").read_text())
print(*summary["verdict"], sep="\n")
print(*summary["notes"], sep="\n")

# %%
# When the answer is "none"
# -------------------------
#
# - **No row is better**: the model stays as it is. With few test patients this is the usual answer. Six are the least
#   with which any test can decide; 20 make the intervals reliable.
# - **The plain segmenter is better than every row**: use it. It is the reward network itself, costs no answer of Sa2VA,
#   and every report says so where it holds. Sa2VA is then worth its cost only where you need its language: objects by
#   name, captions, answers.
# - **The fusion wins with weight 1**: that is the plain segmenter again.
# - **Prompts win here**: these images have a planted gap between prompts. On real angiograms the best prompt of all was
#   worth far less than training (:doc:`../results`).
#
# The first page has the same decision from measurements on real images: :doc:`../index`.
