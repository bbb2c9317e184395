"""Drafts by a model of its own cache: the tokens that it would choose, whatever was before.

The model is the toy, whose logits are a hash of the tokens that it finds in the sequence's blocks:
one that was left out, or that is somebody else's, gives another draft.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import InvalidPromptError, PenstockError
from penstock.runtime.companion import CompanionCache
from penstock.sampling import SequenceSampling
from penstock.sampling.constraint import Bits
from penstock.speculate import Draft
from penstock.speculate.stamps import Stamps
from tests.engine.toy import BLOCK, IS_NAN, RAISES, VOCAB
from tests.speculate.drafts import GREEDY, LIVELY, Text, ToyDraft, state

BLOCKS = list(range(3, 19))


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(RAISES) for _ in range(count)]


def drafted(toy: ToyDraft, *texts: Text, limit: int = 4) -> list[list[int]]:
    return [draft.tokens for draft in toy.proposer.propose([text.wish(limit) for text in texts])]


# ── what a draft is ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("params", [GREEDY, LIVELY])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 23])
def test_it_is_what_the_target_would_choose(params: object, length: int) -> None:
    """The toy as draft and as target: each token of the draft is the target's own."""
    text = Text(tokens(length), BLOCKS, params)  # type: ignore[arg-type]
    for _ in range(4):  # all are accepted, and the target adds one
        [draft] = drafted(toy := ToyDraft(), text)
        assert draft == text.next()
        assert toy.computed == len(text.tokens) + 3
        text.tokens += text.next(5)


def test_its_states_are_those_of_the_tokens() -> None:
    text = Text(tokens(9), BLOCKS, LIVELY)
    wish = text.wish()
    [draft] = ToyDraft().proposer.propose([wish])
    assert draft.states[0] is wish.sampling and wish.sampling.num_generated == 0
    assert [s.num_generated for s in draft.states] == [0, 1, 2, 3, 4]
    want = state(LIVELY, text.tokens + draft.tokens, 9)
    assert draft.states[-1].seen_tokens.tolist() == want.seen_tokens.tolist()
    assert draft.states[-1].seen_counts.tolist() == want.seen_counts.tolist()


@pytest.mark.parametrize("params", [GREEDY, LIVELY])
@pytest.mark.parametrize("accepted", range(6))
def test_after_a_rejection(params: object, accepted: int) -> None:
    """Only what the sequence has otherwise, or more, is computed."""
    toy, text = ToyDraft(), Text(tokens(10), BLOCKS, params)  # type: ignore[arg-type]
    for _ in range(5):
        [draft] = drafted(toy, text, limit=5)
        assert draft == text.next(5)
        new = 5 if accepted == 5 else draft[accepted] ^ 1
        text.tokens += [*draft[:accepted], new]
        before = toy.computed
        assert drafted(toy, text) == [text.next()]
        # of a draft of 5, the last wasn't computed
        assert toy.computed - before == (2 if accepted == 5 else 1) + 3
        assert drafted(ToyDraft(), text) == [text.next()]  # as a fresh one


def test_several_tokens_without_a_draft() -> None:
    """A grammar's forced tokens, or steps in which nobody drafted."""
    toy, text = ToyDraft(), Text(tokens(10), BLOCKS)
    drafted(toy, text)
    text.tokens += tokens(9, seed=1)
    before = toy.computed
    assert drafted(toy, text) == [text.next()]
    assert toy.computed - before == 9 + 3
    assert toy.proposer.last_caught_up == 8
    assert toy.proposer.last_computed == 12


