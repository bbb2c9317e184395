"""AWQ, GPTQ, FP8, bitsandbytes and MXFP4, from tensors that code beside ours has made.

AWQ and GPTQ are packed here by loops over their specifications; the rest by the packages that own
the layout: bitsandbytes, and transformers' dequantization of FP8 and MXFP4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant import Codes
from penstock.quant.files import METHODS, find_matrices
from tests.quant.files.made import Memory, check_same, random_codes

N, K = 24, 128


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """One int32 word for each 32 / bits unsigned integers of a list, lowest bits first."""
    per = 32 // bits
    out = [
        sum(int(v) << (bits * i) for i, v in enumerate(fields[at : at + per]))
        for at in range(0, len(fields), per)
    ]
    return np.array(out, dtype=np.uint32).view(np.int32)


def stream(fields: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers as one stream of bits, lowest first, in int32 words."""
    whole = sum(int(v) << (bits * i) for i, v in enumerate(fields))
    count = -(-len(fields) * bits // 32)
    return np.frombuffer(whole.to_bytes(count * 4, "little"), dtype=np.int32).copy()


def down(matrix: np.ndarray, pack: Any, bits: int) -> Tensor:
    """Each column packed from the top."""
    return torch.from_numpy(np.stack([pack(column, bits) for column in matrix.T], 1))


def across(matrix: np.ndarray, pack: Any, bits: int) -> Tensor:
    """Each row packed from the left."""
    return torch.from_numpy(np.stack([pack(row, bits) for row in matrix]))


def awq(group: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, np.ndarray]:
    """A module `a` in AutoAWQ's gemm layout and its matrix [N, K]."""
    random = np.random.default_rng(seed)
    groups = K // group
    code, zero = random.integers(0, 16, (K, N)), random.integers(0, 16, (groups, N))
    scale = torch.from_numpy(random.uniform(0.01, 0.1, (groups, N))).half()

    def interleave(row: np.ndarray, bits: int) -> np.ndarray:  # awq/utils/packing_utils.py
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        eights = [row[at : at + 8] for at in range(0, len(row), 8)]
        return words(np.concatenate([eight[order] for eight in eights]), bits)

    stored = {
        "a.qweight": across(code, interleave, 4),
        "a.qzeros": across(zero, interleave, 4),
        "a.scales": scale,
    }
    of = np.arange(K) // group
    matrix = torch.from_numpy(code - zero[of]).float() * scale.float()[of]
    return stored, matrix.T.contiguous(), code


@pytest.mark.parametrize("group", [32, 64, 128])
def test_awq(group: int) -> None:
    stored, want, code = awq(group)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    found = find_matrices({**config, "version": "gemm"}, Memory(stored))
    read = found.matrices["a.weight"].read()
    assert isinstance(read, Codes)
    assert read.scheme.name == f"w4a16-g{group}-asym"
    assert torch.equal(read.values, torch.from_numpy(code.T.astype(np.uint8)))
    assert torch.equal(read.dequantize(), want)


def test_awq_in_groups_without_a_kernel() -> None:
    stored, want, _ = awq(16)
    found = find_matrices({"quant_method": "awq", "group_size": 16}, Memory(stored))
    assert found.matrices["a.weight"].scheme is None
    assert torch.equal(found.matrices["a.weight"].read(), want)  # type: ignore[arg-type]
    assert any("groups of 16 have no kernel" in text for text in found.notices)


def test_awq_without_zero_points() -> None:
    stored, _, code = awq(64)
    config = {"quant_method": "awq", "group_size": 64, "zero_point": False}
    with pytest.raises(WeightsError, match=r"a\.qzeros: zero_point is false, but \d+ zero points"):
        find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    stored["a.qzeros"].fill_(0x88888888 - (1 << 32))
    read = find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    assert isinstance(read, Codes)
    assert read.scheme.name == "w4a16-g64"
    scale = stored["a.scales"].float().repeat_interleave(64, 0)
    assert torch.equal(read.dequantize(), ((torch.from_numpy(code) - 8) * scale).T)


def gptq(
    bits: int, group: int, version: str, *, symmetric: bool = False, order: bool = False
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """A module `a` in AutoGPTQ's layout, its matrix [N, K], and the config."""
    random = np.random.default_rng(bits + group)
    n, size = 32, group if group > 0 else K
    count, top = K // size, 2**bits
    code, zero = random.integers(0, top, (K, n)), random.integers(0, top, (count, n))
    if symmetric:
        zero[:] = top // 2
    scale = torch.from_numpy(random.uniform(0.01, 0.1, (count, n))).half()
    of = random.permutation(np.arange(K) // size) if order else np.arange(K) // size
    pack = stream if bits == 3 else words
    kept = (zero - 1) % top if version == "gptq" else zero
    stored = {
        "a.qweight": down(code, pack, bits),
        "a.qzeros": across(kept, pack, bits),
        "a.scales": scale,
        "a.g_idx": torch.from_numpy(of).int(),
    }
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": order, "checkpoint_format": version,
    }  # fmt: skip
    matrix = torch.from_numpy(code - zero[of]).float() * scale.float()[of]
    return stored, matrix.T.contiguous(), config


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "base"),
    [(4, 128, "w4a16-g128"), (4, 32, "w4a16-g32"), (4, -1, "w4a16-channel"),
     (8, -1, "w8a16"), (8, 64, "w8a16-g64")],
)  # fmt: skip
def test_gptq(bits: int, group: int, base: str, symmetric: bool, version: str) -> None:
    stored, want, config = gptq(bits, group, version, symmetric=symmetric)
    for tensors in (stored, {k: v for k, v in stored.items() if k != "a.g_idx"}):
        matrix = find_matrices(config, Memory(tensors)).matrices["a.weight"]
        read = matrix.read()
        assert isinstance(read, Codes)
        assert matrix.scheme == read.scheme
        assert read.scheme.name == base + ("" if symmetric else "-asym")
        assert torch.equal(read.dequantize(), want)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "group", "order", "says"),
    [(2, 64, False, "2 bits"), (3, 32, False, "3 bits"), (4, 16, False, "groups of 16"),
     (4, 32, True, "order of their groups"), (8, 64, True, "order of their groups")],
)  # fmt: skip
def test_gptq_that_is_widened(bits: int, group: int, order: bool, says: str, version: str) -> None:
    stored, want, config = gptq(bits, group, version, order=order)
    found = find_matrices(config, Memory(stored))
    matrix = found.matrices["a.weight"]
    assert matrix.scheme is None
    assert matrix.shape == (32, K)
    assert torch.equal(matrix.read(), want)  # type: ignore[arg-type]
    assert [text for text in found.notices if says in text]


