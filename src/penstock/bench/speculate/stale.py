"""Whether what lies in the caches is what computing the tokens gives.

Drafts leave guesses in the cache that turn out wrong. A draft model's own keys and values, and
those that an EAGLE head makes of the target's states, are shared, moved and found again with the
target's blocks. What a sequence has of each is computed again from its tokens in fresh caches while
it decodes, and compared to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from penstock.bench.finding import Finding
from penstock.cache import PagedLayout, StateCache, any_part, holds_states
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.engine.request import Sequence as Running
from penstock.nn import Decoder, KeptStates
from penstock.runtime import Runtime
from penstock.runtime.draft_model import DraftModel
from penstock.runtime.eagle import PlacedEagle
from penstock.runtime.runner import Forward, Runner
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.sampling import SamplingParams
from penstock.speculate.draft_model import DraftModelProposer
from penstock.speculate.eagle import EagleProposer
from penstock.step import KV, StatefulStep, Step

OUTPUTS: Final = (24, 52)
"""Tokens of an output behind which the caches are looked at."""

CHUNK: Final = 256
"""Tokens of a pass."""


def cache_findings(
    config: EngineConfig, runtime: Runtime, prompts: Sequence[list[int]]
) -> tuple[list[Finding], int]:
    """Run some requests, and look twice at what each has left in the caches.

    Returns what is wrong, and how many positions were compared.
    """
    engine = Engine(config, runtime)
    findings: list[Finding] = []
    positions = 0
    room = runtime.model.max_model_len
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0, max_tokens=min(OUTPUTS[-1] + 8, room - len(prompt)), ignore_eos=True
        )
        engine.add_request(str(i), prompt, params)
        due = list(OUTPUTS)
        while engine.has_unfinished:
            engine.step()
            running = list(engine.scheduler.running)
            if due and running and running[0].num_output >= due[0]:
                del due[0]
                found, count = stale_blocks(engine, running[0])
                findings += found
                positions += count
    return findings[:1], positions


def stale_blocks(engine: Engine, sequence: Running) -> tuple[list[Finding], int]:
    """What of a sequence's full blocks isn't what its tokens give, and positions compared."""
    findings: list[Finding] = []
    positions = 0
    for name, held, fresh, size in _caches(engine, sequence):
        count = len(held)
        positions += count * size
        found = _first_difference(held, fresh)
        if found is not None:
            layer, at = found
            at = held.places[at]
            findings.append(
                Finding(
                    "cache",
                    "bug",
                    f"The {name}'s keys and values in layer {layer} aren't those of the tokens at "
                    f"positions {at * size} to {at * size + size - 1}, which a fresh cache gives. "
                    "This is an error of Penstock: please report it with this command.",
                )
            )
    return findings, positions


class _Blocks:
    """Some blocks of a cache, and which of a sequence's they are."""

    def __init__(self, kv: KV, blocks: Sequence[int], places: Sequence[int] | None = None) -> None:
        """places: None for the first ones."""
        index = torch.tensor(blocks, dtype=torch.int64)
        held = (layer for layer in kv if not isinstance(layer, StateCache))  # those lie in no block
        self.layers = [[_of(part, index) for part in layer[:4]] for layer in held]
        self.places = range(len(blocks)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)


def _of(part: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes]"""
    return part.view(torch.uint8)[blocks].flatten(1)


def _first_difference(held: _Blocks, fresh: _Blocks) -> tuple[int, int] | None:
    """The first layer, and in it the first block, that isn't the same."""
    for layer, (ours, theirs) in enumerate(zip(held.layers, fresh.layers, strict=True)):
        differs = [(a != b).any(dim=1) for a, b in zip(ours, theirs, strict=True)]
        wrong = torch.stack(differs).any(dim=0).nonzero()
        if len(wrong):
            return layer, int(wrong[0])
    return None


