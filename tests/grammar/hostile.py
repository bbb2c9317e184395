"""Inputs made to overflow a stack or to take for ever, each by its size; and one run over them.

Run as a program it compiles each and writes what came of it, a line each: a crash ends only it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.errors import RequestError
from penstock.grammar import Grammars
from penstock.sampling.structured import StructuredOutputs
from penstock.tokenizer import Tokenizer

Asked = dict[str, Any]
TEXT = {"type": "string"}


def wrapped(around: Callable[[Any], Any], inner: Any, count: int) -> Any:
    for _ in range(count):
        inner = around(inner)
    return inner


def chain(count: int, link: Callable[[Any], Any], *, ring: bool = False) -> Asked:
    """Definitions of which each holds the next; of a ring the last holds the first."""
    named = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    named[f"d{count}"] = link({"$ref": "#/$defs/d0"}) if ring else TEXT
    return {"json": {"$ref": "#/$defs/d0", "$defs": named}}


def part(kind: str, **fields: Any) -> Callable[[Any], Any]:
    return lambda inner: {"type": kind, **fields, "content": inner}


def tag(around: Callable[[Any], Any], count: int) -> Asked:
    inner = wrapped(around, {"type": "const_string", "value": "a"}, count)
    return {"structural_tag": {"type": "structural_tag", "format": inner}}


def both(start: str, link: str, end: str, count: int) -> str:
    return start + "".join(link.format(i, i + 1) for i in range(count)) + end.format(count)


LINKS: dict[str, Callable[[Any], Any]] = {
    "ref": lambda ref: ref,
    "ref beside a length": lambda ref: {**ref, "minLength": 1},
    "allOf": lambda ref: {"allOf": [ref, {"minLength": 1}]},
    "anyOf": lambda ref: {"anyOf": [ref, {"type": "null"}]},
    "oneOf": lambda ref: {"oneOf": [ref, {"type": "null"}]},
    "not": lambda ref: {"not": ref},
    "if": lambda ref: {"if": {"type": "null"}, "then": True, "else": ref},
    "items": lambda ref: {"type": "array", "items": ref},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref]},
    "properties": lambda ref: {"type": "object", "properties": {"a": ref}},
    "required": lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
    "additional": lambda ref: {"type": "object", "additionalProperties": ref},
    "patterns": lambda ref: {"type": "object", "patternProperties": {"^a": ref}},
    "dependent": lambda ref: {"type": "object", "dependentSchemas": {"a": ref}},
}
NESTED: dict[str, Callable[[Any], Any]] = {
    **LINKS,
    "condition": lambda inner: {"if": inner, "then": {"minLength": 1}, "else": {"const": 2}},
}

CASES: dict[str, Asked] = {
    **{f"chain of {name}": chain(2_000, link) for name, link in LINKS.items()},
    **{f"short chain of {name}": chain(150, link) for name, link in LINKS.items()},
    **{f"ring of {name}": chain(1_000, link, ring=True) for name, link in LINKS.items()},
    **{f"{name} nested": {"json": wrapped(link, TEXT, 40)} for name, link in NESTED.items()},
    "deep value": {"json": '{"const":' + "[" * 5_000 + "]" * 5_000 + "}"},
    "deep text": {"json": '{"a":' * 90 + "1" + "}" * 90},
    "constants": {"json": {"oneOf": [{"const": i} for i in range(1_000)]}},
    "kinds": {
        "json": {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]}
                for i in range(500)
            ]
        }
    },
    "patterns for one text": {"json": {"allOf": [{"pattern": f"a.*{i}"} for i in range(100)]}},
    "long constant": {"json": {"const": 'k\n"' * 20_000}},
    "pattern's groups": {"json": {"pattern": "(" * 2_000 + "a" + ")*" * 2_000}},
    "pattern's class": {"json": {"pattern": "[" + "[" * 5_000 + "]"}},
    "white space's groups": {
        "json_object": True,
        "whitespace_pattern": "(" * 5_000 + " " + ")*" * 5_000,
    },
    "regex's groups": {"regex": "(a" * 240 + ")*" * 240},
    "regex's deep groups": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "regex's classes": {"regex": "[a-z--" * 5_000 + "[q]" + "]" * 5_000},
    "regex's alternatives": {"regex": "|".join(f"w{i}" for i in range(10_000))},
    "regex's repetitions": {"regex": "(?:" * 100 + "a" + "){1,9}" * 100},
    "regex's optional parts": {"regex": "a?" * 3_000 + "a" * 3_000},
    "long choices": {"choice": ["a" * 30_000, "b" * 30_000]},
    "choices of marks": {"choice": ['"\\\n/' * 2_000]},
    "choices within each other": {"choice": ["a" * i for i in range(1, 1_000)]},
    "Lark's parentheses": {"grammar": "start: " + "(" * 450 + '"a"' + ")*" * 450},
    "Lark's deep parentheses": {"grammar": "start: " + "(" * 9_000 + '"a"' + ")" * 9_000},
    "Lark's tildes": {"grammar": "start: X\nX: " + "~(" * 450 + "/a/" + ")" * 450},
    "Lark's rules": {"grammar": both("start: x0\n", "x{}: x{}\n", 'x{}: "a"\n', 480)},
    "Lark's terminals": {"grammar": both("start: X0\n", "X{}: X{}\n", 'X{}: "a"\n', 9_000)},
    "Lark's schema": {"grammar": "start: %json " + json.dumps(chain(9_000, LINKS["ref"])["json"])},
    "Lark's small schema": {
        "grammar": "start: %json " + json.dumps(chain(3_000, LINKS["patterns"])["json"])
    },
    "Lark in Lark": {"grammar": wrapped("start: %lark {{\n{}\n}}".format, 'start: "a"', 1_000)},
    "Lark's own beginning": {"grammar": "start: " + "start start | " * 20 + '"a"'},
    "GBNF's parentheses": {"grammar": "root ::= " + "(" * 90 + '"a"' + ")*" * 90},
    "GBNF's deep parentheses": {"grammar": "root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000},
    "GBNF's rules": {
        "grammar": both("root ::= r0\n", 'r{} ::= "(" r{} ")"\n', 'r{} ::= "a" | root\n', 9_000)
    },
    "GBNF's stars": {"grammar": 'root ::= "a"' + "*" * 50_000},
    "GBNF's counts": {"grammar": 'root ::= "a"' + "{2}" * 5_000},
    **{
        f"{kind} in a tag": tag(part(kind), count)
        for kind in ("optional", "star", "plus")
        for count in (45,)
    },
    "tags": tag(part("tag", begin="<a>", end="</a>"), 45),
    "deep tags": tag(part("tag", begin="<a>", end="</a>"), 300),
    "a tag's schema": {
        "structural_tag": {
            "type": "structural_tag",
            "format": {
                "type": "json_schema",
                "json_schema": chain(5_000, LINKS["patterns"])["json"],
            },
        }
    },
}


def walk(grammars: Grammars, asked: Asked) -> str:
    """What comes of it: some steps under its masks on this thread, or why not."""
    try:
        state = grammars.start(StructuredOutputs(**asked))
    except RequestError as error:
        return str(error)
    size, rng = grammars.vocabulary.size, random.Random(5)
    bits = np.zeros(grammars.vocabulary.words, dtype=np.int32)
    try:
        for _ in range(5):
            state.fill(bits)
            state.forced()
            may = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size])
            tokens = [i for i in may.tolist() if i not in grammars.vocabulary.eos_token_ids]
            if not tokens:
                break
            state.accept(rng.choice(tokens))
        state.fork().rollback(0)
    except RequestError as error:
        return str(error)
    return ""


def main() -> None:
    stories = Path(penstock.__file__).parent / "assets" / "stories"
    tokenizer = Tokenizer.from_folder(stories)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2], deadline_s=1.0, at_once=8)
    for name, asked in CASES.items():
        print(json.dumps([name, "begins", 0.0]), flush=True)
        start = time.perf_counter()
        said = walk(grammars, asked)
        print(json.dumps([name, said, time.perf_counter() - start]), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