def test_gptq_of_a_whole_row_has_no_order() -> None:
    stored, want, config = gptq(4, -1, "gptq", order=True)
    read = find_matrices(config, Memory(stored)).matrices["a.weight"].read()
    assert isinstance(read, Codes)
    assert torch.equal(read.dequantize(), want)


def test_gptq_with_bits_of_their_own() -> None:
    stored, want, config = gptq(4, 32, "gptq")
    eight, eight_want, _ = gptq(8, 64, "gptq")
    both = stored | {name.replace("a.", "m.down.", 1): t for name, t in eight.items()}
    own = {r"+:.*\.down": {"bits": 8, "group_size": 64}}
    found = find_matrices({**config, "dynamic": own}, Memory(both)).matrices
    assert torch.equal(found["a.weight"].read().dequantize(), want)  # type: ignore[union-attr]
    down_ = found["m.down.weight"].read()
    assert torch.equal(down_.dequantize(), eight_want)  # type: ignore[union-attr]
    with pytest.raises(WeightsError, match=r"dynamic leaves .* but m\.down is quantized"):
        find_matrices({**config, "dynamic": {r"-:.*\.down": {}}}, Memory(both))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("g_idx", lambda t: t + 1, "names groups 1 … 4, but 128 columns in groups of 32 have 4"),
        ("g_idx", lambda t: -t, "names groups -3 … 0"),
        ("qweight", lambda t: t[:-1], r"shape \[15, 32\], but its matrix needs \[16, 32\]"),
        ("qzeros", lambda t: t[:, :-1], r"shape \[4, 3\], but its matrix needs \[4, 4\]"),
        ("scales", lambda t: t[:-1], r"shape \[3, 32\], but its matrix needs \[4, 32\]"),
        ("scales", lambda t: t.clone().fill_(float("inf")), "128 of the 128 scales in a.scales"),
        ("qzeros", None, "a lacks qzeros: the checkpoint has a.g_idx, a.qweight, a.scales"),
        ("qweight", lambda t: t.long(), "is torch.int64, not torch.int32"),
    ],
)
def test_damaged_gptq(part: str, change: Any, says: str) -> None:
    stored, _, config = gptq(4, 32, "gptq")
    if change is None:
        del stored[f"a.{part}"]
    else:
        stored[f"a.{part}"] = change(stored[f"a.{part}"])
    with pytest.raises(WeightsError, match=says):
        find_matrices(config, Memory(stored)).matrices["a.weight"].read()


