"""Tests of whole engines over Triton's kernels, interpreted.

The kernels are chosen when penstock is imported, so these run in a process of their own:
`tests/engine/test_interpreted.py` starts it. Elsewhere they aren't collected.
"""

from __future__ import annotations

import os
from typing import Any


def remember_shapes() -> None:
    """The interpreter checks, names and wraps the shape of every value; here each shape once."""
    from triton.language import core, semantic

    check, broadcast = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    types = dict[tuple[Any, ...], dict[str, Any]]()
    shapes: dict[tuple[int, ...], Any] = {(): (core.tuple([]), core.constexpr(1))}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        known = types.get((str(element_ty), sizes))
        if known is None:
            check(self, element_ty, shape)
            values = core.tuple([core.constexpr(size) for size in sizes])
            of_values = shapes.setdefault(sizes, (values, core.constexpr(self.numel)))
            known = types[str(element_ty), sizes] = {**vars(self), "of_values": of_values}
        vars(self).update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if type.is_block() else shapes[()]

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    semantic.TritonSemantic.broadcast_impl_value = alike


if os.environ.get("PENSTOCK_KERNELS") == "triton":
    from penstock.kernels.triton import linear_tiles

    # what is interpreted takes as long for a tile of 256 features as for one of 64
    wide = {bucket: (256, *tile[1:]) for bucket, tile in linear_tiles._table.items()}
    linear_tiles.override(wide)
    remember_shapes()

collect_ignore_glob = [] if os.environ.get("PENSTOCK_KERNELS") == "triton" else ["test_*.py"]
