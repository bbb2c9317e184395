"""Where keys and values lie in memory, one file a layout."""

from penstock.cache.layouts.latent import PagedLatents
from penstock.cache.layouts.paged import PagedLayout, PagedRows, any_part, block_rows, copy_blocks
from penstock.cache.layouts.states import StateCache, StateLayout, holds_states

__all__ = [
    "PagedLatents",
    "PagedLayout",
    "PagedRows",
    "StateCache",
    "StateLayout",
    "any_part",
    "block_rows",
    "copy_blocks",
    "holds_states",
]
