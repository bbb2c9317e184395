"""Medusa heads on a disk: each public layout gives the same heads; others are refused."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.heads.made import LAYOUTS, Layout, Made, written
from torch import Tensor

from penstock.errors import (
    ConfigError,
    ModelNotFoundError,
    PenstockError,
    UnsupportedModelError,
    WeightsError,
)
from penstock.models.heads.medusa import MedusaCheckpoint, open_medusa_checkpoint
from penstock.nn import NormSpec
from penstock.nn.linear import Linear
from penstock.nn.medusa import MedusaHeads
from penstock.nn.norm import Norm
from penstock.quant import formats_of
from penstock.runtime.device import CPU
from penstock.runtime.heads import HeadsRunner
from penstock.tokenizer import VocabMap

D, V = 32, 48


def states(rows: int) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(1))


def target(rows: int = V, seed: int = 7) -> tuple[Norm, Linear, Tensor]:
    """A final norm that does nothing but scale rows, and a head with its matrix."""
    norm = Norm(D, NormSpec(eps=0.0))
    norm.load("weight", torch.ones(D))
    matrix = torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)) / D**0.5
    head = Linear(D, rows, False, formats_of(None, torch.float32).head, out_dtype=torch.float32)
    head.load("weight", matrix)
    return norm, head, matrix


def filled(
    found: MedusaCheckpoint, heads: int | None = None, head: Linear | None = None
) -> HeadsRunner:
    spec = found.of(heads or found.spec.num_heads)
    norm, own, _ = target()
    formats = formats_of(None, torch.float32)
    made = MedusaHeads(spec, norm, head or own, formats, torch.float32, 4)
    found.fill(made)
    return HeadsRunner(made, CPU, eager=False, width=1)


def normalized(x: Tensor) -> Tensor:
    return x.double() / x.double().square().mean(-1, keepdim=True).sqrt()


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got.double() - want).abs().max() < 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (2, True), (0, True), (1, False)])
def test_every_layout(layout: Layout, layers: int, bias: bool, tmp_path: Path) -> None:
    made = Made(D, V, layers=layers, bias=bias)
    found = open_medusa_checkpoint(made.write(tmp_path / "heads", layout), D, V)
    assert (found.spec.num_heads, found.spec.num_layers, found.spec.num_rows) == (3, layers, V)
    assert found.ids is None
    x = states(6)  # in two passes
    assert close(filled(found)(x), made.logits(normalized(x)))
    some = filled(found, heads=2)(x)  # of those there are, the first
    assert close(some, made.logits(normalized(x))[:, :2])
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4, .* has 3 heads.* up to 3"):
        found.of(4)


@pytest.mark.parametrize("said", [None, True])
def test_the_targets_own_head(said: bool | None, tmp_path: Path) -> None:
    made = Made(D, V)
    tensors = made.first_layout(projections=False)
    folder = written(
        tmp_path / "heads", tensors, {"medusa_num_heads": 3, "medusa_shared_lm_head": said}
    )
    found = open_medusa_checkpoint(folder, D, V)
    assert found.spec.projection == "target" and found.spec.num_rows == V
    *_, matrix = target()
    made.projections = [matrix] * 3
    x = states(5)
    assert close(filled(found)(x), made.logits(normalized(x)))


@pytest.mark.parametrize("copies", [False, True])
def test_one_projection_for_all(copies: bool, tmp_path: Path) -> None:
    """vLLM's original_lm_head, under either name."""
    made = Made(D, V)
    tensors = {n: t for n, t in made.vllm_layout().items() if not n.startswith("lm_heads")}
    made.projections = made.projections[:1] * 3
    names = [f"lm_heads.{k}.weight" for k in range(3)] if copies else ["lm_head.weight"]
    tensors |= {name: made.projections[0].clone() for name in names}
    config = {"num_heads": 3, "original_lm_head": True}
    found = open_medusa_checkpoint(written(tmp_path / "heads", tensors, config), D, V)
    assert found.spec.projection == "one"
    x = states(5)
    assert close(filled(found)(x), made.logits(normalized(x)))


