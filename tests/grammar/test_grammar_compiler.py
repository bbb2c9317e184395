"""The cache, its counters and threads; and what is refused, with its place, in time."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.grammar.test_grammar_gbnf import written
from tests.grammar.walks import allowed, closing, text_of, walk

from penstock.errors import InvalidSamplingError
from penstock.grammar import Grammars, probe
from penstock.grammar.shortest import shortest
from penstock.sampling.structured import StructuredOutputs
from penstock.tokenizer import Tokenizer, VocabMap


@pytest.fixture
def grammars(tokenizer_of: Callable[[str], Tokenizer]) -> Grammars:
    tokenizer = tokenizer_of("stories260K")
    return Grammars(tokenizer, 512, [2], max_entries=4, max_bytes=640_000)


def test_a_structure_is_compiled_once_and_each_start_is_its_own(grammars: Grammars) -> None:
    spec = StructuredOutputs(regex="[ab]+")
    first, second = grammars.start(spec), grammars.start(StructuredOutputs(regex="[ab]+"))
    before = allowed(second, 512)
    first.accept(before[0])
    assert allowed(second, 512) == before
    stats = grammars.stats()
    assert (stats.hits, stats.misses, stats.refused, stats.entries) == (1, 1, 0, 1)
    assert stats.nbytes == 64 * len("[ab]+") and len(stats.compile_s) == 1
    assert stats.percentile(50) == stats.compile_s[0] > 0


def test_whitespace_is_part_of_what_is_asked(grammars: Grammars) -> None:
    grammars.compile(StructuredOutputs(json_object=True))
    grammars.compile(StructuredOutputs(json_object=True, disable_any_whitespace=True))
    grammars.compile(StructuredOutputs(json_object=True, whitespace_pattern=" ?"))
    assert grammars.stats().misses == 3


def test_the_cache_is_bounded_by_count_and_bytes(grammars: Grammars) -> None:
    specs = [StructuredOutputs(regex=f"a{i}") for i in range(6)]
    for spec in specs[:4]:
        grammars.compile(spec)
    grammars.compile(specs[0])  # used again: the second is the oldest
    grammars.compile(specs[4])
    assert grammars.stats().entries == 4
    grammars.compile(specs[0])
    assert (grammars.stats().hits, grammars.stats().misses) == (2, 5)
    grammars.compile(specs[1])
    assert grammars.stats().misses == 6
    grammars.compile(StructuredOutputs(choice=["x" * 9_995]))
    assert grammars.stats().nbytes <= 640_000 and grammars.stats().entries == 1


def test_threads_that_ask_at_once_wait_for_one_compilation(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    grammars = Grammars(tokenizer_of("stories260K"), 512, [2])
    spec = StructuredOutputs(choice=[f"value {i}" for i in range(5_000)])
    together = threading.Barrier(6)

    def start(_: int) -> list[int]:
        together.wait()
        return allowed(grammars.start(spec), 512)

    with ThreadPoolExecutor(6) as pool:
        masks = list(pool.map(start, range(6)))
    assert all(mask == masks[0] for mask in masks)
    assert (grammars.stats().misses, grammars.stats().hits) == (1, 5)


def test_a_refusal_is_remembered(grammars: Grammars) -> None:
    for _ in range(3):
        with pytest.raises(InvalidSamplingError, match=r"outputs\.regex can't be"):
            grammars.start(StructuredOutputs(regex="(a"))
    assert (grammars.stats().hits, grammars.stats().misses, grammars.stats().refused) == (2, 1, 1)


def nested(inner: Any, depth: int) -> Any:
    for _ in range(depth):
        inner = {"properties": {"a": inner}}
    return inner


SLOWEST_S = 3.0  # of the processor: a refusal takes a tenth of that to a third, by the machine

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "false": ({"json": False}, "at #: no value follows the schema false"),
    "contradiction": (
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        "no value follows it .incompatible types",
    ),
    "lengths": (
        {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
        "at #/minLength: no value follows it .minLength is 5, but maxLength is 2",
    ),
    "without end": ({"json": {"$ref": "#"}}, "at #: each of its values would hold another"),
    "needs itself": (
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "would hold another one within it, without end",
    ),
    "unique": (
        {"json": nested({"type": "array", "uniqueItems": True}, 1)},
        "at #/properties/a/uniqueItems: 'uniqueItems' can't be held to",
    ),
    "not a pattern": (
        {"json": nested({"not": {"pattern": "a"}}, 1)},
        "at #/properties/a/not: 'not' can't be held to",
    ),
    "pattern": (
        {"json": nested({"type": "string", "pattern": "a(?=b)"}, 1)},
        r"at #/properties/a/pattern: the pattern 'a\(\?=b\)', character 2: look-around",
    ),
    "boundary": ({"json": {"pattern": r"\bx"}}, "at #/pattern.*a word's boundary"),
    "external": (
        {"json": nested({"$ref": "http://example.com/a"}, 1)},
        "at #/properties/a/.ref: .ref names 'http://example.com/a', which isn't within it",
    ),
    "nowhere": (
        {"json": nested({"$ref": "#/$defs/a"}, 1)},
        "at #/properties/a/.ref: .ref names '/.defs/a', where nothing is",
    ),
    "format": ({"json": {"format": "datetime"}}, "at #/format: .*it calls it 'date-time'"),
    "regex format": ({"json": {"format": "regex"}}, "at #/format: the format 'regex' can't be"),
    "one of": (
        {"json": {"oneOf": [{"type": "string", "pattern": "a"}, {"minLength": 2}]}},
        "at #/oneOf: oneOf has options that more than one value may meet",
    ),
    "keys twice": (
        {"json": {"type": "object", "minProperties": 3}},
        "at #/minProperties: at least 3 properties, of which 0 are required",
    ),
    "options": ({"json": {"x-guidance": {"lenient": True}}}, "at #/x-guidance: x-guidance isn't"),
    "deep": ({"json": nested({}, 80)}, "parts lie more than 100 deep within each other"),
    "wide": (
        {"json": {"properties": {f"p{i}": {} for i in range(3_000)}}},
        "at #/properties: 3,000 names, .* together may have 2,828",
    ),
    "wide by what is required": (
        {"json": nested({"required": [f"p{i}" for i in range(20_000)]}, 1)},
        "at #/properties/a/required: 20,000 names, .* together may have 2,828",
    ),
    "dependencies": (
        {"json": {"dependentRequired": {f"p{i}": ["q"] for i in range(20_000)}}},
        "at #: more than 10,000 schemas",
    ),
    "more when it is written otherwise": (
        {
            "json": {
                "properties": {f"p{i}": {"not": {"enum": [*range(i, i + 60)]}} for i in range(200)}
            }
        },
        "without not, oneOf, if and dependencies it holds 12,.* schemas; at most 10,000",
    ),
    "4 MB": (
        {
            "json": {
                "properties": {
                    f"p{i}": {"properties": {f"q{j}": {"const": "x" * 20} for j in range(100)}}
                    for i in range(900)
                }
            }
        },
        "at #/properties/p99: more than 10,000 schemas",
    ),
    "all of any of": (
        {
            "json": {
                "allOf": [{"anyOf": [{"minLength": i}, {"maxLength": 50 + i}]} for i in range(20)]
            }
        },
        "larger than can be compiled in time",
    ),
    "multiple": ({"json": {"multipleOf": 99_999_989}}, "at #/multipleOf: 99999989 is too fine"),
    "multiples": (
        {"json": {"allOf": [{"multipleOf": 9_973}, {"multipleOf": 9_967}]}},
        "at #/allOf/1/multipleOf: 9967 is too fine, alone or beside others",
    ),
    "enum": (
        {"json": nested({"enum": [f"value {i}" for i in range(100_000)]}, 1)},
        "at #/properties/a/enum: 100,000 values; at most 40,000",
    ),
    "long enum": (
        {"json": {"enum": [f"{i} " + "value " * 16 for i in range(37_000)]}},
        "larger than can be compiled in time",
    ),
    "enum of objects": (
        {"json": {"enum": [{"a": [i]} for i in range(20_000)]}},
        "at #/enum: 20,000 values; at most 40,000",
    ),
    "constant": ({"json": {"const": [*range(50_000)]}}, "at #/const: 1 values; at most 40,000"),
    "long pattern": (
        {"json": nested({"pattern": "ab" * 1_000_000}, 2)},
        "at #/properties/a/properties/a/pattern: .* 2,000,000 characters; at most 100,000",
    ),
    "many patterns": (
        {"json": {"properties": {f"p{i}": {"pattern": "a" * 1_000} for i in range(200)}}},
        "at #/properties/p100/pattern: .* have 101,000 characters; at most 100,000",
    ),
    "choices": ({"choice": [f"{i}" for i in range(100_001)]}, "it has 100,001 choices"),
    "regex": ({"regex": "[a-z"}, "the regex isn't one .*unclosed character class"),
    "regex that nothing matches": ({"regex": r"[^\x00-\u{10FFFF}]"}, "can't be followed"),
    "empty": ({"regex": "()"}, "nothing but the empty text follows it"),
    "deep regex": ({"regex": "(" * 50_000 + "a" + ")" * 50_000}, "the regex isn't one"),
    "whitespace": ({"json_object": True, "whitespace_pattern": "["}, "unclosed character class"),
    "lark": ({"grammar": 'start: "a" b\n'}, "line 1.*unknown name: .b"),
    "lark that takes back": (
        {"grammar": "start: a\na[max_tokens=3]: /.*/\n"},
        "at line 2: the rule 'a' asks for max_tokens",
    ),
    "lark without start": ({"grammar": 'begin: "a"\n'}, "no start rule found"),
    "lark without end": (
        {"grammar": 'start: "a" b\nb: "(" b ")"\n'},
        "at line 2: the rule 'b' needs itself in each of its alternatives",
    ),
    "deep lark": ({"grammar": "start: " + "(" * 15_000 + '"a"' + ")" * 15_000}, "deep within"),
    "long chain": (
        {
            "grammar": "start: r0\n"
            + "".join(f"r{i}: r{i + 1}\n" for i in range(9_000))
            + 'r9000: "a"\n'
        },
        "deep within each other, from 'start' to",
    ),
    "many words": (
        {"grammar": "start: " + " | ".join(f'"{i % 9}"' for i in range(30_000))},
        "its rules have 59,999 items; at most 40,000",
    ),
    "many words in GBNF": (
        {"grammar": 'root ::= "(" root ")" | ' + " | ".join(f'"word {i}"' for i in range(13_000))},
        "character by character; at most 200,000",
    ),
    "doubling": (
        {
            "grammar": "start: A0\n"
            + "".join(f'A{i}: "y" A{i + 1} A{i + 1}\n' for i in range(40))
            + 'A40: "x"\n'
        },
        "too big",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_followed_is_refused_with_its_place(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    asked, message = REFUSED[name]
    spec = StructuredOutputs(**asked)
    grammars = grammars_of("gpt2")
    assert grammars.vocabulary.tokens.vocab_size == 50_257
    start = time.process_time()
    with pytest.raises(InvalidSamplingError, match=message) as error:
        grammars.compile(spec)
    assert time.process_time() - start < SLOWEST_S
    assert str(error.value).startswith(f"structured_outputs.{spec.kind} can't be followed")
    assert len(str(error.value)) < 900


UNSATISFIABLE: dict[str, tuple[Any, str]] = {
    "bounds": (
        {"minimum": 5, "maximum": 2, "type": "number"},
        "/minimum: .*minimum is 5, but maximum is 2",
    ),
    "lengths": ({"minLength": 5, "maxLength": 2, "type": "string"}, "/minLength: .*maxLength is 2"),
    "items": ({"minItems": 5, "maxItems": 2, "type": "array"}, "/minItems: .*maxItems is 2"),
    "interval": (
        {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 6},
        ": .*contains no integer values",
    ),
    "multiple": ({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}, ": .*multiple"),
    "enum": ({"type": "integer", "enum": ["a"]}, "/enum: .*enum has no value of type integer"),
    "constant": ({"type": "string", "const": 5}, "/const: .*const has no value of type string"),
    "no values": ({"enum": []}, "/enum: .*enum is an empty list"),
    "no options": ({"anyOf": []}, "/anyOf: .*anyOf is an empty list"),
    "types": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ": .*incompatible types"),
    "part": (
        {"allOf": [{"type": "string"}, {"minLength": 3, "maxLength": 1}]},
        "/allOf/1/minLength: ",
    ),
    "required": (
        {"type": "object", "required": ["x"], "additionalProperties": False},
        "/required: .*names 'x', which properties doesn't allow",
    ),
    "pattern and length": ({"pattern": "^a{5}$", "maxLength": 3, "type": "string"}, ": no value"),
}


@pytest.mark.parametrize("name", UNSATISFIABLE)
def test_what_no_value_follows_is_named_deep_within(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    schema, message = UNSATISFIABLE[name]
    inner = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    whole = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/b"}, "c": {"minimum": 5, "maximum": 2}},
        "required": ["a"],
        "$defs": {"b": inner},
    }
    with pytest.raises(InvalidSamplingError, match="at #/.defs/b/properties/a" + message):
        grammars_of("gpt2").compile(StructuredOutputs(json=whole))
    optional = {"type": "object", "properties": {"a": inner}}  # a value without it follows
    grammars_of("gpt2").compile(StructuredOutputs(json=optional))


MISPLACED: dict[str, tuple[Any, str]] = {
    "group": ({"pattern": "(a"}, "/pattern: the pattern isn't one .*: unclosed group"),
    "count": (
        {"pattern": "a{2,1}"},
        "/pattern: the pattern isn't one .*: invalid repetition count",
    ),
    "property": ({"pattern": r"\p{Foo}"}, "/pattern: the pattern isn't one .*: Unicode property"),
    "names": ({"patternProperties": {"a)": {}}}, "/patternProperties/.*: unopened group"),
    "undecided": (
        {"type": "string", "pattern": "^[ab]*a[ab]{40}c$", "maxLength": 30},
        "/pattern: whether a text follows its pattern, its length .* takes too long",
    ),
    "undecided names": (
        {"patternProperties": {"^[ab]*a[ab]{40}c$": {}, "^[ab]*b[ab]{40}d$": {}}},
        "/patternProperties: whether two of its patterns meet the same name",
    ),
    "range": ({"type": "number", "maximum": 1e300}, "/maximum: a bound is too large"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_what_the_library_refuses_is_named_with_its_place(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    schema, message = MISPLACED[name]
    with pytest.raises(InvalidSamplingError, match="at #/properties/a/properties/a" + message):
        grammars_of("gpt2").compile(StructuredOutputs(json=nested(schema, 2)))


BREAKS = (
    "(aa|aaa){500}b",
    "((a|aa){100}){100}",
    "a?" * 300 + "a" * 300,
    "(?:" * 100 + "a" + "){1,9}" * 100,
    "(a{1,1000}){1,1000}",  # after a hundred tokens
)


def refused(tokenizer: Tokenizer, regex: str, said: str, seconds: float) -> None:
    """Alone and as a pattern inside a schema, in time, with its place."""
    grammars = Grammars(tokenizer, 512, [2], deadline_s=60.0)
    nested = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{regex}$"}}}
    for asked, place in (({"regex": regex}, ""), ({"json": nested}, " at #/properties/a/pattern")):
        start = time.process_time()
        with pytest.raises(InvalidSamplingError, match=rf"followed{place}: {said}"):
            grammars.compile(StructuredOutputs(**asked))
        assert time.process_time() - start < seconds


@pytest.mark.parametrize("regex", BREAKS)
def test_a_regex_that_would_break_a_text_off_is_refused(
    regex: str, tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_S", 60.0)  # or a busy machine says that it takes too long
    refused(tokenizer_of("stories260K"), regex, r"a text .* breaks off at token \d+", SLOWEST_S)


def test_a_regex_whose_masks_take_too_long_is_refused(
    grammars_of: Callable[[str], Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOST_S", 0.0)
    with pytest.raises(InvalidSamplingError, match=r"tokens of a text .* longer than 0 s to allow"):
        grammars_of("stories260K").compile(StructuredOutputs(regex="([ab]{90}c?){450}"))


def test_what_is_forced_is_found_once(grammars_of: Callable[[str], Grammars]) -> None:
    """45,000 tokens: asked anew at each of them, 40 ms would go by before each."""
    grammars, start = grammars_of("stories260K"), time.process_time()
    state = grammars.start(StructuredOutputs(regex="(a{100}){450}"))
    bits = np.zeros(grammars.vocabulary.words, dtype=np.int32)
    tokens = state.forced()
    for token in tokens[:5000]:
        state.fill(bits)
        assert bits[token // 32] == np.uint32(1 << token % 32).view(np.int32)
        state.accept(token)
    assert np.count_nonzero(bits) == 1
    assert state.forced() == tokens[5000:]
    assert time.process_time() - start < SLOWEST_S


ENDLESS = ("(a{1000}){1000}", "((a{100}){100}){100}", "a{1000000}", "([ab]{999}c?|x{200000}){999,}")


@pytest.mark.parametrize("regex", ENDLESS)
def test_a_regex_whose_shortest_text_is_too_long_is_refused(
    regex: str, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    said = r"the shortest text .* [\d,]+ characters"
    refused(tokenizer_of("stories260K"), regex, said, SLOWEST_S / 2)


@pytest.mark.parametrize(
    "regex",
    [
        "", "abc", "a*b+c?d", "a{3}(bc){2,}", "(a|bc|)(de|f)", r"\p{L}{2}\.\x{41}", "[]a{9}]x",
        r"[^\]]{2}", "^(?:a|b{3})$", "(?P<n>ab){2,4}(?i)x", "[[ab]c]{2}", "a|",
        "((a{2}b){3}|c{5}){2}",
    ],
)  # fmt: skip
def test_the_length_of_the_shortest_text(regex: str) -> None:
    """Held to Python's own parser, where it reads the same."""
    python = regex.replace("\\p{L}", "\\w").replace("\\x{41}", "A").replace("(?i)", "")
    python = python.replace("[[ab]c]", "[abc]").replace("[]a{9}]", "[xa]")
    assert shortest(regex) == re._parser.parse(python).getwidth()[0]  # type: ignore[attr-defined]


