"""Passes change no bit, and all of them give the decoder's own operators."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import fx

from penstock.errors import ConfigError
from penstock.kernels import native
from penstock.models.load import load_model
from penstock.nn import Decoder
from penstock.pipeline import PASSES, Graph, export_graph, load_graph, optimize
from penstock.pipeline.graph import settled, weights_of
from penstock.pipeline.nodes import calls, insert
from penstock.runtime import Program
from tests.exactness.bits import Machine, build
from tests.models.tiny import CASES, each_kind, make_tiny
from tests.pipeline.test_graph import FORMATS, machine, steps

FIRST = list(PASSES)[:4]
SUBSETS = [s for n in range(len(FIRST) + 1) for s in itertools.combinations(FIRST, n)]
SUBSETS += [(*s, "dead-code") for s in SUBSETS if len(s) != 2]
needs_native = pytest.mark.skipif(native.handle is None, reason=native.reason)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build()


@pytest.fixture(scope="module")
def graph(decoder: Decoder) -> Graph:
    return export_graph(decoder, Machine(decoder).kv)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A gated feed-forward block with biases: what `fold-constants` has to do."""
    return make_tiny("llama", tmp_path_factory.mktemp("llama")).load("bfloat16").model


def test_every_subset(biased: Decoder) -> None:
    plain = export_graph(biased, Machine(biased).kv)
    want = steps(machine(biased), 320)
    seen = set()
    for chosen in SUBSETS:
        done = optimize(plain, chosen)
        seen.add(done.graph.digest)
        got = steps(machine(biased, done.graph.bind(weights_of(biased))), 320)
        assert torch.equal(got, want), chosen
    assert len(seen) > 12  # they did something


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    decoder = build(*FORMATS[name])
    done = optimize(export_graph(decoder, Machine(decoder).kv))
    want = steps(machine(decoder))
    assert torch.equal(steps(machine(decoder, done.graph.bind(weights_of(decoder)))), want)


@needs_native
@pytest.mark.parametrize("name", each_kind(CASES))
def test_all_of_them_give_the_decoders_own_operators(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    decoder = make_tiny(name, tmp_path_factory.mktemp(name)).load("bfloat16").model
    made = Machine(decoder)
    done = optimize(export_graph(decoder, made.kv))
    got = Program(done.graph.bind(weights_of(decoder)), made.kv).calls
    want = Program(decoder, made.kv).calls
    assert [(c.name, c.shapes) for c in got] == [(c.name, c.shapes) for c in want]
    for a, b in zip(got, want, strict=True):
        assert all(x is y for x, y in zip(a.constants, b.constants, strict=True))


@needs_native
@pytest.mark.parametrize("without", ["fuse-norm-linear", "fuse-activation", "fuse-residual"])
def test_a_program_of_plainer_operators(biased: Decoder, without: str) -> None:
    """What a fused operator is taken apart into runs as a native program too."""
    done = optimize(export_graph(biased, Machine(biased).kv), [p for p in PASSES if p != without])
    assert done.changes.keys() == PASSES.keys() - {without}
    made = Machine(biased)
    made.forward = Program(done.graph.bind(weights_of(biased)), made.kv)
    assert torch.equal(steps(made, 320), steps(machine(biased), 320))


def test_the_report(graph: Graph) -> None:
    done = optimize(graph)
    assert done.before == graph.operators()
    assert done.changes == {
        "fuse-norm-linear": 7,  # two a layer, and the head's
        "fuse-activation": 3,
        "fuse-residual": 4,  # the second layer's have a norm after them
        "fold-constants": 0,
        "dead-code": 1,  # the order of a bias that is given as it was
    }
    assert len(done.before) - len(done.after) == sum(done.changes.values())
    assert done.after[:3] == ["embedding", "linear", "rotary_cache"]


def test_folded_weights_are_named_after_their_source(biased: Decoder) -> None:
    chosen = ["fold-constants", "dead-code"]
    done = optimize(export_graph(biased, Machine(biased).kv), chosen)
    assert done.changes["fold-constants"] == 3 and "alternate" not in done.after
    name = "layers.0.mlp.up.bias"
    assert name not in done.graph.weights and f"{name}.alternate" in done.graph.weights
    assert name in done.graph.inputs.sources


def test_folded_weights_after_loading(biased: Decoder, tmp_path: Path) -> None:
    file = tmp_path / "graph.pt2"
    optimize(export_graph(biased, Machine(biased).kv), ["fold-constants"]).graph.save(file)
    forward = load_graph(file).bind(weights_of(biased))
    assert torch.equal(steps(machine(biased, forward), 320), steps(machine(biased), 320))


def test_the_graph_given_stays_as_it_is(graph: Graph) -> None:
    before = graph.digest
    optimize(graph)
    assert graph.digest == before


def test_an_unknown_pass(graph: Graph) -> None:
    with pytest.raises(ConfigError, match=r"'fuse-norm' isn't a pass.*Did you mean 'fuse-norm-lin"):
        optimize(graph, ["fuse-norm"])


def _residual(graph: Graph) -> fx.Node:
    return calls(graph.module.graph, "embedding")[0]


def test_a_norm_of_rows_that_change_before_the_product(decoder: Decoder) -> None:
    """It reads them before; fused, it would read them after."""
    work = export_graph(decoder, Machine(decoder).kv)
    norm = calls(work.module.graph, "rms_norm")[0]
    insert(work.module.graph, norm.next, "add_", {"residual": _residual(work), "x": norm})
    changed = settled(work)
    done = optimize(changed, ["fuse-norm-linear"])
    assert done.changes["fuse-norm-linear"] == 6
    weights = weights_of(decoder)
    want = steps(machine(decoder, changed.bind(weights)))
    assert torch.equal(steps(machine(decoder, done.graph.bind(weights))), want)


def test_a_product_that_is_read_twice(decoder: Decoder) -> None:
    work = export_graph(decoder, Machine(decoder).kv)
    gate = calls(work.module.graph, "gate")[0]
    add = calls(work.module.graph, "add_")[0]
    insert(work.module.graph, add, "add_", {"residual": add.args[0], "x": add.args[1]})
    assert operator_count(settled(work), "fuse-residual") == 3
    assert gate.args


def operator_count(graph: Graph, name: str) -> int:
    return optimize(graph, [name]).changes[name]


def test_dead_code(decoder: Decoder) -> None:
    work = export_graph(decoder, Machine(decoder).kv)
    first = calls(work.module.graph, "rms_norm")[0]
    insert(work.module.graph, first, "gate", {
        "x": _residual(work), "activation": 1, "gated": False, "out_features": 224,
    })  # fmt: skip
    done = optimize(settled(work), ["dead-code"])
    assert done.changes == {"dead-code": 1} and len(done.after) == len(done.before) - 1


@pytest.mark.slow
@needs_native
def test_the_embedded_model() -> None:
    from penstock.models.hub import resolve

    decoder = load_model(resolve("stories")).model
    done = optimize(export_graph(decoder, Machine(decoder).kv))
    want = steps(machine(decoder), 300)
    assert torch.equal(steps(machine(decoder, done.graph.bind(weights_of(decoder))), 300), want)
