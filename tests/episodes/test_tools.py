"""Functions as tools: schemas from docstrings and hints, and arguments checked against them."""

import asyncio
import functools
import json
import random
import time
from enum import Enum
from typing import Any, Literal

import pytest

from groupax.data.tool_arguments import check_arguments, convert_arguments
from groupax.tools.calls import ToolCall
from groupax.tools.tool import Tool, match_call, tool, tools_from, tools_of


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def fetch(url: str) -> str:
    """Fetches a page.

    Args:
        url: Address of the page.
    """
    return url


class Game:
    """A game."""

    def reset(self, row: dict) -> str:
        return "Go"

    @property
    def state(self) -> str:
        raise AssertionError("properties are never evaluated")

    @tool(timeout_s=2.0)
    def guess(self, word: str) -> str:
        """Guesses a word.

        Args:
            word: The word.
        """
        return f"{word} {type(self).__name__}"

    async def hint(self) -> str:
        """Gives a hint."""
        return "?"

    @staticmethod
    def rules() -> str:
        """Returns the rules."""
        return "rules"

    def score(self) -> float:
        return 1.0

    def _secret(self) -> str:
        return ""


def test_schemas_equal_those_of_transformers():
    from transformers.utils import get_json_schema

    for function in (add, fetch):
        assert tools_from([function])[function.__name__].schema == get_json_schema(function)


def test_functions_methods_and_tools_are_taken_in_order_with_their_options():
    @tool
    def plain() -> str:
        """Does nothing."""
        return "plain"

    @tool(parallel=True, timeout_s=3)
    def fast() -> str:
        """Does nothing, fast."""
        return "fast"

    own = Tool("own", print, {"type": "function", "function": {"name": "own"}}, parallel=True)
    made = tools_from([fetch, Game().guess, own, plain, fast])
    assert list(made) == ["fetch", "guess", "own", "plain", "fast"]
    assert [each.is_async for each in made.values()] == [True, False, False, False, False]
    assert [each.parallel for each in made.values()] == [False, False, True, False, True]
    assert [each.timeout_s for each in made.values()] == [None, 2.0, None, None, 3]
    assert list(made["guess"].schema["function"]["parameters"]["properties"]) == ["word"]
    assert (made["own"] is own, plain()) == (True, "plain")


def test_marked_or_public_methods_are_tools_and_are_bound_to_an_environment():
    marked, public = tools_of(Game), tools_of(Game, public=True)
    assert (list(marked), list(public)) == (["guess"], ["guess", "hint", "rules"])
    assert marked["guess"].timeout_s == 2.0
    assert list(marked["guess"].schema["function"]["parameters"]["properties"]) == ["word"]
    assert marked["guess"].bind(Game()).function(word="a") == "a Game"
    assert asyncio.run(public["hint"].bind(Game()).function()) == "?"
    assert public["rules"].bind(Game()).function() == "rules"


def hinted(name, **hints):
    """A function with an argument of these hints."""

    def function(a):
        """Adds.

        Args:
            a: A number.
        """

    function.__name__, function.__annotations__ = name, hints
    return function


def lacks_docstring(a: int) -> int:
    return a


