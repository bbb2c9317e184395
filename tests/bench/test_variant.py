"""Variants in words, and the environment of a process that runs one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.variant import Variant, parse_options
from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.kernels.load import ISAS


@pytest.mark.parametrize(
    ("words", "variant"),
    [
        ("stories", Variant()),
        ("stories:", Variant()),
        ("org/name:w4a8-g64", Variant("org/name", "w4a8-g64")),
        ("x:kv=int8,eager", Variant("x", kv_cache_dtype="int8", eager=True)),
        ("x:float32", Variant("x", dtype="float32")),
        ("x:half", Variant("x", dtype="float16", kernels="reference")),
        ("x:dtype=float", Variant("x", dtype="float32")),
        ("x:dtype=bfloat16, isa=avx2", Variant("x", dtype="bfloat16", isa="avx2")),
        (":kernels=reference", Variant("first", kernels="reference")),
        (":", Variant("first")),
    ],
)
def test_words(words: str, variant: Variant) -> None:
    got = Variant.parse(words, "first")
    assert got == variant
    assert Variant.parse(str(got)) == got


def test_a_path_may_have_a_colon(tmp_path: Path) -> None:
    folder = tmp_path / "model:w4a8"
    folder.mkdir()
    assert Variant.parse(str(folder)) == Variant(str(folder))
    assert Variant.parse(f"{folder}:w8a8") == Variant(str(folder), "w8a8")


def test_options_replace_those_chosen() -> None:
    chosen = Variant("x", "w4a8", kv_cache_dtype="int8", dtype="bfloat16")
    assert chosen.with_options("w8a8") == Variant("x", "w8a8", "int8", "bfloat16")
    assert chosen.with_options("kv=fp8") == Variant("x", None, "fp8", "bfloat16")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (":w4a8", "names no model"),
        ("", "names no model"),
        ("w4a8", "is a form, not a model. Write MODEL:w4a8"),
        ("x:w3a1", "'w3a1' isn't an option"),
        ("x:cache=int8", "those with a value are dtype=, kv=, isa=, kernels="),
        ("x:kv=", "has no value"),
        ("x:dtype=int7", "isn't one of auto, float32, bfloat16, float16, tf32 (or float, half)."),
        ("x:dtype=tf23", "Did you mean 'tf32'?"),
        ("x:w4a8,w8a8", "says quantization twice"),
        ("x:isa=avx3", "isn't one of avx2, avx512, avx512-bf16, amx, amx-emulated. Did"),
        ("x:kernels=fast", "isn't one of native, reference"),
        ("x:kernels=reference,isa=avx2", "Leave one of them out"),
    ],
)
def test_what_is_refused(words: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Variant.parse(words)
    assert why in str(caught.value)


def test_nothing_is_no_option() -> None:
    assert parse_options("") == {} == parse_options(" , ")
    with pytest.raises(ConfigError, match="can't be empty"):
        Variant.parse("", "first")


def test_the_environment_of_its_process() -> None:
    base = {"PATH": "p", "PENSTOCK_ISA": "avx512", "PENSTOCK_KERNELS": "native"}
    assert Variant().environment(base) == base
    assert Variant(kernels="reference").environment(base) == {
        "PATH": "p", "PENSTOCK_KERNELS": "reference"
    }  # fmt: skip
    assert Variant(isa="avx2").environment({"PENSTOCK_KERNELS": "reference"}) == {
        "PENSTOCK_KERNELS": "native", "PENSTOCK_ISA": "avx2"
    }  # fmt: skip


def test_what_this_process_runs() -> None:
    assert Variant().here
    assert Variant(kernels="native").here == (native.handle is not None)
    assert Variant(kernels="reference").here == (native.handle is None)
    isas = [isa for isa in ISAS if Variant(isa=isa).here]
    assert isas == ([] if native.handle is None else [native.isa])