def test_gptq_that_says_symmetric_and_is_not() -> None:
    stored, _, config = gptq(4, 32, "gptq_v2", symmetric=True)
    with pytest.raises(
        WeightsError, match="sym is true and checkpoint_format 'gptq', but 128 zero"
    ):
        find_matrices({**config, "checkpoint_format": "gptq"}, Memory(stored)).matrices[
            "a.weight"
        ].read()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv'; 'gemm' is read"),
        ({"quant_method": "awq", "bits": 8}, "bits=8; read are 4"),
        ({"quant_method": "awq", "group_size": 0}, "group_size=0"),
        ({"quant_method": "gptq", "bits": 5}, "bits=5; read are 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; 'gptq'"),
        ({"quant_method": "gtpq"}, f"Did you mean 'gptq'. Read are {', '.join(METHODS)}"),
        ({"bits": 4}, "quant_method='None'"),
    ],
)  # fmt: skip
def test_what_is_not_read(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says.replace("?", ".")):
        find_matrices(config, Memory(gptq(4, 32, "gptq")[0]))


@pytest.mark.parametrize("skip", ["a", "up.a", "layers.3", "up"])
def test_modules_that_should_not_be_quantized(skip: str) -> None:
    module = "layers.3.up.a"
    stored = {name.replace("a.", f"{module}.", 1): t for name, t in awq(32)[0].items()}
    config = {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": [skip]}
    with pytest.raises(WeightsError, match=f"modules_to_not_convert names '{skip}', but {module}"):
        find_matrices(config, Memory(stored))
    for harmless in ("layers.31", "layers.4.up", "q"):
        find_matrices({**config, "modules_to_not_convert": [harmless]}, Memory(stored))


# FP8


def fp8_by_transformers(values: Tensor, scales: Tensor) -> Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("shape", "scale_shape", "name", "rest"),
    [
        ((256, 384), (2, 3), "weight_scale_inv", "-block"),
        ((24, 128), (), "weight_scale", "-tensor"),
        ((24, 128), (1,), "weight_scale", "-tensor"),
        ((24, 128), (24, 1), "weight_scale", ""),
    ],
)
@pytest.mark.parametrize("static", ["", "input_scale", "activation_scale"])
def test_fp8(
    shape: tuple[int, int],
    scale_shape: tuple[int, ...],
    name: str,
    rest: str,
    dtype: torch.dtype,
    static: str,
) -> None:
    torch.manual_seed(0)
    values, scale = (torch.randn(shape) * 40).to(dtype), torch.rand(scale_shape) + 0.5
    block = [128, 128] if rest == "-block" else None
    config = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    stored = {"a.weight": values, f"a.{name}": scale}
    if static:
        config["activation_scheme"] = "static"
        stored[f"a.{static}"] = torch.tensor(0.1)
    found = find_matrices(config, Memory(stored))
    matrix = found.matrices["a.weight"]
    assert set(matrix.parts) == stored.keys()
    read = matrix.read()
    assert isinstance(read, Codes)
    e4m3 = dtype is torch.float8_e4m3fn
    base = "fp8-w8a8" if e4m3 else "fp8-e5m2"
    assert read.scheme == matrix.scheme
    assert read.scheme.name == base + rest + ("-static" if static and e4m3 else "")
    assert read.input_scale == (torch.tensor(0.1).item() if static and e4m3 else None)
    grid = scale if scale.ndim == 2 else scale.reshape(1, 1)
    assert torch.equal(read.dequantize(), fp8_by_transformers(values, grid))
    assert any("activations stay in bfloat16" in text for text in found.notices) == (not e4m3)


