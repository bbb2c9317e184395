"""Where keys and values lie in memory: one file for each layout."""

from penstock.cache.layouts.paged import PagedLayout, PagedRows, copy_blocks

__all__ = ["PagedLayout", "PagedRows", "copy_blocks"]
