"""Where keys and values lie in memory: one file for each layout."""

from penstock.cache.layouts.paged import PagedLayout, PagedRows, block_rows, copy_blocks

__all__ = ["PagedLayout", "PagedRows", "block_rows", "copy_blocks"]
