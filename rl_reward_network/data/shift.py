"""Whether two sets of images come from different places: a classifier two-sample test on simple statistics.

Lopez-Paz and Oquab, "Revisiting Classifier Two-Sample Tests", ICLR 2017. If a linear classifier tells an image of one
set from one of the other, on patients that it was not fitted to, then scores on the first say little of the second.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import subsample

MOST_IMAGES = 100  # of a set; more change the AUC by less than its own error
FEWEST_GROUPS = 5  # of a set; each fold of the cross-validation has one of each
SIDE = 256  # pixels, of which sharpness is measured
ELSEWHERE = 0.9  # AUC from which two sets are of different places; docs/log.md has measured values


def image_statistics(image: np.ndarray) -> np.ndarray:
    """float64 (6,) of an image uint8 (H, W, 3): grey levels, sharpness, colour; not its size, which an export sets."""
    grey = image.astype(np.float64).mean(axis=2)
    small = np.asarray(Image.fromarray(grey.astype(np.float32)).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    sharp = np.abs(np.diff(small, axis=0)).mean() + np.abs(np.diff(small, axis=1)).mean()
    colour = (image.max(axis=2).astype(np.float64) - image.min(axis=2)).mean()
    levels = np.percentile(grey, [5, 50, 95])
    return np.array([grey.std(), *levels, np.log(sharp + 1e-3), colour])


def domain_auc(first: Sequence[Sample], second: Sequence[Sample], seed: int = 0) -> float:
    """The area under the ROC curve with which images of two sets are told apart, on patients left out; 0.5 is chance.

    NaN where a set has fewer than `FEWEST_GROUPS` patients.
    """
    sets = [subsample(list(samples), MOST_IMAGES, seed) for samples in (first, second)]
    if min(len({sample.group_id for sample in samples}) for samples in sets) < FEWEST_GROUPS:
        return float("nan")
    with ThreadPoolExecutor() as threads:
        rows = [*threads.map(lambda sample: image_statistics(sample.load_image()), [*sets[0], *sets[1]])]
    of_second = np.repeat([0, 1], [len(samples) for samples in sets])
    groups = [sample.group_id for samples in sets for sample in samples]
    folds = StratifiedGroupKFold(FEWEST_GROUPS, shuffle=True, random_state=seed)
    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
    found = cross_val_predict(model, np.array(rows), of_second, groups=groups, cv=folds, method="decision_function")
    return float(roc_auc_score(of_second, found))