TOO_LONG: dict[str, Any] = {
    "json": {"enum": ["x" * 100] * 50_000},
    "choice": ["x" * 30_000 + str(i) for i in range(200)],
    "grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(300_000)),
    "regex": "|".join(f"w{i}" for i in range(300_000)),
    "structural_tag": {"type": "structural_tag", "format": {"value": "x" * 2_000_000}},
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_what_is_too_long_is_refused_before_it_is_read(kind: str) -> None:
    start = time.process_time()
    with pytest.raises(
        InvalidSamplingError, match=rf"{kind} has \d,\d*,\d* characters; at most [\d,]+ are read"
    ):
        StructuredOutputs(**{kind: TOO_LONG[kind]})
    assert time.process_time() - start < SLOWEST_S


MALFORMED: list[tuple[Any, str]] = [
    ({"type": 5}, "#/type"),
    ({"type": [["null"]]}, "#/type"),
    ({"properties": {"a": 5}}, "#/properties"),
    ({"properties": {"a": {"required": [1]}}}, "#/properties/a/required"),
    ({"enum": 5}, "#/enum"),
    ({"anyOf": {}}, "#/anyOf"),
    ({"allOf": [5]}, "#/allOf"),
    ({"not": {"allOf": 5}}, "#/not/allOf"),
    ({"not": {"properties": 5}}, "#/not/properties"),
    ({"oneOf": [{"required": 5}, {}]}, "#/oneOf/0/required"),
    ({"items": "a"}, "#/items"),
    ({"minLength": -1}, "#/minLength"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"pattern": 5}, "#/pattern"),
    ({"dependencies": {"a": 5}}, "#/dependencies"),
    ({"$ref": 5}, "#/$ref"),
]


