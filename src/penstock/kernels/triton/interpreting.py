"""What Triton's interpreter needs to run these kernels, and to run them in a test's time.

It keeps scalars in arrays of one element, which NumPy 2.4 no longer takes for a loop's end. At
every call of a function inside a kernel it looks through the whole language for what its own
functions have to stand for, though they do already. It checks each sum of integers for overflow by
computing it once more. NumPy warns where a GPU just has infinities. It cuts float32 off where it
should round to bfloat16, and loses the carry where it rounds to E4M3. It multiplies tiles that the
compiler refuses. And its products are a BLAS's, which on some CPUs adds in another order for other
numbers of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_LANGUAGES = (tl, core)
_LEAST_PRODUCT = (1, 1, 16)
"""Rows, columns and depth of the smallest product of tiles that the compiler takes for a GPU."""

_FLOATS = {np.dtype(np.float16), np.dtype(np.float32)}


def prepare() -> None:
    """Once, before a kernel runs."""
    _count_by_scalars()
    interpreter.InterpretedFunction.__call__ = _call
    _remember_types()
    launch = interpreter.InterpretedFunction.run

    def quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("launch_pdl", None)  # of a GPU
        with np.errstate(all="ignore"):
            launch(self, *args, **kwargs)

    interpreter.InterpretedFunction.run = quietly
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    builder.codegen_fns["min_dot_size"] = lambda *_: _LEAST_PRODUCT
    _round_to_nearest(builder)
    _add_in_float64(builder)


def _remember_types() -> None:
    """NumPy's for each of Triton's: else a table of all is made for every value."""
    find = interpreter._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def found(dtype: Any) -> np.dtype[Any]:
        element = dtype.scalar
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    interpreter._get_np_dtype = found


def _count_by_scalars() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _round_to_nearest(builder: Any) -> None:
    """As a GPU rounds and as torch does, to nearest, ties to even; to bfloat16 from any number."""
    cast, between = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(x: Any, to: Any) -> Any:
        if to.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_bfloat16(x.data.astype(np.float32)), tl.bfloat16)
        if (x.dtype.scalar, to.scalar) == (tl.bfloat16, tl.float32):
            wide = (x.data.astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(wide, tl.float32)
        return cast(x, to)

    def create_fp_to_fp(x: Any, to: Any, rounding: Any) -> Any:
        if (x.dtype.scalar, to.scalar) == (tl.float32, tl.float8e4nv):
            return interpreter.TensorHandle(_e4m3(x.data), tl.float8e4nv)
        return between(x, to, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _bfloat16(x: Any) -> Any:
    bits = x.view(np.uint32)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, upper).astype(np.uint16)


def _e4m3(x: Any) -> Any:
    """Finite values beyond 448 become it, as a GPU's own instruction has it."""
    inside = torch.from_numpy(np.clip(x, -448.0, 448.0))
    bits = inside.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return np.where(np.isnan(x), 0x7F, bits).astype(np.uint8)


def _add_in_float64(builder: Any) -> None:
    """Products of floats are summed in float64 and rounded once: the order is then lost in it."""
    dot = builder.create_dot

    def create_dot(a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype != np.float32 or not {a.data.dtype, b.data.dtype} <= _FLOATS:
            return dot(a, b, d, *how)
        found = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(found.astype(np.float32), d.dtype.scalar)

    builder.create_dot = create_dot


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A function inside a kernel; mostly the kernel's launch has prepared the language for both."""
    if any(core.is_builtin(language.load) for language in _languages(function.fn)):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


@cache
def _languages(function: Any) -> list[Any]:
    """Those of a function's globals that are Triton's language."""
    return [one for one in function.__globals__.values() if any(one is each for each in _LANGUAGES)]