@pytest.mark.parametrize(
    ("scheme", "inputs", "error", "says"),
    [
        ("static", (), WeightsError, "has 0 of the tensors input_scale, activation_scale"),
        ("static", ("input_scale", "activation_scale"), WeightsError, "has 2 of the tensors"),
        ("token", (), UnsupportedModelError, "activation_scheme='token'; read are 'dynamic', 'st"),
    ],
)
def test_activations_of_fp8_that_are_not_read(
    scheme: str, inputs: tuple[str, ...], error: type[Exception], says: str
) -> None:
    stored = {
        "a.weight": torch.ones(24, 64).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(1),
    }
    stored |= {f"a.{name}": torch.tensor(0.1) for name in inputs}
    with pytest.raises(error, match=says):
        find_matrices({"quant_method": "fp8", "activation_scheme": scheme}, Memory(stored))


def test_fp8_in_blocks_that_end_early_and_with_powers_of_two() -> None:
    values = (torch.randn(200, 300) * 40).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1, 2, 4], [8, 16, 32.0]]) / 64
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    padded = torch.zeros(256, 384).to(torch.float8_e4m3fn)
    padded[:200, :300] = values
    want = fp8_by_transformers(padded, scale)[:200, :300]
    for stored in (scale, scale.to(torch.float8_e8m0fnu)):
        tensors = {"a.weight": values, "a.weight_scale_inv": stored}
        found = find_matrices(config, Memory(tensors))
        assert any("powers of two" in text for text in found.notices)
        read = found.matrices["a.weight"].read()
        assert isinstance(read, Codes)
        assert torch.equal(read.dequantize(), want)


def test_fp8_in_other_blocks_is_widened() -> None:
    values, scale = (torch.randn(64, 128) * 40).to(torch.float8_e4m3fn), torch.rand(2, 2)
    config = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    found = find_matrices(config, Memory({"a.weight": values, "a.weight_scale_inv": scale}))
    matrix = found.matrices["a.weight"]
    assert matrix.scheme is None
    assert torch.equal(matrix.read(), fp8_by_transformers(values, scale))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "block", "says"),
    [
        ({}, None, "has 0 of the tensors weight_scale_inv, weight_scale beside it"),
        ({"weight_scale_inv": torch.ones(2, 3)}, [128, 128], r"needs \[1, 1\]"),
        ({"weight_scale": torch.ones(23)}, None, r"shape \[23\], but its matrix needs"),
        ({"weight_scale": torch.tensor(float("nan"))}, None, "1 of the 1 scales"),
    ],
)
def test_damaged_fp8(stored: dict[str, Tensor], block: Any, says: str) -> None:
    tensors = {"a.weight": torch.ones(24, 64).to(torch.float8_e4m3fn)}
    tensors |= {f"a.{name}": t for name, t in stored.items()}
    config = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(WeightsError, match=says):
        find_matrices(config, Memory(tensors)).matrices["a.weight"].read()


# bitsandbytes