@pytest.mark.parametrize(("schema", "place"), MALFORMED)
def test_what_isnt_a_schema_is_refused_with_its_place(
    schema: Any, place: str, grammars_of: Callable[[str], Grammars]
) -> None:
    with pytest.raises(InvalidSamplingError, match=f"at {re.escape(place)}: .* must be"):
        grammars_of("gpt2").compile(StructuredOutputs(json=schema))


HARD = {
    "exponential": {"regex": r"((((a|aa)+|b)+|c)+|d)+"},
    "far back": {"regex": ".*a.{200}"},
    "long": {"regex": "x{1,100000}"},
    "squared": {"regex": "(x{1,1000}y){1,1000}"},
    "letters": {"regex": r"\p{L}{1,100000}"},
    "items": {"json": {"type": "array", "items": {"type": "string"}, "maxItems": 100_000}},
    "length": {"json": {"type": "string", "maxLength": 10_000_000}},
    "enum": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "choices": {"choice": [f"value {i}" for i in range(100_000)]},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" | "a" "a" |\n'},
}


@pytest.mark.parametrize("name", HARD)
def test_what_looks_hard_is_followed(name: str, grammars_of: Callable[[str], Grammars]) -> None:
    state = grammars_of("gpt2").start(StructuredOutputs(**HARD[name]))
    rng = random.Random(name)
    for _ in range(10):
        tokens = [i for i in allowed(state, 50_257) if i != 50_256]
        if not tokens:
            break
        state.accept(rng.choice(tokens))


