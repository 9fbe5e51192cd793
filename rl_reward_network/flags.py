"""Two levels of help: `--help` shows the common flags of a command, `--help-all` every flag."""

from dataclasses import fields, replace
from typing import Annotated, Any, TypeVar

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

RARE = "rare"  # metadata of a flag that only `--help-all` shows
Value = TypeVar("Value")
Rare = Annotated[Value, RARE]


def common_flags(hidden: set[tuple[type, str]]) -> ConstructorRegistry:
    """Rules for `tyro.cli` that leave `Rare` fields out of the help text.

    Args:
        hidden: the class and name of each field that was left out are added to it.
    """
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
    """Flags of the named fields whose value is not the default, e.g. ["--beta"]."""
    defaults = {field.name: field.default for field in fields(settings)}
    return [f"--{name}" for name in names if getattr(settings, name) != defaults[name]]


def check_counts(settings: Any, *names: str) -> None:
    """Check fields that count something; None is allowed.

    Raises:
        ValueError: one is below 1.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
