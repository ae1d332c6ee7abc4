"""From bytes to structs, and what is said of those that are wrong."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.body import Body, Refused, noun, only
from jaxserve.server.schema.decoding import check_depth, decode


class Circle(Body, frozen=True, kw_only=True, tag_field="kind", tag="circle"):
    radius: Annotated[float, Meta(gt=0)]
    filled: Annotated[Any, only(False)] = None


class Square(Body, frozen=True, kw_only=True, tag_field="kind", tag="square"):
    side: Annotated[int, Meta(ge=1, le=9)]


class Drawing(Body, frozen=True, kw_only=True):
    title: Annotated[str, Meta(min_length=1, max_length=9)]
    shapes: Annotated[list[Circle | Square], Meta(max_length=3)] | None = None
    scale: float | None = None
    weights: dict[Annotated[str, Meta(pattern="^[a-z]$", extra=noun("a letter", "letters"))], float] | None = None
    colour: Literal["red", "blue"] | Annotated[int, Meta(ge=0)] | None = None
    tags: Annotated[list[str], Meta(min_length=1)] | None = None
    ids: list[list[int]] | None = None
    hidden: bool | None = None
    frame: Refused = None
    options: Any = None


def error_of(text: str) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        decode(text.encode("utf-8", "surrogatepass"), Drawing)
    return caught.value.param, str(caught.value)


WRONG: list[tuple[str, str | None, str]] = [
    ('{"title": 5}', "title", "title must be a string of 1 to 9 characters, found integer 5"),
    ('{"title": "0123456789"}', "title", "title must be a string of 1 to 9 characters, found string '0123456789'"),
    ('{"title": null}', "title", "title must be a string of 1 to 9 characters, found null"),
    ("{}", "title", "title must be a string of 1 to 9 characters, found nothing"),
    ("[1, 2]", None, "the body must be a JSON object, found array of 2"),
    ("null", None, "the body must be a JSON object, found null"),
    ('{"title": "x", "shapes": {}}', "shapes", "shapes must be an array of at most 3 objects, found object of 0"),
    ('{"title": "x", "shapes": [7]}', "shapes[0]", "shapes[0] must be an object, found integer 7"),
    ('{"title": "x", "shapes": [{}]}', "shapes[0].kind", 'shapes[0].kind must be one of "circle", "square", found nothing'),
    (
        '{"title": "x", "shapes": [{"kind": "egg"}]}',
        "shapes[0].kind",
        'shapes[0].kind must be one of "circle", "square", found string \'egg\'',
    ),
    (
        '{"title": "x", "shapes": [{"kind": "square", "side": 3}, {"kind": "circle"}]}',
        "shapes[1].radius",
        "shapes[1].radius must be a number above 0, found nothing",
    ),
    (
        '{"title": "x", "shapes": [{"kind": "square", "side": 10}]}',
        "shapes[0].side",
        "shapes[0].side must be an integer from 1 to 9, found integer 10",
    ),
    (
        '{"title": "x", "shapes": [{"kind": "square", "side": 1.0}]}',
        "shapes[0].side",
        "shapes[0].side must be an integer from 1 to 9, found number 1.0",
    ),
    (
        '{"title": "x", "shapes": [{"kind": "square", "side": 1, "sid": 2}]}',
        "shapes[0].sid",
        "unknown field 'shapes[0].sid'; did you mean 'side'?",
    ),
    (
        '{"title": "x", "shapes": [{"kind": "circle", "radius": 1, "filled": true}]}',
        "shapes[0].filled",
        "shapes[0].filled is not supported other than as false or null, found true",
    ),
    (
        '{"title": "x", "shapes": [{"kind": "circle", "radius": 1, "filled": 0}]}',
        "shapes[0].filled",
        "shapes[0].filled is not supported other than as false or null, found integer 0",
    ),
    ('{"title": "x", "frame": {}}', "frame", "frame is not supported other than as null, found object of 0"),
    ('{"title": "x", "scale": 1e999}', "scale", "scale must be a finite number, found number inf"),
    ('{"title": "x", "scale": NaN}', "scale", "scale must be a finite number, found number nan"),
    ('{"title": "x", "weights": {"AB": 1}}', "weights", "weights must have letters as keys, found string 'AB'"),
    ('{"title": "x", "weights": {"a": 1, "b": "2"}}', "weights.b", "weights.b must be a finite number, found string '2'"),
    (
        '{"title": "x", "colour": "green"}',
        "colour",
        'colour must be one of "blue", "red" or an integer at least 0, found string',
    ),
    ('{"title": "x", "colour": true}', "colour", 'colour must be one of "blue", "red" or an integer at least 0, found true'),
    ('{"title": "x", "tags": []}', "tags", "tags must be an array of at least 1 strings, found array of 0"),
    ('{"title": "x", "ids": [[1], [2, "3"]]}', "ids[1][1]", "ids[1][1] must be an integer, found string '3'"),
    ('{"title": "x", "hidden": 1}', "hidden", "hidden must be true or false, found integer 1"),
    ('{"titel": "x"}', "titel", "unknown field 'titel'; did you mean 'title'?"),
    ('{"title - at `$.scale`": 1}', "title - at `$.scale`", "unknown field 'title - at `$.scale`'"),
    ('{"a":1, x}', None, "the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 9 (char 8)"),
    ('{"title": "x"} x', None, "the body is not JSON: Extra data: line 1 column 16 (char 15)"),
    ("", None, "the body is not JSON: Expecting value: line 1 column 1 (char 0)"),
    ('{"title": "\\ud800"}', "title", "title must be text, found half of a surrogate pair (U+D800 at character 0)"),
    ('{"title": "x", "options": ["\\udc00"]}', "options[0]", "options[0] must be text, found half of a surrogate pair"),
    ('{"title": "\udc00"}', None, "the body is not UTF-8: byte 0xed at offset 11"),
    ('{"title": "x", "options": ' + "[" * 100_000 + "]" * 100_000 + "}", None, "the body is nested too deeply"),
    ('{"title": "x", "tags": ' + "[" * 100_000, None, "the body is nested too deeply"),
    ('{"title": "x", "colour": ' + "9" * 5000 + "}", None, "the body is not JSON: Exceeds the limit (4300 digits)"),
]


@pytest.mark.parametrize(("text", "param", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_say_where_what_was_expected_and_what_was_found(text: str, param: str | None, message: str) -> None:
    found, said = error_of(text)
    assert found == param
    assert said.startswith(message)
    assert len(said) < 300


def test_what_is_right() -> None:
    shapes = [{"kind": "circle", "radius": 1, "filled": False}, {"kind": "square", "side": 2}]
    body = {"title": "x", "shapes": shapes, "weights": {"a": 2}, "colour": 7, "frame": None, "options": {"any": ["thing"]}}
    drawing = decode(json.dumps(body).encode(), Drawing)
    assert drawing == decode(body, Drawing)
    assert drawing.shapes == [Circle(radius=1.0, filled=False), Square(side=2)]
    assert drawing.options == {"any": ["thing"]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SHAPES = st.fixed_dictionaries({}, optional=dict.fromkeys(("kind", "radius", "side", "filled"), JSON))


@given(
    body=st.fixed_dictionaries(
        {"title": st.just("x")},
        optional={name: JSON for name in Drawing.__struct_fields__ if name != "title"}
        | {"shapes": st.lists(SHAPES | JSON, max_size=3)},
    )
)
def test_bytes_and_values_are_judged_alike(body: dict[str, Any]) -> None:
    outcomes = []
    for data in (body, json.dumps(body, allow_nan=True).encode()):
        try:
            outcomes.append(decode(data, Drawing))
        except InvalidRequest as error:
            outcomes.append(error.param)
    if "NaN" not in json.dumps(body) and "Infinity" not in json.dumps(body):
        assert outcomes[0] == outcomes[1]


def test_depth() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    check_depth("options", value)
    with pytest.raises(InvalidRequest, match="options must have at most 64 objects and arrays inside each other"):
        check_depth("options", {"a": value})
