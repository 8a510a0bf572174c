"""The page that describes the API, made from its OpenAPI document. Unlike the framework's own it loads nothing from
elsewhere, runs no script and needs no network.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from turngym_leaderboard.pages.render import Links, render

Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter or a key. `place`: where it stands, as in path, query or header."""

    name: str
    place: str
    kind: str
    required: bool
    told: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the API. `body`, `answer`: what is sent and told; "" where there is none."""

    method: str
    path: str
    told: str
    fields: tuple[Field, ...]
    body: str
    answer: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of JSON object."""

    name: str
    told: str
    fields: tuple[Field, ...]


def api_page(document: Schema) -> str:
    """HTML of an OpenAPI document, as FastAPI makes it."""
    info = _object(document, "info")
    told = {"title": info["title"], "about": info.get("description", "")}
    return render("api.html", Links(), {**told, "calls": list(calls(document)), "shapes": list(shapes(document))})


def calls(document: Schema) -> Iterator[Call]:
    """The calls of a document, in its order."""
    for path, item in _object(document, "paths").items():
        for method, told in cast("Mapping[str, Schema]", item).items():
            bodies, answers = _object(told, "requestBody"), _object(told, "responses")
            good = [cast(Schema, answer) for status, answer in answers.items() if status.startswith("2")]
            yield Call(
                method=method.upper(),
                path=path,
                told=str(told.get("description", "")),
                fields=tuple(_parameter(each) for each in cast("list[Schema]", told.get("parameters", []))),
                body=_content(bodies),
                answer=_content(good[0]) if good else "",
            )


def shapes(document: Schema) -> Iterator[Shape]:
    """The kinds of objects of a document, by name."""
    for name, told in sorted(_object(_object(document, "components"), "schemas").items()):
        schema = cast(Schema, told)
        required = cast("list[str]", schema.get("required", []))
        fields = tuple(
            Field(key, "", _kind(cast(Schema, each)), key in required, str(cast(Schema, each).get("description", "")))
            for key, each in _object(schema, "properties").items()
        )
        words = ", ".join(map(str, cast("list[object]", schema.get("enum", []))))
        yield Shape(name, str(schema.get("description", "")) + (f" One of {words}." if words else ""), fields)


def _parameter(told: Schema) -> Field:
    return Field(
        name=str(told["name"]),
        place=str(told["in"]),
        kind=_kind(_object(told, "schema")),
        required=bool(told.get("required")),
        told=str(told.get("description", "")),
    )


def _content(told: Schema) -> str:
    for media in _object(told, "content").values():
        return _kind(_object(cast(Schema, media), "schema"))
    return ""


def _kind(schema: Schema) -> str:
    """What a schema allows, in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in cast("list[Schema]", schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(_object(schema, 'items')) or 'anything'}"
    return str(schema.get("format") or schema.get("type") or "")


def _object(schema: Schema, key: str) -> Schema:
    return cast(Schema, schema.get(key) or {})
