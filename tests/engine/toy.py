"""Engines without weights: a model whose logits depend on everything that it reads in the cache.

The toy writes each token's id where its key and value would go, and computes logits from a hash of
the ids that it finds through the block table. A wrong block, a lost copy, or a token that is
computed twice or never gives other logits than `logits_of` the sequence's own tokens.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.cache import PagedLayout
from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOutput
from penstock.engine.batch import Batch, Batcher
from penstock.engine.request import Status
from penstock.engine.scheduler import Part, Plan
from penstock.engine.waiting import Entry
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from penstock.quant import Dense, WeightFormats
from penstock.runtime import Runner, Runtime
from penstock.sampling import Sampler, SamplingParams, SequenceSampling
from penstock.step import KV, Step

VOCAB = 64
HIDDEN = 16
BLOCK = 4
RAISES, IS_NAN = 62, 63
"""Ids that break the toy: the step raises, or the row's logits are not numbers."""

GREEDY = SamplingParams(temperature=0.0)

BLOCK_GIB = BLOCK * 2 * 16 * 4 / (1 << 30)
"""What `PagedLayout` counts for one of the toy's blocks: `swap_space` for one slot."""


def logits_of(tokens: Sequence[int], vocab: int = VOCAB) -> np.ndarray:
    """[V] float32 of the next token after `tokens`."""
    if IS_NAN in tokens:
        return np.full(vocab, np.nan, dtype=np.float32)
    seed = zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes())
    state = np.arange(1, vocab + 1, dtype=np.uint32) * np.uint32(seed | 1)
    state ^= state >> np.uint32(15)
    state *= np.uint32(0x2C1B3C6D)
    logits = (state >> np.uint32(8)).astype(np.float32) * np.float32(2**-22)
    logits[RAISES:] = -9.0  # only a prompt holds them
    return logits


