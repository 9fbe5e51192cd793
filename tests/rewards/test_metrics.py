"""Checks over `METRICS`, closed forms of each, and METEOR against published and hand-computed pairs."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from monai.metrics.confusion_matrix import compute_confusion_matrix_metric, get_confusion_matrix
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.meandice import compute_dice
from monai.metrics.meaniou import compute_iou
from monai.metrics.utils import get_mask_edges
from torch import from_numpy

from rl_reward_network.rewards import metrics
from rl_reward_network.rewards.metrics import (
    METRICS,
    boundary,
    calibration_error,
    components,
    empty_rules,
    holes,
    mask_metrics,
    meteor,
    meteor_variant,
    one_tree,
    tokens,
)
from rl_reward_network.rewards.table import MASK_REWARDS

# Of one empty mask beside a box of 3 x 6 pixels, in an image of 15 x 20.
ONE_EMPTY = {**dict.fromkeys(MASK_REWARDS, 0), "failure": 1, "hd95": 25, "betti0": 1, "betti1": 0}


def box(rows, columns, shape=(15, 20)):
    mask = np.zeros(shape, dtype=bool)
    mask[slice(*rows), slice(*columns)] = True
    return mask


def random_pairs():
    """40 pairs of masks: specks, blobs of all densities, and masks that touch every border; none is empty."""
    rng = np.random.default_rng(0)
    noise = rng.random((2, 40, 37, 41)) < rng.uniform(0.005, 0.95, (2, 40, 1, 1))
    noise[0, :5], noise[:, :, 0, 0] = True, True
    return noise[0], noise[1]


def by_monai(name, pred, target):
    tensors = [from_numpy(masks[:, None].astype(np.float32)) for masks in (pred, target)]
    if name in ("precision", "recall"):
        return compute_confusion_matrix_metric(name, get_confusion_matrix(*tensors))[:, 0].numpy()
    if name == "hd95":
        return compute_hausdorff_distance(*tensors, include_background=True, percentile=95)[:, 0].numpy()
    return {"dice": compute_dice, "iou": compute_iou}[name](*tensors)[:, 0].numpy()


@pytest.mark.parametrize("name", METRICS)
class TestEveryMetric:
    def test_stays_in_its_range_and_equal_masks_are_best(self, name):
        metric, (pred, target) = METRICS[name], random_pairs()
        values, equal = metric.function(pred, target), metric.function(target, target)
        assert values.dtype == np.float64
        assert values.shape == (40,)
        assert ((values >= 0) & (values <= (np.inf if metric.highest is None else metric.highest))).all()
        np.testing.assert_allclose(equal, metric.highest if metric.higher_is_better else 0, rtol=1e-12)
        assert ((values <= equal) if metric.higher_is_better else (values >= equal)).all()

    def test_has_a_rule_for_empty_masks(self, name):
        metric, some = METRICS[name], box((3, 6), (3, 9))
        empty = np.zeros_like(some)
        values = metric.function(np.stack([empty, empty, some]), np.stack([empty, some, empty]))
        assert values.tolist() == [1 if metric.higher_is_better else 0, ONE_EMPTY[name], ONE_EMPTY[name]]
        assert metric.title in empty_rules()

    @pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)])
    def test_does_not_change_where_both_masks_are_flipped(self, name, axes):
        pred, target = (masks[:10] for masks in random_pairs())
        if name == "cldice":  # thinning has a direction: exact for lines alone
            pred, target = np.stack([box((4, 5), (0, 20)), box((0, 15), (7, 8))]), np.stack([box((4, 5), (3, 9))] * 2)
        flipped = METRICS[name].function(np.flip(pred, axes), np.flip(target, axes))
        np.testing.assert_allclose(flipped, METRICS[name].function(pred, target), rtol=1e-9)

    def test_compares_pair_by_pair_and_takes_none(self, name):
        measure, (pred, target) = METRICS[name].function, (masks[5:10] for masks in random_pairs())
        np.testing.assert_array_equal(measure(pred, target), [measure(pred[[i]], target[[i]])[0] for i in range(5)])
        assert measure(pred[:0], target[:0]).shape == (0,)

    @pytest.mark.parametrize(
        ("pred", "target", "message"),
        [
            (np.zeros((1, 2, 2), bool), np.zeros((1, 2, 3), bool), r"got \(1, 2, 2\) and \(1, 2, 3\)"),
            (np.zeros((2, 2), bool), np.zeros((2, 2), bool), r"one \(N, H, W\) shape"),
            (np.zeros((1, 2, 2)), np.zeros((1, 2, 2), bool), "must be bool, got float64 and bool; threshold"),
            (np.zeros((1, 0, 5), bool), np.zeros((1, 0, 5), bool), r"must have pixels, got \(N, H, W\) = \(1, 0, 5\)"),
        ],
    )
    def test_refuses_other_shapes_and_types(self, name, pred, target, message):
        with pytest.raises(ValueError, match=message):
            METRICS[name].function(pred, target)


@pytest.mark.parametrize("name", ["dice", "iou", "precision", "recall", "hd95"])
def test_parity_with_monai(name):
    pred, target = random_pairs()
    np.testing.assert_allclose(METRICS[name].function(pred, target), by_monai(name, pred, target), rtol=1e-5, atol=1e-6)


def test_closed_form_of_all_columns():
    target = box((2, 9), (2, 9))
    target[4:6, 4:6] = False  # 45 pixels around a hole of 4
    pred = box((2, 9), (2, 9))
    pred[12:14, 15:17] = True  # 53 pixels in two components without a hole
    columns = mask_metrics(pred, target)
    assert list(columns) == list(METRICS)
    expected = {
        "dice": 2 * 45 / 98,
        "failure": 0,
        "iou": 45 / 53,
        "recall": 1,
        "precision": 45 / 53,
        "betti0": 1,
        "betti1": 1,
    }
    assert {name: columns[name] for name in expected} == pytest.approx(expected)
    assert {"dice", "iou", "recall", "precision", "cldice", "betti"} <= MASK_REWARDS.keys()
    assert MASK_REWARDS["betti"](pred[None], target[None]).tolist() == [1 / 3], "one component and one hole too many"


def test_one_tree_counts_islands_and_loops_and_asks_for_no_truth():
    tree, loop, two, empty = (np.zeros((6, 8), dtype=bool) for _ in range(4))
    tree[2] = tree[:, 3] = True
    loop[1:5, 1:5] = True
    loop[2:4, 2:4] = False
    two[1, 1] = two[4, 6] = True
    assert one_tree(np.stack([tree, loop, two, empty])).tolist() == [1, 1 / 2, 1 / 2, 0]
    assert one_tree(np.zeros((0, 6, 8), dtype=bool)).shape == (0,)


def test_calibration_error_in_closed_form():
    target = np.array([[[True, True, False, False]]])
    soft = np.array([[[0.9, 0.91, 0.01, 0.5]]])
    # three bins: two pixels at 0.905, both true; one at 0.01, false; one at 0.5, false
    expected = (2 * abs(0.905 - 1) + 0.01 + 0.5) / 4
    assert calibration_error(soft, target).tolist() == pytest.approx([expected])
    assert calibration_error(target.astype(float), target).tolist() == [0]
    assert calibration_error(1 - target.astype(float), target).tolist() == [1]
    with pytest.raises(ValueError, match="soft masks must have the shape of the true ones"):
        calibration_error(soft[:, :, :2], target)
    with pytest.raises(ValueError, match=r"soft masks must be in \[0, 1\], got -0.1 to 0.9"):
        calibration_error(np.array([[[0.9, -0.1, 0.0, 0.5]]]), target)


def test_large_masks_do_not_overflow():
    full = np.ones((1, 2000, 2000), dtype=bool)
    assert METRICS["iou"].function(full, full).tolist() == [1]


def test_centreline_dice_ignores_width_and_punishes_breaks():
    line = box((10, 11), (0, 20), (20, 20))  # one pixel wide: its own centreline
    thick, half = box((8, 13), (0, 20), (20, 20)), box((10, 11), (0, 10), (20, 20))
    far = box((2, 3), (0, 20), (20, 20))
    values = METRICS["cldice"].function(np.stack([line, thick, half, far]), np.stack([line] * 4))
    # half a line: its centreline is all inside (1), half of the target's centreline is found (1/2)
    np.testing.assert_allclose(values[[0, 2, 3]], [1, 2 * 0.5 / 1.5, 0])
    assert values[1] > 0.9, "the skeleton forks a little at the ends"
    assert METRICS["dice"].function(thick[None], line[None])[0] < 0.4
    blobs = np.stack([box((5, 5 + height), (5, 5 + width)) for height in (1, 2, 3) for width in (1, 2, 3)])
    np.testing.assert_allclose(METRICS["cldice"].function(blobs, blobs), 1, err_msg="every small blob has a centreline")


def test_distances_in_closed_form():
    line, lower, dot = np.zeros((3, 1, 50, 60), dtype=bool)
    line[0, 10, 5:25], lower[0, 17, 5:25] = True, True
    dot[0, 13, 9] = True
    hd95 = METRICS["hd95"].function
    assert hd95(line, lower) == 7
    assert hd95(dot, lower) == pytest.approx(hd95(lower, dot))
    ends = np.percentile(np.hypot(4, np.arange(5, 25) - 9), 95)  # from each pixel of the line below to the dot
    assert hd95(dot, lower) == pytest.approx(ends, rel=1e-6)


def test_the_boundary_is_that_of_monai():
    for pair in zip(*random_pairs(), strict=True):
        for mask, edges in zip(pair, get_mask_edges(*pair, crop=False), strict=True):
            np.testing.assert_array_equal(boundary(mask), edges)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("....", "...."), (0, 0)),
        (("####", "####"), (1, 0)),
        (("#.#.", "....", "#.##"), (4, 0)),
        (("#...", ".#..", "..##"), (1, 0)),  # a diagonal line is connected
        ((".#.", "#.#", ".#."), (1, 1)),  # and closes a loop
        (("###", "#.#", "#.#"), (1, 0)),  # open at the border: no hole
        (("#####", "#.#.#", "##.##", "#####"), (1, 3)),  # three holes that touch at corners alone
        (("#######", "#.....#", "#.###.#", "#.#.#.#", "#.###.#", "#.....#", "#######"), (2, 2)),
    ],
)
def test_components_and_holes_of_drawings(lines, expected):
    mask = np.array([[pixel == "#" for pixel in line] for line in lines])
    assert (components(mask), holes(mask)) == expected


def test_components_less_holes_are_eulers_number():
    """Corners less edges plus faces of the closed pixels, in which diagonal neighbours share a corner."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        mask = rng.random((9, 12)) < rng.uniform(0.1, 0.9)
        corners, edges = set(), set()
        for row, column in zip(*np.nonzero(mask), strict=True):
            corners |= {(row + i, column + j) for i in (0, 1) for j in (0, 1)}
            edges |= {("h", row, column), ("h", row + 1, column), ("v", row, column), ("v", row, column + 1)}
        assert components(mask) - holes(mask) == len(corners) - len(edges) + mask.sum()