def test_a_batch_is_each_of_its_sequences() -> None:
    lengths, limits = [1, 30, 4, 17, 9, 3], [4, 1, 7, 2, 4, 7]
    texts = [
        Text(tokens(length, i), range(10 * i, 10 * i + 10), (GREEDY, LIVELY)[i % 2])
        for i, length in enumerate(lengths)
    ]
    toy = ToyDraft(max_num_tokens=200)
    for _ in range(3):
        wishes = [t.wish(limit) for t, limit in zip(texts, limits, strict=True)]
        found = [draft.tokens for draft in toy.proposer.propose(wishes)]
        assert found == [t.next(limit) for t, limit in zip(texts, limits, strict=True)]
        for text, draft in zip(texts, found, strict=True):
            text.tokens += [*draft[: len(draft) // 2], 7]
        limits = limits[::-1]
    passes = toy.toy.steps[:7]  # of the first call: one for each token of the longest draft
    assert [step.num_sequences for step in passes] == [6, 5, 4, 4, 2, 2, 2]


# ── within its limits ────────────────────────────────────────────────────────────────────────────


def test_a_long_prompt_is_caught_up_in_chunks() -> None:
    toy = ToyDraft(max_num_tokens=16)
    short, long = Text(tokens(3, 1), range(40, 60)), Text(tokens(43), BLOCKS)
    found = []
    for _ in range(8):
        before = toy.computed
        found.append(drafted(toy, short, long))
        assert toy.computed - before == toy.proposer.last_computed <= 16
        assert found[-1][0] == short.next()
        short.tokens += found[-1][0][:1]
        if found[-1][1]:
            assert found[-1][1] == long.next()[: len(found[-1][1])]
            long.tokens.append(5)
    assert [bool(draft) for _, draft in found] == [False] * 3 + [True] * 5
    assert len(found[-1][1]) == 4


def test_as_many_tokens_as_a_call_may_have() -> None:
    text = Text(tokens(10), BLOCKS)
    assert drafted(ToyDraft(max_num_tokens=10), text) == [text.next(1)]
    assert drafted(ToyDraft(max_num_tokens=11), text) == [text.next(2)]
    assert drafted(ToyDraft(max_num_tokens=9), text) == [[]]


def test_nothing_beyond_the_draft_models_length() -> None:
    toy = ToyDraft(max_model_len=12)
    for length, want in ((8, 4), (9, 4), (10, 3), (12, 1), (13, 0), (30, 0)):
        text = Text(tokens(length), BLOCKS)
        assert drafted(toy, text) == [text.next(want)]
    assert max(int(step.positions.max()) for step in toy.toy.steps) == 11


def test_ids_that_the_draft_model_lacks() -> None:
    toy = ToyDraft(num_ids=40)
    fits, has_more = Text([3, 39, 7], [1, 2, 3]), Text([3, 40, 7], [4, 5, 6])
    assert drafted(toy, fits, has_more) == [fits.next(), []]
    assert max(int(step.tokens.max()) for step in toy.toy.steps[:1]) == 39


def test_without_room() -> None:
    """Rather than write into others' blocks."""
    text = Text(tokens(9), BLOCKS[:3])
    assert drafted(ToyDraft(), text) == [text.next()]  # 8 + 4 tokens
    with pytest.raises(PenstockError, match="room for 13 tokens, but its sequence has 3 blocks"):
        drafted(ToyDraft(), text, limit=5)


# ── what is in the blocks already ────────────────────────────────────────────────────────────────


def test_a_prefix_that_another_sequence_has_computed() -> None:
    toy, first = ToyDraft(), Text(tokens(22), BLOCKS)
    drafted(toy, first)
    second = Text(first.tokens[:18] + tokens(5, 1), BLOCKS[:4] + list(range(30, 40)))
    assert drafted(toy, second) == [second.next()]
    assert toy.proposer.last_caught_up == 22 - 16  # four whole blocks are there
    toy.proposer.forget(first)
    third = Text(first.tokens[:16], BLOCKS[:4] + list(range(20, 25)))
    assert drafted(toy, third) == [third.next()]
    assert toy.proposer.last_caught_up == 0  # but for the last token, all is there


def test_a_prefix_that_only_the_target_has_computed() -> None:
    toy = ToyDraft()
    drafted(toy, Text(tokens(6), BLOCKS))  # one whole block, and half of the next
    text = Text(tokens(22), BLOCKS)
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 21 - 4


def test_guesses_that_filled_a_block_are_not_taken_for_tokens() -> None:
    toy, first = ToyDraft(), Text(tokens(6), BLOCKS)
    [draft] = drafted(toy, first)  # position 8 is the last that was computed
    same = Text(first.tokens + draft, [*BLOCKS[:2], 30, 31])
    assert drafted(toy, same) == [same.next()]
    assert toy.proposer.last_caught_up == 9 - 8
    other = Text([*first.tokens, draft[0], draft[1] ^ 1, 1, 2], [*BLOCKS[:2], 32, 33])
    assert drafted(toy, other) == [other.next()]
    assert toy.proposer.last_caught_up == 9 - 4


def test_a_sequence_that_gave_way_and_came_back() -> None:
    """To the very same blocks, in one of which somebody else was meanwhile."""
    toy, text = ToyDraft(), Text(tokens(22), BLOCKS)
    drafted(toy, text)
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 0
    drafted(toy, Text(tokens(2, 1), [BLOCKS[2], 40]))
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 21 - 8
    text.blocks = BLOCKS[:3] + list(range(30, 40))  # elsewhere
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 21 - 12


def test_the_block_in_which_it_was_writing_was_given_away() -> None:
    toy, text = ToyDraft(), Text(tokens(10), BLOCKS)
    drafted(toy, text, limit=1)
    drafted(toy, Text(tokens(2, 1), [BLOCKS[2], 40]), limit=1)
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 9 - 8


def test_room_for_guesses_that_was_given_back() -> None:
    """What was computed in it is gone, and nothing else."""
    toy, text = ToyDraft(), Text(tokens(7), BLOCKS[:3])
    [draft] = drafted(toy, text, limit=5)  # to position 10, in the third block
    text.tokens += [draft[0], draft[1] ^ 1]
    drafted(toy, Text(tokens(2, 1), [BLOCKS[2], 40]))
    text.blocks[2:] = [50, 51]
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 0
    text.tokens += [1, 2, 3]  # in the block 50
    text.blocks[2] = 52
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 3


def test_what_is_kept_of_a_sequence() -> None:
    toy, text = ToyDraft(), Text(tokens(10), BLOCKS)
    drafted(toy, text)
    toy.proposer.forget(text)
    toy.proposer.forget(text)  # or of one that never had a draft
    assert not toy.proposer._known
    drafted(toy, text)
    assert toy.proposer.last_caught_up == 9 - 8


def test_keys_that_are_equal_are_not_the_same() -> None:
    toy = ToyDraft()
    one, other = Text(tokens(10), BLOCKS), Text(tokens(10, 1), range(30, 40))
    keys = [[], []]  # type: ignore[var-annotated]
    for _ in range(2):
        wishes = [replace(t.wish(), key=key) for t, key in zip((one, other), keys, strict=True)]
        assert [d.tokens for d in toy.proposer.propose(wishes)] == [one.next(), other.next()]
        gc.collect()
    assert toy.proposer.last_caught_up == 0


def test_blocks_that_are_copied_and_swapped() -> None:
    toy, text = ToyDraft(), Text(tokens(11), BLOCKS)
    drafted(toy, text, limit=1)
    companion = CompanionCache(toy.kv)  # type: ignore[arg-type]
    companion.stamps = toy.proposer.stamps
    copy = Text(text.tokens, [30, 31, 32, 33])
    companion.copy([(BLOCKS[0], 30), (BLOCKS[1], 31), (BLOCKS[2], 32)])
    assert drafted(toy, copy) == [copy.next()]
    assert toy.proposer.last_caught_up == 10 - 8  # a block that isn't full is its writer's
    companion.swap_out([(30, 0), (31, 1), (32, 2)])
    toy.ids[30:33] = RAISES  # whoever has them now
    companion.swap_in([(0, 32), (1, 30), (2, 31)])
    copy.blocks = [32, 30, 31, 40]
    assert drafted(toy, copy) == [copy.next()]
    assert toy.proposer.last_caught_up == 10 - 8


def test_a_copy_takes_the_place_of_what_was_there() -> None:
    stamps = Stamps(4)
    for block, mark in enumerate((11, 22, -3, 0)):
        stamps.set(block, mark)
    stamps.copy([(0, 1), (1, 2), (2, 0), (3, 3)])  # all are read first
    assert stamps.of(range(4)) == [0, 11, 22, 0]
    stamps.swap_in([(9, 1)])  # a slot that was never seen
    assert stamps.of(range(4)) == [0, 0, 22, 0]


@pytest.mark.parametrize("seed", range(8))
def test_everything_at_once(seed: int) -> None:
    """Sequences come, share prefixes, are rejected, move, end, and leave their blocks to others."""
    rng = random.Random(seed)
    toy = ToyDraft(48, max_num_tokens=rng.choice([12, 40, 200]), max_model_len=40)
    free = list(range(48))
    texts: list[Text] = []
    drafts = 0
    for _ in range(150):
        if len(texts) < 4 and len(free) >= 10 and rng.random() < 0.4:
            shared = rng.choice(texts) if texts and rng.random() < 0.6 else None
            whole = 0 if shared is None else rng.randrange(len(shared.tokens) // BLOCK + 1)
            head = [] if shared is None else shared.tokens[: whole * BLOCK]
            blocks = [] if shared is None else shared.blocks[:whole]
            blocks = blocks + [free.pop(rng.randrange(len(free))) for _ in range(10 - whole)]
            tail = tokens(rng.randrange(1, 9), rng.randrange(9))
            texts.append(Text(head + tail, blocks, rng.choice([GREEDY, LIVELY])))
        some = [text for text in texts if rng.random() < 0.7]
        limits = [rng.randrange(1, 5) for _ in some]
        wishes = [text.wish(limit) for text, limit in zip(some, limits, strict=True)]
        for text, limit, draft in zip(some, limits, toy.proposer.propose(wishes), strict=True):
            assert draft.tokens == text.next(limit)[: len(draft)]
            drafts += bool(draft)
            text.tokens += [*draft.tokens[: rng.randrange(5)], rng.randrange(RAISES)]
            room = -(-len(text.tokens) // BLOCK)
            if rng.random() < 0.3:  # for guesses, given back
                free += text.blocks[room:]
                text.blocks[room:] = [free.pop(rng.randrange(len(free))) for _ in range(10 - room)]
        for text in list(texts):
            others = {block for other in texts if other is not text for block in other.blocks}
            if len(text.tokens) > 34 or rng.random() < 0.05:
                texts.remove(text)
                toy.proposer.forget(text)
                free += [block for block in text.blocks if block not in others]
            elif rng.random() < 0.1:  # gives way; whoever comes first takes its blocks
                own = [block for block in text.blocks if block not in others]
                free += own
                free.sort(key=lambda block: rng.random())
                text.blocks = [free.pop() for _ in range(10)] if len(free) >= 10 else text.blocks
                free = [block for block in free if block not in text.blocks]
    assert drafts > 50


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


def test_a_row_without_a_token_ends_its_draft() -> None:
    toy = ToyDraft()
    broken, whole = Text([1, IS_NAN, 2], [1, 2, 3]), Text(tokens(7), BLOCKS)
    for _ in range(2):
        assert drafted(toy, broken, whole) == [[], whole.next()]


def test_a_pass_that_raises() -> None:
    """Nothing of it is relied on later."""
    toy, text = ToyDraft(), Text(tokens(10), BLOCKS)
    drafted(toy, text)
    text.tokens += [RAISES, 3]
    with pytest.raises(RuntimeError, match="the toy broke"):
        drafted(toy, text)
    text.tokens[10:] = tokens(6, 1)
    assert drafted(toy, text) == [text.next()]
    assert toy.proposer.last_caught_up == 15 - 8


class Even:
    """Only even tokens may come; `broken`: its mask can't be made, `wrong`: it refuses them all."""

    is_complete = is_over = may_end = False

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def fill(self, bits: Bits) -> None:
        if self.fault == "broken":
            raise ValueError("no mask")
        bits[:] = np.int32(0x55555555)

    def accept(self, token_id: int) -> None:
        if self.fault == "wrong" or token_id % 2:
            raise InvalidPromptError("not even")

    def forced(self) -> list[int]:
        return []

    def fork(self) -> Even:
        return Even(self.fault)

    def rollback(self, count: int) -> None:
        raise AssertionError("a guess is forked")


def constrained(text: Text, fault: str = "") -> Draft:
    wish = text.wish()
    held = SequenceSampling(LIVELY, text.tokens, VOCAB, 11, frozenset(), constraint=Even(fault))
    [draft] = ToyDraft().proposer.propose([replace(wish, sampling=held)])
    return draft


def test_a_grammar_limits_drafts_too() -> None:
    text = Text(tokens(9), BLOCKS, LIVELY)
    draft = constrained(text)
    assert len(draft) == 4 and all(token % 2 == 0 for token in draft.tokens)
    assert draft.tokens != text.next()
    assert len(constrained(text, "broken")) == len(constrained(text, "wrong")) == 0
