"""Tests of whole engines over Triton's kernels, interpreted.

The kernels are chosen when penstock is imported, so these run in a process of their own:
`tests/engine/test_interpreted.py` starts it. Elsewhere they aren't collected.
"""

from __future__ import annotations

import inspect
import os
from typing import Any


def remember_shapes() -> None:
    """The interpreter checks, names and wraps the shape of every value; here each shape once."""
    from triton.language import core, semantic

    check, broadcast = core.block_type.__init__, semantic.TritonSemantic.broadcast_impl_value
    types = dict[tuple[Any, ...], dict[str, Any]]()
    shapes: dict[tuple[int, ...], Any] = {(): (core.tuple([]), core.constexpr(1))}

    sizes_of = dict[int, tuple[int, ...]]()  # of those in `shapes`

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of.get(id(shape))
        if sizes is None:
            sizes = tuple([getattr(size, "value", size) for size in shape])
        known = types.get((element_ty.name, sizes))
        if known is None:
            check(self, element_ty, shape)
            values = core.tuple([core.constexpr(size) for size in sizes])
            of_values = shapes.setdefault(sizes, (values, core.constexpr(self.numel)))
            sizes_of[id(of_values[0])] = sizes
            known = types[element_ty.name, sizes] = {**vars(self), "of_values": of_values}
        self.__dict__ = dict(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if type.is_block() else shapes[()]

    def alike(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    semantic.TritonSemantic.broadcast_impl_value = alike


def remember_types() -> None:
    """It finds out anew for every operation which type its result has, and whether types are the
    same that are one object."""
    from triton.language import core, semantic

    one = semantic.TritonSemantic
    check, cast, found = (
        one.binary_op_type_checking_impl, one.cast, one.computation_type_impl
    )  # fmt: skip
    compare, results = core.dtype.__eq__, dict[tuple[Any, ...], Any]()
    constants = dict[tuple[Any, ...], Any]()  # beside values of a type and shape

    def checked(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> Any:
        divides = len(how) > 3 or "div_or_mod" in more  # which has rules of its own
        if divides or type(lhs) is not core.tensor or lhs.dtype.is_ptr():
            return check(self, lhs, rhs, *how, **more)
        kind = type(rhs)
        if kind is core.tensor:
            if lhs.dtype is rhs.dtype and lhs.shape is rhs.shape:
                return lhs, rhs
        elif kind is int or kind is float:
            key = rhs, kind, lhs.dtype.name, id(lhs.shape), how, *more.items()
            if key in constants:
                return lhs, constants[key]
            one, other = check(self, lhs, rhs, *how, **more)
            if one is lhs:  # so it has that type and shape, too; nobody writes into it
                constants[key] = other
            return one, other
        return check(self, lhs, rhs, *how, **more)

    def unless_same(self: Any, value: Any, to: Any, *how: Any) -> Any:
        return value if value.dtype is to.scalar else cast(self, value, to, *how)

    def type_of_both(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, div
        if key not in results:
            results[key] = found(self, a, a_scalar, b, b_scalar, div)
        return results[key]

    def equal(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    one.binary_op_type_checking_impl, one.cast = checked, unless_same
    one.computation_type_impl, core.dtype.__eq__ = type_of_both, equal


def remember_language() -> None:
    """It looks through the whole language at every launch for what to put in place of it."""
    from triton.language import core
    from triton.runtime import interpreter

    members = dict[int, list[tuple[str, Any]]]()

    def attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, called)

    def builtins(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in members:
            every = inspect.getmembers(package)
            members[id(package)] = [(k, v) for k, v in every if core.is_builtin(v)]
        for name, member in members[id(package)]:
            attribute(package, name, member, builder, scope)

    interpreter._patch_attr, interpreter._patch_builtin = attribute, builtins


if os.environ.get("PENSTOCK_KERNELS") == "triton":
    from penstock.kernels.triton import linear_tiles

    # what is interpreted takes as long for a tile of 256 features as for one of 64
    wide = {bucket: (256, *tile[1:]) for bucket, tile in linear_tiles._table.items()}
    linear_tiles.override(wide)
    remember_shapes()
    remember_types()
    remember_language()

collect_ignore_glob = [] if os.environ.get("PENSTOCK_KERNELS") == "triton" else ["test_*.py"]
