"""The native CPU library: found, loaded, told which instruction set to use, and reported.

Environment:
    PENSTOCK_KERNELS   `native` (default), `reference`: run every operator's Python reference, or
                       `triton`: interpret the kernels of GPUs (`kernels.gpu`)
    PENSTOCK_ISA       `avx2`, `avx512`, `avx512-bf16`, `amx`, or `amx-emulated` (AMX's code with
                       its tiles in software, for tests); unset: the best that this machine has
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import ops
from penstock.errors import KernelError, nearest
from penstock.hardware import detect
from penstock.kernels.gpu import interpreting

ISAS = ("avx2", "avx512", "avx512-bf16", "amx", "amx-emulated")

TILE_MIN_ROWS = 4
"""Fewer rows are multiplied by vectors even where there is AMX (csrc/cpu/dispatch.cpp)."""

logger = logging.getLogger("penstock")

_HAS_VECTORS = {"avx2", "fma", "f16c"} <= set(detect().flags)


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library, or why there is none."""

    handle: ctypes.CDLL | None
    reason: str  # why it isn't used; empty when it is

    @property
    def isa(self) -> str | None:
        """The instruction set in use."""
        if self.handle is None:
            return None
        name: bytes | None = self.handle.penstock_isa()
        return name.decode() if name else None

    def available_isas(self) -> list[str]:
        """The instruction sets that this machine can run, the best one last but emulation."""
        handle = self.handle
        if handle is None:
            return []
        return [isa for isa in ISAS if handle.penstock_isa_available(isa.encode())]

    def select_isa(self, name: str | None) -> None:
        """Use the kernels for `name`, or the best for None. Not while kernels run."""
        if self.handle is None:
            raise KernelError(f"There is no native library to select {name!r} in: {self.reason}")
        code = self.handle.penstock_select_isa((name or "").encode())
        if code == 1:
            raise KernelError(
                f"PENSTOCK_ISA={name!r} isn't one of {', '.join(ISAS)}.{nearest(str(name), ISAS)}"
            )
        if code == 2:
            raise KernelError(
                f"This CPU can't run {name or 'any of the native kernels'}; "
                f"it can run: {', '.join(self.available_isas()) or 'the reference'}."
            )

    @property
    def allocations(self) -> int:
        """How often kernels and programs have taken memory from the system; results aren't counted,
        which are torch's. In steps of sizes that there have been it stays what it is."""
        return 0 if self.handle is None else int(self.handle.penstock_allocations())

    def read_bandwidth(self, buffer: torch.Tensor, threads: int) -> float:
        """Bytes per second of one pass of `threads` threads over a float32 buffer."""
        assert self.handle is not None
        size = buffer.numel() * buffer.element_size()
        return float(self.handle.penstock_read_bandwidth(buffer.data_ptr(), size, threads))

    def matrix_peak(self, rounds: int, threads: int, tiles: bool) -> float:
        """FLOPs per second: float32 FMA, or bfloat16 AMX tiles fed from L1 (0 without AMX)."""
        assert self.handle is not None
        return float(self.handle.penstock_matrix_peak(rounds, threads, int(tiles)))

    def dot_peak(self, rounds: int, threads: int) -> float:
        """FLOPs per second: bfloat16 by vdpbf16ps, out of registers (0 without it)."""
        assert self.handle is not None
        return float(self.handle.penstock_dot_peak(rounds, threads))

    def int8_peak(self, rounds: int, threads: int, tiles: bool) -> float:
        """int8 operations per second, two a multiply-add: by vectors out of registers (as w8a8
        multiplies), or AMX tiles fed from L1 (0 without AMX).
        """
        assert self.handle is not None
        return float(self.handle.penstock_int8_peak(rounds, threads, int(tiles)))

    def int4_peak(self, rounds: int, threads: int, tiles: bool) -> float:
        """The same of int8 by int4 (as w4a8 multiplies), which AVX2 has a shorter way for."""
        assert self.handle is not None
        return float(self.handle.penstock_int4_peak(rounds, threads, int(tiles)))


def _find() -> Path | None:
    """The library beside this file, or where an editable install has put it."""
    package = sys.modules[__package__]
    for folder in (Path(__file__).parent, *map(Path, package.__path__)):
        if (folder / "_native.so").exists():
            return folder / "_native.so"
    return None


