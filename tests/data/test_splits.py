import hashlib
import json
import random
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample, data_fingerprint, pseudonym
from rl_reward_network.data.masks import parse_polygon
from rl_reward_network.data.splits import (
    FRACTIONS,
    SPLITS,
    VERDICT,
    load_split,
    make_split,
    one_spelling,
    patient_key,
    save_split,
    select,
    spellings,
    subsample,
)
from rl_reward_network.embedded.datasets import PATIENTS
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.report.statistics import MIN_PATIENTS

SQUARE = parse_polygon([4, 4, 14, 4, 14, 14, 4, 14], (32, 32))


def make_samples(groups=14, series=2, frames=5, parts=SQUARE, first=0, split=None):
    """Patients with `series` videos of `frames` frames each."""
    return [
        Sample(
            image_path=Path(__file__),  # its bytes stand for pixels; names are told apart by sample_id
            text="blood vessel",
            group_id=pseudonym("group", f"Doe{g}"),
            series_id=pseudonym("series", f"Doe{g}", f"{v}"),
            sample_id=pseudonym("sample", f"Doe{g}_{v}_{f}"),
            size=(32, 32),
            mask_parts=parts,
            group=f"Doe{g}",
            split=split,
        )
        for g in range(first, first + groups)
        for v in range(series)
        for f in range(frames)
    ]


def sizes(split):
    return [len(split.groups[name]) for name in SPLITS]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        *((4, [1, 1, 1, 1]), (5, [2, 1, 1, 1]), (7, [2, 2, 1, 2]), (14, [4, 4, 2, 4]), (19, [6, 5, 3, 5])),
        *((20, [4, 4, 6, 6]), (21, [4, 5, 6, 6]), (30, [8, 9, 6, 7]), (37, [11, 11, 6, 9]), (160, [48, 48, 24, 40])),
    ],
)
def test_shares_of_small_numbers(groups, expected):
    split = make_split(make_samples(groups, 1, 1), seed=0)
    assert sizes(split) == expected
    changed = 20 <= groups < 37
    assert split.settings == {"split_seed": 0, "split_sizes": expected if changed else None}, "of older runs"


def test_limits_and_shares_are_those_of_statistics_and_flags():
    assert VERDICT == MIN_PATIENTS
    assert RunConfig().fractions == FRACTIONS


@pytest.mark.parametrize(
    ("groups", "fractions", "expected"),
    [
        (20, (0.8, 0.1, 0.1), [8, 8, 2, 2]),
        (30, (0.4, 0.2, 0.4), [6, 6, 6, 12]),
        (10, (0.98, 0.01, 0.01), [4, 4, 1, 1]),
        (4, (0.01, 0.01, 0.98), [1, 1, 1, 1]),
    ],
)
def test_shares_that_the_user_gives_are_taken_as_they_are(groups, fractions, expected):
    split = make_split(make_samples(groups, 1, 1), 0, fractions=fractions)
    assert (sizes(split), split.sizes) == (expected, tuple(expected) if groups != 4 else None)


def with_split(train, val, test, **bare):
    numbers = {"train": train, "val": val, "test": test}
    samples, first = [], 0
    for name, count in numbers.items():
        samples += make_samples(count, 1, 2, SQUARE if name not in bare.get("bare", ()) else None, first, name)
        first += count
    return samples


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((20, 6, 8), [10, 10, 6, 8]),
        ((3, 2, 1), [2, 1, 2, 1]),
        ((20, 0, 20), [7, 7, 6, 20]),  # DRIVE
        ((10, 0, 4), [4, 4, 2, 4]),  # CHASE
        ((1000, 0, 300), [400, 400, 200, 300]),
        ((3, 0, 2), [1, 1, 1, 2]),
        ((75, 10, 0), [27, 26, 10, 22]),
        ((20, 0, 0), [4, 4, 6, 6]),
    ],
)
def test_a_split_of_the_data_is_kept_and_its_train_halved(given, expected):
    samples = with_split(*given)
    split = make_split(samples, 3)
    assert sizes(split) == expected
    for name in ("val", "test"):
        own = {sample.group_id for sample in samples if sample.split == name}
        assert not own or own == set(split.groups[name])
    assert split != make_split(samples, 4), "the halves follow the seed"


def test_unlabelled_patients_of_a_split_of_the_data_stay_where_they_are():
    samples = with_split(6, 2, 2, bare={"test"}) + make_samples(3, 1, 1, None, 50, "train")
    split = make_split(samples, 0)
    assert sizes(split) == [3, 3 + 3, 2, 2]
    assert sizes(make_split(with_split(6, 2, 2, bare={"train", "val", "test"}), 0)) == [3, 3, 2, 2], "without labels"