def test_a_reduced_vocabulary_writes_with_what_it_has(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("gpt2")
    letters = {i for i in range(50_257) if len(tokenizer.token_bytes(i)) == 1}
    vocab_map = VocabMap.of(50_257, {*letters, 50_256}, {})
    grammars = Grammars(tokenizer, 50_257, [50_256], vocab_map)
    spec = StructuredOutputs(json={"type": "object", "properties": {"name": {"const": "Lily"}}})
    rng, favoured = random.Random(5), closing(tokenizer)
    for _ in range(5):
        ids = walk(grammars.start(spec), 50_257, [50_256], rng, favoured=favoured)
        assert ids is not None
        assert set(ids) <= letters
        json.loads(text_of(tokenizer, ids))
    state = grammars.start(StructuredOutputs(choice=["Lily"]))
    forced = state.forced()
    assert [tokenizer.token_bytes(i) for i in forced] == [b"L", b"i", b"l", b"y"]


def test_what_a_reduced_vocabulary_cant_begin_is_refused(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("gpt2")
    kept = {i for i in range(50_257) if not tokenizer.token_bytes(i).startswith(b"{")}
    grammars = Grammars(tokenizer, 50_257, [50_256], VocabMap.of(50_257, kept, {}))
    for asked in (
        StructuredOutputs(json_object=True),
        StructuredOutputs(choice=["a{b"]),
        StructuredOutputs(regex="\\{+"),
    ):
        with pytest.raises(InvalidSamplingError, match="no token of the model can"):
            grammars.compile(asked)
    grammars.compile(StructuredOutputs(regex="[{}]+"))  # another way is left


def test_a_key_isnt_spelt_as_another_one(grammars_of: Callable[[str], Grammars]) -> None:
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"], "type": "object"}
    spec = StructuredOutputs(json=schema)
    assert written(grammars_of("gpt2"), spec, '{"a": "x\\n", "\\"b\\"": 5}')
    assert not written(grammars_of("gpt2"), spec, '{"a": "x", "\\u0061": 5}')
    control = StructuredOutputs(json={"enum": ["a\x01"]})
    assert written(grammars_of("gpt2"), control, '"a\\u0001"')


WRONG_SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "circle": ({"json": {"allOf": [{"type": "object"}], "$ref": "#"}}, "without end"),
    "dependencies": (
        {"json": {"dependentRequired": {"a": {"pattern": {}}}}},
        "at #/dependentRequired: dependentRequired must be an object of lists of names",
    ),
    "surrogate": ({"choice": ["b", "a\ud800"]}, r"at choice\[1\]: it holds half of a surrogate"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_what_once_was_an_error_of_ours_is_refused(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    given, message = WRONG_SHAPES[name]
    with pytest.raises(InvalidSamplingError, match=message):
        grammars_of("gpt2").compile(StructuredOutputs(**given))
    circle = {"properties": {"a": {"$ref": "#/properties/a", "format": "date"}}}
    grammars_of("gpt2").compile(StructuredOutputs(json=circle))