class Toy:
    """`forward` of the toy."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.steps: list[Step] = []

    def __call__(self, step: Step, kv: KV) -> Tensor:
        copies = {one.name: getattr(step, one.name).clone() for one in fields(step)}
        self.steps.append(type(step)(**copies))  # the next step overwrites this one's tensors
        ids = kv[0][0]
        ids.view(-1)[step.slots.long()] = step.tokens
        if step.copies is not None:
            again, slots = step.copies.long().unbind(1)
            ids.view(-1)[slots] = step.tokens[again]
        if (step.tokens == RAISES).any():
            raise RuntimeError("the toy broke")
        starts, lengths = step.query_start.tolist(), step.context_len.tolist()
        rows = []
        for at in step.sample_at.tolist():
            b = next(i for i, start in enumerate(starts[1:]) if at < start)
            length = lengths[b] - (starts[b + 1] - 1 - at)
            seen = ids[step.block_table[b].long()].flatten()[:length].tolist()
            assert min(seen) >= 0  # or it reads what nobody wrote
            rows.append(logits_of(seen, self.vocab))
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, self.vocab))


def toy_runtime(
    num_blocks: int = 64,
    max_model_len: int = 64,
    *,
    eos: tuple[int, ...] = (),
    tokenizer: Any = None,
    block_size: int = BLOCK,
    vocab: int = VOCAB,
    generation: dict[str, Any] | None = None,
    forward: Any = None,
) -> Runtime:
    """A runtime around a toy; `forward` replaces it."""
    layer = LayerSpec(AttentionSpec(1, 1, 16, 1.0, None), MlpSpec(16))
    decoder = DecoderSpec(vocab, HIDDEN, (layer,), NormSpec(), max_model_len)
    spec = ModelSpec("toy", decoder, (), "float32", None, eos)
    dense = Dense(torch.float32)
    model: Any = torch.nn.Module()
    model.formats = WeightFormats(dense, dense)
    model.last_hidden_state = lambda: Toy(HIDDEN)
    loaded = LoadedModel(model, spec, torch.float32, max_model_len, generation or {}, eos)
    ids = torch.full((num_blocks, block_size), -1, dtype=torch.int32)
    runner = Runner(forward or Toy(vocab), [(ids, torch.zeros(num_blocks, 0))])
    layout = PagedLayout(((1, 16),), torch.float32, block_size)
    return Runtime(loaded, tokenizer, layout, num_blocks, runner)


def toy_engine(
    num_blocks: int = 64,
    max_model_len: int = 64,
    *,
    eos: tuple[int, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    **kwargs: Any,
) -> Engine:
    """An engine on a toy, whose plans are checked as they are made."""
    kwargs.setdefault("max_num_seqs", 8)
    kwargs.setdefault("max_num_batched_tokens", 64)
    kwargs.setdefault("preemption_mode", "recompute")  # "auto" depends on what was measured
    runtime = toy_runtime(num_blocks, max_model_len, eos=eos)
    engine = Engine(EngineConfig.of(**kwargs), runtime, clock)
    watch(engine)
    return engine


def reference(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
    seed: int = 0,
    eos: tuple[int, ...] = (),
    max_model_len: int = 64,
) -> list[int]:
    """The tokens of one sample, from the sampler alone: no cache, no batch."""
    state = SequenceSampling(
        params, prompt, VOCAB, params.seed if params.seed is not None else seed,
        frozenset(eos), index,
    )  # fmt: skip
    sampler, output = Sampler(VOCAB), list[int]()
    ends = {*params.stop_ids} if params.ignore_eos else {*params.stop_ids, *eos}
    while True:
        logits = torch.from_numpy(logits_of([*prompt, *output]))[None]
        token = sampler(logits, [state]).token_ids[0]
        state.append(token)
        output.append(token)
        count = len(output)
        if token in ends and count >= params.min_tokens:
            return output
        if count == params.max_tokens or len(prompt) + count >= max_model_len:
            return output


def drain(engine: Engine, limit: int = 2000) -> dict[str, RequestOutput]:
    """Step until nothing is left; the ended requests by id. Fails rather than run for ever."""
    done = {}
    for _ in range(limit):
        if not engine.has_unfinished:
            return done
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check(engine)
    raise AssertionError(f"not done after {limit} steps: {engine.stats()}")


def run_one(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    engine.add_request("it", prompt, params)
    return drain(engine)["it"]


# ── what holds between any two steps, and of any plan ────────────────────────────────────────────


def check(engine: Engine, plan: Plan | None = None) -> None:
    """Every block, slot and row is accounted for; `plan`: whose copies are still to be made."""
    swaps_in = [] if plan is None else plan.swaps_in
    back = [s for swap in swaps_in for s in swap.group]
    held_for_copy = [slot for swap in swaps_in for slot in swap.slots]
    pool, scheduler = engine.pool, engine.scheduler
    own = [s for r in engine.requests.values() for s in r.sequences]
    sequences = own + [s.shadow for s in own if s.shadow is not None]
    held = Counter(block for s in sequences for way in (s.blocks, *s.ways) for block in way)
    assert pool.count(pool.empty) == 1 + held.pop(pool.empty, 0)
    assert [pool.count(b) for b in range(pool.num_blocks)] == [
        held[b] for b in range(pool.num_blocks)
    ]
    assert pool.num_used == len(held)
    rows = [s.row for s in sequences if s.row >= 0]
    assert sorted(rows + scheduler.rows.free) == list(range(scheduler.config.max_num_seqs))
    by_status = {status: [s for s in sequences if s.status is status] for status in Status}
    assert {id(s) for s in scheduler.running} == {id(s) for s in by_status[Status.RUNNING]}
    assert len(scheduler.running) == len(by_status[Status.RUNNING])
    queued = list(scheduler.waiting)
    if scheduler.config.policy == "fcfs":
        assert [s.order for s in queued] == sorted(s.order for s in queued)
    assert not queued or scheduler.waiting.first() is queued[0]
    assert all(s.status in {Status.WAITING, Status.SWAPPED} for s in queued)
    assert scheduler.num_waiting == sum(s.status is Status.WAITING for s in queued)
    _check_swapped(engine, by_status[Status.SWAPPED], queued, held_for_copy)
    unborn = [s for s in by_status[Status.WAITING] if not any(s is other for other in queued)]
    assert all(s.index > 0 and not s.num_output for s in unborn)  # samples of a queued request
    for s in sequences:
        _check_sequence(engine, s, any(s is one for one in back), plan is not None)
    if engine.tree is not None:
        _check_tree(engine)


def _check_swapped(
    engine: Engine, swapped: list[Any], queued: list[Any], held_for_copy: list[int]
) -> None:
    """Every slot is accounted for, and the first of each request waits for all."""
    space, groups = engine.swap_space, engine.scheduler.swapper.groups
    assert engine.scheduler.num_swapped == len(swapped) == sum(map(len, groups.values()))
    held = Counter(slot for s in swapped for slot in s.slots) + Counter(held_for_copy)
    assert all(space.count(slot) == times for slot, times in held.items())
    assert space.num_used == len(held) <= space.num_slots
    leaders = [s for s in queued if s.status is Status.SWAPPED]
    assert {id(s) for s in leaders} == {id(group[0]) for group in groups.values()}
    assert len(leaders) == len(groups)


def _check_sequence(engine: Engine, s: Any, back: bool, planned: bool) -> None:
    size = engine.scheduler.block_size
    if s.status is Status.SWAPPED:
        assert not s.blocks and not s.nodes and s.row < 0
        assert len(s.slots) * size >= s.num_computed > (len(s.slots) - 1) * size
        return
    assert not s.slots
    if s.status is not Status.RUNNING:
        assert not s.blocks and not s.nodes and not s.num_computed
        assert (s.row >= 0) == (s.status is Status.FORKING)
        return
    assert 0 < len(s.tokens) <= engine.max_model_len
    assert 0 <= s.num_computed < len(s.tokens)
    assert len(s.blocks) * size >= s.num_computed
    if not planned and not s.mates:  # which are given a block and may then be held up
        assert s.draft is None and not s.ways
        early = engine.runtime.runner.graphs is not None  # and one for a step begun early
        assert 0 <= len(s.blocks) - -(-s.num_computed // size) <= early
    assert engine.scheduler.table[s.row, : len(s.blocks)].tolist() == s.blocks
    if engine.tree is not None:
        full = s.num_computed // size
        # one that has come back is given its nodes with its next token, which mates may hold up
        assert len(s.nodes) == full or ((back or s.mates) and len(s.nodes) < full)
        for i, node in enumerate(s.nodes):
            assert s.blocks[i] in (node.block, engine.pool.empty)
            assert list(node.key) == s.tokens[i * size : (i + 1) * size]


def _check_tree(engine: Engine) -> None:
    """An idle block is a node's, and nobody holds what continues it; the rest of them are held."""
    assert engine.tree is not None
    pool, found = engine.pool, set[int]()
    stack = list(engine.tree._roots.values())
    while stack:
        node = stack.pop()
        for child in node.children.values():
            assert child.parent is node
            assert child.block not in found
            found.add(child.block)
            if node.block >= 0 and not pool.count(node.block) and not engine.runtime.horizon:
                assert not pool.count(child.block)
            stack.append(child)
    assert set(engine.tree._nodes) == found == pool._known
    unheld = {block for block in found if not pool.count(block)}
    assert set(pool._idle) == {block for block in unheld if not pool.pins(block)}
    assert pool._resting == {block for block in unheld if pool.pins(block)}
    assert engine.pins is not None and set(pool._pins) <= found
    assert Counter(n.block for p in engine.pins._pins.values() for n in p.path) == pool._pins
    assert pool.num_pinned <= pool.num_blocks // 2
    order = {block: i for i, block in enumerate(pool._idle)}
    for block, node in engine.tree._nodes.items():
        if block in order and node.parent is not None and node.parent.block in order:
            if engine.runtime.horizon:
                continue
            assert order[block] < order[node.parent.block]  # given up before its parent