def test_a_patient_or_a_picture_in_two_parts_is_refused():
    samples = with_split(6, 2, 2)
    patient = [replace(samples[0], split="test", sample_id="x"), *samples]
    with pytest.raises(ValueError, match=r"^1 patient.*`split`: Doe0 \(test, train\); .*correct `split`"):
        make_split(patient, 0)
    same = [replace(one, group_id=samples[0].group_id) if one.group == "Doe9" else one for one in samples]
    with pytest.raises(ValueError, match=r"^1 patient.*: Doe0 \(train\) = Doe9 \(test\); .*the same picture"):
        make_split(same, 0)


def one_of_each(groups):
    ids = [[pseudonym(kind, group) for kind in ("group", "series", "sample")] for group in groups]
    return [replace(make_samples(1, 1, 1)[0], group_id=g, series_id=v, sample_id=s) for g, v, s in ids]


def test_fingerprint_and_embedded_split_are_those_of_version_1_and_a_field_changes_the_former(tmp_path):
    embedded = make_split(one_of_each(f"{number:06d}0001" for number in range(PATIENTS)), 0)
    assert hashlib.sha256(json.dumps(embedded.groups).encode()).hexdigest().startswith("39780f3dcac94d9c")
    (tmp_path / "pixels").write_text("pixels")
    bare = [replace(one, image_path=tmp_path / "pixels") for one in one_of_each("ab")]
    assert data_fingerprint(bare) == "2728a6f616ebdb1c48ff377546f7f86f2e46efd1764f4591532a9a302f96d84f"
    given = with_split(3, 1, 1)
    moved = [replace(one, split="train") if one.split == "val" else one for one in given]
    assert len({data_fingerprint(one) for one in (given, moved, [replace(one, split=None) for one in given])}) == 3


def test_every_group_is_in_one_split_no_split_is_empty_and_bare_ones_are_in_policy():
    for groups in range(4, 60):
        samples = make_samples(groups, 1, 1)
        split = make_split(samples, seed=groups)
        assert min(sizes(split)) >= 1
        assert sorted(g for ids in split.groups.values() for g in ids) == sorted(s.group_id for s in samples)
    bare = make_samples(6, parts=None, first=14)
    split = make_split(make_samples(14) + bare, seed=0)
    assert sizes(split) == [4, 4 + 6, 2, 4]
    assert {s.group_id for s in bare} <= set(split.groups["policy"])


def test_no_patient_of_many_near_identical_frames_is_in_two_splits():
    samples = make_samples()
    split = make_split(samples, seed=42)
    patients = {name: {s.group for s in select(samples, split, name)} for name in SPLITS}
    assert all(patients[a].isdisjoint(patients[b]) for a, b in combinations(SPLITS, 2))
    assert sum(len(select(samples, split, name)) for name in SPLITS) == len(samples)


def test_split_follows_the_seed_and_not_the_order_and_its_file_holds_no_names(tmp_path):
    samples = make_samples()
    assert make_split(samples, 3) == make_split(random.Random(1).sample(samples, len(samples)), 3)
    assert len({json.dumps(make_split(samples, seed).groups) for seed in range(20)}) > 15
    samples = make_samples()
    split = make_split(samples, seed=5)
    save_split(split, tmp_path / "split.json")
    assert load_split(tmp_path / "split.json", samples) == split
    assert split.fingerprint == data_fingerprint(samples)
    assert "Doe" not in (tmp_path / "split.json").read_text()


def put(*keys, value):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value(content[keys[-1]]) if callable(value) else value

    return change


def leak(content):
    content["groups"]["test"].append(content["groups"]["reward"][0])


def redrawn(samples):
    return [replace(sample, mask_parts=parse_polygon([4, 4, 15, 4, 15, 14, 4, 14], (32, 32))) for sample in samples]


@pytest.mark.parametrize(
    ("change", "read", "message"),
    [
        (leak, list, "leak: group"),
        (put("format_version", value=2), list, "format_version is 2, this program reads 1"),
        (put("groups", "test", value=lambda ids: ids[1:]), list, "in no split; the split is of other data"),
        (
            put("groups", "test", value=lambda ids: [*ids, "0" * 12]),
            list,
            "not in the data; the split is of other data",
        ),
        (put("fingerprint", value="0" * 64), list, "fingerprint is 0{12}, .*the split is of other data"),
        (lambda content: None, redrawn, "fingerprint.*the split is of other data"),
        (put("groups", "reward", value=[]), list, "needs a list of group ids"),
        (put("groups", "test", value="P1"), list, "needs a list of group ids"),
        (put("seed", value=None), list, "needs a list of group ids, and `seed`"),
        (lambda content: content["groups"].pop("val"), list, "exactly the keys reward, policy, val, test"),
        (lambda content: content.clear(), list, "format_version is None"),
    ],
)
def test_bad_split_files_are_refused(tmp_path, change, read, message):
    path, samples = tmp_path / "split.json", make_samples()
    save_split(make_split(samples, seed=5), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"split\.json: .*{message}"):
        load_split(path, read(samples))