# ---- METEOR ----------------------------------------------------------------------------------------------------------

PARTY = (
    "It is a guide to action which ensures that the military always obeys the commands of the party",
    "It is a guide to action that ensures that the military will forever heed Party commands",
)
PUBLISHED = [  # prediction, reference, score to four digits
    (*PARTY, 0.6944),  # NLTK's own documentation
    ("non matching hypothesis", "this is a cat", 0.0),  # the same
    ("the cat sat on the mat", "the cat sat on the mat", 0.9977),  # Wikipedia, METEOR, examples
    ("the cat was sat on the mat", "the cat sat on the mat", 0.9654),
    ("on the mat sat the cat", "the cat sat on the mat", 0.5),
]
ROUNDED = [score for *_, score in PUBLISHED]
BY_HAND = [  # prediction, reference, score; words that WordNet may know as synonyms are in them
    ("a dark thin vessel", "a dark narrow vessel", 3 / 4 * (1 - 0.5 * (2 / 3) ** 3)),  # m 3, c 2: 0.638889
    ("vessels branching left", "the vessel branches left", 10 / 13 * (1 - 0.5 / 27)),  # P 1, R 3/4, c 1: 0.754986
]


@pytest.fixture
def fresh_probe():
    metrics._wordnet.cache_clear()
    yield
    metrics._wordnet.cache_clear()


