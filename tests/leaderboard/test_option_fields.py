"""Options by their schema as fields, and what is filled in as options."""

from typing import Literal

import pytest
from pydantic import Field

from turngym_leaderboard.playground.option_fields import BadOption, OptionField, option_fields, read_options
from turngym_server.environment import Options


class Sample(Options):
    size: int = Field(default=6, ge=3, le=20, description="Rows.")
    most: int | None = Field(default=None, ge=1)
    slip: float = Field(default=0.25, gt=0, le=0.5)
    floors: Literal["uniform", "walk"] = "uniform"
    level: Literal[1, 2] = 1
    reversed: bool = False
    symbols: str = "#."
    names: tuple[str, ...] = ("a",)


FIELDS = option_fields(Sample.model_json_schema())


def test_each_kind_of_option_has_its_field():
    assert (
        OptionField("size", "whole", "6", "Rows.", least="3", most="20"),
        OptionField("most", "whole", "", "", least="1", optional=True),
        OptionField("slip", "number", "0.25", "", most="0.5"),
        OptionField("floors", "choice", "uniform", "", ("uniform", "walk"), ("uniform", "walk")),
        OptionField("level", "choice", "1", "", ("1", "2"), (1, 2)),
        OptionField("reversed", "choice", "false", "", ("true", "false"), (True, False)),
        OptionField("symbols", "text", "#.", ""),
        OptionField("names", "json", '["a"]', ""),
    ) == FIELDS


def test_what_was_left_as_it_stood_is_no_option():
    assert read_options(FIELDS, {field.name: f" {field.default} " for field in FIELDS}) == {}
    assert read_options(FIELDS, {}) == {}
    assert read_options(FIELDS, {"unknown": "1"}) == {}


def test_values_have_the_schemas_types():
    filled = {
        "size": "8",
        "most": "3",
        "slip": "0.5",
        "floors": "walk",
        "level": "2",
        "reversed": "true",
        "symbols": "12",
        "names": '["b", "c"]',
    }
    options = read_options(FIELDS, filled)
    assert options == {
        "size": 8,
        "most": 3,
        "slip": 0.5,
        "floors": "walk",
        "level": 2,
        "reversed": True,
        "symbols": "12",
        "names": ["b", "c"],
    }
    assert Sample.model_validate(options).names == ("b", "c")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("size", "8.5", "size: '8.5' is not a whole number"),
        ("size", "true", "size: 'true' is not a whole number"),
        ("size", "", "size: '' is not a whole number"),
        ("slip", "much", "slip: 'much' is not a number"),
        ("floors", "high", "floors: 'high' is none of uniform, walk"),
        ("names", "[", "names: '[' is not JSON"),
        ("names", "[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_value_is_named(name, text, message):
    with pytest.raises(BadOption) as error:
        read_options(FIELDS, {name: text})
    assert message in str(error.value)


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"a": 1}}])
def test_a_schema_without_properties_has_no_fields(schema):
    assert option_fields(schema) == ()