def watch(engine: Engine) -> None:
    """Check every plan of this engine's scheduler, and every batch made of one."""
    _watch_batches(engine)
    scheduler = engine.scheduler
    schedule, set_aside = scheduler.schedule, scheduler.waiting.set_aside
    overtaken = False  # somebody waited for another's prefix, and others went first

    def noted() -> Entry:
        nonlocal overtaken
        overtaken = True
        return set_aside()

    def checked() -> Plan:
        had = bool(scheduler.running or scheduler.waiting)
        preempted, queued = scheduler.num_preemptions, set(scheduler.waiting)
        plan = schedule()
        config, size = scheduler.config, scheduler.block_size
        assert plan.num_tokens == sum(n for _, n in plan.parts) <= config.max_num_batched_tokens
        paired = any(s.mates for s in [*scheduler.running, *scheduler.waiting])
        assert bool(plan.parts) == had or paired  # there is always something to do
        members = [s for s, _ in plan.parts]
        assert len({id(s) for s in members}) == len(members) <= config.max_num_seqs
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        for s, n in plan.parts:
            guesses = 0 if s.draft is None else len(s.draft)
            assert s.status is Status.RUNNING and 0 < n <= s.remaining + guesses
            assert guesses == 0 or n == s.remaining + guesses
            assert n >= s.remaining or config.enable_chunked_prefill or s.num_output
            written = range(
                s.num_computed // size,
                (s.num_computed + n - 1 - guesses + s.draft_depth) // size + 1,
            )
            assert all(engine.pool.count(s.blocks[i]) == 1 for i in written)
        decoding = [
            s for s in scheduler.running if s.num_output and s.remaining == 1 and not s.mates
        ]
        assert all(any(s is m for m in members) for s in decoding)  # they never wait
        if scheduler.num_preemptions > preempted:
            rank = scheduler.waiting.rank  # the lowest in rank gave way, and all it left with
            for gone in set(scheduler.waiting) - queued:
                last = max(rank(s) for s in gone.request.sequences if s.status is gone.status)
                assert all(rank(s) < last for s in scheduler.running)
            if config.policy == "fcfs" and not overtaken:
                assert max(s.order for s in scheduler.running) < min(
                    s.order for s in scheduler.waiting
                )
        check(engine, plan)
        return plan

    scheduler.schedule = checked  # type: ignore[method-assign]
    scheduler.waiting.set_aside = noted  # type: ignore[method-assign]


def _watch_batches(engine: Engine) -> None:
    """A batch that was moved on in place is the one that would be laid out anew."""
    build, config = engine.batcher.build, engine.config.scheduler

    def checked(parts: list[Part]) -> Batch:
        batch = build(parts)
        anew = Batcher(
            engine.scheduler.table,
            engine.scheduler.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
        ).build(parts)
        for one in fields(Step):
            assert torch.equal(getattr(batch.step, one.name), getattr(anew.step, one.name))
        assert (batch.sampled, batch.logit_rows) == (anew.sampled, anew.logit_rows)
        assert (batch.drawn, batch.rows) == (anew.drawn, anew.rows)
        assert batch.prompt_rows == anew.prompt_rows
        return batch

    engine.batcher.build = checked  # type: ignore[method-assign]