@pytest.mark.parametrize(("prediction", "reference", "score"), PUBLISHED + BY_HAND)
def test_published_pairs_and_pairs_computed_by_hand(monkeypatch, prediction, reference, score):
    if meteor_variant() == "full" and (prediction, reference, score) in PUBLISHED:
        assert meteor([prediction], [reference])[0] == pytest.approx(score, abs=5e-5)
    monkeypatch.setattr(metrics, "_wordnet", lambda: metrics.NO_SYNONYMS)
    assert meteor_variant() == "exact+stem"
    assert meteor([prediction], [reference])[0] == pytest.approx(score, abs=5e-5 if score in ROUNDED else 1e-12)


def test_synonyms_match_in_the_full_variant(monkeypatch):
    lemmas = [SimpleNamespace(name=lambda word=word: word) for word in ("thin", "narrow")]
    narrow = SimpleNamespace(synsets=lambda word: [SimpleNamespace(lemmas=lambda: lemmas)] if word == "thin" else [])
    monkeypatch.setattr(metrics, "_wordnet", lambda: narrow)
    assert meteor_variant() == "full"
    assert meteor(["a dark thin vessel"], ["a dark narrow vessel"])[0] == pytest.approx(1 - 0.5 / 64)


def test_short_perfect_captions_are_worth_one_when_normalised():
    predictions = ["vessel", "Blood vessel!", "the blood vessel", "", "nerve"]
    references = ["vessel", "blood vessel", "blood vessel", "vessel", "vessel"]
    plain, normalised = (meteor(predictions, references, normalise=normalise) for normalise in (False, True))
    longer = 2 / 3 / (0.9 * 2 / 3 + 0.1)  # P 2/3, R 1; one chunk of two as in the reference with itself
    assert plain.tolist() == pytest.approx([0.5, 0.9375, 0.9375 * longer, 0, 0])
    assert normalised.tolist() == pytest.approx([1, 1, longer, 0, 0])
    assert plain.dtype == normalised.dtype == np.float64


