"""Drafts by EAGLE heads against brute force: a head in plain torch over transformers' states, asked
for each token of a tree by a text of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels import native
from penstock.sampling import Sampler, SamplingParams, SequenceSampling
from tests.models.tiny import Tiny, make_tiny
from tests.speculate.eagle_reference import STATES, Reference, make_tensors, write
from tests.speculate.eagle_rig import SIZE, Rig, Text, ways_of

METHODS = ("eagle", "eagle3")
BLOCKS = [7, 3, 12, 5, 20, 9]
pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")


class World:
    """A tiny target, and a head of each kind, on disk and in plain torch."""

    def __init__(self, folder: Path) -> None:
        self.tiny: Tiny = make_tiny("llama", folder / "target")
        self.target = folder / "target"
        model = self.tiny.oracle
        tables = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
        self.heads, self.folders = dict[str, Reference](), dict[str, Path]()
        for method in METHODS:
            tensors = make_tensors(method == "eagle3")
            self.folders[method] = write(folder / method, tensors)
            self.heads[method] = Reference(tensors, method == "eagle3", *tables)

    def rig(self, method: str, **options: Any) -> Rig:
        return Rig(self.target, self.folders[method], method, **options)

    def states(self, method: str, tokens: Sequence[int]) -> torch.Tensor:
        """Of all tokens but the last, which no step has computed."""
        with torch.inference_mode():
            found = self.tiny.oracle.model(
                torch.tensor([tokens[:-1]]), output_hidden_states=True
            ).hidden_states
        chosen = [found[-1]] if method == "eagle" else [found[i] for i in STATES]
        return torch.cat(chosen, -1)[0].clone()

    def tree(
        self, method: str, text: Text, depth: int, width: int, most: int,
        seen: Sequence[int] | None = None,
    ) -> list[tuple[int, ...]]:  # fmt: skip
        states = self.states(method, text.tokens)
        return self.heads[method].tree(states, text.tokens, depth, width, most, seen)

    def chain(
        self, method: str, text: Text, depth: int, seen: Sequence[int] | None = None
    ) -> list[int]:
        """The likeliest token, again and again."""
        states, path = self.states(method, text.tokens), list[int]()
        for _ in range(depth):
            chances = self.heads[method].after(states, text.tokens, path, seen)
            path.append(int(chances.argmax()))
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("eagle"))


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(count)]


def text_of(count: int, seed: int = 0, blocks: Sequence[int] = BLOCKS) -> Text:
    return Text(tokens(count, seed), list(blocks))


def prompt(rig: Rig, text: Text, *chunks: int) -> Text:
    """Compute all of the text but its last token, the last chunk being the rest."""
    for chunk in chunks:
        rig.step((text, chunk))
    rig.step((text, len(text.tokens) - 1 - text.computed))
    return text


def go_on(rig: Rig, text: Text, more: Sequence[int], sees: bool = True) -> None:
    """A step has computed the last token and all of `more` but its last."""
    text.tokens += more
    rig.step((text, len(more)), sees=sees)


# ── what a draft is ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 5, SIZE, SIZE + 1, SIZE + 2, 2 * SIZE - 1, 75])
def test_a_tree_is_that_of_brute_force(world: World, method: str, count: int) -> None:
    rig = world.rig(method, num_speculative_tokens=4, tree_width=3, tree_tokens=16)
    text = prompt(rig, text_of(count))
    assert rig.ways(text, limit=4) == [world.tree(method, text, 4, 3, 16)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, SIZE, SIZE + 1, 60])
def test_a_chain_is_the_likeliest_tokens(world: World, method: str, count: int) -> None:
    rig = world.rig(method, num_speculative_tokens=6, tree_width=1)
    text = prompt(rig, text_of(count))
    [draft] = rig.drafts(text, limit=6)
    assert draft.parents is None
    assert draft.tokens == world.chain(method, text, 6)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_as_the_whole(world: World, method: str) -> None:
    """Prompts in any chunks, one of them in the middle of a block."""
    for chunks in ((), (SIZE,), (1, 2, 40), (50, 1, 1), (30, 4, 30)):
        rig = world.rig(method, num_speculative_tokens=3, tree_width=3, tree_tokens=12)
        text = prompt(rig, text_of(75), *chunks)
        assert rig.ways(text, limit=3) == [world.tree(method, text, 3, 3, 12)], chunks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [1, 3])
def test_sequences_together_are_as_alone(world: World, method: str, width: int) -> None:
    """Of other lengths, other depths, and in steps with each other's prompts."""
    rig = world.rig(
        method,
        num_speculative_tokens=4,
        tree_width=width,
        **({"tree_tokens": 12} if width > 1 else {}),
    )
    texts = [
        text_of(40, 1, [1, 2, 3]),
        text_of(SIZE + 1, 2, [4, 5, 6]),
        text_of(66, 3, [11, 10, 8, 7]),
    ]
    rig.step((texts[0], 39), (texts[1], 20))
    rig.step((texts[2], 50), (texts[1], 12))
    rig.step((texts[2], 15))
    limits = (2, 4, 1)
    wishes = [rig.wish(text, limit) for text, limit in zip(texts, limits, strict=True)]
    for draft, text, limit in zip(rig.proposer.propose(wishes), texts, limits, strict=True):
        if width == 1:
            assert draft.tokens == world.chain(method, text, limit)
        else:
            assert ways_of(draft) == world.tree(method, text, limit, width, 12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [1, 4])
