"""Outputs of each family, in the forms that model cards and chat templates document.

Each is (what it shows, the text as a model writes it, the answer, the calls). Sources are named in
the modules of `penstock.server.tools`.
"""
# ruff: noqa: E501

from __future__ import annotations

from typing import Any

Row = tuple[str, str, str, list[tuple[str, dict[str, Any]]]]


def untouched(what: str, text: str) -> Row:
    """Text in which nothing is called."""
    return what, text, text, []


SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"type": "object"},
            "exact": {"type": "boolean"},
        },
    },
    "get_time": {"type": "object", "properties": {}},
    "note": {"type": "object", "properties": {"text": {"type": "string"}}},
}

PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME: tuple[str, dict[str, Any]] = ("get_time", {})
NESTED = (
    "get_weather",
    {"where": {"at": [48.85, 2.35], "tags": [{"a": None}, {"b": True}]}, "exact": False},
)
QUOTES = ("note", {"text": 'She said "no\\yes" {then} [left],\n<b>1</b>'})
UNICODE = ("note", {"text": "Zürich – 東京 🗼"})

HERMES: list[Row] = [
    untouched(
        "a tool that wasn't offered",
        '<tool_call>\n{"name": "get_rain", "arguments": {"city": "Paris"}}\n</tool_call>',
    ),
    (
        "one",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call>",
        "",
        [PARIS],
    ),
    (
        "parallel, behind text",
        'I\'ll look both up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", '
        '"days": 3}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n'
        "</tool_call>",
        "I'll look both up.",
        [PARIS, TIME],
    ),
    (
        "nested",
        '<tool_call>\n{"name": "get_weather", "arguments": {"where": {"at": [48.85, 2.35], "tags": '
        '[{"a": null}, {"b": true}]}, "exact": false}}\n</tool_call>',
        "",
        [NESTED],
    ),
    (
        "quotes",
        '<tool_call>\n{"name": "note", "arguments": {"text": "She said \\"no\\\\yes\\" {then} '
        '[left],\\n<b>1</b>"}}\n</tool_call>',
        "",
        [QUOTES],
    ),
    (
        "unicode, escaped and not",
        '<tool_call>\n{"name": "note", "arguments": {"text": "Zürich \\u2013 東京 '
        '\\ud83d\\uddfc"}}\n</tool_call>',
        "",
        [UNICODE],
    ),
    (
        "arguments before the name, without a closing tag",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}',
        "",
        [PARIS],
    ),
    (
        "arguments as text, none, and two in a block",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": '
        '3}"}\n{"name": "get_time"}\n</tool_call>',
        "",
        [PARIS, TIME],
    ),
    (
        "a brace short",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}\n'
        "</tool_call> Done.",
        "Done.",
        [PARIS],
    ),
    untouched(
        "not JSON", "Look: <tool_call>\n{'name': 'get_time', 'arguments': {}}\n</tool_call> ok"
    ),
    (
        "wrong in its arguments, and a whole one behind it",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": Paris}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": Paris}}\n</tool_call>',
        [TIME],
    ),
    untouched("cut off", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'),
    untouched(
        "arguments that aren't an object",
        '<tool_call>\n{"name": "get_time", "arguments": [1]}\n</tool_call>',
    ),
    untouched("no call", "2 < 3 and <tool\n"),
]

QWEN3_CODER: list[Row] = [
    untouched(
        "a tool that wasn't offered",
        "<tool_call>\n<function=get_rain>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "one, behind text",
        "Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Let me look.",
        [PARIS],
    ),
    (
        "parallel, empty",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "",
        [PARIS, TIME],
    ),
    (
        "nested, and a name of Python's",
        '<tool_call>\n<function=get_weather>\n<parameter=where>\n{"at": [48.85, 2.35], "tags": '
        '[{"a": null}, {"b": true}]}\n</parameter>\n<parameter=exact>\nFalse\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        [NESTED],
    ),
    (
        "text as it is",
        '<tool_call>\n<function=note>\n<parameter=text>\nShe said "no\\yes" {then} [left],\n<b>1</b>'
        "\n</parameter>\n</function>\n</tool_call>",
        "",
        [QUOTES],
    ),
    (
        "null or text, and a text that looks like a number",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n75001\n</parameter>\n"
        "<parameter=units>\nNone\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "75001", "units": None})],
    ),
    (
        "without the outer tag",
        "<function=note>\n<parameter=text>\nZürich – 東京 🗼\n</parameter>\n</function>\n</tool_call>",
        "",
        [UNICODE],
    ),
    untouched("cut off", "<tool_call>\n<function=note>\n<parameter=text>\nZür"),
    untouched("JSON instead", '<tool_call>\n{"name": "get_time"}\n</tool_call>'),
]