def test_punctuation_and_case_earn_nothing():
    assert tokens("A dark-blue Vessel, the surgeon's; 2.5 mm.") == [
        *("a", "dark", "blue", "vessel", "the", "surgeon", "s", "2", "5", "mm")
    ]
    assert tokens(" .,;!? ") == []
    assert meteor([], []).shape == meteor([], [], normalise=True).shape == (0,)
    assert meteor([". , ; !"], ["a vessel, dark; thin!"]).tolist() == [0]
    assert meteor(["THE VESSEL."], ["the vessel"]).tolist() == [0.9375]


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "got 2 and 1"),
        (["a", "b"], ["a", ""], r"reference 1 .*\(''\)"),
        (["a"], [" ?! "], r"reference 0 .*\(' \?! '\)"),
        ("vessel", ["vessel"], "got one string"),
        (["vessel"], "vessel", "got one string"),
    ],
)
def test_captions_that_cannot_be_compared(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        meteor(predictions, references)


def test_nltk_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk.translate", None)
    with pytest.raises(ValueError, match="package nltk: pip install"):
        meteor(["vessel"], ["vessel"])


def test_wordnet_is_looked_for_once_and_never_downloaded(fresh_probe, monkeypatch, tmp_path):
    import nltk

    asked = []
    find = nltk.data.find
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk.data, "find", lambda name, paths=None: asked.append(name) or find(name, paths))
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("nothing may be downloaded"))
    assert meteor_variant() == "exact+stem"
    assert {"corpora/wordnet", "corpora/wordnet.zip"} <= set(asked)
    asked.clear()
    assert meteor_variant() == "exact+stem"
    assert asked == []


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_wordnet_that_cannot_be_read(fresh_probe, monkeypatch, tmp_path, kind):
    import nltk

    place = tmp_path / "corpora" / "wordnet"
    place.mkdir(parents=True)
    if kind == "zip":
        place.rmdir()
        place.with_suffix(".zip").write_bytes(b"not a zip")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"corpora/wordnet .*cannot read it \(\w+\); delete"):
        meteor_variant()
