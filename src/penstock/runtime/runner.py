"""The only place that sees both a model and its cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from penstock.cache import RecentBlocks, SwapStore, block_rows, copy_blocks
from penstock.errors import ConfigError, PenstockError
from penstock.nn import Decoder
from penstock.runtime.companion import CompanionCache
from penstock.runtime.graphs import GraphForward
from penstock.runtime.orders import Kind
from penstock.runtime.package import PackageForward
from penstock.runtime.plan import Plan
from penstock.runtime.program import Program
from penstock.runtime.team import Team
from penstock.runtime.vocabulary import ReducedVocabulary
from penstock.step import KV, Step

Forward = Callable[[Step, KV], Tensor]
"""Logits [S, V] float32 of the rows `step.sample_at`; writes the step's keys and values."""


class Runner:
    """Runs steps; owns the cache's memory."""

    def __init__(
        self,
        forward: Forward,
        kv: KV,
        vocabulary: ReducedVocabulary | None = None,
        hidden_plan: Callable[[], Plan] | None = None,
        recent: RecentBlocks | None = None,
        companions: Sequence[CompanionCache] = (),
        adapted: Forward | None = None,
        team: Team | None = None,
        columns: int = 0,
        part: Callable[[Step], Step] | None = None,
        both_ways: Forward | None = None,
    ) -> None:
        """vocabulary: of a model that lacks some of its tokenizer's ids. hidden_plan: gives
        that of steps that end with hidden states, where it was recorded before. recent: of a cache
        with a window, who has which place in it. companions: caches of other models in the same
        blocks, which move with this one's. adapted: what runs steps with adapters. team: other
        processes, which do the same to their parts of the model and of its cache. columns: of
        logits, which another process may make. part: what of a step this one does, where others do
        the rest with it. both_ways: what runs steps with runs, which no program takes.
        """
        self._forward = forward
        self.vocabulary = vocabulary
        self.hidden_plan = hidden_plan
        self.kv = kv
        self.recent = recent
        self.companions = tuple(companions)
        self.adapted = adapted
        self.team = team
        self._columns = columns
        self._part = part
        self._both_ways = both_ways
        self._swapped: SwapStore | None = None
        self._ran: Forward | None = None
        self._owner: Callable[[], object | None] = lambda: None

    def claim(self, engine: object, holders: Callable[[int], int] | None = None) -> None:
        """Make `engine` the one whose steps run: blocks are its to give out.

        holders: how many of its sequences hold a block; without it, one each.

        An engine that has nothing left to do loses the runtime, and says so in its next step.
        Raises ConfigError while the one that has it still has requests.
        """
        owner = self._owner()
        if getattr(owner, "has_unfinished", False):
            raise ConfigError(
                "Another engine has requests on this runtime, and one cache can't serve two. Load "
                "a runtime for each, or wait until its requests have ended."
            )
        self._owner = weakref.ref(engine)
        if self.recent is not None:
            self.recent.holders = holders or (lambda block: 1)
            self.recent.unsure = 0  # until it says that it guesses

    def check(self, engine: object) -> None:
        """Raises ConfigError unless `engine` was the last to claim this runner.

        Its GPU becomes this thread's, which kernels are launched on.
        """
        if self._owner() is not engine:
            raise ConfigError(
                "This engine's runtime has been given to another engine, whose cache it is now. "
                "Load a runtime for each."
            )
        if self.graphs is not None:
            self.graphs.enter()

    @property
    def program(self) -> Program | None:
        """What runs steps as one native call, where that is how they run."""
        return self._forward if isinstance(self._forward, Program) else None

    @property
    def graphs(self) -> GraphForward | None:
        """What runs steps on a GPU, where that is how they run."""
        return self._forward if isinstance(self._forward, GraphForward) else None

    @property
    def how(self) -> str:
        """How steps run, for readers."""
        if self.graphs is not None:
            return self.graphs.how
        if self.program is not None:
            return "one native call a step"
        return "a compiled package" if self.is_packaged else "operators one by one"

    @property
    def is_packaged(self) -> bool:
        """Whether steps run by a compiled package."""
        return isinstance(self._forward, PackageForward)

    @property
    def by_modules(self) -> bool:
        """Whether steps run by the decoder's modules, where hooks see what passes."""
        return isinstance(self._forward, Decoder)

    @cached_property
    def _block_rows(self) -> list[Tensor]:
        return block_rows(self.kv)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to): before the step that writes to the copies."""
        order = self.together(lambda team: team.moving(Kind.COPY, pairs))
        with torch.inference_mode(), order:
            if self.program is not None:
                self.program.copy_blocks(pairs)
            else:
                copy_blocks(self._block_rows, pairs)
            if self.recent is not None:
                self.recent.copy(pairs)
            for companion in self.companions:
                companion.copy(pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to swap slots, (block, slot); memory for them is taken as it is needed."""
        with self.together(lambda team: team.moving(Kind.SWAP_OUT, pairs)):
            self._store().put(pairs)
        for companion in self.companions:
            companion.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy swap slots back to blocks, (slot, block)."""
        with self.together(lambda team: team.moving(Kind.SWAP_IN, pairs)):
            self._store().take(pairs)
        for companion in self.companions:
            companion.swap_in(pairs)

    def _store(self) -> SwapStore:
        if self.recent is not None:
            raise PenstockError("Blocks of a cache with a window can't be swapped out.")
        if self._swapped is None:
            self._swapped = SwapStore(self.kv)
        return self._swapped

    @contextmanager
    def computing(self, step: Step) -> Iterator[None]:
        """What a step needs of the cache around it; whoever runs one by other ways enters this."""
        if self.recent is not None:
            self.recent.enter(step)
        yield
        if self.recent is not None:
            self.recent.leave(step)

    @property
    def is_pipelined(self) -> bool:
        """Whether steps end in another process."""
        return self.team is not None and self.team.is_pipelined

    def through(self, step: Step, kind: Kind, columns: int) -> list[Tensor]:
        """What `kind` asks of a step that goes through all stages (`Team.compute`)."""
        assert self.team is not None
        with torch.inference_mode():
            return self.team.compute(step, kind, lambda part: self._forward(part, self.kv), columns)

    def own_part(self, step: Step) -> Step:
        """What of a step this process does: all of it, but where ranks share sequences."""
        return step if self._part is None else self._part(step)

    def together(self, order: Callable[[Team], bytes]) -> AbstractContextManager[None]:
        """What is done within, other ranks do too, where there are some: as `order` has it."""
        return nullcontext() if self.team is None else self.team.doing(order(self.team))

    def forward(self, step: Step) -> Tensor:
        """The step's logits [S, V], good until the next one; keys and values go to the cache."""
        return self.by(self._forward_of(step), step)

    def _forward_of(self, step: Step) -> Forward:
        self._ran = self._forward
        if step.adapters is not None:
            if self.adapted is None:
                raise PenstockError("A step has adapters, but nothing was loaded for them.")
            self._ran = self.adapted
        if step.runs is not None:
            if self._both_ways is None:
                raise PenstockError("A step has runs, but nothing was loaded for them.")
            self._ran = self._both_ways
        return self._ran

    @property
    def experts_used(self) -> int:
        """Those that the last step's tokens chose, of all layers; 0 where nobody counts them."""
        if self.is_pipelined or self._part is not None:  # others' tokens chose some
            return 0
        return self._ran.experts_used if isinstance(self._ran, Program) else 0

    @property
    def finds_largest(self) -> bool:
        """Whether `largest` can be asked for."""
        if self.team is not None and self.team.is_pipelined:
            return self.vocabulary is None and self.team.finds_largest
        program = self.program
        return self.vocabulary is None and program is not None and program.finds_largest

    def largest(self, step: Step) -> tuple[Tensor, Tensor]:
        """As `forward`, but of the logits only each row's largest: places [S], values [S]."""
        if self.is_pipelined:
            places, values = self.through(step, Kind.LARGEST, 0)
            return places, values
        program = self._forward_of(step)
        assert isinstance(program, Program)
        order = self.together(lambda team: team.step(step, Kind.LARGEST))
        around = nullcontext() if self.recent is None else self.computing(step)
        with torch.inference_mode(), around, order:
            return program.largest(self.own_part(step), self.kv)

    def follow(self, step: Step, tokens: Tensor) -> Tensor:
        """The same where `step.tokens` says which of `tokens`, on the GPU, they are."""
        assert self.graphs is not None and self.vocabulary is None
        with torch.inference_mode():
            return self.graphs.follow(step, self.kv, tokens)

    def by(self, forward: Forward, step: Step) -> Tensor:
        """The same by another way to run the model, over the same cache."""
        with torch.inference_mode(), nullcontext() if self.recent is None else self.computing(step):
            if self.vocabulary is None:
                return self._run(forward, step)
            return self.vocabulary.widen(self._run(forward, self.vocabulary.narrow(step)))

    def _run(self, forward: Forward, step: Step) -> Tensor:
        if self.team is None:
            return forward(self.own_part(step), self.kv)
        if forward is not self._forward:
            raise PenstockError("Other ranks run whole steps alone, not by other ways.")
        if self.is_pipelined:
            return self.through(step, Kind.STEP, self._columns)[0]
        with self.team.doing(self.team.step(step, Kind.STEP)):
            return forward(self.own_part(step), self.kv)
