"""Sums for `/metrics`, kept as steps are computed and not only when requests end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import NO_PREFIXES
from penstock.engine.request import Request, Sequence

if TYPE_CHECKING:
    from penstock.engine.engine import Engine


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the engine was made."""

    prompt: int = 0
    """Of prompts: those found in the cache when a request starts, then each chunk as it is
    computed. What is computed again after giving way isn't counted again, so a request whose prompt
    is complete has added its length."""
    generated: int = 0  # of all samples
    jumped: int = 0  # of these, those that a constraint forced, without a step of their own
    recorded: int = 0  # of those generated: what `take_generated` has told of

    @property
    def sum(self) -> int:
        """Of prompts and generated."""
        return self.prompt + self.generated

    def take_generated(self) -> int:
        """Tokens generated since this was last asked."""
        new, self.recorded = self.generated - self.recorded, self.generated
        return new

    def prompt_computed(self, sequence: Sequence) -> None:
        """`sequence` has come further in its prompt, or again as far."""
        request = sequence.request
        reached = min(sequence.num_computed, sequence.num_prompt)
        if reached > request.num_counted:
            self.prompt += reached - request.num_counted
            request.num_counted = reached


def stats_of(engine: Engine) -> dict[str, Any]:
    """Counters of an engine as it stands."""
    scheduler, pool = engine.scheduler, engine.pool
    return {
        "requests": len(engine.requests),
        **requests_by_state(
            len(engine.requests), list(scheduler.running), list(scheduler.swapper.groups)
        ),
        "prompt_tokens": engine.token_counts.prompt,
        "generation_tokens": engine.token_counts.generated,
        "jumped_tokens": engine.token_counts.jumped,
        **engine.intake.grammar_stats(),
        **({} if engine.speculation is None else engine.speculation.stats()),
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "swapped": scheduler.num_swapped,
        "blocks": pool.num_blocks,
        "used_blocks": pool.num_used,
        "cached_blocks": pool.num_idle,
        "kv_fragmentation": fragmentation(engine),
        **(engine.pins.stats() if engine.pins else {"pins": 0, "pinned_blocks": 0}),
        **(engine.tree.stats() if engine.tree else NO_PREFIXES),
        **engine.preemption.stats(),
        "swapped_blocks": engine.swap_space.num_used,
        "swap_space_blocks": engine.swap_space.num_slots,
        "steps": engine.ledger.prefill.steps + engine.ledger.decode.steps,
        **({} if engine.remembering is None else engine.remembering.stats()),
        **({} if scheduler.states is None else scheduler.states.stats()),
        **_sight_stats(engine),
        **_graph_stats(engine),
    }


def fragmentation(engine: Engine) -> float:
    """Of the places for tokens in blocks in use, the share that holds none: ends of last blocks.

    0 where nothing is in use. A block that samples share counts once, as full as the fullest has
    it.
    """
    size = engine.runtime.layout.block_size
    idle: dict[int, int] = {}
    for sequence in engine.scheduler.running:
        if sequence.blocks:
            gap = len(sequence.blocks) * size - sequence.num_computed
            last = sequence.blocks[-1]
            idle[last] = min(gap, idle.get(last, gap))
    used = engine.pool.num_used * size
    return sum(idle.values()) / used if used else 0.0


def _sight_stats(engine: Engine) -> dict[str, Any]:
    """What has been seen; nothing of models that see nothing."""
    sight = engine.runtime.sight
    if sight is None:
        return {}
    return {"pictures": sight.asked, "picture_hits": sight.hits, "picture_tiles": sight.tiles}


def _graph_stats(engine: Engine) -> dict[str, Any]:
    """How a GPU's steps have run; nothing on a CPU."""
    graphs = engine.runtime.runner.graphs
    if graphs is None:
        return {}
    counts = graphs.counts
    return {
        "graph_captures": counts.captures,
        "graph_capture_s": counts.capture_s,
        "graph_replays": counts.replays,
        "eager_steps": counts.eager,
        "steps_begun_early": engine.computing.overlapped,
    }


def requests_by_state(
    total: int, running: Iterable[Sequence], swapped: Iterable[Request]
) -> dict[str, int]:
    """Of `total` requests that haven't ended, how many run, wait, and are swapped out.

    A request runs as long as any of its samples does.
    """
    active = {sequence.owner for sequence in running}
    out = len({request.guides or request for request in swapped} - active)
    return {
        "requests_running": len(active),
        "requests_waiting": max(total - len(active) - out, 0),
        "requests_swapped": out,
    }
