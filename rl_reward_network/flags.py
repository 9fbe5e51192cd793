"""Flags: their names and places, two levels of help (`--help` and `--help-all`) in groups by purpose, and ranges.

The ranges hold for the same settings in Python, where `check_finite` is not called.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

RARE = "rare"  # metadata of a flag that only `--help-all` shows
Value = TypeVar("Value")
Args = TypeVar("Args")
Rare = Annotated[Value, RARE]
OTHERS = "training"  # the group of flags that no group names
GROUPS = {  # of the help, in this order: flags, or fields whose settings belong to it
    "data": "inputs max_labelled dataset_name max_regions",
    "model": "model_path image_resize quantization adapters side_network prompting regions",
    OTHERS: "seed",
    "reward": "rewards reward reward_net reward_steps shuffle_rewards score_weights",
    "output": "config name output_dir run_folder resume report_to log_completions",
    "hardware": "gpu dtype segment_batch use_flash_attn feature_cache_gib gradient_checkpointing deepspeed",
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


@dataclass(frozen=True)
class Flag:
    """A flag of a command."""

    path: tuple[str, ...]  # of its value in the arguments
    kind: Any  # without annotations
    marks: tuple[Any, ...] = ()  # its annotations

    @property
    def aliases(self) -> list[str]:
        """Its other names, with underscores."""
        given = [alias for mark in self.marks for alias in getattr(mark, "aliases", None) or ()]
        return [alias.removeprefix("--").replace("-", "_") for alias in given]

    def value(self, args: Any) -> Any:
        """Its value in the arguments of the command."""
        for name in self.path:
            args = getattr(args, name)
        return args


def flags_of(args_type: Any) -> dict[str, Flag]:
    """Name, with underscores -> flag, of a dataclass and of the settings inside it."""
    found = dict[str, Flag]()
    for name, annotated in get_type_hints(args_type, include_extras=True).items():
        kind, marks = _taken_apart(annotated)
        if is_dataclass(kind):
            found |= {inner: replace(flag, path=(name, *flag.path)) for inner, flag in flags_of(kind).items()}
        elif tyro.conf.Suppress not in marks:
            found[_shown(name, marks)] = Flag((name,), kind, marks)
    return found


def _taken_apart(annotated: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and its annotations."""
    apart = get_origin(annotated) is Annotated
    return (get_args(annotated)[0], annotated.__metadata__) if apart else (annotated, ())


def _shown(field: str, marks: Sequence[Any]) -> str:
    """The name of a field as a flag."""
    names = [name for mark in marks if (name := getattr(mark, "name", None)) and hasattr(mark, "aliases")]
    return str(names[-1]).replace("-", "_") if names else field


def parse(args_type: Callable[..., Args], words: Sequence[str], mode: str | None = None, **settings: Any) -> Args:
    """The arguments of a command, a dataclass, from its flags, with further arguments of `tyro.cli`.

    Of a flag that is given twice the last counts; `mode` is that of words without one. Where the arguments have a
    method `presets`, which returns the defaults of their mode, those are the defaults. A flag that is True, False or
    left to a preset means True where no value follows it.
    """
    switches, spelled = {f"--{name}" for name, flag in flags_of(args_type).items() if _switch(flag)}, list[str]()
    for word, following in pairwise([*main_names(args_type, words), ""]):
        alone = word in switches and following not in ("True", "False", "None")
        spelled += [word, "True"] if alone else [word]
    settings |= {"config": (tyro.conf.FlagConversionOff,), "use_underscores": True, "args": spelled}
    default: Any = tyro.MISSING_NONPROP if mode is None else args_type(mode)
    args = tyro.cli(args_type, default=default, **settings)
    return tyro.cli(args_type, default=args.presets(), **settings) if hasattr(args, "presets") else args


def main_names(args_type: Any, words: Sequence[str]) -> Iterator[str]:
    """The words of a command line, each flag by its own name in place of another one, and with underscores."""
    names = {alias: name for name, flag in flags_of(args_type).items() for alias in (name, *flag.aliases)}
    for word in words:
        flag, equals, value = word.partition("=")
        name = names.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        yield word if name is None else f"--{name}{equals}{value}"


def _switch(flag: Flag) -> bool:
    return flag.kind in (bool, bool | None)


def help_rules(args_type: Any, hidden: set[str] | None = None) -> ConstructorRegistry:
    """Rules for the help of `tyro.cli`: flags in groups by purpose, each under one name, its text in whole lines.

    With `hidden`, `Rare` flags are left out, and their names are added to it. Commands without settings inside their
    arguments have one group.
    """
    registry, groups, grouped = ConstructorRegistry(), dict[type, tuple[StructFieldSpec, ...]](), list[bool]()

    @registry.struct_rule
    def by_purpose(info: StructTypeInfo) -> Any:
        if info.type in groups:
            return StructConstructorSpec(dict, groups[info.type])
        if info.type is not args_type or grouped:
            return None  # tyro continues with its own rules
        grouped.append(True)
        of_groups: dict[str, list[StructFieldSpec]] = {"": [], **{name: [] for name in GROUPS}}
        for group, field in _leaves(info):
            _, marks = _taken_apart(field.type)
            if hidden is not None and RARE in marks:
                hidden.add(field.name)
            else:
                of_groups[group].append(_in_whole_lines(field))
        shown = of_groups.pop("")
        for name, members in of_groups.items():
            if members:
                kind = type(name, (), {"__doc__": ""})
                groups[kind] = tuple(members)
                shown.append(StructFieldSpec(name, kind, tyro.MISSING_NONPROP))
        return StructConstructorSpec(dict, tuple(shown))

    return registry


def _leaves(info: StructTypeInfo, within: str = "") -> Iterator[tuple[str, StructFieldSpec]]:
    """Each flag of a dataclass and of the settings in its field `within`, with its group; "" is none."""
    spec = ConstructorRegistry.get_struct_spec(info)
    assert isinstance(spec, StructConstructorSpec)
    nested = within or any(is_dataclass(_taken_apart(field.type)[0]) for field in spec.fields)
    for field in spec.fields:
        kind, marks = _taken_apart(field.type)
        if is_dataclass(kind):
            yield from _leaves(StructTypeInfo.make(field.type, field.default, False), field.name)
        elif not nested or tyro.conf.Positional in marks:
            yield "", field
        else:
            yield GROUP_OF.get(_shown(field.name, marks)) or GROUP_OF.get(within, OTHERS), field


def _in_whole_lines(field: StructFieldSpec) -> StructFieldSpec:
    """A field whose description is not broken as in the source, without the other names of its flag."""
    kind, marks = _taken_apart(field.type)
    kept = [replace(mark, aliases=None) if getattr(mark, "aliases", None) else mark for mark in marks]
    text = field.helptext() if callable(field.helptext) else field.helptext
    annotated: Any = Annotated[(kind, *kept)] if kept else kind
    return replace(field, type=annotated, helptext=" ".join((text or "").split()))


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
