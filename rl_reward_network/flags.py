"""Two levels of help: `--help` shows the common flags of a command, `--help-all` every flag."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

RARE = "rare"  # metadata of a flag that only `--help-all` shows
Value = TypeVar("Value")
Rare = Annotated[Value, RARE]
_HIDDEN = get_args(tyro.conf.Suppress[int])[1:]


@contextmanager
def rare_hidden(settings: type) -> Iterator[int]:
    """Hide the rare flags of a settings class, and of the settings nested in it, from tyro's help text.

    Args:
        settings: a dataclass with `Rare` fields.

    Yields:
        The number of rare flags.
    """
    hints = get_type_hints(settings, include_extras=True)
    rare = [name for name, hint in hints.items() if RARE in metadata(hint)]
    count = len(rare)
    with ExitStack() as nested:
        for hint in hints.values():
            if is_dataclass(inner := plain(hint)) and isinstance(inner, type):
                count += nested.enter_context(rare_hidden(inner))
        before = dict(settings.__annotations__)
        settings.__annotations__.update({name: Annotated[hints[name], *_HIDDEN] for name in rare})
        try:
            yield count
        finally:
            settings.__annotations__.update(before)


def changed(settings: Any, *names: str) -> list[str]:
    """Flags of the named fields whose value is not the default, e.g. ["--beta"]."""
    defaults = {field.name: field.default for field in fields(settings)}
    return [f"--{name}" for name in names if getattr(settings, name) != defaults[name]]


def metadata(hint: Any) -> tuple[Any, ...]:
    """What an `Annotated` type carries beside the type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def plain(hint: Any) -> Any:
    """The type of an `Annotated` type."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint
