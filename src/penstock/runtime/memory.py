"""How many blocks the cache and the swap space get, decided before anything is allocated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cache import PagedLayout
from penstock.config import PROMPT_LOGITS, CacheConfig, SchedulerConfig
from penstock.errors import OutOfCacheError
from penstock.nn import DecoderSpec

COMFORTABLE_BYTES = 4 << 30
"""The cache's size unless asked otherwise, where one sequence of full length needs no more."""

SWAP_BYTES = 1 << 30
"""The swap space's size unless asked otherwise, where that is no more than …"""

SWAP_FRACTION = 0.1
"""… this much of the free memory."""


class _Caches:
    """Caches of the same blocks, as one."""

    def __init__(self, layouts: Sequence[PagedLayout]) -> None:
        self._layouts = layouts
        self.bytes_per_block = sum(layout.bytes_per_block for layout in layouts)

    def nbytes(self, num_blocks: int) -> int:
        return sum(layout.nbytes(num_blocks) for layout in self._layouts)

    def blocks_in(self, nbytes: int) -> int:
        """The most blocks that `nbytes` hold; a cache with a window has more than its blocks."""
        most = nbytes // self.bytes_per_block
        return bisect_right(range(1, most + 1), nbytes, key=self.nbytes)


def activation_bytes(
    decoder: DecoderSpec,
    itemsize: int,
    config: SchedulerConfig,
    guesses: int = 0,
    prompt_logits: int = PROMPT_LOGITS,
) -> int:
    """What the largest step of a decoder holds beside weights and cache.

    Of the widest layer its residual stream, that normed, queries, keys, values, what attention
    gives, and the MLP between its matrices (of experts each choice's own, and what it gives);
    logits in float32 of all sequences, their `guesses` and of the prompts' tokens that a step
    reads: as computed, as graphs share them, as the sampler changes them. Only prompts in one piece
    may take more.
    """
    widest = waiting = 0
    for layer in decoder.layers:
        a, mlp = layer.attention, layer.mlp
        attended = sum(a.qkv_columns)
        attended += a.out_dim if a.has_state else a.num_heads * a.kept_dim
        if a.gated or a.has_state:
            attended += a.out_dim
        if a.latent is not None:  # queries for latents, and what they see of those
            attended += a.num_heads * (2 * a.latent.rank + a.turning) + a.out_dim
        if a.sink_tokens:  # queries twice, and in float32 what the first tokens give them
            attended += a.num_heads * (a.head_dim + 4 * (a.head_dim + 2) // itemsize)
        between = (3 if mlp.gated else 2) * mlp.intermediate
        if mlp.experts is not None:  # each choice has its own, and a product
            between = mlp.experts.per_token * (between + decoder.hidden) + mlp.experts.shared
        widest = max(widest, waiting + attended + between)
        waiting = a.out_dim if layer.waits else 0
    if decoder.inputs is not None:
        widest += 2 * len(decoder.layers) * decoder.inputs.dim
    tokens = config.max_num_batched_tokens * (2 * decoder.hidden + widest) * itemsize
    rows = config.max_num_seqs * (1 + guesses) + prompt_logits
    rows = min(rows, config.max_num_batched_tokens)
    return tokens + 3 * 4 * rows * decoder.vocab_size


@dataclass(frozen=True, slots=True)
class Horizon:
    """What any layer sees of a sequence, where blocks beyond that are let go.

    A cache has one more block there, which stays empty: it stands for those that nobody sees.
    """

    window: int = 0  # the latest tokens; 0: all
    sink_tokens: int = 0  # and the first ones

    def __bool__(self) -> bool:
        return self.window > 0

    def blocks(self, block_size: int, tokens: int) -> int:
        """That a sequence of so many tokens keeps: with one that the window leaves and one that it
        enters.
        """
        whole = -(-tokens // block_size)
        if not self:
            return whole
        return min(whole, self.kept(block_size) + -(-self.window // block_size) + 2)

    def kept(self, block_size: int) -> int:
        """Blocks of the first tokens."""
        return -(-self.sink_tokens // block_size)

    def most_blocks(self, block_size: int, tokens: int, step_tokens: int) -> int:
        """That one sequence of so many tokens fills at any time: what it keeps, and those that a
        step of so many adds.
        """
        whole = -(-tokens // block_size)
        return min(whole, self.blocks(block_size, tokens) + -(-step_tokens // block_size))


SEES_ALL = Horizon()


def horizon_of(decoder: DecoderSpec, max_model_len: int) -> Horizon:
    """Of a decoder's layers; none where one of them sees all of `max_model_len`."""
    seen = [layer.attention for layer in decoder.layers]
    if not all(a.window > 0 and a.reach < max_model_len for a in seen):
        return SEES_ALL
    return Horizon(max(a.window for a in seen), max(a.sink_tokens for a in seen))


def plan_blocks(
    layout: PagedLayout,
    config: CacheConfig,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    beside: Sequence[PagedLayout] = (),
    comfortable: bool = True,
    reserved_bytes: int = 0,
    longest: int | None = None,
) -> int:
    """The number of blocks: `config.num_blocks`, or as many as fit and can be used.

    beside: caches with as many blocks as this one, of a draft model. comfortable: others want
    memory too, so that 4 GiB are enough unless one sequence needs more. reserved_bytes: of what is
    available, for a GPU's largest step. longest: blocks of a sequence of `max_model_len`, where it
    lets some go.
    Raises OutOfCacheError when not even one sequence of `max_model_len` fits.
    """
    all_of = _Caches((layout, *beside))
    one = layout.blocks_for(max_model_len) if longest is None else longest
    size = all_of.bytes_per_block
    available_bytes = max(available_bytes - reserved_bytes, 0)
    free = f"{_mib(available_bytes)} are free"
    if reserved_bytes:
        free += (
            f" beside the {_mib(reserved_bytes)} of the largest step (lower max_num_batched_tokens "
            "or max_num_seqs)"
        )

    def shorter(blocks: int) -> str:
        if longest is None:
            return f"max_model_len to {blocks * layout.block_size}"
        return "the window (max_attention_window) or max_num_batched_tokens"

    budget = int(available_bytes * config.memory_fraction)
    if config.num_blocks is not None:
        need = all_of.nbytes(config.num_blocks)
        if need > available_bytes:
            raise OutOfCacheError(
                f"num_blocks={config.num_blocks} need {_mib(need)}, but {free}. At most "
                f"{all_of.blocks_in(available_bytes)} fit."
            )
        blocks = config.num_blocks
        if blocks < one:
            raise OutOfCacheError(
                f"One sequence of max_model_len={max_model_len} needs {one} blocks of "
                f"{layout.block_size} tokens, but num_blocks is {blocks}. Raise it, or lower "
                f"{shorter(blocks)}."
            )
        return blocks
    fit = all_of.blocks_in(budget)
    if fit < one:
        need = all_of.nbytes(one)
        raise OutOfCacheError(
            f"One sequence of max_model_len={max_model_len} needs {_mib(need)} of cache, "
            f"but {_mib(budget)} may be used ({100 * config.memory_fraction:.3g}% of what is free"
            + (
                f" beside the {_mib(reserved_bytes)} of the largest step). "
                if reserved_bytes
                else "). "
            )
            + (
                f"Lower {shorter(fit)}."
                if fit
                else f"Not even one block ({_mib(all_of.nbytes(1))}) fits: free some memory, or "
                "raise gpu_memory_utilization"
                + (", or lower max_num_batched_tokens." if reserved_bytes else ".")
            )
        )
    # and one more for each, which the scheduler keeps free for it to grow into
    useful = (one + 1) * max_num_seqs
    most = max(COMFORTABLE_BYTES // size, one) if comfortable else fit
    return min(fit, useful, most)


def plan_swap(
    layout: PagedLayout,
    config: SchedulerConfig,
    available_bytes: int,
    beside: Sequence[PagedLayout] = (),
) -> int:
    """The number of blocks that may lie outside the cache; 0 where none are to.

    available_bytes: what is free beside the cache. beside: caches whose blocks are swapped along.
    Raises OutOfCacheError when `config.swap_space` is more than there is, or when
    `preemption_mode="swap"` would have no room for a single block.
    """
    if config.preemption_mode == "recompute" or layout.recent_window or layout.states is not None:
        return 0  # what lies in a window or a state can't be swapped out: that is refused
    size = _Caches((layout, *beside)).bytes_per_block
    if config.swap_space is None:
        budget = min(SWAP_BYTES, int(available_bytes * SWAP_FRACTION))
    else:
        budget = int(config.swap_space * (1 << 30))
        if budget > available_bytes:
            raise OutOfCacheError(
                f"swap_space={config.swap_space} is {_mib(budget)}, but {_mib(available_bytes)} "
                "are free beside the cache. Lower it."
            )
    if config.preemption_mode == "swap" and budget < size:
        raise OutOfCacheError(
            f"preemption_mode='swap' needs room for a block of {_mib(size)} at least, but the swap "
            f"space has {_mib(budget)}. Raise swap_space, or set preemption_mode='recompute'."
        )
    return budget // size


def _mib(size: int) -> str:
    if size < 1 << 20:
        return f"{size / (1 << 10):.1f} KiB"
    return f"{size / (1 << 20):,.1f} MiB"