LLAMA3_JSON: list[Row] = [
    (
        "one",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "",
        [PARIS],
    ),
    (
        "behind the tag, with a type",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", '
        '"days": 3}}',
        "",
        [PARIS],
    ),
    (
        "parallel",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": '
        '"get_time", "parameters": {}}',
        "",
        [PARIS, TIME],
    ),
    (
        "behind text and the tag",
        'Now: <|python_tag|>{"name": "get_time", "parameters": {}}',
        "Now:",
        [TIME],
    ),
    untouched("in a text", 'Write {"name": "get_time", "parameters": {}} for it.'),
    untouched(
        "within an object",
        '{"log": [{"name": "get_time", "parameters": {}}], "last": {"name": "note", "parameters": '
        '{"text": "a"}}}',
    ),
    untouched("in a list", ' [{"name": "get_time", "parameters": {}}]'),
    (
        "behind a call",
        '{"name": "get_time", "parameters": {}} It is {"name": "get_time", "parameters": {}}',
        'It is {"name": "get_time", "parameters": {}}',
        [TIME],
    ),
    (
        "nested",
        '{"name": "get_weather", "parameters": {"where": {"at": [48.85, 2.35], "tags": [{"a": null}'
        ', {"b": true}]}, "exact": false}}',
        "",
        [NESTED],
    ),
    (
        "quotes",
        '{"name": "note", "parameters": {"text": "She said \\"no\\\\yes\\" {then} [left],\\n<b>1</b>'
        '"}}',
        "",
        [QUOTES],
    ),
    (
        "unicode",
        '{"name": "note", "parameters": {"text": "Zürich – 東京 🗼"}}',
        "",
        [UNICODE],
    ),
    untouched("JSON that calls nothing", '{"name": "Bob", "parameters": {"age": 3}} {"x": 1} {'),
    untouched("a built-in tool", '<|python_tag|>brave_search.call(query="Paris")'),
    untouched("cut off", '{"name": "get_weather", "parameters": {"city": "Par'),
]

PYTHONIC: list[Row] = [
    untouched("a tool that wasn't offered", "[get_rain(city='Paris')]"),
    ("one", '[get_weather(city="Paris", days=3)]', "", [PARIS]),
    ("parallel", "[get_weather(city='Paris', days=3), get_time()]", "", [PARIS, TIME]),
    ("a last comma", "[get_weather(city='Paris' , days = 3 ),\n]", "", [PARIS]),
    (
        "between Llama 4's tags, behind text",
        "Both.\n<|python_start|>[get_weather(city='Paris',days = 3,),get_time( )]<|python_end|>",
        "Both.",
        [PARIS, TIME],
    ),
    (
        "nested",
        "[get_weather(where={'at': (48.85, 2.35), 'tags': [{'a': None}, {'b': true}]}, exact=False)]",
        "",
        [NESTED],
    ),
    (
        "quotes",
        "[note(text='She said \"no\\\\yes\" {then} [left],\\n<b>1</b>')]",
        "",
        [QUOTES],
    ),
    ("unicode", "[note(text='Z\\xfcrich ' '\\u2013 東京 \\U0001f5fc')]", "", [UNICODE]),
    untouched("lists that call nothing", "See [1], [note] and [other(a=1)]."),
    untouched("not a literal", "[note(text=open('x'))]"),
    ("cut off", "[get_time(), note(text='a", ", note(text='a", [TIME]),
]

