"""Dataclasses with the field names and defaults of another library. Imports no jax."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from groupax.compat.fields import Fields, as_number, warn
from groupax.settings.fields import nearest, shown

T = TypeVar("T", bound="Arguments")
U = TypeVar("U")
_NOTHING: Mapping[str, str] = MappingProxyType({})


def arguments(
    library: str,
    inert: Mapping[str, str] = _NOTHING,
    refused: Mapping[str, str] = _NOTHING,
    aliases: Mapping[str, str] = _NOTHING,
) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator that completes a dataclass of arguments with what is known about its fields.

    Args:
        library: Name of the library that the fields come from.
        inert: Fields without effect in groupax, each with the reason; also their texts in a parser's `--help`.
        refused: Fields that may only have their default, each with the reason and what to do instead.
        aliases: Current field name for each former name.
    """

    def complete(cls: type[T]) -> type[T]:
        own = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        for field in own:
            if field.name in inert:
                text = f"Has no effect in groupax: {inert[field.name]}."
                field.metadata = MappingProxyType({"help": text.replace("%", "%%")})
        defaults = {field.name: _default(field) for field in own if field.name not in aliases}
        cls.FIELDS = Fields(library, defaults, inert, aliases, refused)
        return accepting_more(cls)

    return complete


def accepting_more(cls: type[U]) -> type[U]:
    """Removes the annotations of a dataclass's constructor, which accepts and converts more than its fields store."""
    cls.__init__.__annotations__.clear()
    return cls


class Arguments:
    """The base of dataclasses of another library's arguments.

    A field without effect is accepted with a warning, and one that cannot be honoured is refused, when it is set to
    something else than its default. Names that are no fields are refused, but a subclass may set attributes of its own.
    """

    FIELDS: ClassVar[Fields]

    def __new__(cls: type[T], *values: Any, **settings: Any) -> T:
        """Refuses unknown names, which the generated constructor would refuse without naming the nearest."""
        del values
        known = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        for name in settings:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
        return object.__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self.FIELDS
        if name in fields.aliases:
            if value is None:  # a former name that is not used
                return
            name = fields.aliases[name]
        if name not in fields.defaults:
            if _is_own(type(self)):
                raise TypeError(f"{type(self).__name__} has no field {name!r}{nearest(name, fields.defaults)}")
        elif name in fields.refused:
            if value != fields.defaults[name]:
                raise ValueError(f"{name}={shown(value)} is not supported: {fields.refused[name]}")
        elif name not in fields.inert:
            value = as_number(name, value, fields.defaults[name])
        elif value != fields.defaults[name]:
            warn(f"{fields.library}'s {name}={value!r} changes nothing in groupax: {fields.inert[name]}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if why := self.why_absent(name):
            raise AttributeError(f"{type(self).__name__} has no {name}: {why}")
        raise AttributeError(f"{type(self).__name__} has no field {name!r}{nearest(name, self.FIELDS.defaults)}")

    @staticmethod
    def why_absent(name: str) -> str | None:
        """Returns why an attribute of the other library does not exist, and what to do; None if it has no such one."""
        del name
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns every field with its value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns every field, those that are no numbers or texts as texts."""
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Returns the fields as JSON text; what JSON cannot express as its Python representation."""
        return json.dumps(self.to_dict(), indent=2, default=repr)


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "groupax"
