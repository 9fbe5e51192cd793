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
    SPLITS,
    load_split,
    make_split,
    one_spelling,
    patient_key,
    save_split,
    select,
    spellings,
    subsample,
)

SQUARE = parse_polygon([4, 4, 14, 4, 14, 14, 4, 14], (32, 32))


def make_samples(groups=14, series=2, frames=5, parts=SQUARE, first=0):
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
        )
        for g in range(first, first + groups)
        for v in range(series)
        for f in range(frames)
    ]


def sizes(split):
    return [len(split.groups[name]) for name in SPLITS]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(4, [1, 1, 1, 1]), (5, [2, 1, 1, 1]), (7, [2, 2, 1, 2]), (14, [4, 4, 2, 4]), (20, [6, 6, 3, 5])],
)
def test_shares_of_small_numbers(groups, expected):
    assert sizes(make_split(make_samples(groups, 1, 1), seed=0)) == expected


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
        (put("groups", "val", value=[]), list, "needs a list of group ids"),
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
        (lambda: make_split(make_samples(3), seed=0), r"3 group\(s\) with masks.*--group_regex"),
        (lambda: make_split(make_samples(3) + BARE, seed=0), r"3 group\(s\) with masks"),
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