def _declare(handle: ctypes.CDLL) -> None:
    handle.penstock_isa.restype = ctypes.c_char_p
    handle.penstock_allocations.restype = ctypes.c_int64
    handle.penstock_select_isa.argtypes = [ctypes.c_char_p]
    handle.penstock_isa_available.argtypes = [ctypes.c_char_p]
    handle.penstock_read_bandwidth.restype = ctypes.c_double
    handle.penstock_read_bandwidth.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    peaks = (handle.penstock_matrix_peak, handle.penstock_int8_peak, handle.penstock_int4_peak)
    for peak in peaks:
        peak.restype = ctypes.c_double
        peak.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    handle.penstock_dot_peak.restype = ctypes.c_double
    handle.penstock_dot_peak.argtypes = [ctypes.c_int64, ctypes.c_int]


def load() -> NativeLibrary:
    """Load the native library, unless PENSTOCK_KERNELS or its absence says otherwise."""
    wanted = os.environ.get("PENSTOCK_KERNELS", "native")
    if wanted not in ("native", "reference", "triton"):
        raise KernelError(f"PENSTOCK_KERNELS={wanted!r} isn't one of native, reference, triton.")
    if wanted != "native" and os.environ.get("PENSTOCK_ISA"):
        raise KernelError(
            f"PENSTOCK_ISA={os.environ['PENSTOCK_ISA']} chooses among native kernels, but "
            f"PENSTOCK_KERNELS={wanted} runs none. Unset one of them."
        )
    if wanted != "native":
        return NativeLibrary(None, f"PENSTOCK_KERNELS={wanted}")
    path = _find()
    if path is None:
        reason = (
            "the native library wasn't built (no C++ compiler at installation, or not x86-64); "
            "install g++ and reinstall"
        )
        logger.warning("Running the reference kernels, which are slow: %s.", reason)
        return NativeLibrary(None, reason)
    if not _HAS_VECTORS:
        reason = "this CPU has no AVX2 and FMA"
        logger.warning("Running the reference kernels, which are slow: %s.", reason)
        return NativeLibrary(None, reason)
    try:
        torch.ops.load_library(str(path))
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(
            f"{path} can't be loaded: {error}. Reinstall penstock, or set "
            "PENSTOCK_KERNELS=reference to run without it."
        ) from error
    _declare(handle)
    library = NativeLibrary(handle, "")
    library.select_isa(os.environ.get("PENSTOCK_ISA"))
    return library


native = load()


BY_TORCH = {
    "combine": "on a CPU part of experts",
    "grouped_linear": "on a CPU part of experts",
    "route": "on a CPU part of experts",
    "sort_tokens": "on a CPU part of experts",
}
"""Operators without a native kernel of their own, and why that isn't slow."""


def _vectors() -> str:
    """The vectors that stand beside the products in use, or alone."""
    beside = {"amx": "avx512", "avx512-bf16": "avx512", "amx-emulated": "avx2"}
    return beside.get(native.isa or "", native.isa or "none")


def _has_tiles() -> bool:
    return native.isa in ("amx", "amx-emulated")


def _code_of(name: str) -> str:
    """The instruction set of an operator's kernel: only products have their own beside vectors."""
    if name not in ("linear", "linear_add_", "paged_attention", "ring_attention"):
        return _vectors()
    if _has_tiles():
        return f"{native.isa} from {TILE_MIN_ROWS} rows (not of float32), else {_vectors()}"
    return native.isa or "none"