@pytest.mark.parametrize("cut", [False, True])
def test_fewer_ids(cut: bool, tmp_path: Path) -> None:
    """vLLM's token_map: the rows of the projections are some of the ids."""
    made = Made(D, V)
    ids = torch.tensor([40, 3, 17, 5])
    tensors = made.vllm_layout() | {"token_map": ids}
    if cut:
        tensors |= {n: t[ids] for n, t in tensors.items() if n.startswith("lm_heads")}
    config = {"num_heads": 3, "truncated_vocab_size": 4, "vocab_size": V}
    found = open_medusa_checkpoint(written(tmp_path / "heads", tensors, config), D, V)
    assert found.ids is not None and found.ids.tolist() == ids.tolist()
    x = states(3)
    assert close(filled(found)(x), made.logits(normalized(x))[..., ids])
    beyond = written(tmp_path / "beyond", tensors | {"token_map": ids + 20}, config)
    with pytest.raises(WeightsError, match=r"token_map leads to tokens from 23 to 60, .* of 48"):
        open_medusa_checkpoint(beyond, D, V)
    for name, bad, said in (
        ("floats", ids.float(), r"token_map is torch.float32 of \[4\], not a list of integers"),
        ("flags", ids.bool(), "token_map is torch.bool"),
        ("table", ids[None], r"token_map is torch.int64 of \[1, 4\]"),
        ("twice", torch.tensor([40, 3, 3, 5]), "from 3 to 40, some of them twice"),
        ("negative", ids - 4, "from -1 to 36, some of them twice or beyond"),
        ("none", ids[:0], "token_map names 0 ids"),
    ):
        folder = written(tmp_path / name, tensors | {"token_map": bad}, config)
        with pytest.raises(WeightsError, match=said):
            open_medusa_checkpoint(folder, D, V)
    if cut:
        fewer = written(tmp_path / "fewer", tensors | {"token_map": ids[:3].clone()}, config)
        with pytest.raises(WeightsError, match=r"names 3 ids, but its projections have 4 rows"):
            open_medusa_checkpoint(fewer, D, V)


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    """Heads of the whole one, of the reduced one, of a few ids, or with the target's head."""
    kept = np.array([1, 4, 5, 30, 47])
    reduced = VocabMap.of(V, kept, {})
    made, x = Made(D, V), states(3)
    want = made.logits(normalized(x))[..., kept]
    found = open_medusa_checkpoint(made.write(tmp_path / "whole"), D, 5, reduced)
    assert found.ids is not None and found.ids.tolist() == kept.tolist()
    assert close(filled(found)(x), want)
    made.projections = [p[kept] for p in made.projections]
    for layout in LAYOUTS:
        of_it = open_medusa_checkpoint(made.write(tmp_path / layout, layout), D, 5, reduced)
        assert of_it.ids is not None and of_it.ids.tolist() == kept.tolist()
        assert close(filled(of_it)(x), want)
    whole = Made(D, V)
    tensors = whole.vllm_layout() | {"token_map": torch.tensor([30, 2, 1])}
    some = open_medusa_checkpoint(written(tmp_path / "some", tensors, {}), D, 5, reduced)
    assert some.ids is not None and some.ids.tolist() == [30, 1]
    assert close(filled(some)(x), whole.logits(normalized(x))[..., [30, 1]])
    tensors = whole.first_layout(projections=False)
    shared = open_medusa_checkpoint(written(tmp_path / "shared", tensors, {}), D, 5, reduced)
    assert shared.ids is not None and shared.ids.tolist() == kept.tolist()
    assert shared.spec.num_rows == 5
    with pytest.raises(ConfigError, match="a vocab_size of 7, and the target has one of 48"):
        open_medusa_checkpoint(Made(D, 7).write(tmp_path / "other"), D, 5, reduced)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    assert all(name in tensors for name in names)
    return {n: t for n, t in tensors.items() if n not in names}


FIRST = Made(D, V).first_layout()
OTHER = torch.zeros(D, D)