def test_a_fold_of_a_cross_validation_has_no_test(tmp_path):
    samples = make_samples()
    split = make_split(samples, seed=5)
    moved = {**split.groups, "val": (*split.groups["val"], *split.groups["test"]), "test": ()}
    save_split(replace(split, groups=moved), tmp_path / "split.json")
    read = load_split(tmp_path / "split.json", samples)
    assert (read.groups, select(samples, read, "test")) == (moved, [])


def test_subsample_takes_one_of_each_series_before_a_second_and_follows_the_seed():
    samples = make_samples(groups=3, series=2, frames=5)  # 6 series
    for count in range(len(samples) + 1):
        taken = subsample(samples, count, seed=0)
        per_series = [sum(s.series_id == one for s in taken) for one in {s.series_id for s in samples}]
        assert len(set(taken)) == count == sum(per_series)
        assert max(per_series) - min(per_series) <= 1
    samples = make_samples()
    assert subsample(samples, 9, seed=1) == subsample(samples[::-1], 9, seed=1) != subsample(samples, 9, seed=2)
    assert subsample(samples, 0, seed=1) == []
    uneven = make_samples(1, 1, 5) + make_samples(1, 1, 1, first=1)
    assert [len(subsample(uneven, count, seed=0)) for count in (4, 99)] == [4, 6]


BARE = make_samples(9, parts=None, first=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_split(make_samples(3), seed=0), r"3 labelled patient\(s\) with 1 image.*--group_regex"),
        (lambda: make_split(make_samples(3) + BARE, seed=0), r"3 labelled patient\(s\) with 1 image.*improve"),
        (
            lambda: make_split(with_split(1, 2, 2), 0),
            r"^1 labelled .* in `train` .*\(val, test as given\).*reward, policy",
        ),
        (lambda: make_split(with_split(0, 2, 2), 0), r"^0 labelled patient\(s\) in `train`"),
        (lambda: select(BARE, make_split(BARE, 0), "train"), "'train' is unknown, expected one of reward"),
        (lambda: subsample(BARE, -1, seed=1), "count must be >= 0, got -1"),
    ],
)
def test_what_cannot_be_split_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ONE = [
    ["Patient 7", "patient_07", "PATIENT  7", "patient-007", "Patient7", "\uff30atient \uff17", " patient.7 "],
    ["M\u00fcller", "Mu\u0308ller", "M\u00dcLLER", "mu\u0308ller"],
    ["0000012345", "12345"],
    ["Stra\u00dfe", "STRASSE"],
    ["DOE^JANE", "Doe Jane", "doe_jane"],
    ["\u0930\u093e\u092e 1", "\u0930\u093e\u092e_01"],
]


def test_patients_have_keys_of_their_own() -> None:
    others = ["Patient 70", "Patient 17", "7", "1.2", "12", "***", "%", "p7a", "\u0930\u0940\u092e 1"]
    names = [*(group[0] for group in ONE), *others]
    assert len({patient_key(name) for name in names}) == len(names)
    names = ["patient 7", "Patient 7", "p8"]
    first = {"patient 7": "Patient 7", "Patient 7": "Patient 7", "p8": "p8"}
    assert one_spelling(names) == one_spelling(names[::-1]) == first, "the first one stands for all"
    assert spellings(names) == {"patient 7": ["Patient 7", "patient 7"], "p 8": ["p8"]}


def read(folder: Path, names: list[str]) -> dict[str, Sample]:
    records = [{"image": f"{n}.png", "text": "x", "series": "1", "group": name} for n, name in enumerate(names)]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for record in records:
        Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "images" / record["image"])
    (folder / "annotations.json").write_text(json.dumps(records))
    return dict(zip(names, read_annotations(folder), strict=True))


@pytest.mark.parametrize("names", ONE)
def test_spellings_of_one_patient_are_one_group_with_its_series(tmp_path: Path, names: list[str]) -> None:
    found = read(tmp_path, [*names, "P99"])
    other = found.pop("P99")
    assert len({(sample.group_id, sample.series_id) for sample in found.values()}) == 1
    assert other.group_id not in {sample.group_id for sample in found.values()}
    again = read(tmp_path, ["P99", *reversed(names)])
    assert {name: sample.group_id for name, sample in again.items() if name != "P99"} == {
        name: sample.group_id for name, sample in found.items()
    }, "whatever the order"
