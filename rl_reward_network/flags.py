"""Flags: two levels of help (`--help` shows the common flags of a command, `--help-all` every flag), and ranges.

The ranges hold for the same settings in Python, where `check_finite` is not called.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

RARE = "rare"  # metadata of a flag that only `--help-all` shows
Value = TypeVar("Value")
Args = TypeVar("Args")
Rare = Annotated[Value, RARE]


def parse(args_type: Callable[..., Args], words: Sequence[str], **settings: Any) -> Args:
    """The arguments of a command, a dataclass, from its flags, with further arguments of `tyro.cli`.

    Where they have a method `presets`, which returns the defaults of their mode, those are the defaults. A flag that is
    True, False or left to a preset means True where no value follows it.
    """
    switches, spelled = _switches(args_type), list[str]()
    for word, following in pairwise([*words, ""]):
        alone = word.startswith("--") and word[2:].replace("-", "_") in switches
        spelled += [word, "True"] if alone and following not in ("True", "False", "None") else [word]
    args = tyro.cli(args_type, args=spelled, **settings)
    return tyro.cli(args_type, args=spelled, default=args.presets(), **settings) if hasattr(args, "presets") else args


def _switches(args_type: Any) -> set[str]:
    """Names of the fields of a dataclass that are bool or None, also inside nested settings."""
    names = set[str]()
    for name, kind in get_type_hints(args_type).items():
        names |= {name} if kind == bool | None else _switches(kind) if is_dataclass(kind) else set()
    return names


def common_flags(hidden: set[tuple[type, str]]) -> ConstructorRegistry:
    """Rules for `tyro.cli` that leave `Rare` fields out of the help text; class and name of each go to `hidden`."""
    registry, open_types = ConstructorRegistry(), set[type]()

    @registry.struct_rule
    def without_rare(info: StructTypeInfo) -> Any:
        if info.type in open_types:
            return None  # tyro continues with its own rules
        open_types.add(info.type)
        spec = ConstructorRegistry.get_struct_spec(info)
        open_types.remove(info.type)
        if not isinstance(spec, StructConstructorSpec):
            return spec
        rare = {field.name for field in spec.fields if RARE in getattr(field.type, "__metadata__", ())}
        hidden.update((info.type, name) for name in rare)
        return replace(spec, fields=tuple(field for field in spec.fields if field.name not in rare))

    return registry


def changed(settings: Any, *names: str) -> list[str]:
    """Flags of the named fields whose value is not the default, e.g. ["--dtype"]."""
    defaults = {field.name: field.default for field in fields(settings)}
    return [f"--{name}" for name in names if getattr(settings, name) != defaults[name]]


def check_finite(settings: Any) -> None:
    """Raise a ValueError for a flag that is NaN or infinite, also inside nested settings, tuples and mappings."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            check_finite(value)
        elif wrong := [number for number in _floats(value) if not math.isfinite(number)]:
            raise ValueError(f"--{field.name} is {wrong[0]}, expected a finite number")


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(part)


def check_range(settings: Any, *names: str, above: bool = False) -> None:
    """Raise a ValueError for a number, or one in a mapping, below 0 (with `above` or 0), or not finite; None passes."""
    for name in names:
        value = getattr(settings, name)
        for number in value.values() if isinstance(value, Mapping) else (value,):
            if number is not None and not (0 < number < math.inf if above else 0 <= number < math.inf):
                raise ValueError(f"{name} is {number}, expected {'more than 0' if above else '0 or more'}")


def check_at_least(settings: Any, least: int, *names: str) -> None:
    """Raise a ValueError for a count below `least`; None is not checked."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, expected {least} or more")