MISTRAL: list[Row] = [
    untouched("a tool that wasn't offered, by name", '[TOOL_CALLS]get_rain[ARGS]{"city": "Paris"}'),
    untouched(
        "a tool that wasn't offered",
        '[TOOL_CALLS][{"name": "get_rain", "arguments": {"city": "Paris"}}]',
    ),
    (
        "one, with an id",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": '
        '"D681PevKs"}]',
        "",
        [PARIS],
    ),
    (
        "parallel, behind text",
        'Both.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "get_time", "arguments": {}}]',
        "Both.",
        [PARIS, TIME],
    ),
    (
        "nested, by name",
        '[TOOL_CALLS]get_weather[ARGS]{"where": {"at": [48.85, 2.35], "tags": [{"a": null}, {"b": '
        'true}]}, "exact": false}',
        "",
        [NESTED],
    ),
    (
        "parallel, with and without ids",
        '[TOOL_CALLS]get_weather[CALL_ID]bbc5b7ede[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]'
        "get_time[ARGS]{}",
        "",
        [PARIS, TIME],
    ),
    (
        "quotes",
        '[TOOL_CALLS]note[ARGS]{"text": "She said \\"no\\\\yes\\" {then} [left],\\n<b>1</b>"}',
        "",
        [QUOTES],
    ),
    (
        "unicode, an object alone",
        '[TOOL_CALLS]{"name": "note", "arguments": {"text": "Zürich – 東京 🗼"}}',
        "",
        [UNICODE],
    ),
    untouched("no arguments", "[TOOL_CALLS]get_time ok"),
    untouched("cut off", '[TOOL_CALLS][{"name": "get_weather", "argum'),
]

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALLED, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

DEEPSEEK: list[Row] = [
    untouched(
        "a tool that wasn't offered",
        f'{_BEGIN}{_CALL}get_rain{_SEP}{{"city": "Paris"}}{_CALLED}{_END}',
    ),
    (
        "V3, parallel, behind text",
        f"Both.{_BEGIN}{_CALL}function{_SEP}get_weather\n```json\n"
        f'{{"city": "Paris", "days": 3}}\n```{_CALLED}\n{_CALL}function{_SEP}get_time\n```json\n{{}}'
        f"\n```{_CALLED}{_END}",
        "Both.",
        [PARIS, TIME],
    ),
    (
        "V3.1, parallel",
        f'{_BEGIN}{_CALL}get_weather{_SEP}{{"city": "Paris", "days": 3}}{_CALLED}{_CALL}get_time'
        f"{_SEP}{{}}{_CALLED}{_END}",
        "",
        [PARIS, TIME],
    ),
    (
        "nested",
        f'{_BEGIN}{_CALL}get_weather{_SEP}{{"where": {{"at": [48.85, 2.35], "tags": [{{"a": null}}, '
        f'{{"b": true}}]}}, "exact": false}}{_CALLED}{_END}',
        "",
        [NESTED],
    ),
    (
        "quotes",
        f'{_BEGIN}{_CALL}note{_SEP}{{"text": "She said \\"no\\\\yes\\" {{then}} [left],\\n<b>1</b>"}}'
        f"{_CALLED}{_END}",
        "",
        [QUOTES],
    ),
    (
        "unicode, without the outer tokens",
        f'{_CALL}function{_SEP}note\n```json\n{{"text": "Zürich – 東京 🗼"}}\n```{_CALLED}',
        "",
        [UNICODE],
    ),
    untouched(
        "not JSON", f"{_BEGIN}{_CALL}function{_SEP}note\n```json\ntext: x\n```{_CALLED}{_END}"
    ),
    untouched("cut off", f"{_BEGIN}{_CALL}get_ti"),
]

_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

HARMONY: list[Row] = [
    untouched(
        "a tool that wasn't offered",
        '<|channel|>commentary to=functions.get_rain <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
    ),
    (
        "one, thought about",
        f"{_THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        "",
        [PARIS],
    ),
    (
        "the recipient first, as templates write it",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 3}',
        "",
        [PARIS],
    ),
    (
        "said before, and two",
        "<|channel|>commentary<|message|>Both.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather<|message|>{"city": "Paris", "days": 3}<|call|><|start|>assistant'
        "<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
        "Both.",
        [PARIS, TIME],
    ),
    (
        "nested",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"where": {"at": [48.85, 2.35], "tags": [{"a": null}, {"b": true}]}, "exact": false}',
        "",
        [NESTED],
    ),
    (
        "quotes",
        "<|channel|>commentary to=functions.note <|constrain|>json<|message|>"
        '{"text": "She said \\"no\\\\yes\\" {then} [left],\\n<b>1</b>"}<|call|>',
        "",
        [QUOTES],
    ),
    (
        "unicode",
        "<|channel|>commentary to=functions.note <|constrain|>json<|message|>"
        '{"text": "Zürich – 東京 🗼"}<|call|>',
        "",
        [UNICODE],
    ),
    ("an answer", f"{_THOUGHT}<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
    untouched(
        "not JSON", "<|channel|>commentary to=functions.note <|constrain|>json<|message|>text"
    ),
]

