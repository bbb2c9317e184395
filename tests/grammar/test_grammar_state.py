"""A sequence's state: masks, forced tokens, ends, copies and steps back, held to each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from tests.grammar.walks import allowed, closing, text_of, walk
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from penstock.errors import RequestError
from penstock.grammar import Grammars, GrammarState
from penstock.grammar import state as grammar_state
from penstock.sampling.structured import StructuredOutputs
from penstock.tokenizer import Tokenizer

TOKENIZERS = ("stories260K", "gpt2", "llama2", "qwen2.5")
OBJECT = {
    "type": "object",
    "properties": {
        "first name": {"const": "Lily Ann"},
        "kind": {"enum": ["a little girl", "a little dog", "<|im_end|>", "</s>"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["first name", "kind", "age"],
    "additionalProperties": False,
}
SPECS = {
    "choice": StructuredOutputs(choice=["yes", "no", "not at all", "é日本", "<|im_end|>", " a"]),
    "regex": StructuredOutputs(regex=r"The (cat|dog|café) (is|was) [0-9]{1,3} years old\."),
    "object": StructuredOutputs(json=OBJECT),
    "compact": StructuredOutputs(json=OBJECT, disable_any_whitespace=True),
    "any object": StructuredOutputs(json_object=True),
    "lark": StructuredOutputs(grammar='start: item+\nitem: "[" /[a-z]{2,8}/ "] " | "(" item ")"\n'),
    "gbnf": StructuredOutputs(grammar='root ::= "f(" root ")" | [α-ω]+ | "the end"'),
    "tag": StructuredOutputs(
        structural_tag={
            "structures": [{"begin": "<call=go>", "schema": OBJECT, "end": "</call>"}],
            "triggers": ["<call="],
        }
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_forced_tokens_are_those_that_single_masks_leave(
    name: str, spec: StructuredOutputs, grammars_of: Callable[[str], Grammars]
) -> None:
    grammars = grammars_of(name)
    size, tokenizer = grammars.vocabulary.size, grammars.vocabulary.tokenizer
    rng = random.Random(name)
    ends = set(grammars.vocabulary.eos_token_ids)
    jumps = 0
    for _ in range(2):
        state = grammars.start(spec)
        for _ in range(20):
            forced = state.forced()
            stepping = state.fork()
            for token in forced:
                assert allowed(stepping, size) == [token]
                stepping.accept(token)
            jumps += len(forced)
            for token in forced:
                state.accept(token)
            assert allowed(state, size) == allowed(stepping, size)
            choice = [i for i in allowed(state, size) if i not in ends]
            if not choice:
                break
            state.accept(rng.choice(choice))
    if spec.kind == "json" and spec.disable_any_whitespace:
        assert jumps > 10
    assert tokenizer.vocab_size == size


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_walk_ends_in_a_text_without_special_tokens(
    name: str, spec: StructuredOutputs, grammars_of: Callable[[str], Grammars]
) -> None:
    grammars = grammars_of(name)
    vocabulary = grammars.vocabulary
    favoured, rng = closing(vocabulary.tokenizer), random.Random(f"{name} {spec.kind}")
    finished = 0
    for _ in range(3):
        ends = vocabulary.eos_token_ids
        ids = walk(grammars.start(spec), vocabulary.size, ends, rng, favoured=favoured, limit=100)
        if ids is not None:
            finished += 1
            assert not vocabulary.special_ids & set(ids)
            text_of(vocabulary.tokenizer, ids)
    assert finished or spec.kind in ("json_object", "structural_tag")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_copies_and_steps_back_are_the_same_state(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    grammars = grammars_of(name)
    size, rng = grammars.vocabulary.size, random.Random(3)
    ends = set(grammars.vocabulary.eos_token_ids)
    for spec in SPECS.values():
        state = grammars.start(spec)
        masks = [allowed(state, size)]
        for _ in range(12):
            choice = [i for i in masks[-1] if i not in ends]
            if not choice:
                break
            state.accept(rng.choice(choice))
            masks.append(allowed(state, size))
        for back in range(1, len(masks)):
            other = state.fork()
            other.rollback(back)
            assert allowed(other, size) == masks[-1 - back]
        assert allowed(state, size) == masks[-1]
        state.rollback(0)
        with pytest.raises(ValueError, match="can't be taken back"):
            state.rollback(len(masks) + 5)


def test_a_token_that_must_not_come_is_an_error_and_changes_nothing(
    grammars_of: Callable[[str], Grammars],
) -> None:
    grammars = grammars_of("gpt2")
    tokenizer, size = grammars.vocabulary.tokenizer, grammars.vocabulary.size
    state = grammars.start(SPECS["choice"])
    before = allowed(state, size)
    with pytest.raises(RequestError, match=r"Token id \d+ \('z'\) doesn't go on"):
        state.accept(tokenizer.encode("zebra")[0])
    with pytest.raises(RequestError, match="doesn't go on"):
        state.accept(tokenizer.eos_token_id or 0)
    assert allowed(state, size) == before


def test_all_end_tokens_may_come_where_the_text_may_end(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    size = 151_936  # rows of the head beyond the tokenizer's own
    grammars = Grammars(tokenizer, size, [i for i in ends if i is not None])
    state = grammars.start(StructuredOutputs(regex="ab?"))
    assert not state.may_end and not set(ends) & set(allowed(state, size))
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    state.accept(a)
    assert state.may_end and not state.is_complete
    assert allowed(state, size) == sorted([b, *ends])
    assert state.forced() == []
    state.accept(b)
    assert state.may_end and state.is_complete
    assert allowed(state, size) == sorted(ends)
    assert state.forced() == []
    for end in ends:
        state.accept(end or 0)
        assert allowed(state, size) == []
        with pytest.raises(RequestError, match="doesn't go on"):
            state.accept(b)
        state.rollback(1)
        assert allowed(state, size) == sorted(ends)
    state.accept(ends[0] or 0)
    state.rollback(2)
    assert allowed(state, size) == sorted([b, *ends])


@pytest.mark.parametrize("extra", [0, 1, 31, 32])
def test_a_model_without_an_end_token_has_empty_masks_at_the_end(
    extra: int, tokenizer_of: Callable[[str], Tokenizer]
) -> None:
    tokenizer = tokenizer_of("gpt2")
    size = tokenizer.vocab_size + extra
    state = Grammars(tokenizer, size, []).start(StructuredOutputs(choice=["yes"]))
    assert allowed(state, size) == tokenizer.encode("yes")
    state.accept(tokenizer.encode("yes")[0])
    assert state.is_complete and state.may_end
    assert allowed(state, size) == []


def test_a_row_of_another_size_is_refused(grammars_of: Callable[[str], Grammars]) -> None:
    state = grammars_of("gpt2").start(SPECS["choice"])
    with pytest.raises(ValueError, match="words of int32"):
        state.fill(np.zeros(5, dtype=np.int32))


def test_a_form_whose_states_are_used_up_is_compiled_anew(
    tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies of a matcher share its lexer, which keeps 50,000 states: then it is stuck."""
    tokenizer = tokenizer_of("stories260K")
    letters = [
        next(i for i in range(512) if tokenizer.token_bytes(i) == one) for one in (b"a", b"b")
    ]
    grammars = Grammars(tokenizer, 512, [2])
    spec = StructuredOutputs(choice=["a" * 30_000, "b" * 30_000])

    def follow(token: int) -> GrammarState:
        state = grammars.start(spec)
        state.accept(token)
        while not state.is_complete:
            forced = state.forced()
            if not forced:
                forced = allowed(state, 512)[:1]
            for one in forced:
                state.accept(one)
        return state

    assert follow(letters[0]).is_complete
    assert follow(letters[1]).is_complete  # in a lexer of its own
    assert (grammars.stats().misses, grammars.stats().entries) == (2, 1)
    monkeypatch.setattr(grammar_state.GrammarState, "_renew", lambda self: False)
    with pytest.raises(RequestError, match=r"takes too many states .*too many states"):
        follow(letters[0])


