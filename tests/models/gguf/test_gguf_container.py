"""The container: what is read, and that a damaged or hostile file is an error, not a crash."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError, ModelNotFoundError, UnsupportedModelError, WeightsError
from penstock.models import load_model, resolve
from penstock.models.gguf.container import Container, read_container

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], offset: int, kind: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def build(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    keys = [key("general.architecture", STRING, text("llama"))] if keys is None else keys
    tensors = tensors or []
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def read(folder: Path, raw: bytes) -> Container:
    (folder / "m.gguf").write_bytes(raw)
    return read_container(folder / "m.gguf")


def test_reads_what_gguf_writes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    values: dict[str, tuple[Callable[..., None], Any]] = {
        "a.uint8": (writer.add_uint8, 200), "a.int8": (writer.add_int8, -100),
        "a.uint16": (writer.add_uint16, 60000), "a.int16": (writer.add_int16, -30000),
        "a.uint32": (writer.add_uint32, 4 * 10**9), "a.int32": (writer.add_int32, -(2 * 10**9)),
        "a.uint64": (writer.add_uint64, 10**19), "a.int64": (writer.add_int64, -(9 * 10**18)),
        "a.float32": (writer.add_float32, 1e-5), "a.float64": (writer.add_float64, 1e-300),
        "a.bool": (writer.add_bool, True), "a.string": (writer.add_string, "▁straße"),
        "a.strings": (writer.add_array, ["x", "", "\n"]), "a.ints": (writer.add_array, [1, -2]),
        "a.floats": (writer.add_array, [0.5, -2.0]), "a.bools": (writer.add_array, [True, False]),
        "a.nested": (writer.add_array, [[1, 2], [3]]),
    }  # fmt: skip
    for name, (add, value) in values.items():
        add(name, value)
    writer.add_custom_alignment(64)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("other", matrix[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_container(tmp_path / "m.gguf")
    assert {name: found.metadata[name] for name in values} == {
        name: value for name, (_, value) in values.items()
    }
    info = found.tensors["matrix"]
    assert info.shape == (3, 4)
    assert np.array_equal(info.block.tensor(info.data, info.shape).numpy(), matrix)
    assert found.tensors["other"].block.name == "F16"


ONE = [tensor("a", [4, 2], 0)]
DAMAGED: dict[str, tuple[bytes, str]] = {
    "magic": (build(magic=b"GGJT"), r"isn't a GGUF file: it begins with b'GGJT'"),
    "empty": (b"", "is empty"),
    "four bytes": (b"GGUF", "the version needs 4 bytes and 0 are left"),
    "keys": (build(counts=(0, 1 << 60)), r"announces 1,152,921,504,606,846,976 metadata keys"),
    "tensors": (build(counts=(1 << 60, 1)), r"announces 1,152,921,504,606,846,976 tensors"),
    "string": (
        build([text("k") + struct.pack("<IQ", STRING, 1 << 62)]),
        r"announces 4,611,686,018,427,387,904 bytes of k",
    ),
    "array": (
        build([text("k") + struct.pack("<IIQ", ARRAY, UINT32, 1 << 61)]),
        r"announces 2,305,843,009,213,693,952 elements of k",
    ),
    "array of strings": (
        build([text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 40)]),
        r"1,099,511,627,776 elements of k",
    ),
    "deep arrays": (
        build([text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000]),
        "more than 4 arrays in each other",
    ),
    "value type": (build([key("k", 77, b"")]), "value type 77"),
    "element type": (build([text("k") + struct.pack("<IIQ", ARRAY, 99, 0)]), "elements of type 99"),
    "truth": (build([key("k", 7, b"\x02")]), "truth value of 2"),
    "key twice": (build([key("k", 0, b"\1"), key("k", 0, b"\1")]), "'k' is there twice"),
    "not UTF-8": (build([struct.pack("<Q", 2) + b"\xff\xfe"]), "isn't UTF-8"),
    "alignment 0": (build([key("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "alignment 24": (build([key("general.alignment", 4, b"\x18\0\0\0")]), "alignment is 24"),
    "cut off": (build(tensors=ONE, data=31), r"tensor 'a' \[2, 4\] in F32 takes 32 bytes"),
    "far offset": (build(tensors=[tensor("a", [4], 1 << 62)], data=32), "beyond the end"),
    "crooked offset": (build(tensors=[tensor("a", [4], 4)], data=64), "no multiple of 32"),
    "overlap": (
        build(tensors=[tensor("a", [16], 0), tensor("b", [4], 32)], data=64),
        "'a' and 'b' overlap by 32 bytes",
    ),
    "same name": (build(tensors=[*ONE, tensor("a", [4], 32)], data=64), "'a' is there twice"),
    "no size": (build(tensors=[tensor("a", [4, 0], 0)], data=64), r"shape \[0, 4\]"),
    "huge": (build(tensors=[tensor("a", [1 << 62, 1 << 62], 0)], data=64), "beyond the end"),
    "dimensions": (build(tensors=[tensor("a", [1] * 5, 0)], data=64), "5 dimensions; 1 to 4"),
    "part of a block": (build(tensors=[tensor("a", [40, 2], 0, 2)], data=64), "rows of 40"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    raw, said = DAMAGED[name]
    with pytest.raises(WeightsError, match=said):
        read(tmp_path, raw)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (build(version=1), "has version 1 of GGUF; 2 and 3 are read"),
        (build(version=3 << 24), "the other byte order"),
        (build(tensors=[tensor("a", [256], 0, 16)], data=66), "'a' is in IQ2_XXS, which isn't"),
        (build(tensors=[tensor("a", [256], 0, 999)], data=66), "'a' is in type 999, which isn't"),
    ],
)
def test_what_isnt_built_is_named(raw: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read(tmp_path, raw)


def test_version_2_reads(tmp_path: Path) -> None:
    assert read(tmp_path, build(tensors=ONE, data=32, version=2)).tensors["a"].shape == (2, 4)


def test_claims_allocate_nothing(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for raw, _ in DAMAGED.values():
        with pytest.raises(WeightsError):
            read(tmp_path, raw)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_bytes_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    whole = build(
        [key("general.architecture", STRING, text("llama")), key("llama.block_count", 4, b"\1\0\0\0")],
        [tensor("token_embd.weight", [4, 2], 0), tensor("output_norm.weight", [4], 32)],
        48,
    )
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        read(tmp_path, bytes(raw))
    except ModelError:
        pass
    else:
        with pytest.raises(ModelError):  # it lacks nearly everything
            load_model(tmp_path / "m.gguf")


def split(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full(8, i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_parts_are_joined(opened: int, tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert len(parts) == 3
    found = read_container(parts[opened])
    assert found.metadata["general.architecture"] == "llama"
    assert {n: float(t.data.view("<f4")[0]) for n, t in found.tensors.items()} == {
        f"t{i}": float(i) for i in range(5)
    }


def test_missing_parts_are_named(tmp_path: Path) -> None:
    parts = split(tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"one of 3 files, 1 of them missing .*00002-of"):
        read_container(parts[0])


def test_parts_of_two_models_dont_mix(tmp_path: Path) -> None:
    parts = split(tmp_path)
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(WeightsError, match="says it is part 1 of 3, not 2 of 3"):
        read_container(parts[0])


def test_a_renamed_part_says_what_is_wrong(tmp_path: Path) -> None:
    parts = split(tmp_path)
    lone = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match="its name must end in -00001-of-00003"):
        read_container(lone)


def test_resolve_takes_files(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(build())
    assert resolve(str(file)) == file
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(build())
    assert resolve(blob) == blob
    other = tmp_path / "model.bin"
    other.write_bytes(b"PK")
    with pytest.raises(ModelNotFoundError, match=r"model\.bin is a file, but no GGUF"):
        resolve(other)


def test_resolve_finds_the_file_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(build())
    assert resolve(tmp_path) == tmp_path / "m.gguf"
    (tmp_path / "n.gguf").write_bytes(build())
    with pytest.raises(ModelNotFoundError, match=r"no config\.json, but 2 models.*m\.gguf, n\.gguf"):
        resolve(tmp_path)


def test_resolve_finds_the_parts_of_a_folder(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert resolve(tmp_path) == parts[0]
