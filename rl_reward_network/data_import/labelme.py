"""LabelMe: one JSON file per image, with shapes, imagePath, imageWidth and imageHeight."""

import os
from pathlib import Path, PureWindowsPath
from typing import Any

from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data_import.files import (
    files_below,
    json_files,
    listed,
    names_of,
    pictures_below,
    relative_path,
    unread_keys,
)
from rl_reward_network.data_import.items import Found, Outline, OutlineMasks, declared_size, file_item, id_text

CORNERS: dict[str, tuple[int, ...]] = {
    "polygon": (),
    "rectangle": (2, 4),  # X-AnyLabeling writes all corners
    "rotation": (4,),
    "quadrilateral": (4,),
}
"""shape_type -> number of points; () of any."""
KNOWN = {
    "": {"version", "shapes", "imagePath", "imageData", "imageHeight", "imageWidth", "lineColor", "fillColor"},
    "shapes": {"label", "points", "shape_type", "group_id", "direction", "mask", "line_color", "fill_color", "score"},
}
LOOKED_AT = 20  # JSON files that tell whether it is LabelMe


def recognise_labelme(source: Path) -> str:
    """ "LabelMe"; "" where no JSON file has shapes and imagePath (the first few are read)."""
    files = files_below(source, ".json")
    contents, _ = json_files(files[:LOOKED_AT])
    drawn = any(isinstance(one, dict) and one.keys() >= {"shapes", "imagePath"} for one in contents.values())
    return f"LabelMe ({len(files)} JSON files)" if drawn else ""


def read_labelme(source: Path, frames: str = "") -> Found:
    """One item per image; images without a JSON file are unlabelled."""
    images, masks = pictures_below(source)
    drawn: dict[Path, OutlineMasks] = {}
    contents, unreadable = json_files(files_below(source, ".json"))
    faults = list[str]()
    for path, content in contents.items():
        try:
            if not (isinstance(content, dict) and isinstance(content.get("shapes"), list)):
                raise ValueError(f"{path}: no list `shapes`; delete it, or save it again with LabelMe")
            image = _image_of(path, content, set(images))
            if image in drawn:
                raise ValueError(f"{path}: {image.name} has a JSON file already; keep one")
            sides = content.get("imageHeight"), content.get("imageWidth")
            size = None if sides == (None, None) else declared_size(*sides, str(path))  # old files have none
            drawn[image] = OutlineMasks(tuple(_outlines(path, content["shapes"])), size, str(path))
        except ValueError as error:
            faults.append(str(error))
    lost = {path.with_suffix("") for path in unreadable}  # their images are annotated: not imported as unlabelled
    images = [path for path in images if path in drawn or path.with_suffix("") not in lost]
    names = names_of(images, source)
    items = [file_item(source, path, names[path], drawn.get(path)) for path in images]
    notes = [f"{len(masks)} picture(s) of masks, left out: {listed(masks, source)}"] if masks else []
    notes += unread_keys(contents.values(), KNOWN)
    broken = {relative_path(path, source).as_posix(): fault for path, fault in unreadable.items()}
    return Found(items, {}, faults, notes, broken=broken, read=tuple(contents))


def _image_of(path: Path, content: dict[str, Any], images: set[Path]) -> Path:
    """The image of a JSON file: its imagePath, else a guess below the JSON file or beside it, else of the same stem."""
    named = PureWindowsPath(str(content.get("imagePath", ""))).parts
    exact = Path(os.path.normpath(path.parent.joinpath(*named)))
    parts = [part for part in named if part not in ("..", ".")]
    folders = [path.parent, path.parent.parent] if parts else []
    places = [folder.joinpath(*names) for folder in folders for names in (parts, parts[-1:])]
    for place in (exact, *places, *(path.with_suffix(suffix) for suffix in IMAGE_SUFFIXES)):
        if place in images:
            _check_renamed(path, place, images)
            return place
    raise ValueError(
        f"{path}: imagePath is {content.get('imagePath')!r}, no image of the source; put it beside the file"
    )


def _check_renamed(path: Path, image: Path, images: set[Path]) -> None:
    """Raise if a JSON file names another image than the one of its own stem: files were renamed, imagePath was not."""
    near = [folder / f"{path.stem}{suffix}" for folder in (path.parent, image.parent) for suffix in IMAGE_SUFFIXES]
    if image.stem != path.stem and (own := [place for place in near if place in images]):
        raise ValueError(
            f"{path}: imagePath names {image.name}, but there is {own[0].name}; write the right one into imagePath, or"
            " give the file the name of its image"
        )


def _outlines(path: Path, shapes: list[Any]) -> list[Outline]:
    """Polygons, rectangles and quadrangles; ValueError for other shapes."""
    outlines = []
    for number, shape in enumerate(shapes):
        where = f"{path}: shape {number}"
        try:
            kind = str(shape.get("shape_type") or "polygon")
            points = [(float(x), float(y)) for x, y in shape["points"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: no list `points` of pairs x, y ({error!r}); save it again with LabelMe"
            ) from error
        if shape.get("label") in (None, ""):
            raise ValueError(f"{where}: no `label`; name its class in LabelMe")
        if kind not in CORNERS:
            raise ValueError(f"{where}: shape_type is {kind!r}, expected {', '.join(CORNERS)}; draw it as a polygon")
        if CORNERS[kind] and len(points) not in CORNERS[kind]:
            counts = " or ".join(map(str, CORNERS[kind]))
            raise ValueError(f"{where}: a {kind} of {len(points)} points, expected {counts}; draw it as a polygon")
        if len(points) == 2 and kind == "rectangle":
            (left, top), (right, bottom) = points
            points = [(left, top), (right, top), (right, bottom), (left, bottom)]
        outlines.append(Outline(id_text(shape["label"]), [[value for point in points for value in point]], where))
    return outlines