def lacks_description(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
    """
    return a + b


def has_stars(**more: int) -> int:
    """Adds.

    Args:
        more: Numbers.
    """
    return 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lacks_docstring, "'lacks_docstring' has no JSON schema: .* no docstring"),
        (lacks_description, "'lacks_description' has no JSON schema: .* no description for the argument 'b'"),
        (hinted("lacks_hint"), "'lacks_hint' has no JSON schema: Argument a is missing a type hint"),
        (hinted("has_strange_hint", a=random.Random), "'has_strange_hint' has no JSON schema.*Random"),
        (has_stars, r"'has_stars' has the parameter '\*\*more: int'"),
        (functools.partial(add, 1), "must be a function or a method"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        tools_from([function])


def test_tools_that_contradict_are_refused():
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        tools_from([add, add])
    with pytest.raises(ValueError, match="'add' needs a schema of the same name"):
        Tool("add", add, {"function": {"name": "sub"}})
    with pytest.raises(ValueError, match="'add' has timeout_s=0"):
        tool(timeout_s=0)(add)

    class Wrong:
        @tool
        def reset(self) -> None:
            """Resets."""

    with pytest.raises(ValueError, match=r"Wrong\.reset is called by the training loop"):
        tools_of(Wrong)


def test_calls_find_their_tools_and_unknown_ones_the_known_names():
    made = tools_from([add, fetch])
    assert match_call(made, ToolCall("add", {"a": 1})) == (made["add"], ToolCall("add", {"a": 1}))
    missing, wrong = match_call(made, ToolCall("fetsh", {}))
    assert missing is None
    assert wrong.fault == "Tool fetsh not found; did you mean fetch? the tools are add, fetch."
    assert match_call(made, ToolCall("", {}, "broken")) == (None, ToolCall("", {}, "broken"))
    assert match_call({}, ToolCall("x", {}))[1].fault == "Tool x not found; there are no tools."


# -- arguments


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def typed(
    text: str = "",
    count: int = 0,
    ratio: float = 0.0,
    flag: bool = False,
    colour: Colour = Colour.RED,
    size: Literal["s", "m", 5] = "s",
    names: list[str] | None = None,
    pair: tuple[int, str] = (0, ""),
    scores: dict[str, int] | None = None,
    either: int | str = 0,
    maybe: int | None = None,
    nested: list[list[int]] | dict[str, list[int]] | None = None,
    anything: Any = None,
):
    return text


typed.__doc__ = "Takes everything.\n\nArgs:\n" + "".join(f"    {name}: Some.\n" for name in typed.__annotations__)
TYPED = tools_from([typed])["typed"].schema
ADD = tools_from([add])["add"].schema


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"text": "7"}, {"text": "7"}),
        ({"count": "7"}, {"count": 7}),
        ({"count": "7.0"}, {"count": 7}),
        ({"ratio": "0.5"}, {"ratio": 0.5}),
        ({"flag": "True"}, {"flag": True}),
        ({"colour": "blue"}, {"colour": "blue"}),
        ({"size": 5}, {"size": 5}),
        ({"names": '["a"]'}, {"names": ["a"]}),
        ({"names": "null"}, {"names": None}),
        ({"pair": [1, "a"]}, {"pair": [1, "a"]}),
        ({"scores": '{"a": "1"}'}, {"scores": {"a": 1}}),
        ({"either": "7"}, {"either": "7"}),
        ({"maybe": "None"}, {"maybe": None}),
        ({"nested": [[1], ["2"]]}, {"nested": [[1], [2]]}),
        ({"anything": {"a": [None]}}, {"anything": {"a": [None]}}),
    ],
)
def test_arguments_become_what_the_schema_wants(arguments, expected):
    checked = check_arguments(TYPED, arguments)
    assert checked == expected
    assert [type(value) for value in checked.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("schema", "arguments", "message"),
    [
        (ADD, {"c": 1}, "the tool 'add' has no argument 'c'"),
        (ADD, {"b": 1}, "the tool 'add' needs the argument a"),
        (ADD, {"a": "one"}, "the argument 'a' must be an integer, got 'one'"),
        (ADD, {"a": True}, "must be an integer, got True"),
        (TYPED, {"ratio": 1e999}, "must be a number, got inf"),
        (TYPED, {"text": 7}, "the argument 'text' must be a string, got 7"),
        (TYPED, {"flag": 1}, "must be a boolean, got 1"),
        (TYPED, {"x" * 1_000_000: 1}, "has no argument"),
        (ADD, {"a": "[" * 100_000}, "must be an integer"),
        (ADD, {"a": "9" * 100_000}, "must be an integer"),
        (TYPED, {"colour": "bleu"}, "must be one of 'red', 'blue', got 'bleu'; did you mean blue"),
        (TYPED, {"names": ["a", 1]}, "entry 1 of the argument 'names' must be a string, got 1"),
        (TYPED, {"pair": [1]}, "must have 2 entries, got 1"),
        (TYPED, {"scores": {"a": "x"}}, "the argument 'a' of the argument 'scores' must be an integer"),
        (TYPED, {"nested": 1}, "must be an array, got 1; or .* must be an object, got 1"),
    ],
)
def test_arguments_that_the_schema_does_not_allow_are_refused(schema, arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_arguments(schema, arguments)
    assert len(str(refused.value)) < 300


def test_objects_with_properties_are_checked_inside():
    place = {
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    parameters = {"type": "object", "properties": {"place": place}}
    schema = {"function": {"name": "go", "parameters": parameters}}
    assert check_arguments(schema, {"place": {"x": "1.5"}}) == {"place": {"x": 1.5}}
    with pytest.raises(ValueError, match="the argument 'place' needs the argument x"):
        check_arguments(schema, {"place": {}})
    with pytest.raises(ValueError, match="the argument 'place' has no argument 'y'"):
        check_arguments(schema, {"place": {"x": 1, "y": 2}})
    assert check_arguments({"function": {"name": "go"}}, {}) == {}


INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
DEFINITIONS = {
    "Point": {"type": "object", "properties": {"x": INTEGER, "next": {"$ref": "#/$defs/Point"}}, "required": ["x"]},
    "e%f": {"enum": [1, 2], "type": "integer"},
    "a/b": {"$ref": "#/$defs/e%25f"},
    "Circle": {"type": "object", "properties": {"kind": {"const": "circle"}, "r": STRING}},
    "Square": {"type": "object", "properties": {"kind": {"const": "square"}, "r": INTEGER}},
}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (STRING, ["None", "true", "5", '{"a": 1}', "", "  x\n"]),
        ({"anyOf": [STRING, NULL]}, ["x", "", None]),
        ({"type": ["string", "null"]}, ["none", None]),
        ({"anyOf": [INTEGER, STRING]}, [5, "1.0", "007", "five"]),
        ({"anyOf": [STRING, {"type": "array", "items": STRING}, {"type": "object"}]}, ["x", ["5"], {"a": 1}, "[5]"]),
        ({"$ref": "#/$defs/Point"}, [{"x": 1}, {"x": 1, "next": {"x": 2}}]),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "A point."}, [{"x": 1}]),
        ({"$ref": "#/$defs/e%25f", "default": 1}, [2]),
        ({"$ref": "#/$defs/a~1b", "nullable": True}, [2, None]),
        ({"oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}]}, [{"kind": "square", "r": 5}]),
        ({"enum": [1, "1.5", None, True]}, [1, "1.5", None, True]),
        (True, [{"k": 1}]),
        ({"type": "object", "additionalProperties": INTEGER}, [{"a": 1}]),
        ({"patternProperties": {"^n_": INTEGER, "(a+)+": STRING}, "additionalProperties": False}, [{"n_a": 1}]),
        ({"type": "dict", "properties": {"x": {"type": "float"}}}, [{"x": 1.5}]),
        ({"if": {"properties": {"x": {"const": 1}}}, "then": {"required": ["y"]}}, [{"x": 1, "y": 2}, {"x": 2}]),
    ],
)
def test_texts_of_xml_are_the_values_that_templates_write_so(schema, values):
    parameters = {"properties": {"a": schema}, "$defs": DEFINITIONS, "anyOf": [{"required": ["a"]}]}
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)
        found = check_arguments({"function": {"name": "f", "parameters": parameters}}, {"a": text}, True)["a"]
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("parameters", "given", "expected"),
    [
        ({"properties": {"a": INTEGER}}, {"a": "1", "more": "2"}, {"a": 1, "more": "2"}),
        (
            {"properties": {"a": INTEGER, "b": {"enum": ["x"]}}, "required": ["c"]},
            {"a": "1", "b": "y"},
            {"a": 1, "b": "y"},
        ),
    ],
)
def test_an_argument_with_a_fault_does_not_change_the_others(parameters, given, expected):
    schema = {"function": {"name": "f", "parameters": parameters}}
    assert convert_arguments(schema, given) == expected
    with pytest.raises(ValueError, match="the tool 'f' "):
        check_arguments(schema, given, True)


def test_a_schema_cannot_make_a_check_long():
    deep: Any = STRING
    for _ in range(5000):
        deep = {"allOf": [deep]}
    doubled = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(99)}
    patterns = {f"a*a*{i}": INTEGER for i in range(10_000)}
    names = [f"name{i}" for i in range(30_000)]
    start = time.perf_counter()
    for parameters in (
        {"properties": {"a": deep}},
        {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": doubled},
        {"$ref": "#/$defs/a0", "$defs": doubled},
        {"patternProperties": {"^(a+)+$": INTEGER, "(a)\\1*": INTEGER, **patterns}, "additionalProperties": False},
        {"properties": {"a": {"enum": names}}},
        {"properties": {"a": {"enum": [*range(200_000)]}}},
        {"properties": dict.fromkeys(names, INTEGER)},
    ):
        given = {"a": "[" * 50 + "1," * 5000, "a" * 60: "x"}
        assert convert_arguments({"function": {"name": "f", "parameters": parameters}}, given) == given
    assert time.perf_counter() - start < 10
    many = list(range(20_000))
    parameters = {"properties": {"a": {"type": "array", "items": INTEGER}}}
    found = check_arguments({"function": {"name": "f", "parameters": parameters}}, {"a": json.dumps(many)}, True)
    assert found == {"a": many}
