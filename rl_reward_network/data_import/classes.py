"""The classes that the masks of a source hold, and which of them are the mask."""

from collections.abc import Iterable

ALL = "all"


def chosen_classes(label: str | None, classes: Iterable[str], class_ids: dict[str, str]) -> list[str] | None:
    """The classes whose union is the mask; None where the user has to choose.

    Args:
        label: a class by name, number or colour; several with commas between; "all"; None: the only class there is.
        classes: the classes that occur.
        class_ids: number -> name, see `Found`.

    Raises:
        ValueError: no class of that name.
    """
    known = sorted({*classes, *class_ids.values()}, key=class_order)
    if label is None:
        return known if len(known) <= 1 else None
    if label == ALL and ALL not in known:
        return known
    parts = [label] if _named(label, known, class_ids) else [part.strip() for part in label.split(",")]
    chosen = [_named(part, known, class_ids) for part in parts]
    if unknown := [part for part, name in zip(parts, chosen, strict=True) if name is None]:
        raise ValueError(
            f"label {unknown[0]!r} is no class of the masks; they hold {', '.join(known) or 'nothing'}; --label all is"
            " the union"
        )
    return [name for name in chosen if name is not None]


def _named(label: str, known: list[str], class_ids: dict[str, str]) -> str | None:
    """The class of a name, a colour or a number, names first; None without one."""
    alike = [name for name in known if name.lower() == label.lower()]
    return label if label in known else alike[0] if len(alike) == 1 else class_ids.get(label)


def class_order(name: str) -> tuple[bool, int, str]:
    """Numbers by value, before names."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