LFM2: list[Row] = [
    untouched("a tool that wasn't offered", "<|tool_call_start|>[get_rain()]<|tool_call_end|>"),
    untouched("unmarked", '[get_weather(city="Paris", days=3)]'),
    ("one", '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>', "", [PARIS]),
    (
        "parallel, then text",
        "<|tool_call_start|>[get_weather(city='Paris', days=3), get_time()]<|tool_call_end|>Both.",
        "Both.",
        [PARIS, TIME],
    ),
    (
        "one after the other",
        "So: <|tool_call_start|>[get_weather(city='Paris', days=3)]<|tool_call_end|>"
        "<|tool_call_start|> [get_time()]",
        "So:",
        [PARIS, TIME],
    ),
    (
        "nested",
        "<|tool_call_start|>[get_weather(where={'at': [48.85, 2.35], 'tags': [{'a': None}, "
        "{'b': True}]}, exact=False)]<|tool_call_end|>",
        "",
        [NESTED],
    ),
    ("unicode", "<|tool_call_start|>[note(text='Zürich – 東京 🗼')]", "", [UNICODE]),
    untouched("not a list", "<|tool_call_start|>get_time()<|tool_call_end|>"),
]

GEMMA4: list[Row] = [
    untouched(
        "a tool that wasn't offered", '<|tool_call>call:get_rain{city:<|"|>Paris<|"|>}<tool_call|>'
    ),
    untouched("unmarked", 'call:get_weather{city:<|"|>Paris<|"|>,days:3}'),
    ("one", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', "", [PARIS]),
    (
        "parallel, behind text",
        'Both.\n<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        "Both.",
        [PARIS, TIME],
    ),
    (
        "nested, its nothing as Python's",
        "<|tool_call>call:get_weather{where:{at:[48.85,2.35],tags:[{a:None},{b:true}]},exact:false}<tool_call|>",
        "",
        [NESTED],
    ),
    (
        "nested, with quotes around keys",
        '<|tool_call>call:get_weather{<|"|>where<|"|>:{<|"|>at<|"|>:[48.85,2.35],<|"|>tags<|"|>:[{a:null},{b:true}]},exact:false}<tool_call|>',
        "",
        [NESTED],
    ),
    (
        "JSON",
        '<|tool_call>call:get_weather{"where": {"at": [48.85, 2.35], "tags": [{"a": null}, {"b": true}]}, "exact": false}<tool_call|>',
        "",
        [NESTED],
    ),
    (
        "quotes, of which none is escaped",
        '<|tool_call>call:note{text:<|"|>She said "no\\yes" {then} [left],\n<b>1</b><|"|>}<tool_call|>',
        "",
        [QUOTES],
    ),
    (
        "quotes in JSON's",
        '<|tool_call>call:note{text:"She said \\"no\\\\yes\\" {then} [left],\\n<b>1</b>"}<tool_call|>',
        "",
        [QUOTES],
    ),
    (
        "unicode, cut off behind it",
        '<|tool_call>call:note{text:<|"|>Zürich – 東京 🗼<|"|>}',
        "",
        [UNICODE],
    ),
    (
        "a word without quotes, white space",
        "<|tool_call> call:get_weather { city : Paris , days : 3 } <tool_call|>",
        "",
        [PARIS],
    ),
    (
        "the beginnings of marks",
        '<|tool_call>call:note{text:<|"|><|"<tool_call|><|<|"|>}<tool_call|>',
        "",
        [("note", {"text": '<|"<tool_call|><|'})],
    ),
    untouched("a string that doesn't end", '<|tool_call>call:note{text:<|"|>x}<tool_call|>'),
    untouched("a number that isn't one", "<|tool_call>call:get_weather{days:3.1.4}<tool_call|>"),
    untouched("a list", "<|tool_call>call:get_weather[1]<tool_call|>"),
    untouched("without call", "<|tool_call>get_time{}<tool_call|>"),
    untouched("cut off", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,da'),
]

RECORDED: dict[str, list[Row]] = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "lfm2": LFM2,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "gemma4": GEMMA4,
    "openai": HARMONY,
}