@pytest.mark.parametrize(
    ("tensors", "config", "error", "said"),
    [
        (Made(16, V).first_layout(), {}, ConfigError, "hidden_size of 16, and the target .* of 32"),
        (Made(D, 40).first_layout(), {}, ConfigError, "vocab_size of 40, and the target .* of 48"),
        (FIRST, {"hidden_size": 64}, ConfigError, "hidden_size of 64, and the target .* of 32"),
        (FIRST, {"vocab_size": 64}, ConfigError, "vocab_size of 64, and the target .* of 48"),
        (without(FIRST, "1.0.linear.weight"), {}, WeightsError,
         "lacks 1 of the tensors of its 3 heads with 1 blocks each: weight of block 0 of head 1"),
        (without(FIRST, "2.0.linear.bias", "0.1.weight"), {}, WeightsError,
         "lacks 2 of .* bias of block 0 of head 2, projection of head 0"),
        (FIRST, {"medusa_num_heads": 5}, WeightsError,
         "has 3 heads, but config.json says medusa_num_heads=5"),
        (FIRST, {"medusa_num_layers": 2}, WeightsError,
         "has 1 layers, but config.json says medusa_num_layers=2"),
        (FIRST, {"medusa_shared_lm_head": True}, WeightsError, "has 3 projections, but config"),
        (FIRST | {"norm.weight": OTHER}, {}, WeightsError, "1 tensors that no layout .* norm.we"),
        (FIRST | {"0.3.weight": OTHER}, {}, WeightsError, r"0\.3\.weight should be a projection"),
        (FIRST | {"0.0.linear.weight": OTHER[:16]}, {}, WeightsError,
         r"the weight of block 0 of head 0 is \[16, 32\], not \[32, 32\]"),
        (FIRST | {"0.1.weight": torch.zeros(40, D)}, {}, WeightsError, "not of one shape"),
        (FIRST | {"0.1.weight": torch.zeros(V, D, dtype=torch.int8)}, {}, WeightsError,
         "'0.1.weight' in .* is torch.int8; float32, bfloat16 and float16 load"),
        ({}, {}, WeightsError, "has no tensors of Medusa heads"),
        (FIRST, {"logit_scale": 0.5}, UnsupportedModelError, "logit_scale"),
        (FIRST | {"0.0.linear.weight": torch.tensor(1.0)}, {}, WeightsError,
         r"the weight of block 0 of head 0 is \[\], not \[32, 32\]"),
        (FIRST | {"0.0.linear.bias": torch.tensor(1.0)}, {}, WeightsError,
         r"the bias of block 0 of head 0 is \[\], not \[32\]"),
        (FIRST | {"0.1.weight": torch.tensor(1.0)}, {}, WeightsError, r"projections are \[\(\), "),
        (FIRST, {"medusa_num_heads": "three"}, WeightsError, "says medusa_num_heads='three'"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit(
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    error: type[PenstockError],
    said: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=said):
        open_medusa_checkpoint(written(tmp_path / "heads", tensors, config), D, V)


@pytest.mark.parametrize(
    "name",
    [
        "99999999.0.linear.bias", "0.99999999.linear.bias", "blocks.9.layers.0.weight",
        "lm_heads.99999999.weight", "99999999.1.weight", f"{'9' * 5000}.0.linear.bias",
    ],
)  # fmt: skip
def test_numbers_beyond_the_tensors(name: str, tmp_path: Path) -> None:
    """Nothing is counted up to such a number."""
    tensors = without(FIRST, "2.0.linear.bias") | {name: torch.zeros(D)}
    folder = written(tmp_path / "heads", tensors, {})
    start = time.perf_counter()
    with pytest.raises(WeightsError, match=r"has 9 tensors, too few for one that is named '\w+"):
        open_medusa_checkpoint(folder, D, V)
    assert time.perf_counter() - start < 5


def test_far_fewer_tensors_than_their_numbers_ask_for(tmp_path: Path) -> None:
    """Those that are missing are counted, not listed: here 4 · 10^6 less 3000."""
    some = torch.zeros(1)
    tensors = {f"{i}.{i}.linear.bias": some.clone() for i in range(1000)}
    tensors |= {f"{i}.0.linear.weight": some.clone() for i in range(1000)}
    tensors |= {f"0.{i}.linear.weight": some.clone() for i in range(1, 1000)}
    tensors |= {"1999.1999.linear.weight": some.clone()}
    folder = written(tmp_path / "heads", tensors, {"medusa_shared_lm_head": True})
    start = time.perf_counter()
    with pytest.raises(WeightsError, match=r"lacks 7997000 of .* 2000 heads with 2000"):
        open_medusa_checkpoint(folder, D, V)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_damaged_values(layout: Layout, value: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for place in ("weight", "bias", "projection"):
        made = Made(D, V)
        weight, bias = made.blocks[1][0]
        assert bias is not None
        bad = {"weight": weight, "bias": bias, "projection": made.projections[1]}[place]
        held = bad.to(dtype).clone()
        held.view(-1)[[0, 3, -1]] = float(value)
        made.blocks[1][0] = (
            held if place == "weight" else weight, held if place == "bias" else bias
        )  # fmt: skip
        made.projections[1] = held if place == "projection" else made.projections[1]
        folder = made.write(tmp_path / place, layout)
        said = rf"^3 of {bad.numel()} values of \S*1\.\S+ in {folder}/\w+\.\w+ are NaN.*damaged"
        with pytest.raises(WeightsError, match=said):
            open_medusa_checkpoint(folder, D, V)


def test_folders_without_heads(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"There is no folder .*nowhere"):
        open_medusa_checkpoint(tmp_path / "nowhere", D, V)
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        open_medusa_checkpoint(tmp_path, D, V)
    (tmp_path / "config.json").write_text("{}")
    said = r"has none of medusa_lm_head\.safetensors, .* It has config\.json\."
    with pytest.raises(ModelNotFoundError, match=said):
        open_medusa_checkpoint(tmp_path, D, V)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="is not valid JSON"):
        open_medusa_checkpoint(tmp_path, D, V)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("left", [0, 100, 3000])
def test_files_that_were_cut_off(layout: Layout, left: int, tmp_path: Path) -> None:
    folder = Made(D, V).write(tmp_path / "heads", layout)
    [file] = [path for path in folder.iterdir() if path.name != "config.json"]
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(WeightsError, match=re.escape(f"{file} ({left} bytes) can't be read")):
        open_medusa_checkpoint(folder, D, V)


class Opened:
    """What a pickle could do."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, ("was-run", "w")


def test_what_is_no_tensor_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Made(D, V).write(tmp_path / "heads", "pt")
    torch.save({"0.0.linear.weight": Opened()}, folder / "medusa_lm_head.pt")
    with pytest.raises(WeightsError, match="isn't a file of tensors only"):
        open_medusa_checkpoint(folder, D, V)
    assert not (tmp_path / "was-run").exists()
    torch.save({"heads": {"0": OTHER}}, folder / "medusa_lm_head.pt")
    with pytest.raises(WeightsError, match="'heads' in it is a dict, not a tensor"):
        open_medusa_checkpoint(folder, D, V)