def _caches(engine: Engine, sequence: Running) -> Iterator[tuple[str, _Blocks, _Blocks, int]]:
    """Each cache's full blocks of a sequence, and the same computed afresh."""
    runtime = engine.runtime
    layout, size = runtime.layout, runtime.layout.block_size
    whole = sequence.num_computed // size
    if whole and not layout.recent_window:  # whose codes depend on what was recent
        own = runtime.model.model
        fresh = _computed(own, layout, runtime.runner, sequence.tokens[: whole * size])
        yield "target", _Blocks(runtime.runner.kv, sequence.blocks[:whole]), fresh, size
    proposer = None if engine.speculation is None else engine.speculation.proposer
    draft = runtime.draft
    if isinstance(proposer, DraftModelProposer) and isinstance(draft, DraftModel):
        blocks, known = proposer.computed(sequence)
        whole = known // size
        if whole:
            tokens = sequence.tokens[: whole * size]
            fresh = _computed(draft.model.model, draft.layout, draft.runner, tokens)
            yield "draft model", _Blocks(draft.runner.kv, blocks[:whole]), fresh, size
    if layout.recent_window:
        return
    if isinstance(proposer, EagleProposer) and isinstance(draft, PlacedEagle):
        tokens, blocks = sequence.tokens, sequence.blocks
        places = proposer.known_places(sequence, tokens, blocks)
        if places:
            fresh = _computed_by_head(runtime, draft, tokens, places)
            held = _Blocks(draft.kv, [blocks[at] for at in places], places)
            yield "EAGLE head", held, fresh, size


def _computed_by_head(
    runtime: Runtime, draft: PlacedEagle, tokens: Sequence[int], places: Sequence[int]
) -> _Blocks:
    """The blocks of a head's fresh cache at these places of a sequence, by the target's states."""
    head, blocks = draft.head, places[-1] + 1
    count = blocks * draft.layout.block_size
    states = KeptStates(draft.kept.layers, head.states.new_empty((count, head.spec.width)))
    _computed(runtime.model.model, runtime.layout, runtime.runner, tokens[:count], states)
    kv = draft.layout.allocate(blocks, head.states.device)
    by_states, graphs, vocabulary = head.by_states(), runtime.runner.graphs, draft.vocabulary
    forward: Forward = by_states if graphs is None else graphs.beside(by_states, kv)
    with torch.inference_mode():
        for first in range(0, count, len(head.states)):
            last = min(first + len(head.states), count)
            head.states[: last - first] = states.store[first:last]
            step = _step(tokens[1:], first, last, blocks)
            forward(step if vocabulary is None else vocabulary.narrow(step), kv)
    return _Blocks(kv, places, places)


def _computed(
    decoder: Decoder,
    layout: PagedLayout,
    like: Runner,
    tokens: Sequence[int],
    states: KeptStates | None = None,
) -> _Blocks:
    """The blocks of a fresh cache that hold `tokens`, which fill them, computed in their order.

    like: who runs the decoder's steps; on a GPU these run there, too. states: is given those of all
    tokens.
    """
    size = layout.block_size
    blocks = len(tokens) // size
    kv = layout.allocate(blocks, any_part(like.kv).device)
    forward: Forward = decoder if like.graphs is None else like.graphs.beside(decoder, kv)
    vocabulary = like.vocabulary
    own = None if vocabulary is None else ReducedVocabulary(vocabulary.map)
    runner = Runner(forward, kv, own)
    # the engine's last step has left its states in what was there
    kept, decoder.kept = decoder.kept, None
    if states is not None:
        store = states.store.new_empty((CHUNK, states.store.shape[1]))
        decoder.kept = KeptStates(states.layers, store)
    try:
        for first in range(0, len(tokens), CHUNK):
            last = min(first + CHUNK, len(tokens))
            step = _step(tokens, first, last, blocks)
            runner.forward(_going_on(step, first // CHUNK) if holds_states(kv) else step)
            if states is not None:
                states.store[first:last] = store[: last - first]
    finally:
        decoder.kept = kept
    return _Blocks(runner.kv, range(blocks))


def _going_on(step: Step, number: int) -> Step:
    """The chunk of that number, from the state that the one before has left: two slots by turns."""
    states = torch.tensor([(number - 1) % 2 if number else -1], dtype=torch.int32)
    kept = torch.tensor([[step.num_tokens - 1, number % 2]], dtype=torch.int32)
    return StatefulStep(
        step.tokens, step.positions, step.slots, step.query_start, step.context_len,
        step.block_table, step.sample_at, states, kept,
    )  # fmt: skip


def _step(tokens: Sequence[int], first: int, last: int, blocks: int) -> Step:
    """The pass that computes the tokens from `first` to `last`, in blocks in their order."""

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return Step(
        tokens=whole(tokens[first:last]),
        positions=whole(range(first, last)),
        slots=whole(range(first, last)),
        query_start=whole([0, last - first]),
        context_len=whole([last]),
        block_table=whole(range(blocks))[None],
        sample_at=whole([last - first - 1]),
    )