def report_linear() -> list[tuple[str, str, str]]:
    """(weights, what multiplies fewer than TILE_MIN_ROWS rows, and more) of the native `linear`.

    Activations are bfloat16; those of float32 take the vectors at any number of rows. Every scheme
    (`quant.scheme`) is in one row, whatever shares its scales.
    """
    if native.handle is None:
        return []
    fma = "vfmadd231ps"
    int8 = "vpdpbusd" if _vectors() == "avx512" else "vpmaddubsw, vpmaddwd"
    tiles = _has_tiles()
    few, many = fma, "tdpbf16ps" if tiles else fma
    look = "looked up by vpermps, vpermw" if _vectors() == "avx512" else "looked up by vpermps"
    float32, looked_up = f"widened to float32, {fma}", f"{look}, {fma}"
    widened, levels = float32, looked_up
    wide, k_quants = "widened to bfloat16", ("q4_k", "q5_k", "q6_k", "mixed_k")
    if tiles:
        widened, levels = f"widened to bfloat16, {many}", f"{look}, {many}"
    elif native.isa == "avx512-bf16":
        few = many = "vdpbf16ps"
        float32 = widened = f"widened to bfloat16, {many}"
        looked_up = levels = f"{look}, {many}"
    by_table = looked_up, levels
    return [
        ("float32", fma, fma),
        ("bfloat16", few, many),
        ("w8a16", float32, widened),
        ("w4a16", *(by_table if _vectors() == "avx512" else (float32, widened))),
        ("fp8, fp8-w8a8, fp8-e5m2", float32, widened),
        ("nf4, mxfp4, nvfp4", *by_table),
        ("w8a8", int8, "tdpbssd" if tiles else int8),
        ("w4a8", int8, "widened to int8, tdpbssd (from 9 rows)" if tiles else int8),
        (", ".join(f"{kind}-a16" for kind in k_quants), f"{wide}, {few}", f"{wide}, {many}"),
        (
            ", ".join(f"{kind}-a8" for kind in k_quants),
            int8,
            "made two bytes, tdpbsud, tdpbssd (from 8 rows)" if tiles else int8,
        ),
    ]


def report_cache() -> list[tuple[str, str, str, str]]:
    """(kv_cache_dtype, the activations it goes with, what runs, how) of keys and values.

    Their operators are `rotary_cache`, which writes them, and `paged_attention`, which reads them.
    """
    names = ("rotary_cache", "paged_attention")
    runs = "native, " + _code_of("paged_attention")
    if not all(map(ops.has_native, names)):
        runs = f"reference: {native.reason or 'no native kernel'}"
    widened = "widened to bfloat16"
    rows = [
        ("bfloat16", "bfloat16", "multiplied as it is"),
        ("float32", "float32", "multiplied as it is"),
        ("int8", "bfloat16", f"{widened}; scales go into scores, weights"),
        ("fp8", "bfloat16", widened),
        ("int4", "bfloat16", f"{widened}, with step and minimum"),
        ("kivi", "bfloat16", "as int4; the latest tokens as bfloat16"),
    ]
    vectors = f"native, {_vectors()}" if runs.startswith("native") else runs
    return [
        (name, beside, vectors if beside == "float32" else runs, how) for name, beside, how in rows
    ]


_FOR_GPUS = {
    "draw_beyond": "a CPU is asked which rows need it, and sorts those",
    "linear_unordered": "a CPU's linear has one order, which is its fastest",
    "linear_unordered_add_": "a CPU's linear has one order, which is its fastest",
}
"""Operators that steps on a CPU don't call."""


def _interpreted(name: str) -> tuple[str, str]:
    """What runs where Triton's kernels are interpreted, and why."""
    from penstock.kernels import triton

    if name in triton.launchers():
        return "Triton, interpreted", "PENSTOCK_KERNELS=triton"
    return "by torch", "no Triton kernel for this operator"


def report() -> list[tuple[str, str, str]]:
    """(operator, what runs, why) for every operator on the CPU."""
    forced = os.environ.get("PENSTOCK_ISA")
    why = f"PENSTOCK_ISA={forced}" if forced else "best this CPU has"
    rows = []
    for name in ops.op_names():
        if interpreting():
            rows.append((name, *_interpreted(name)))
        elif ops.has_native(name):
            rows.append((name, f"native, {_code_of(name)}", why))
        elif native.handle is None:
            rows.append((name, "reference", native.reason))
        elif hasattr(torch.ops.penstock, f"program_{name}"):
            rows.append((name, "native in programs", "a copy; one by one by torch"))
        elif name in _FOR_GPUS:
            rows.append((name, "on GPUs only", _FOR_GPUS[name]))
        elif name in BY_TORCH:
            rows.append((name, "by torch", BY_TORCH[name]))
        else:
            rows.append((name, "reference", "no native kernel for this operator"))
    return rows