def four_bits(kind: str, block: int, nested: bool, shape: tuple[int, int]) -> tuple[
    dict[str, Tensor], Tensor
]:  # fmt: skip
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(1)
    weight = torch.randn(shape) * 0.1
    packed, state = functional.quantize_4bit(
        weight, blocksize=block, quant_type=kind, compress_statistics=nested
    )
    stored = {"a.weight": packed}
    stored |= {f"a.weight.{name}": t for name, t in state.as_dict(packed=True).items()}
    state.shape = torch.Size([1, weight.numel()])  # 0.50's for CPUs starts each row with a block
    with torch.compiler.set_stance("force_eager"):  # it compiles a function for odd shapes
        return stored, functional.dequantize_4bit(packed, state).view(shape)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_nf4(block: int, nested: bool) -> None:
    stored, want = four_bits("nf4", block, nested, (48, 384))
    matrix = find_matrices(BNB, Memory(stored)).matrices["a.weight"]
    assert set(matrix.parts) == stored.keys()
    read = matrix.read()
    assert isinstance(read, Codes)
    assert read.scheme == matrix.scheme
    assert read.scheme.name == f"nf4-g{block}"
    assert torch.equal(read.dequantize(), want)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "block", "shape"),
    [("fp4", 64, (48, 384)), ("nf4", 256, (48, 512)), ("nf4", 64, (6, 96)), ("nf4", 64, (5, 33))],
)
def test_four_bits_that_are_widened(
    kind: str, block: int, shape: tuple[int, int], nested: bool
) -> None:
    stored, want = four_bits(kind, block, nested, shape)
    found = find_matrices(BNB, Memory(stored))
    matrix = found.matrices["a.weight"]
    assert matrix.scheme is None
    assert matrix.shape == shape
    assert torch.equal(matrix.read(), want)  # type: ignore[arg-type]
    without = {name: t for name, t in stored.items() if not name.endswith("weight.quant_map")}
    again = find_matrices(BNB, Memory(without)).matrices["a.weight"].read()
    assert torch.allclose(again, want, rtol=1e-6, atol=0)  # type: ignore[arg-type]
    assert [text for text in found.notices if "no kernel" in text]


def test_eight_bits() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(1)
    values, largest, _ = functional.int8_vectorwise_quant((torch.randn(24, 64) * 0.1).half())
    layout = torch.zeros((), dtype=torch.uint8)
    stored = {"a.weight": values, "a.SCB": largest, "a.weight_format": layout}
    matrix = find_matrices({"quant_method": "bitsandbytes"}, Memory(stored)).matrices["a.weight"]
    assert set(matrix.parts) == stored.keys()
    read = matrix.read()
    assert isinstance(read, Codes)
    assert read.scheme.name == "w8a16"
    assert torch.equal(read.values, values)
    want = functional.int8_vectorwise_dequant(values, largest)  # in another order: (q · SCB) / 127
    assert torch.allclose(read.dequantize(), want, rtol=2**-22, atol=0)
    stored["a.weight_format"] = torch.ones((), dtype=torch.uint8)
    with pytest.raises(UnsupportedModelError, match="weight_format isn't 0"):
        find_matrices({"quant_method": "bitsandbytes"}, Memory(stored))


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("weight", lambda t: t[:-1], r"shape \[9215, 1\], but its matrix needs \[9216, 1\]"),
        ("weight.absmax", lambda t: t[:-1], r"shape \[287\], but its matrix needs \[288\]"),
        ("weight.absmax", None, r"a lacks weight\.absmax"),
        ("weight.nested_quant_map", None, r"a lacks weight\.nested_quant_map"),
        ("weight.nested_absmax", lambda t: t * float("nan"), "2 of the 2 scales"),
        ("weight.quant_map", lambda t: t.flip(0), "isn't the table of NF4"),
        ("weight.quant_state.bitsandbytes__nf4", lambda t: t[:20], "isn't the state of a matrix"),
        ("weight.quant_state.bitsandbytes__nf4", None, "neither SCB nor a quant_state"),
    ],
)
def test_damaged_bitsandbytes(part: str, change: Any, says: str) -> None:
    stored, _ = four_bits("nf4", 64, True, (48, 384))
    stored |= {name.replace("a.", "b.", 1): t for name, t in stored.items()}
    if change is None:
        del stored[f"a.{part}"]
    else:
        stored[f"a.{part}"] = change(stored[f"a.{part}"])
    with pytest.raises(WeightsError, match=says):
        find_matrices(BNB, Memory(stored)).matrices["a.weight"].read()