def test_it_goes_on_with_what_was_accepted(world: World, method: str, width: int) -> None:
    """Guesses that came and guesses that didn't: what they left in the cache is written over."""
    rig = world.rig(
        method,
        num_speculative_tokens=4,
        tree_width=width,
        **({"tree_tokens": 10} if width > 1 else {}),
    )
    text = prompt(rig, text_of(28))
    for turn in range(12):
        [draft] = rig.drafts(text, limit=4)
        if width == 1:
            assert draft.tokens == world.chain(method, text, 4), turn
        else:
            assert ways_of(draft) == world.tree(method, text, 4, width, 10), turn
        accepted = max(ways_of(draft), key=len)[: turn % 5]
        go_on(rig, text, [*accepted, (text.tokens[-1] * 7 + turn) % 320])
    assert rig.proposer.last_caught_up == 0


@pytest.mark.parametrize("temperature", [0.3, 4.0])
def test_a_trees_tokens_are_likely_at_the_requests_temperature(
    world: World, temperature: float
) -> None:
    rig = world.rig("eagle", num_speculative_tokens=3, tree_width=3, tree_tokens=10)
    texts = [prompt(rig, text_of(30, 2, [1])), prompt(rig, text_of(20, 3, [2]))]
    texts[0].params = SamplingParams(temperature=temperature)
    states = world.states("eagle", texts[0].tokens)
    want = [
        world.heads["eagle"].tree(states, texts[0].tokens, 3, 3, 10, None, temperature),
        world.tree("eagle", texts[1], 3, 3, 10),
    ]
    assert rig.ways(*texts) == want != [world.tree("eagle", texts[0], 3, 3, 10), want[1]]
    [draft] = rig.drafts(texts[0])
    assert draft.chances == sorted(draft.chances or (), reverse=True)
    found = world.heads["eagle"].after(states, texts[0].tokens) / temperature
    assert draft.chances[0] == pytest.approx(float(found.softmax(-1).max()), rel=1e-3)


def test_a_sampled_chain_draws_as_the_target_would(world: World) -> None:
    """With the sequence's parameters and each place's own random number."""
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=3)
    rig = world.rig("eagle", num_speculative_tokens=5, tree_width=1)
    text = prompt(rig, text_of(30))
    text.params = params
    [draft] = rig.drafts(text, limit=5)
    states, path = world.states("eagle", text.tokens), list[int]()
    state = SequenceSampling(params, text.tokens, 320, 3, frozenset())
    sampler = Sampler(320)
    for _ in range(5):
        logits = world.heads["eagle"].after(states, text.tokens, path)[None].clone()
        path += sampler(logits, [state]).token_ids
        state.append(path[-1])
    assert draft.tokens == path != world.chain("eagle", text, 5)


