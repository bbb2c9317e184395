"""What loads, what is said when it can't, and what the environment may choose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import ops
from penstock.errors import KernelError
from penstock.kernels import native, report, report_linear
from penstock.kernels.load import BY_TORCH, TILE_MIN_ROWS, NativeLibrary
from penstock.quant import SCHEMES

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_native
def test_every_operator_runs_natively() -> None:
    assert [name for name, what, _ in report() if what == "reference"] == []
    assert [name for name, what, _ in report() if what == "by torch"] == sorted(BY_TORCH)
    assert {name for name, _, _ in report()} == set(ops.op_names())
    assert set(ops.implementations("linear")) == {"reference", "native"}


@needs_native
def test_isa_is_chosen_by_the_environment() -> None:
    code = "from penstock.kernels import native; print(native.isa)"
    assert run(code, PENSTOCK_ISA="avx2").stdout.strip() == "avx2"
    best = [isa for isa in native.available_isas() if isa != "amx-emulated"][-1]
    assert run(code, PENSTOCK_ISA="").stdout.strip() == best


@needs_native
def test_unknown_isa_names_the_nearest() -> None:
    with pytest.raises(KernelError, match="Did you mean 'avx512'"):
        native.select_isa("avx-512")


@needs_native
@pytest.mark.skipif("amx" in native.available_isas(), reason="this CPU has AMX")
def test_isa_that_the_cpu_lacks() -> None:
    before = native.isa
    with pytest.raises(KernelError, match="This CPU can't run amx; it can run: avx2"):
        native.select_isa("amx")
    assert native.isa == before


@needs_native
@pytest.mark.parametrize("isa", native.available_isas())
def test_linear_is_reported_as_it_runs(isa: str) -> None:
    before = native.isa
    native.select_isa(isa)
    try:
        runs = {name: runs for name, runs, _ in report()}
        rows = {weights: (few, many) for weights, few, many in report_linear()}
    finally:
        native.select_isa(before)
    tiles = isa.startswith("amx")
    for name in ("linear", "linear_add_", "paged_attention"):
        assert ("from 4 rows" in runs[name]) == tiles
    assert "from 4 rows" not in runs["rms_norm"]
    few = "vpmaddubsw, vpmaddwd" if isa in ("avx2", "amx-emulated") else "vpdpbusd"
    assert rows["w8a8"] == (few, "tdpbssd" if tiles else few)
    assert rows["float32"] == ("vfmadd231ps", "vfmadd231ps")
    product = "vdpbf16ps" if isa == "avx512-bf16" else "tdpbf16ps" if tiles else "vfmadd231ps"
    assert rows["bfloat16"][1] == product and rows["w8a16"][1].endswith(product)
    assert rows["nf4, mxfp4, nvfp4"][1].endswith(product)
    assert ("looked up" in rows["w4a16"][0]) == (isa not in ("avx2", "amx-emulated"))
    assert runs["linear"].startswith(f"native, {isa}")
    assert (runs["rms_norm"] == runs["linear"]) == (isa in ("avx2", "avx512"))
    named = {name for row in rows for name in row.split(", ")}
    k_quants = {f"{k}-a{b}" for k in ("q4_k", "q5_k", "q6_k", "mixed_k") for b in (8, 16)}
    assert named == {*SCHEMES, "float32", "bfloat16", *k_quants}


def test_the_rows_from_which_tiles_run_are_the_library_s() -> None:
    source = Path(__file__).parents[2] / "csrc" / "cpu"
    assert f"kTileMinRows = {TILE_MIN_ROWS};" in (source / "dispatch.cpp").read_text()
    assert f"kTileMinRows = {TILE_MIN_ROWS};" in (source / "attention_tiles.h").read_text()


def test_reference_on_request() -> None:
    code = (
        "from penstock.kernels import native, report\n"
        "print(native.isa, native.reason, {what for _, what, _ in report()})"
    )
    out = run(code, PENSTOCK_KERNELS="reference").stdout
    assert out.strip() == "None PENSTOCK_KERNELS=reference {'reference'}"


def test_an_isa_without_native_kernels_is_refused() -> None:
    failed = run("import penstock.kernels", PENSTOCK_KERNELS="reference", PENSTOCK_ISA="avx2")
    assert "PENSTOCK_ISA=avx2 chooses among native kernels" in failed.stderr


def test_unknown_kernels_are_refused() -> None:
    failed = run("import penstock.kernels", PENSTOCK_KERNELS="fast")
    assert "PENSTOCK_KERNELS='fast' isn't one of native, reference" in failed.stderr


def test_without_a_library_selecting_says_why() -> None:
    with pytest.raises(KernelError, match="wasn't built"):
        NativeLibrary(None, "it wasn't built").select_isa("avx2")
    assert NativeLibrary(None, "it wasn't built").available_isas() == []
