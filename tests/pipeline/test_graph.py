"""An exported graph: the same bits as the decoder it was made of, and errors that say what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError, KernelError, WeightsError
from penstock.nn import Decoder
from penstock.pipeline import Graph, export_graph, load_graph, optimize
from penstock.pipeline.graph import weights_of
from penstock.pipeline.nodes import arguments, calls, operator
from penstock.runtime import Forward
from penstock.step import KV, Step
from tests.exactness.bits import Machine, build, prompt
from tests.models.tiny import each_kind, make_tiny

FORMATS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "w8a16": (torch.bfloat16, "w8a16"),
    "w8a8": (torch.bfloat16, "w8a8"),
    "w4a16": (torch.bfloat16, "w4a16-g64"),
    "w4a8": (torch.bfloat16, "w4a8-g32-asym"),
    "fp8": (torch.bfloat16, "fp8"),
    "fp8-w8a8": (torch.bfloat16, "fp8-w8a8-block"),
    "nf4": (torch.bfloat16, "nf4"),
    "mxfp4": (torch.bfloat16, "mxfp4"),
    "nvfp4": (torch.bfloat16, "nvfp4"),
}
PLAIN = {"linear", "gate", "alternate", "rms_norm", "layer_norm", "add_", "embedding"}
PLAIN |= {"rotary_cache", "paged_attention", "softcap_"}


def steps(machine: Machine, vocab: int = 517) -> Tensor:
    """Logits of chunks, a batch that mixes a chunk and single tokens, and one token alone."""
    a = machine.stream(prompt(60, 1, vocab))
    b = machine.stream(prompt(45, 2, vocab))
    parts = machine.run([(a, 40)]) + machine.run([(a, 1), (b, 44)])
    parts += machine.run([(a, 1), (b, 1)]) + machine.run([(a, 1)])
    return torch.cat(parts)


def machine(decoder: Decoder, forward: Forward | None = None, kv: str = "auto") -> Machine:
    made = Machine(decoder, kv=kv)
    made.forward = forward or decoder
    return made


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build()


@pytest.fixture(scope="module")
def graph(decoder: Decoder) -> Graph:
    return export_graph(decoder, Machine(decoder).kv)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, tmp_path: Path) -> None:
    dtype, quantization = FORMATS[name]
    decoder = build(dtype, quantization)
    made = export_graph(decoder, Machine(decoder).kv)
    made.save(tmp_path / "graph.pt2")
    loaded = load_graph(tmp_path / "graph.pt2")
    assert loaded.digest == made.digest
    assert set(made.operators()) <= PLAIN
    want = steps(machine(decoder))
    assert torch.equal(steps(machine(decoder, loaded.bind(weights_of(decoder)))), want)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "kivi"])
def test_every_cache(decoder: Decoder, kv: str) -> None:
    made = export_graph(decoder, Machine(decoder, kv=kv).kv)
    want = steps(machine(decoder, kv=kv))
    assert torch.equal(steps(machine(decoder, made.bind(weights_of(decoder)), kv)), want)


@pytest.mark.parametrize("name", each_kind())
def test_every_family(name: str, tmp_path: Path) -> None:
    decoder = make_tiny(name, tmp_path).load("bfloat16").model
    made = export_graph(decoder, Machine(decoder).kv)
    want = steps(machine(decoder), 320)
    assert torch.equal(steps(machine(decoder, made.bind(weights_of(decoder))), 320), want)


def test_hidden_states_are_a_graph_too(decoder: Decoder) -> None:
    hidden = decoder.last_hidden_state()
    made = export_graph(hidden, Machine(decoder).kv)
    want = steps(machine(decoder, hidden))
    assert torch.equal(steps(machine(decoder, made.bind(weights_of(hidden)))), want)


def test_one_operator_for_one_thing(graph: Graph, decoder: Decoder) -> None:
    layer = ["rms_norm", "linear", "rotary_cache", "paged_attention", "linear", "add_"]
    layer += ["rms_norm", "linear", "gate", "linear", "add_"]
    assert graph.operators()[: 1 + len(layer)] == ["embedding", *layer]
    for node in calls(graph.module.graph, "linear"):  # nothing before or after the product
        given = arguments(node)
        assert given["norm"] is None and given["activation"] == 0 and not given["gated"]


def test_nodes_are_named_by_what_they_call(graph: Graph) -> None:
    """And nothing is noted of operators that they called before passes."""
    for made in (graph, optimize(graph).graph):
        for node in made.module.graph.nodes:
            if name := operator(node):
                assert re.fullmatch(rf"{name}(_\d+)?", node.name)
                assert "eager_input_vals" not in node.meta


def test_nothing_is_copied_or_changed(decoder: Decoder, tmp_path: Path) -> None:
    before = {name: tensor.data_ptr() for name, tensor in weights_of(decoder).items()}
    made = export_graph(decoder, Machine(decoder).kv)
    after = {name: tensor.data_ptr() for name, tensor in weights_of(decoder).items()}
    assert before == after
    file = tmp_path / "graph.pt2"
    made.save(file)
    assert file.stat().st_size < sum(t.nbytes for t in weights_of(decoder).values()) / 4
    assert all(t.data_ptr() == before[n] for n, t in made.bind(weights_of(decoder)).bound.items())
    assert str(Path(__file__).parents[2]).encode() not in file.read_bytes()  # where it was made


def test_the_digest_is_of_what_is_computed(graph: Graph, decoder: Decoder) -> None:
    assert export_graph(decoder, Machine(decoder, blocks=40).kv).digest == graph.digest
    assert export_graph(decoder, Machine(decoder, kv="int8").kv).digest != graph.digest
    other = build(quantization="w8a8")
    assert export_graph(other, Machine(other).kv).digest != graph.digest


def test_a_weight_that_is_missing(graph: Graph, decoder: Decoder) -> None:
    weights = weights_of(decoder)
    del weights["layers.1.mlp.up.weight"]
    with pytest.raises(WeightsError, match=r"takes 1 weights.*layers\.1\.mlp\.up\.weight"):
        graph.bind(weights)


def test_weights_of_another_format(graph: Graph) -> None:
    with pytest.raises(WeightsError, match=r"head\.weight as bfloat16 .*, not as int8"):
        graph.bind(weights_of(build(quantization="w8a8")))


def test_a_cache_of_another_kind(graph: Graph, decoder: Decoder) -> None:
    forward = graph.bind(weights_of(decoder))
    with pytest.raises(ConfigError, match=r"exported for a cache of 3 layers of bfloat16.*int8"):
        steps(machine(decoder, forward, "int8"))


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
def test_a_file_that_is_damaged(graph: Graph, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "graph.pt2"
    graph.save(file)
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "other": b"{}", "empty": b""}[damage])
    with pytest.raises(ConfigError, match=r"graph\.pt2 isn't a graph that can be read"):
        load_graph(file)


def test_an_operator_that_isnt_ours(decoder: Decoder) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self, step: Step, kv: KV) -> Tensor:
            logits: Tensor = self.decoder(step, kv)
            return logits * 2

    with pytest.raises(KernelError, match=r"aten\.mul.* isn't one of Penstock's operators"):
        export_graph(Doubled(), Machine(decoder).kv)