@pytest.mark.parametrize("method", METHODS)
def test_operators_one_by_one_draft_alike(world: World, method: str) -> None:
    rig = world.rig(method, num_speculative_tokens=3, tree_width=2, enforce_eager=True)
    text = prompt(rig, text_of(40))
    assert rig.ways(text) == [world.tree(method, text, 3, 2, 6)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cache", ["auto", "int8", "int4", "kivi"])
def test_quantized_heads_and_caches_guess_nearly_the_same(
    world: World, method: str, cache: str
) -> None:
    """In bfloat16, and in int8 weights: most of the tree is that of float32."""
    rig = world.rig(
        method, num_speculative_tokens=3, tree_width=3, tree_tokens=9, dtype="bfloat16",
        quantization="w8a16", kv_cache_dtype=cache,
    )  # fmt: skip
    same = 0
    for seed in range(6):
        text = prompt(rig, text_of(50, seed))
        want = world.tree(method, text, 3, 3, 9)
        same += len(set(rig.ways(text)[0]) & set(want))
        rig.proposer.forget(text)
    assert same > 6 * 9 / 2


# ── what it knows ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", METHODS)
def test_a_gap_is_left_out(world: World, method: str) -> None:
    """Steps that it didn't see: the blocks that they reach into are left out, the others seen."""
    rig = world.rig(method, num_speculative_tokens=3, tree_width=3, tree_tokens=9)
    text = prompt(rig, text_of(41))
    go_on(rig, text, [5], sees=False)
    go_on(rig, text, [6])
    assert rig.drafts(text)[0].tokens == []  # the last state lies in a block that isn't whole
    for token in range(2 * SIZE - len(text.tokens) + 4):
        go_on(rig, text, [token + 9])
    seen = [p for p in range(len(text.tokens) - 1) if not SIZE <= p < 2 * SIZE]
    assert rig.ways(text) == [world.tree(method, text, 3, 3, 9, seen)]
    assert rig.ways(text) != [world.tree(method, text, 3, 3, 9)]


@pytest.mark.parametrize("method", METHODS)
def test_states_wait_while_nobody_asks(world: World, method: str) -> None:
    """Without drafts for a while, and then with them: as far as states are laid aside."""
    rig = world.rig(method, num_speculative_tokens=3, tree_width=3, tree_tokens=9)
    text = prompt(rig, text_of(30))
    for turn in range(20):
        go_on(rig, text, [turn + 7])
    assert rig.ways(text) == [world.tree(method, text, 3, 3, 9)]
    assert rig.proposer.last_caught_up > 0
    assert rig.ways(text) == [world.tree(method, text, 3, 3, 9)]  # nothing has come meanwhile
    for turn in range(2 * SIZE + 40):
        go_on(rig, text, [turn % 50 + 7])
    # the last two blocks' worth, from a block's beginning on, after what was read before
    last = len(text.tokens) - 1
    start = -(-(last - 2 * SIZE) // SIZE) * SIZE
    seen = [*range(SIZE), *range(start, last)]
    assert rig.ways(text) == [world.tree(method, text, 3, 3, 9, seen)]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_a_prefix_are_used_again(world: World, method: str) -> None:
    """Where the tokens up to one beyond their ends are the same; those that aren't are left out."""
    rig = world.rig(method, num_speculative_tokens=3, tree_width=2)
    first = prompt(rig, text_of(80, 4))
    other = Text([*first.tokens[: 2 * SIZE], *tokens(20, 9)], [BLOCKS[0], BLOCKS[1], 30, 31])
    other.computed = 2 * SIZE
    prompt(rig, other)
    # row 63 is made of token 64, which is another one here
    seen = [p for p in range(len(other.tokens) - 1) if not SIZE <= p < 2 * SIZE]
    assert rig.ways(other) == [world.tree(method, other, 3, 2, 6, seen)]
    same = Text([*first.tokens[:70], *tokens(20, 8)], [BLOCKS[0], BLOCKS[1], 32, 33])
    same.computed = 2 * SIZE
    prompt(rig, same)
    assert rig.ways(same) == [world.tree(method, same, 3, 2, 6)]
    assert rig.ways(first) == [world.tree(method, first, 3, 2, 6)]


def test_a_block_that_was_anothers_is_not_read(world: World) -> None:
    """Blocks whose tokens were others' when the head wrote in them, or that nobody wrote in."""
    rig = world.rig("eagle", num_speculative_tokens=3, tree_width=2)
    prompt(rig, text_of(70, 5))
    text = Text(tokens(80, 6), BLOCKS)
    rig.step((text, SIZE), sees=False)
    prompt(rig, text)
    assert rig.ways(text) == [world.tree("eagle", text, 3, 2, 6, range(SIZE, 79))]
    fresh = Text(tokens(80, 7), [35, 36, 37])
    rig.step((fresh, SIZE), sees=False)
    prompt(rig, fresh)
    assert rig.ways(fresh) == [world.tree("eagle", fresh, 3, 2, 6, range(SIZE, 79))]


def test_copied_and_swapped_blocks_keep_what_is_known_of_them(world: World) -> None:
    rig = world.rig("eagle", num_speculative_tokens=3, tree_width=2)
    text = prompt(rig, text_of(75))
    runner = rig.runtime.runner
    runner.copy([(BLOCKS[0], 30), (BLOCKS[1], 31), (BLOCKS[2], 32)])
    copy = Text(text.tokens[:], [30, 31, 32, 33], text.computed)
    go_on(rig, copy, [8])  # the block that wasn't full is unknown: no draft until the next one
    assert rig.drafts(copy)[0].tokens == []
    for turn in range(3 * SIZE - len(copy.tokens) + 3):
        go_on(rig, copy, [turn + 3])
    seen = [p for p in range(len(copy.tokens) - 1) if not 2 * SIZE <= p < 3 * SIZE]
    assert rig.ways(copy) == [world.tree("eagle", copy, 3, 2, 6, seen)]
    runner.swap_out([(BLOCKS[0], 0), (BLOCKS[1], 1), (BLOCKS[2], 2)])
    runner.swap_in([(0, 21), (1, 22), (2, 23)])
    text.blocks = [21, 22, 23, 24, 25]
    go_on(rig, text, [9])
    assert rig.ways(text) == [world.tree("eagle", text, 3, 2, 6)]


@pytest.mark.parametrize("count", [50, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE - 3])
def test_a_way_through_a_tree_may_become_the_sequences_own(world: World, count: int) -> None:
    """Its blocks are copies of the one that wasn't full, and what comes after them."""
    rig = world.rig("eagle", num_speculative_tokens=3, tree_width=2)
    text, spare = prompt(rig, text_of(count)), iter(range(24, 40))
    for turn in range(6):
        assert rig.ways(text) == [world.tree("eagle", text, 3, 2, 6)]
        at, beyond = divmod(text.computed, SIZE)
        way = [next(spare), next(spare)]
        if beyond:
            rig.runtime.runner.copy([(text.blocks[at], way[0])])
        text.blocks[at:] = way
        go_on(rig, text, [turn + 3, turn + 40])


def test_a_prompt_that_is_computed_again(world: World) -> None:
    """As after a preemption: in other blocks, or in its own."""
    rig = world.rig("eagle3", num_speculative_tokens=3, tree_width=2)
    text = prompt(rig, text_of(70))
    assert rig.ways(text) == [world.tree("eagle3", text, 3, 2, 6)]
    for blocks in ([14, 15, 16, 17], [17, 14, 15, 16], [17, 14, 15, 16]):
        text.blocks, text.computed = blocks, 0
        prompt(rig, text, 33)
        assert rig.ways(text) == [world.tree("eagle3", text, 3, 2, 6)]


def test_what_has_ended_leaves_room(world: World) -> None:
    """Many sequences one after another, and some that wait meanwhile."""
    rig = world.rig("eagle", num_speculative_tokens=3, tree_width=2)
    shelf = rig.proposer._shelf
    room = shelf.num_free
    waiting = [prompt(rig, text_of(20, 40 + i, [30 + i])) for i in range(4)]
    for seed in range(8):
        text = prompt(rig, text_of(34, seed))
        for turn in range(70):
            go_on(rig, text, [turn + 4])
        rig.proposer.forget(text)
    for text in waiting:
        rig.proposer.forget(text)
    assert shelf.num_free == room


def test_no_wish_beyond_the_longest_sequence(world: World) -> None:
    rig = world.rig("eagle", num_speculative_tokens=4, tree_width=2)
    text = prompt(rig, text_of(255, 1, range(1, 9)))
    assert max(map(len, rig.ways(text, limit=4)[0])) == 2
    assert rig.drafts(Text([5], [3]))[0].tokens == []  # of which nothing was computed
