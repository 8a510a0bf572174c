"""An environment's options as fields of a form, by their JSON Schema, and what was filled in as options.

A field that was left as it stood is no option: the server has the default. Pure functions; knows nothing of HTML.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

Kind = Literal["whole", "number", "choice", "text", "json"]

_KINDS: Final[Mapping[str, Kind]] = {"integer": "whole", "number": "number", "string": "text"}


class BadOption(ValueError):
    """What was filled in is no value. Says which, and what is expected."""


@dataclass(frozen=True, slots=True)
class OptionField:
    """One option.

    Attributes:
        default: as it stands in the form.
        choices: of kind "choice": what it may be, as it stands in the form; values: what each means.
        least, most: bounds that it may reach, as they stand in the form; "": none.
        optional: empty means null.
    """

    name: str
    kind: Kind
    default: str
    description: str
    choices: tuple[str, ...] = ()
    values: tuple[object, ...] = ()
    least: str = ""
    most: str = ""
    optional: bool = False


def option_fields(schema: Mapping[str, object]) -> tuple[OptionField, ...]:
    """The fields of an options schema. What is neither a plain value nor a choice of them is filled in as JSON."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ()
    return tuple(
        _field(str(name), cast("dict[str, object]", about))
        for name, about in cast("dict[object, object]", properties).items()
        if isinstance(about, dict)
    )


def read_options(fields: Sequence[OptionField], filled: Mapping[str, str]) -> dict[str, object]:
    """The options that were changed.

    Raises:
        BadOption: a value cannot be read.
    """
    return {
        field.name: _value(field, filled[field.name].strip())
        for field in fields
        if field.name in filled and filled[field.name].strip() != field.default
    }


def _field(name: str, about: Mapping[str, object]) -> OptionField:
    inner, optional = _without_null(about)
    default = about.get("default")
    description = str(about.get("description", ""))
    values = (True, False) if inner.get("type") == "boolean" else _enumerated(inner)
    if values:
        values = (None, *values) if optional else values
        return OptionField(name, "choice", _told(default), description, tuple(map(_told, values)), values)
    kind: Kind = _KINDS.get(str(inner.get("type")), "json")
    if kind == "json":
        return OptionField(name, kind, json.dumps(default, ensure_ascii=False), description)
    least, most = inner.get("minimum"), inner.get("maximum")
    return OptionField(
        name=name,
        kind=kind,
        default=_told(default),
        description=description,
        least="" if least is None else _told(least),
        most="" if most is None else _told(most),
        optional=optional,
    )


def _enumerated(schema: Mapping[str, object]) -> tuple[object, ...]:
    values = schema.get("enum")
    return tuple(cast("list[object]", values)) if isinstance(values, list) else ()


def _without_null(about: Mapping[str, object]) -> tuple[Mapping[str, object], bool]:
    """The schema of a value that may be null too, and whether it may."""
    either = about.get("anyOf")
    if not isinstance(either, list):
        return about, False
    schemas = [cast("dict[str, object]", each) for each in cast("list[object]", either) if isinstance(each, dict)]
    others = [schema for schema in schemas if schema.get("type") != "null"]
    if len(others) == 1 and len(others) < len(schemas):
        return others[0], True
    return {}, False


def _told(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(field: OptionField, text: str) -> object:
    if not text and field.optional:
        return None
    if field.kind == "choice":
        if text not in field.choices:
            raise BadOption(f"{field.name}: {text!r} is none of {', '.join(field.choices)}")
        return field.values[field.choices.index(text)]
    if field.kind == "text":
        return text
    expected = {"whole": "a whole number", "number": "a number"}.get(field.kind, "JSON")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        raise BadOption(f"{field.name}: {text!r} is not {expected}") from None
    if field.kind in ("whole", "number"):
        kinds = int if field.kind == "whole" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise BadOption(f"{field.name}: {text!r} is not {expected}")
    return value
