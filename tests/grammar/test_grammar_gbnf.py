"""GBNF: what walks write is recognised by an Earley parser of the original, and the other way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.grammar.earley import Grammar
from tests.grammar.walks import closing, text_of, walk

from penstock.errors import InvalidSamplingError, RequestError
from penstock.grammar import Grammars
from penstock.grammar.gbnf import looks_like_gbnf
from penstock.sampling.structured import StructuredOutputs

FOLDER = "structured/llama.cpp-grammars"
FILES = ("arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list")
TEXTS = {  # which walks seldom end
    "arithmetic": ("a = 1\n", "(x_1 +2)*3 = y\nb=(c)\n"),
    "c": ("int f(){x = 1;}", "int f(int a){return a;}"),
}
FEATURES = {
    "classes": r"root ::= [a-c]+ [^a-z\n] [\]\\\[&~-] [\x41-\x43] [\u03b1-\u03c9] [\U0001F600]",
    "escapes": r'root ::= "\"\\\n\t\x41\u00e9\U0001F600/" "[a]"',
    "counts": 'root ::= "a"{3} "b"{2,} "c"{0,2} "d"{1,3} ("e" "f"){2}',
    "never": 'root ::= "a"{0} ("b" root){0,0} "c"+ ("d"{0})* "e"',
    "groups": 'root ::= ("x" | ( "y" | "z" )+ "!")? ("," word)*\nword ::= [a-z] [a-z0-9_-]*',
    "comments": '# the first\nroot ::= "a" # then\n  | item # or\nitem ::= "b" |\n "c"  #end',
    "lines": 'root ::= (\n  "a"\n  | "b"\n) tail\n\ntail ::= "x"\r\n',
    "names": 'root ::= foo-bar fooBar foo_bar\nfoo-bar ::= "1"\nfooBar ::= "2"\nfoo_bar ::= "3"',
    "left": 'root ::= sum\nsum ::= sum "+" term | term\nterm ::= [0-9] | "(" sum ")"',
    "right": 'root ::= word\nword ::= [a-z] word | [a-z] "."',
    "nested": 'root ::= "(" root ")" | "[" root "]" root | ""',
    "mutual": 'root ::= a\na ::= "a" b | "."\nb ::= "b" a | "!"',
    "any": 'root ::= "<" . ">" .?',
    "empty": 'root ::= | "a" root "b"',
}


def written(grammars: Grammars, spec: StructuredOutputs, text: str) -> bool:
    state = grammars.start(spec)
    try:
        for token in grammars.vocabulary.tokenizer.encode(text):
            state.accept(token)
    except RequestError:
        return False
    return state.may_end


def mutations(text: str, alphabet: str, rng: random.Random) -> list[str]:
    """The text with a character taken away, put in, changed, or two swapped."""
    at = rng.randrange(len(text) + 1)
    other = rng.choice(alphabet)
    return [
        text[:at] + text[at + 1 :],
        text[:at] + other + text[at:],
        text[:at] + other + text[at + 1 :],
        text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
    ]


def check(source: str, grammars: Grammars, walks: int, texts: Sequence[str] = ()) -> None:
    spec = StructuredOutputs(grammar=source)
    known = Grammar(source)
    vocabulary = grammars.vocabulary
    tokenizer, rng = vocabulary.tokenizer, random.Random(source)
    favoured = closing(tokenizer)
    for text in texts:
        assert written(grammars, spec, text) and known.accepts(text), text
        for one in mutations(text, text + "a1 \n(", rng):
            assert written(grammars, spec, one) == known.accepts(one), one
    finished = len(texts)
    for _ in range(walks):
        ids = walk(
            grammars.start(spec),
            vocabulary.size,
            vocabulary.eos_token_ids,
            rng,
            favoured=favoured,
            limit=160,
        )
        if ids is None:
            continue
        finished += 1
        text = text_of(tokenizer, ids)
        assert known.accepts(text), text
        alphabet = text + 'a1 \n"é()'
        for one in mutations(text, alphabet, rng):
            if "\ufffd" not in one:
                assert written(grammars, spec, one) == known.accepts(one), one
    assert finished


@pytest.mark.parametrize("name", FEATURES)
def test_features_agree_with_the_recogniser(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    assert looks_like_gbnf(FEATURES[name])
    check(FEATURES[name], grammars_of("gpt2"), 6)


@pytest.mark.parametrize("name", FILES)
def test_grammars_of_llama_cpp_agree_with_the_recogniser(
    name: str, shared_data: Path, grammars_of: Callable[[str], Grammars]
) -> None:
    file = shared_data / FOLDER / f"{name}.gbnf"
    if not file.is_file():
        pytest.skip(f"the shared data has no {FOLDER}")
    check(file.read_text(encoding="utf-8"), grammars_of("gpt2"), 5, TEXTS.get(name, ()))


WRONG = {
    'root ::= "a" other': r"line 1: there is no rule 'other'",
    'x ::= "a"': "no rule 'root'",
    'root ::= "a': "line 1: a text isn't closed",
    "root ::= [a-": r"line 1: a class \[ isn't closed",
    "root ::= [z-a]": "line 1: the range z-a goes backwards",
    'root ::= ("a"': "line 1: a parenthesis isn't closed",
    'root ::= "a"{2,1}': r"line 1: \{2,1\} has its bounds the wrong way round",
    'root ::= "a"{x}': r"line 1: a repetition is written \{m\}",
    r'root ::= "\q"': r"line 1: the escape \\q has no meaning",
    r'root ::= "\ud800"': r"line 1: U\+D800 is no character",
    'root ::= "a"\nroot ::= "b"': "line 2: the rule 'root' is there already, in line 1",
    'root ::= "a" )': r"line 1: '\)' can't stand here",
    'root ::= "a"\nb = "c"': "line 2: after the rule's name 'b' comes no ::=",
    'root ::= "a" root': "line 1: the rule 'root' needs itself in each of its alternatives",
    'root ::= a\na ::= "x" b\nb ::= "y" a': "needs itself in each of its alternatives",
    "root ::= <think>": "line 1: tokens by name can't be read in GBNF",
    "root ::= " + "(" * 200 + '"a"' + ")" * 200: "more than 100 parentheses",
    'root ::= r0\nr999 ::= "a"\n'
    + "\n".join(f"r{i} ::= r{i + 1}" for i in range(999)): "deep within",
}


@pytest.mark.parametrize("source", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named_with_its_line(
    source: str, grammars_of: Callable[[str], Grammars]
) -> None:
    with pytest.raises(InvalidSamplingError, match=WRONG[source]):
        grammars_of("gpt2").compile(StructuredOutputs(grammar=source))
