"""The key-value cache: who holds which block, what is in it, and how it lies in memory."""

from penstock.cache.blocks import BlockPool
from penstock.cache.kv_dtype import kv_dtype, kv_name
from penstock.cache.layouts import (
    PagedLatents,
    PagedLayout,
    PagedRows,
    StateCache,
    StateLayout,
    any_part,
    block_rows,
    copy_blocks,
    holds_states,
)
from penstock.cache.pins import PinnablePool, Pins
from penstock.cache.prefix_tree import NO_PREFIXES, Node, PrefixTree
from penstock.cache.recent import RecentBlocks, most_recent_blocks, recent_blocks
from penstock.cache.swap import SwapSpace, SwapStore

__all__ = [
    "NO_PREFIXES",
    "BlockPool",
    "Node",
    "PagedLatents",
    "PagedLayout",
    "PagedRows",
    "PinnablePool",
    "Pins",
    "PrefixTree",
    "RecentBlocks",
    "StateCache",
    "StateLayout",
    "SwapSpace",
    "SwapStore",
    "any_part",
    "block_rows",
    "copy_blocks",
    "holds_states",
    "kv_dtype",
    "kv_name",
    "most_recent_blocks",
    "recent_blocks",
]
