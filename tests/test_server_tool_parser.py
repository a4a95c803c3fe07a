"""Tool calls in text: found at any cut, typed by their schemas, and otherwise left alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bireme.server.tool_parser import ToolCall, ToolCallParser
from bireme.server.tools import arguments_json

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
        },
    },
}
NOTHING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, NOTHING]

PARIS = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
PARIS_CALL = ToolCall("get_weather", '{"city": "Paris"}')
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"
PING_CALL = ToolCall("ping", "{}")


def city(text: str) -> list[ToolCall]:
    return [ToolCall("get_weather", json.dumps({"city": text}, ensure_ascii=False))]


def one_parameter(key: str, value: str) -> str:
    return f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def parse(pieces: Sequence[str], **options: Any) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(TOOLS, **options)
    text, calls = "", []
    for piece in pieces:
        more, found = parser.push(piece)
        text += more
        calls += found
    more, found = parser.flush()
    assert len(calls) + len(found) == parser.num_calls
    return text + more, calls + found


# (text, the content, the calls)
CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("", "", []),
    ("no call\n\n", "no call\n\n", []),
    (PARIS, "", [PARIS_CALL]),
    (f"Let me see.\n\n{PARIS}\n", "Let me see.", [PARIS_CALL]),
    (f"{PARIS}\n{PING}", "", [PARIS_CALL, PING_CALL]),
    (f"{PARIS}{PARIS}", "", [PARIS_CALL, PARIS_CALL]),
    (f"a {PARIS} b {PING} c", "a  b  c", [PARIS_CALL, PING_CALL]),
    (f"\n{PARIS}\n\nDone.", "Done.", [PARIS_CALL]),
    ("<tool_call><function=ping></function></tool_call>", "", [PING_CALL]),
    ("<tool_call>\r\n\t<function=ping>  </function> </tool_call>", "", [PING_CALL]),
    (one_parameter("city", "a\nb\n"), "", city("a\nb\n")),
    (one_parameter("city", ""), "", city("")),
    (one_parameter("city", ' "x" \\ 🚢'), "", [ToolCall("get_weather", '{"city": " \\"x\\" \\\\ 🚢"}')]),
    (one_parameter("days", "3"), "", [ToolCall("get_weather", '{"days": 3}')]),
    (one_parameter("days", "three"), "", [ToolCall("get_weather", '{"days": "three"}')]),
    (one_parameter("unknown", "3"), "", [ToolCall("get_weather", '{"unknown": "3"}')]),
    # a value may hold what looks like tags, where the format still says which is meant
    (one_parameter("city", "<b>x</b> </parameter> y"), "", city("<b>x</b> </parameter> y")),
    (one_parameter("city", "</function>\n</tool_call>"), "", city("</function>\n</tool_call>")),
    (one_parameter("city", "<parameter=x>\n1"), "", city("<parameter=x>\n1")),
    (one_parameter("city", "</parameter>\n</tool_call>"), "", city("</parameter>\n</tool_call>")),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        '<parameter=tags>\n["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>',
        "",
        [ToolCall("get_weather", '{"city": "Rome", "days": 2, "tags": ["a", {"b": null}]}')],
    ),
    (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n1\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [ToolCall("get_weather", '{"days": 2}')],
    ),
    (
        "<tool_call>\n<function=other>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [ToolCall("other", '{"n": "1"}')],
    ),
    # prose
    ("Write <tool_call> to call.", "Write <tool_call> to call.", []),
    ("<tool_call>", "<tool_call>", []),
    ("a < b, <tool, <tool_calls> </tool_call>\n", "a < b, <tool, <tool_calls> </tool_call>\n", []),
    ('<tool_call>\n{"name": "ping"}\n</tool_call>', '<tool_call>\n{"name": "ping"}\n</tool_call>', []),
    ("<tool_call>\n<function=>\n</function>\n</tool_call>", "<tool_call>\n<function=>\n</function>\n</tool_call>", []),
    ("<tool_call>\n<function=ping>\nhm", "<tool_call>\n<function=ping>\nhm", []),
    ("<tool_call>\n<function=a\nb></function>", "<tool_call>\n<function=a\nb></function>", []),
    ("<tool_call>\n<function=ping>\n<parameter=>x", "<tool_call>\n<function=ping>\n<parameter=>x", []),
    (f"The tag <tool_call> opens: {PING}", "The tag <tool_call> opens:", [PING_CALL]),
    (f"<tool_call>{PING}", "<tool_call>", [PING_CALL]),
    (f"<tool_call>\n<function=<tool_call>{PING}", "<tool_call>\n<function=<tool_call>", [PING_CALL]),
    (f"<tool_call>{' ' * 65}<function=ping></function>", f"<tool_call>{' ' * 65}<function=ping></function>", []),
    (f"<tool_call><function={'n' * 257}></function>", f"<tool_call><function={'n' * 257}></function>", []),
    # cut answers: no half calls
    (PARIS[:-5], "", [PARIS_CALL]),
    (PARIS[: PARIS.index("</tool_call>")], "", [PARIS_CALL]),
    (PARIS[: PARIS.index("</function>") + 5], PARIS[: PARIS.index("</function>") + 5], []),
    (PARIS[: PARIS.index("ris")], PARIS[: PARIS.index("ris")], []),
    (f"See:\n\n{PARIS[:30]}", f"See:\n\n{PARIS[:30]}", []),
    (f"{PING}\n{PARIS[:30]}", PARIS[:30], [PING_CALL]),
    (PARIS.replace("</tool_call>", "and so on"), "and so on", [PARIS_CALL]),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(CASES)))
def test_text_and_calls_are_told_apart_whole_per_character_and_at_every_cut(row: int) -> None:
    text, content, calls = CASES[row]
    assert parse([text]) == (content, calls)
    assert parse(list(text)) == (content, calls)
    for cut in range(1, len(text)):
        assert parse([text[:cut], text[cut:]]) == (content, calls), text[:cut]


def test_random_text_at_random_cuts_gives_what_the_whole_gives() -> None:
    rng = random.Random(11)
    words = [
        "<tool_call>", "</tool_call>", "<function=", "<function=ping>", "<function=get_weather>", "</function>",
        "<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>", ">", "<", "</", "\n", " ", "7",
        "🚢", PING, PARIS, "<tool_call>\n<function=get_weather>\n<parameter=days>\n",
    ]  # fmt: skip
    num_calls = 0
    for _ in range(10_000):
        text = "".join(rng.choice(words) for _ in range(rng.randint(0, 12)))
        pieces, start = [], 0
        while start < len(text):
            end = start + rng.randint(1, 9)
            pieces.append(text[start:end])
            start = end
        only_first = rng.random() < 0.3
        whole = parse([text], only_first=only_first)
        assert parse(pieces, only_first=only_first) == whole, text
        for call in whole[1]:
            assert isinstance(json.loads(call.arguments), dict)
        num_calls += len(whole[1])
    assert num_calls > 1000


def test_any_arguments_written_as_templates_write_them_come_back() -> None:
    rng = random.Random(3)
    properties = {"s": {"type": "string"}, "n": {"type": "number"}, "o": {"type": "object"}, "b": {"type": "boolean"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    for _ in range(2000):
        text = "".join(rng.choice(['"', "\\", "\n", "<", "</parameter>", "é", "🚢", " ", "true"]) for _ in range(8))
        want = {
            "s": text,
            "n": rng.choice([0, -3, 2.5, 1e30]),
            "o": {text: [text, None, rng.random()]},
            "b": rng.random() < 0.5,
        }
        lines = ["<tool_call>", "<function=f>"]
        for key, value in want.items():
            lines += [f"<parameter={key}>", value if isinstance(value, str) else json.dumps(value), "</parameter>"]
        parser = ToolCallParser([tool])
        _, calls = parser.push("\n".join([*lines, "</function>", "</tool_call>"]))
        assert json.loads(calls[0].arguments) == want


def test_text_is_shown_as_soon_as_no_call_can_begin_in_it() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.push("Let me see.\n\n") == ("Let me see.", [])
    assert parser.push("<too") == ("", [])
    assert parser.push("l> ") == ("\n\n<tool>", [])
    assert parser.push("<tool_call>\n<function=pi") == ("", [])
    assert parser.push("ng>\n</function>") == ("", [PING_CALL])
    assert parser.push("\n</tool_call>") == ("", [])
    assert parser.flush() == ("", [])


def test_an_answer_of_one_call_leaves_out_what_follows() -> None:
    for pieces in ([f"a\n{PARIS}\n{PING} b"], list(f"a\n{PARIS}\n{PING} b")):
        assert parse(pieces, only_first=True) == ("a", [PARIS_CALL])


def test_a_long_value_is_read_in_linear_time() -> None:
    parser = ToolCallParser(TOOLS)
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    for _ in range(100_000):
        parser.push("abc<\n")
    assert len(parser._held) < 20
    _, calls = parser.push("\n</parameter>\n</function>")
    assert len(json.loads(calls[0].arguments)["city"]) == 500_000


# ---- types ----

DEFINED = {"Mood": {"enum": ["good", "bad"]}, "Level": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}


@pytest.mark.parametrize(
    ("schema", "text", "want"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, ' "quoted" ', ' "quoted" '),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "integer"}, "null", "null"),
        ({"type": "integer"}, "1" * 40, int("1" * 40)),
        ({"type": "integer"}, "1e300", "1e300"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "5.25", 5.25),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "{}", "{}"),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "object"}, '{"a":\n 1}', {"a": 1}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"]}, "x", "x"),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/Level"}]}, "7", 7),
        ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "maybe", "maybe"),
        ({"allOf": [{"$ref": "#/$defs/Level"}]}, "7", 7),
        ({"$ref": "#/$defs/Level"}, "7", 7),
        ({"$ref": "#/$defs/Mood"}, "7", "7"),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"$ref": "#/$defs/None/such"}, "7", "7"),
        ({"$ref": "https://example.org/x"}, "7", "7"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({}, "7", "7"),
        (True, "7", "7"),
        ({"type": 7, "anyOf": 7, "enum": 7}, "7", "7"),
    ],
)
def test_an_argument_has_the_type_that_its_schema_says_or_is_text(schema: Any, text: str, want: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINED}
    value = json.loads(arguments_json({"x": text}, parameters))["x"]
    assert (value, type(value)) == (want, type(want))


def test_numbers_keep_the_digits_that_the_model_wrote() -> None:
    parameters = {"properties": {"x": {"type": "number"}}}
    assert arguments_json({"x": "0.10000000000000000001"}, parameters) == '{"x": 0.10000000000000000001}'


def test_undeclared_arguments_follow_additional_properties() -> None:
    assert arguments_json({"x": "7"}, {"additionalProperties": {"type": "integer"}}) == '{"x": 7}'
    assert arguments_json({"x": "7"}, {"additionalProperties": True}) == '{"x": "7"}'
    assert arguments_json({"x": "7"}, None) == '{"x": "7"}'
