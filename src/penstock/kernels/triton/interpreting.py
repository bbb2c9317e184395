"""What Triton's interpreter needs to run these kernels, and to run them in a test's time.

It keeps scalars in arrays of one element, which NumPy 2.4 no longer takes for a loop's end. At
every call of a function inside a kernel it looks through the whole language for what its own
functions have to stand for, though they do already. It checks each sum of integers for overflow by
computing it once more. NumPy warns where a GPU just has infinities. It multiplies tiles that the
compiler refuses. And its products are a BLAS's, which on some CPUs adds in another order for other
numbers of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
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
    launch = interpreter.InterpretedFunction.run

    def quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            launch(self, *args, **kwargs)

    interpreter.InterpretedFunction.run = quietly
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    builder.codegen_fns["min_dot_size"] = lambda *_: _LEAST_PRODUCT
    _add_in_float64(builder)


def _count_by_scalars() -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


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
    languages = [
        each for each in function.fn.__globals__.values() if any(each is one for one in _LANGUAGES)
    ]
    if any(core.is_builtin(language.load) for language in languages):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)
