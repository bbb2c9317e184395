"""What is written is read back, for every scheme in every layout that takes it."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightsError
from penstock.models.sources import open_source
from penstock.quant import Codes, parse_scheme
from penstock.quant.files import LAYOUTS, layouts_for, write_checkpoint
from penstock.quant.files.shards import ROOM_BYTES
from tests.quant.files.made import SCHEMES, check_same, random_codes

CLAIMS = [(name, layout) for name in SCHEMES for layout in layouts_for(parse_scheme(name))]
NORM = torch.arange(8).bfloat16()


def test_every_scheme_has_a_layout() -> None:
    assert {name for name, _ in CLAIMS} == set(SCHEMES)
    assert {layout for _, layout in CLAIMS} == set(LAYOUTS)


@pytest.mark.parametrize(("name", "layout"), CLAIMS)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (200, 256), (8, 384)])
def test_roundtrip(name: str, layout: str, n: int, k: int, tmp_path: Path) -> None:
    codes = random_codes(name, n, k, seed=n + k)
    module = "model.layers.0.mlp.down_proj"
    tensors = [(f"{module}.weight", codes), ("model.norm.weight", NORM)]
    write_checkpoint(tmp_path, {"model_type": "llama"}, tensors, layout)
    source = open_source(tmp_path)
    assert source.names() == [f"{module}.weight", "model.norm.weight"]
    assert source.scheme(f"{module}.weight") == codes.scheme
    assert source.scheme("model.norm.weight") is None
    assert source.shape(f"{module}.weight") == (n, k)
    assert source.config["model_type"] == "llama"
    assert source.dtype() == torch.bfloat16
    check_same(source.read(f"{module}.weight"), codes)
    assert torch.equal(source.read("model.norm.weight"), NORM)


@pytest.mark.parametrize("name", ["w4a16-g128", "w4a16-g64-asym", "w8a16-g32", "w4a8-g128", "nf4"])
@pytest.mark.parametrize("k", [72, 200, 704])
def test_short_last_groups(
    name: str, k: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = layouts_for(parse_scheme(name))[0]
    codes = random_codes(name, 24, k)
    if layout == "bitsandbytes" and k % 64:
        with pytest.raises(ConfigError, match=f"blocks of 64 through rows of {k}"):
            write_checkpoint(tmp_path, {}, [("a.weight", codes)], layout)
        assert not list(tmp_path.glob("*"))
        return
    with caplog.at_level(logging.WARNING, "penstock"):
        write_checkpoint(tmp_path, {}, [("a.weight", codes)], layout)
    assert ("shorter group" in caplog.text) == (k % codes.scheme.group != 0)
    check_same(open_source(tmp_path).read("a.weight"), codes)


def test_matrices_of_many_schemes(tmp_path: Path) -> None:
    schemes = [n for n in SCHEMES if "compressed-tensors" in layouts_for(parse_scheme(n))]
    made = {f"layers.{i}.up": random_codes(n, 16, 128, i) for i, n in enumerate(schemes * 2)}
    tensors: list[tuple[str, Tensor | Codes]] = [(f"{m}.weight", c) for m, c in made.items()]
    tensors.append(("lm_head.weight", torch.ones(4, 8)))
    write_checkpoint(tmp_path, {}, tensors)
    source = open_source(tmp_path)
    for module, codes in made.items():
        check_same(source.read(f"{module}.weight"), codes)
    assert torch.equal(source.read("lm_head.weight"), torch.ones(4, 8))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["lm_head"]
    assert len(config["config_groups"]) == len(schemes)


def test_shards_hold_no_more_than_their_limit(tmp_path: Path) -> None:
    plain = {f"t{i}": torch.full((100, i + 1), float(i)).bfloat16() for i in range(20)}
    odd = {f"odd{i}": torch.arange(i, dtype=torch.uint8) for i in (1, 3, 7)}
    single = {"one": torch.tensor([1.5]), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)}
    tensors = plain | odd | single
    write_checkpoint(tmp_path, {}, tensors.items(), shard_bytes=10_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size <= 10_000 + ROOM_BYTES + 8 for file in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = {}
    for file in files:  # by the library itself
        found |= safetensors.torch.load_file(file)
        assert all(
            index["weight_map"][name] == file.name for name in safetensors.torch.load_file(file)
        )
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_many_tensors_need_no_larger_header(tmp_path: Path) -> None:
    tensors = [(f"model.layers.{i}.a.rather.long.name", torch.tensor([i])) for i in range(3000)]
    write_checkpoint(tmp_path, {}, tensors)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    assert {name: int(t) for name, t in found.items()} == {name: int(t) for name, t in tensors}


def test_a_tensor_is_stored_before_the_next_is_made(tmp_path: Path) -> None:
    alive = 0

    class Counted:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            assert alive <= 2  # the one that is written, and its successor

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def tensors():  # type: ignore[no-untyped-def]
        for i in range(20):
            tensor = torch.zeros(64, 64)
            tensor.counted = Counted()  # type: ignore[attr-defined]
            yield f"t{i}", tensor

    write_checkpoint(tmp_path, {}, tensors())
    assert alive == 0


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        (
            "w4a16-g128",
            "awq",
            "can: compressed-tensors, gptq. It holds w4a16-g128-asym",
        ),
        ("w4a8-g64-asym", "gptq", "Layouts that can: compressed-tensors"),
        ("nf4", "compressed-tensors", "Layouts that can: bitsandbytes"),
        ("fp8-e5m2-block", "compressed-tensors", "Layouts that can: fp8"),
        (
            "fp8-block",
            "fp8",
            "Layouts that can: compressed-tensors",
        ),  # its readers round activations
        ("nvfp4", "gptq", "Layouts that can: compressed-tensors"),
        ("w8a8", "compressed-tensor", "Did you mean 'compressed-tensors'"),
    ],
)
def test_what_a_layout_cannot_express(name: str, layout: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        write_checkpoint(tmp_path, {}, [("a.weight", random_codes(name, 128, 128))], layout)
    assert not list(tmp_path.glob("*"))


def test_a_layout_of_one_scheme_refuses_two(tmp_path: Path) -> None:
    tensors = [(f"a{n}.weight", random_codes(n, 8, 128)) for n in ("w4a16-g64", "w8a16")]
    with pytest.raises(ConfigError, match="one scheme for all its matrices, not w4a16-g64, w8a16"):
        write_checkpoint(tmp_path, {}, tensors, "gptq")


@pytest.mark.parametrize(
    ("module", "shape", "layout", "says"),
    [
        ("a", (12, 128), "awq", "12 isn't a multiple of 8"),
        ("lm_head", (16, 128), "awq", "keeps lm_head unquantized"),
        ("model.embed_tokens", (16, 128), "gptq", "keeps model.embed_tokens unquantized"),
        ("a", (12, 128), "gptq", r"\[12, 128\] isn't made of such"),
    ],
)
def test_shapes_that_a_layout_cannot_pack(
    module: str, shape: tuple[int, int], layout: str, says: str, tmp_path: Path
) -> None:
    codes = random_codes("w4a16-g64-asym", *shape)
    with pytest.raises(ConfigError, match=says):
        write_checkpoint(tmp_path, {}, [(f"{module}.weight", codes)], layout)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_floats_of_four_bits_need_whole_groups(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="K = 72 isn't made of such"):
        write_checkpoint(tmp_path, {}, [("a.weight", random_codes(name, 8, 72))])


def test_scales_that_should_be_shared_but_differ(tmp_path: Path) -> None:
    codes = random_codes("w8a16-tensor", 8, 64)
    codes.scale[3] += 1
    with pytest.raises(WeightsError, match="every 8 rows should share their scales"):
        write_checkpoint(tmp_path, {}, [("a.weight", codes)])
    codes = random_codes("mxfp4", 8, 64)
    codes.scale[3, 1] = 0.3
    with pytest.raises(WeightsError, match="1 scales aren't powers of two"):
        write_checkpoint(tmp_path / "b", {}, [("a.weight", codes)])
    codes = random_codes("nvfp4", 8, 64)
    codes.scale[3, 1] = 0.3
    with pytest.raises(WeightsError, match="aren't E4M3"):
        write_checkpoint(tmp_path / "c", {}, [("a.weight", codes)])


def test_nothing_stays_where_writing_fails(tmp_path: Path) -> None:
    def tensors():  # type: ignore[no-untyped-def]
        yield "a", torch.zeros(100, 100)
        yield "b", torch.zeros(100, 100)
        raise RuntimeError("the model can't be read")

    with pytest.raises(RuntimeError, match="can't be read"):
        write_checkpoint(tmp_path, {}, tensors(), shard_bytes=1000)
    assert not list(tmp_path.glob("*"))
    with pytest.raises(WeightsError, match="'a' is written twice"):
        write_checkpoint(tmp_path, {}, [("a", NORM), ("a", NORM)])
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("limit", [100_000, 1_000_000])  # in the header's room, in the data
def test_a_full_disk_is_said(limit: int, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(WeightsError, match=r"can't be written: .*File too large"):
            write_checkpoint(tmp_path, {}, [("a", torch.zeros(1 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list(tmp_path.glob("*"))


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for i in (1, 7):
        (tmp_path / f"model-{i:05}.safetensors.partial").write_bytes(b"half")
    write_checkpoint(tmp_path, {}, [("a", NORM)])
    assert sorted(p.name for p in tmp_path.glob("*")) == ["config.json", "model.safetensors"]


def test_a_folder_with_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, [("a", NORM)])
    with pytest.raises(ConfigError, match=r"holds model\.safetensors already"):
        write_checkpoint(tmp_path, {}, [("a", NORM)])


def test_config_of_the_source_is_kept_but_for_its_quantization(tmp_path: Path) -> None:
    config = {"a": 1, "dtype": torch.bfloat16, "quantization_config": {"quant_method": "gptq"}}
    write_checkpoint(tmp_path, config, [("a", NORM)])
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1, "dtype": "bfloat16"}