def row(grammars: Grammars) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.zeros(grammars.vocabulary.words, dtype=np.int32)


def words_of(tokenizer: Tokenizer) -> list[int]:
    """Tokens of letters alone."""
    pieces = {i: tokenizer.token_bytes(i) for i in range(3, tokenizer.vocab_size)}
    return [i for i, piece in pieces.items() if piece.isalpha() and piece.isascii()]


def told(grammars: Grammars, tokens: list[int]) -> GrammarState:
    state = grammars.start(MANY_STATES)
    for token in tokens:
        state.accept(token)
    return state


MANY_STATES = StructuredOutputs(regex=".*a.{60}b.{60}c")
"""A lexer that must know where each of the last 60 a's stood."""


def test_guesses_use_states_up_and_the_text_goes_on(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    """Three wrong guesses at each place; masks stay those of a text that nobody guessed at."""
    tokenizer = tokenizer_of("stories260K")
    grammars, rng = Grammars(tokenizer, 512, [2]), random.Random(0)
    words = words_of(tokenizer)
    state = grammars.start(MANY_STATES)
    early = state.fork()
    tokens: list[int] = []
    while grammars.stats().misses < 2:
        assert len(tokens) < 5_000, "the states never ended"
        for _ in range(3):
            guess = state.fork()
            for token in rng.choices(words, k=4):
                guess.accept(token)
            guess.fill(row(grammars))
        tokens.append(rng.choice(words))
        state.accept(tokens[-1])
        state.fill(row(grammars))
    for _ in range(100):
        tokens.append(rng.choice(words))
        state.accept(tokens[-1])
    alone = told(Grammars(tokenizer, 512, [2]), tokens)
    masks = [row(grammars), row(grammars)]
    alone.fill(masks[0])
    state.fill(masks[1])
    assert masks[0].tolist() == masks[1].tolist()
    early.accept(rng.choice(words))  # of the old lexer, which would say that it doesn't go on
    assert len(tokens) > 100


def test_a_refusal_for_want_of_states_is_not_the_texts_fault(
    tokenizer_of: Callable[[str], Tokenizer],
) -> None:
    """A stuck lexer refuses what may come, and doesn't say why; what mayn't come stays refused."""
    tokenizer = tokenizer_of("stories260K")
    grammars, rng = Grammars(tokenizer, 512, [2]), random.Random(1)
    words = words_of(tokenizer)
    kept, tokens = grammars.start(MANY_STATES), rng.choices(words, k=60)
    for token in tokens:
        kept.accept(token)

    def wander(state: GrammarState, count: int) -> None:
        for token in rng.choices(words, k=count):
            state.accept(token)
        state.fill(row(grammars))

    def stuck() -> str:
        """Why a copy that can't renew itself ends, once the states are used up."""
        for _ in range(2_000):
            other = kept.fork()
            other._fresh = None
            try:
                wander(other, 40)
            except RequestError as error:
                return str(error)
        return "never"

    assert all("too many states" in stuck() for _ in range(20))
    more = rng.choices(words, k=50)
    for token in more:
        kept.accept(token)
    assert grammars.stats().misses == 2
    newline = next(i for i in range(512) if tokenizer.token_bytes(i) == b"\n")
    with pytest.raises(RequestError, match="doesn't go on"):
        kept.fork().accept(newline)
    alone = told(Grammars(tokenizer, 512, [2]), tokens + more)
    assert alone.fork()._told == kept._told


def test_a_lexer_is_renewed_every_so_many_tokens(
    tokenizer_of: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a text that takes all states by itself ends with the reason."""
    tokenizer = tokenizer_of("stories260K")
    grammars = Grammars(tokenizer, 512, [2])
    state = told(grammars, words_of(tokenizer)[:10])
    assert state._renew() and not state._renew()
    for token in words_of(tokenizer)[: grammar_state.RENEWED_EVERY]:
        assert not state._renew()
        state.accept(token)
    assert state._renew()
    state.rollback(20)
    assert not state._renew()
    monkeypatch.setattr(state, "_fresh", None)
    assert not state._renew()


NAMES = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "name_of_the_child": {"type": "boolean"},
            "the_name_of_a_thing": {"enum": ["one_or_the_other", "neither_of_them"]},
            "a.long-name,of:what": {"const": "it's what_it_is, or isn't"},
        },
        "required": ["name_of_the_child", "the_name_of_a_thing", "a.long-name,of:what"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Over a tokenizer that joins words at underscores, but begins none with one."""
    made = tokenizers.Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+(?:_\p{L}+)*|[^\p{L}]")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = (
        "one_of_them a_thing_of_mine the_name_of_all in_the_room of_the_house is_the_best the them"
    )
    made.train_from_iterator([text] * 20, learner)
    folder = tmp_path_factory.mktemp("joining")
    made.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    return Grammars(tokenizer, tokenizer.vocab_size, [0], deadline_s=120.0)


@pytest.mark.parametrize("name", [*TOKENIZERS, "joining"])
@pytest.mark.parametrize("spec", [NAMES, SPECS["compact"], SPECS["regex"]])
def test_what_is_forced_depends_on_the_text_alone(
    name: str,
    spec: StructuredOutputs,
    grammars_of: Callable[[str], Grammars],
    joining: Grammars,
) -> None:
    """Not on when one asks: in jumps, step by step, after guesses, after steps back.

    Some tokenizers split the rest of a forced text in other ways than the whole of it.
    """
    grammars = joining if name == "joining" else grammars_of(name)
    size, ends = grammars.vocabulary.size, set(grammars.vocabulary.eos_token_ids)
    rng = random.Random(3)
    for _ in range(3):
        jumping, tokens, forced = grammars.start(spec), list[int](), set[int]()
        while True:
            run = jumping.forced()
            forced |= set(range(len(tokens), len(tokens) + len(run)))
            choice = run or [i for i in allowed(jumping, size) if i not in ends]
            if not choice:
                break
            for token in run or [rng.choice(choice)]:
                jumping.accept(token)
                tokens.append(token)
        assert len(forced) > 3
        masks = []
        stepping, silent = grammars.start(spec), grammars.start(spec)
        for at, token in enumerate(tokens):
            masks.append(allowed(stepping, size))
            assert token in masks[-1] if at not in forced else masks[-1] == [token]
            twin = silent.fork()  # which nobody has asked before
            assert allowed(twin, size) == masks[-1]
            stepping.accept(token)
            silent.accept(token)
        for at in reversed(range(len(tokens))):
            stepping.rollback(1)
            assert allowed(stepping, size) == masks[at]
