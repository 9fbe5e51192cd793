import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rl_reward_network.data.grasp_any_region import read_grasp_any_region
from rl_reward_network.embedded import regions

SIDE = 256
NO_MASK = np.zeros((1, 1), dtype=bool)


@pytest.fixture(scope="module")
def scenes() -> list[regions.Scene]:
    return list(regions.make_scenes(120, seed=7))


@pytest.fixture(scope="module")
def objects(scenes: list[regions.Scene]) -> list[tuple[regions.Scene, regions.RegionObject]]:
    return [(scene, obj) for scene in scenes for obj in scene.objects]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five scenes in three shards."""
    path = tmp_path_factory.mktemp("data") / "regions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "SHARD_ROWS", 2)
        regions.write_regions(path, count=5, seed=3, side=128)
    return path


def assert_equal(first: regions.Scene, second: regions.Scene) -> None:
    assert first.image.dtype == second.image.dtype == np.uint8
    assert (first.image == second.image).all()
    assert [obj.caption for obj in first.objects] == [obj.caption for obj in second.objects]
    for one, other in zip(first.objects, second.objects, strict=True):
        assert one.mask.dtype == other.mask.dtype == bool
        assert (one.mask == other.mask).all()


def table_of(folder: Path) -> pa.Table:
    """All shards, without the `datasets` library."""
    return pa.concat_tables(pa.ipc.open_stream(path).read_all() for path in sorted(folder.glob("*.arrow")))


def extent(mask: np.ndarray) -> float:
    """Largest width over all directions, in pixels."""
    y, x = np.nonzero(mask)
    angles = np.linspace(0, np.pi, 36, endpoint=False)[:, None]
    return float(np.ptp(x * np.cos(angles) + y * np.sin(angles), axis=1).max()) + 1


def test_a_scene_depends_on_seed_and_index_only() -> None:
    few, many = list(regions.make_scenes(2, seed=1)), list(regions.make_scenes(4, seed=1))
    for one, other in zip(few, many, strict=False):
        assert_equal(one, other)
    assert_equal(many[3], regions.render_scene(np.random.default_rng([1, 3])))
    others = [*many, *regions.make_scenes(4, seed=2)]
    assert len({scene.image.tobytes() for scene in others}) == len(others)


def test_three_or_four_different_objects_in_different_places_and_apart(scenes: list[regions.Scene]) -> None:
    assert {len(scene.objects) for scene in scenes} == {3, 4}
    for scene in scenes:
        assert (scene.image.shape, scene.image.dtype) == ((SIDE, SIDE, 3), np.uint8)
        assert len({obj.place for obj in scene.objects}) == len(scene.objects)
        assert len({(obj.colour, obj.shape, obj.size) for obj in scene.objects}) == len(scene.objects)
        assert sum(obj.mask.astype(int) for obj in scene.objects).max() == 1
        for obj in scene.objects:
            assert obj.mask.dtype == bool
            assert obj.mask.any()
            assert not obj.mask[[0, -1]].any()
            assert not obj.mask[:, [0, -1]].any()


def test_four_large_neighbours_find_room() -> None:
    """The most crowded case: a large object in the centre and in three cells beside it."""
    radii = np.full(4, regions.WIDTHS["large"][1] * regions.OUTER_RADII["triangle"])
    for seed in range(50):
        centres = regions._arrange(np.random.default_rng(seed), np.array([1, 3, 4, 5]), radii, SIDE)
        assert min(np.linalg.norm(a - b) for a, b in combinations(centres, 2)) > 2 * radii[0] + regions.CLEARANCE


def test_the_place_word_is_never_in_doubt(objects: list[tuple[regions.Scene, regions.RegionObject]]) -> None:
    for _, obj in objects:
        y, x = np.nonzero(obj.mask)
        cell = regions.PLACES.index(obj.place)
        inside = np.array([x.mean() + 0.5, y.mean() + 0.5]) * 3 / SIDE - [cell % 3, cell // 3]
        assert (inside > 0.12).all()
        assert (inside < 0.88).all()


def test_objects_look_as_their_words_say(objects: list[tuple[regions.Scene, regions.RegionObject]]) -> None:
    """Shape: area of the mask over that of the circle around it: 1, 2 / pi, 3 sqrt(3) / (4 pi), and of a cross."""
    extents = {size: [extent(obj.mask) for _, obj in objects if obj.size == size] for size in regions.SIZES}
    areas = {size: [obj.mask.sum() for _, obj in objects if obj.size == size] for size in regions.SIZES}
    assert min(extents["small"]) > 26
    assert min(extents["large"]) - max(extents["small"]) > 8
    assert min(areas["large"]) / max(areas["small"]) > 1.3
    cross = (2 * 1.08 * 0.34 - 0.34**2) / (np.pi * regions.OUTER_RADII["cross"] ** 2)
    expected = {"circle": 1.0, "square": 2 / np.pi, "triangle": 3**1.5 / (4 * np.pi), "cross": cross}
    names, palette = list(regions.COLOURS), np.array(list(regions.COLOURS.values()))
    for scene, obj in objects:
        y, x = np.nonzero(obj.mask)
        radius = np.hypot(x - x.mean(), y - y.mean()).max() + 0.4
        assert obj.mask.sum() / (np.pi * radius**2) == pytest.approx(expected[obj.shape], rel=0.15)
        mean = scene.image[obj.mask].mean(axis=0)
        assert names[np.linalg.norm(palette - mean, axis=1).argmin()] == obj.colour


def test_every_caption_reads_naturally_and_is_read_back() -> None:
    assert (
        regions.RegionObject("red", "circle", "small", "top left", NO_MASK).caption
        == "a small red circle at the top left"
    )
    assert (
        regions.RegionObject("blue", "cross", "large", "centre", NO_MASK).caption == "a large blue cross in the centre"
    )
    for colour, shape, size, place in product(regions.COLOURS, regions.SHAPES, regions.SIZES, regions.PLACES):
        obj = regions.RegionObject(colour, shape, size, place, NO_MASK)
        assert regions.parse_caption(obj.caption) == {"colour": colour, "shape": shape, "size": size, "place": place}
        assert regions.caption_correct(f"{obj.caption.capitalize()}.", obj)
        other = regions.RegionObject(colour, shape, size, regions.PLACES[regions.PLACES.index(place) - 1], NO_MASK)
        assert not regions.caption_correct(other.caption, obj)


@pytest.mark.parametrize(
    "text",
    [
        "A small red circle at the top left.",
        "Sure, it is [SEG] a SMALL, red circle -- at the top-left of the image.<|im_end|>",
        "top left: red, small; a circle",
        "a small red circle, yes, a circle, at the top\nleft",
    ],
)
def test_wording_around_the_attributes_does_not_matter(text: str) -> None:
    assert regions.parse_caption(text) == {"colour": "red", "shape": "circle", "size": "small", "place": "top left"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "a red circle at the top left", "a small circle at the top left", "a small red thing at the top left"),
        *("a small red circle", "a small red or blue circle at the top left", "a small red circle at the left top"),
        *("a small red circle or square at the top left", "a small or large red circle at the top left"),
        *("a small red circle at the top left, near the top", "a small red circle at the top left or bottom right"),
        "a smaller reddish circle at the top left",
    ],
)
def test_missing_or_contradicting_words_are_no_caption(text: str) -> None:
    assert regions.parse_caption(text) is None


def assert_holds(folder: Path, scenes: list[regions.Scene]) -> None:
    found = read_grasp_any_region(folder)
    objects = [(scene.image, obj) for scene in scenes for obj in scene.objects]
    for region, (image, obj) in zip(found, objects, strict=True):
        np.testing.assert_array_equal(region.load()[0], image)
        np.testing.assert_array_equal(region.load()[1], obj.mask)
        assert region.caption == obj.caption
    assert len({region.image_id for region in found}) == len(scenes)


def test_the_files_are_those_of_gar_and_read_back(folder: Path) -> None:
    assert_holds(folder, list(regions.make_scenes(5, seed=3, side=128)))
    names = ["data-00000-of-00003.arrow", "data-00001-of-00003.arrow", "data-00002-of-00003.arrow"]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "dataset_info.json", "state.json"]
    assert [part["filename"] for part in json.loads((folder / "state.json").read_text())["_data_files"]] == names
    assert [path.name for path in folder.parent.iterdir()] == ["regions"]


def test_the_columns_and_rows_are_those_of_gar(folder: Path) -> None:
    table = table_of(folder)
    rle = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    expected = {"image": image, "mask_rle": pa.list_(rle), "conversations": pa.list_(turn), "catagory": pa.string()}
    assert {field.name: field.type for field in table.schema} == expected
    assert b'"_type": "Image"' in table.schema.metadata[b"huggingface"]
    for row, scene in zip(table.to_pylist(), regions.make_scenes(5, seed=3, side=128), strict=True):
        turns = row["conversations"]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * len(scene.objects)
        assert [turn["value"] for turn in turns[::2]] == [
            f"<image>\n{regions.QUESTION}",
            *[regions.QUESTION] * (len(turns) // 2 - 1),
        ]
        assert row["catagory"] == " ".join(obj.shape for obj in scene.objects)
        assert row["image"]["path"] is None
        assert row["image"]["bytes"].startswith(b"\x89PNG")


def test_another_process_writes_equal_bytes_quietly_and_nowhere_else(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rl_reward_network.embedded.regions import write_regions;"
        "write_regions(Path(sys.argv[1]), 3, 9, 128); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", program, str(tmp_path / "first")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == ran.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    regions.write_regions(tmp_path / "second", 3, 9, 128)
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"), [({"count": 0}, "count is 0"), ({"side": 95}, "side is 95 .* at least 96")]
)
def test_no_scene_and_too_small_a_side_are_refused(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regions.write_regions(tmp_path / "regions", **({"count": 1, "seed": 0} | settings))
    assert list(tmp_path.iterdir()) == []