def test_bitsandbytes_reads_what_is_written() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    from penstock.quant.files import bitsandbytes

    codes = random_codes("nf4", 48, 384)
    stored = bitsandbytes.store("a", codes)
    parts = {name.removeprefix("a.weight."): t for name, t in stored.items() if name != "a.weight"}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    state.dtype = torch.float32
    assert torch.equal(functional.dequantize_4bit(stored["a.weight"], state), codes.dequantize())


# MXFP4


def test_mxfp4_as_gpt_oss_stores_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (24, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (24, 4), dtype=torch.uint8)
    stored = {"a.weight_blocks": blocks, "a.weight_scales": scales}
    read = find_matrices({"quant_method": "mxfp4"}, Memory(stored)).matrices["a.weight"].read()
    assert isinstance(read, Codes)
    assert read.scheme.name == "mxfp4"
    want = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    assert torch.equal(read.dequantize(), want[0].T)  # theirs are transposed
    bare = {"a_blocks": blocks, "a_scales": scales}
    check_same(
        find_matrices({"quant_method": "mxfp4"}, Memory(bare)).matrices["a.weight"].read(), read
    )


def test_mxfp4_of_experts() -> None:
    """Each by itself, the rows of gate and up out of their turns."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    stored, want = {}, {}
    for what, rows in (("gate_up_proj", 24), ("down_proj", 10)):
        blocks = torch.randint(0, 256, (5, rows, 2, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (5, rows, 2), dtype=torch.uint8)
        stored |= {f"m.experts.{what}_blocks": blocks, f"m.experts.{what}_scales": scales}
        want[what] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = find_matrices({"quant_method": "mxfp4"}, Memory(stored)).matrices
    assert len(found) == 3 * 5
    for e in range(5):
        for name, values in {
            "gate_proj": want["gate_up_proj"][e, :, 0::2],
            "up_proj": want["gate_up_proj"][e, :, 1::2],
            "down_proj": want["down_proj"][e],
        }.items():
            matrix = found[f"m.experts.{e}.{name}.weight"]
            read = matrix.read()
            assert isinstance(read, Codes)
            assert read.scheme.name == "mxfp4"
            assert matrix.shape == read.shape == tuple(values.T.shape)
            assert torch.equal(read.dequantize(), values.T)


@pytest.mark.parametrize(
    ("blocks", "scales", "error", "says"),
    [
        ((8, 24, 4, 16), (8, 24, 3), WeightsError, r"shape \[8, 24, 3\], but its matrix needs"),
        ((24, 4, 8), (24, 4), WeightsError, r"shape \[24, 4, 8\], neither \[N, K / 32, 16\] nor"),
        ((24, 16), (24,), WeightsError, r"shape \[24, 16\], neither"),
        ((24, 4, 16), (24, 3), WeightsError, r"shape \[24, 3\], but its matrix needs \[24, 4\]"),
        ((24, 4, 16), None, WeightsError, r"has no a\.weight_scales beside it"),
    ],
)
def test_mxfp4_that_is_not_read(
    blocks: tuple[int, ...], scales: tuple[int, ...] | None, error: type[Exception], says: str
) -> None:
    stored = {"a.weight_blocks": torch.zeros(blocks, dtype=torch.uint8)}
    if scales is not None:
        stored["a.weight_scales"] = torch.zeros(scales, dtype=torch.uint8)
    with pytest.raises(error, match=says):
        find_matrices({"quant_method": "mxfp4"}, Memory(stored))
