"""A decoder as a graph: `torch.export` of its operators, with step, cache and weights as inputs.

Nothing is computed and no weight is copied: tracing runs on fake tensors. How many tokens,
sequences, blocks and sampled rows there are stays open; a cache's layout and the weights' formats
are part of the graph.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from penstock.cache import any_part
from penstock.errors import ConfigError
from penstock.pipeline.nodes import operator
from penstock.pipeline.plain import to_plain
from penstock.runtime import compile_counter
from penstock.runtime.inputs import Derived, Form, Inputs, Weights
from penstock.runtime.package import quiet
from penstock.step import KV, LayerCache, StatefulStep, Step

_FORMAT = 2
_TRACES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""What torch notes about where a node came from: paths of this machine among it."""


class Graph:
    """A forward pass as operators.

    program: torch's own form, for saving and compiling. caches: each layer's tensors as the graph
    knows them (fake: dtype and shape). weights: the same of the weights it takes, `derived` among
    them.
    """

    def __init__(self, program: ExportedProgram, derived: dict[str, Derived]) -> None:
        self.program = program
        self.derived = derived
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        (step, kv, weights), _ = pytree.tree_unflatten(nodes, program.call_spec.in_spec)
        self.nodes: tuple[Step, list[tuple[fx.Node, ...]], dict[str, fx.Node]] = (step, kv, weights)
        self.caches = [tuple(node.meta["val"] for node in layer) for layer in kv]
        self.weights: dict[str, Tensor] = {n: node.meta["val"] for n, node in weights.items()}
        self.module = program.graph_module

    @property
    def inputs(self) -> Inputs:
        """What it takes beside a step."""
        return Inputs(
            tuple(tuple(Form.of_block(part) for part in layer) for layer in self.caches),
            {name: Form.of(weight) for name, weight in self.weights.items()},
            self.derived,
        )

    def operators(self) -> list[str]:
        """The operators in the order in which they run."""
        return [name for node in self.module.graph.nodes if (name := operator(node))]

    @property
    def digest(self) -> str:
        """SHA-256 of what is computed: operators, constants, shapes and dtypes; not of weights.

        Open dimensions are told apart, but not by the names that torch has given them.
        """
        lines = [f"{_FORMAT} {json.dumps(_plain(self.derived), sort_keys=True)}"]
        sizes: dict[str, str] = {}

        def numbered(found: re.Match[str]) -> str:
            return sizes.setdefault(found[0], f"d{len(sizes)}")

        for node in self.module.graph.nodes:
            value = node.meta.get("val")
            form = ""
            if isinstance(value, Tensor):
                form = f"{value.dtype} {re.sub('[a-z]+[0-9]+', numbered, str(list(value.shape)))}"
            lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {form}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def bind(self, weights: Weights) -> GraphForward:
        """The graph over these weights, as a `Forward`; derived ones are computed now.

        Raises WeightsError when one is missing or isn't what the graph was made for.
        """
        return GraphForward(self, weights)

    def example(self) -> tuple[Step, KV, dict[str, Tensor]]:
        """Inputs without data, as the graph was traced with: open dimensions are symbols."""
        step, kv, weights = self.nodes
        arrays = {f.name: getattr(step, f.name).meta["val"] for f in fields(step)}
        caches = [tuple(node.meta["val"] for node in layer) for layer in kv]
        return type(step)(**arrays), caches, {n: node.meta["val"] for n, node in weights.items()}

    def save(self, file: Path) -> None:
        """Write the graph, without any weight."""
        buffer = io.BytesIO()
        with quiet():
            torch.export.save(
                self.program, buffer, extra_files={"derived.json": json.dumps(_plain(self.derived))}
            )
        file.write_bytes(buffer.getvalue())


class GraphForward(nn.Module):
    """A graph with its weights: `forward(step, kv)` → logits [S, V] float32."""

    def __init__(self, graph: Graph, weights: Weights) -> None:
        super().__init__()
        self._inputs = graph.inputs
        self._weights = list(self._inputs.complete(weights).values())
        self._run = graph.module
        self._kv: KV | None = None

    @property
    def bound(self) -> dict[str, Tensor]:
        """The weights by name, derived ones among them."""
        return dict(zip(self._inputs.weights, self._weights, strict=True))

    def forward(self, step: Step, kv: KV) -> Tensor:
        if kv is not self._kv:
            self._inputs.check_cache(kv)
            self._kv = kv
        arrays = (getattr(step, f.name) for f in fields(step))
        parts = (part for layer in kv for part in layer)
        (logits,) = self._run(*arrays, *parts, *self._weights)
        found: Tensor = logits
        return found


def weights_of(decoder: nn.Module) -> dict[str, Tensor]:
    """A decoder's packed tensors by name: what its graph is given. None of them is copied."""
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}


def export_graph(decoder: nn.Module, kv: KV) -> Graph:
    """The graph of `decoder` over a cache like `kv`, in plain form: one operator for one thing.

    kv: two blocks or more; nothing of it is read or written, nor does `decoder` change.
    Raises KernelError when the decoder calls something that isn't one of Penstock's operators.
    """
    if any_part(kv).shape[0] < 2:
        raise ConfigError("A graph is exported over a cache of two blocks or more, not of one.")
    compile_counter.note("export")
    stencil = _Stencil(decoder)
    graph = trace(stencil, kv, weights_of(decoder), {})
    to_plain(graph.module.graph)
    return settled(graph)


def settled(graph: Graph) -> Graph:
    """A graph that can be saved and compiled, of one whose nodes were rewritten in place.

    Nodes are named by what they call now, and what each returns is found anew, by its operator's
    checks of what it is given. Weights are those that are inputs now. Raises what those checks
    raise, of a rewriting that was wrong.
    """
    graph.module.graph.lint()
    module = fx.GraphModule(graph.module, _renamed(graph.module.graph))
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    fake = given[0].meta["val"].fake_mode
    FakeTensorProp(module, fake).propagate_dont_convert_inputs(*(n.meta["val"] for n in given))
    returned: Any = module.graph.output_node().args[0]
    program = graph.program
    root = program.module_call_graph[0]
    assert root.signature is not None
    stated = replace(
        root.signature,
        inputs=[TensorArgument(name=node.name) for node in given],
        outputs=[TensorArgument(name=node.name) for node in returned],
        in_spec=pytree.tree_structure((graph.nodes, {})),
    )
    made = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(
            [InputSpec(InputKind.USER_INPUT, each, None) for each in stated.inputs],
            [OutputSpec(OutputKind.USER_OUTPUT, each, None) for each in stated.outputs],
        ),
        state_dict={},
        range_constraints=program.range_constraints,
        module_call_graph=[replace(root, signature=stated)],
        verifiers=program.verifiers,
    )
    return Graph(made, graph.derived)


def _renamed(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes are named by their operators; of what is noted of them it keeps what the
    inputs are.
    """
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        given: Any = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = operator(node) or node.name
        copies[node] = made.create_node(node.op, node.target, given[0], given[1], name)
        if node.op == "placeholder":
            copies[node].meta["val"] = node.meta["val"]
    return made


def trace(
    forward: Callable[[Step, KV, Weights], Tensor],
    kv: KV,
    weights: Weights,
    derived: dict[str, Derived],
) -> Graph:
    """Export `forward(step, kv, weights)`; all but dtypes and shapes of its inputs is ignored."""
    tokens, sequences, width, sampled = (Dim(name, min=1) for name in "TBMS")
    with FakeTensorMode(shape_env=ShapeEnv()):

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32)

        # a dimension of 1 would be taken for a constant, and so would two that are equal
        arrays = ints(7), ints(7), ints(7), ints(4), ints(3), ints(3, 5), ints(2)
        stated = any(map(_is_state, kv))
        step = StatefulStep(*arrays, ints(3), ints(6, 2)) if stated else Step(*arrays)
        caches = [
            tuple(
                torch.empty(
                    t.shape if _fixed(t) else (i + (23 if _is_state(parts) else 11), *t.shape[1:]),
                    dtype=t.dtype,
                )
                for i, t in enumerate(parts)
            )
            for parts in kv
        ]
        given = {name: torch.empty(tuple(t.shape), dtype=t.dtype) for name, t in weights.items()}
    rows, each = {0: tokens}, {0: sequences}
    more = [each, {0: Dim("K", min=1)}] if stated else []
    shapes = (
        [rows, rows, rows, {0: sequences + 1}, each, {**each, 1: width}, {0: sampled}, *more],
        [
            tuple(
                {} if _fixed(t) else {0: Dim(f"{'G' if _is_state(parts) else 'N'}{i}", min=1)}
                for i, t in enumerate(parts)
            )
            for parts in caches
        ],
        dict.fromkeys(given),
    )
    with quiet(), _uncollected():
        program = torch.export.export(
            _Callable(forward), (step, caches, given), dynamic_shapes=shapes, strict=False
        )
    for node in program.graph.nodes:
        for key in _TRACES:
            node.meta.pop(key, None)
    program.example_inputs = None
    return Graph(program, derived)


def _is_state(parts: LayerCache) -> bool:
    """Whether these are a layer's states: parts of blocks have six dimensions, or four."""
    return bool(parts) and parts[0].dim() == 5


def _fixed(part: Tensor) -> bool:
    """Whether a part of a cache is one number for all blocks: the window of `kivi`."""
    return tuple(part.shape) == (1,)


def load_graph(file: Path) -> Graph:
    """Read what `Graph.save` wrote. Raises ConfigError when the file isn't that."""
    extra = {"derived.json": ""}
    try:
        with quiet():
            program = torch.export.load(io.BytesIO(file.read_bytes()), extra_files=extra)
        derived = {
            name: Derived(**made) for name, made in json.loads(extra["derived.json"]).items()
        }
        return Graph(program, derived)
    except Exception as error:  # whatever a damaged archive makes torch raise
        raise ConfigError(
            f"{file} isn't a graph that can be read: {type(error).__name__}: {error}. "
            "Export the model again."
        ) from error


class _Callable(nn.Module):
    """What torch.export wants to be given: a module."""

    def __init__(self, forward: Callable[[Step, KV, Weights], Tensor]) -> None:
        super().__init__()
        self._forward = forward

    def forward(self, step: Step, kv: KV, weights: Weights) -> Tensor:
        return self._forward(step, kv, weights)


class _Stencil:
    """A decoder's modules without its tensors: those are arguments of each call."""

    def __init__(self, decoder: nn.Module) -> None:
        names = {id(tensor): name for name, tensor in weights_of(decoder).items()}
        kept = {id(t): t for t in (*decoder.parameters(), *decoder.buffers())}
        self._decoder = copy.deepcopy(decoder, dict(kept))
        self._places: list[tuple[str, dict[str, Any], str]] = []
        for module in self._decoder.modules():
            holders = (module._parameters, module._buffers, getattr(module, "packed", {}))
            for holder in holders:
                self._places += [
                    (names[id(tensor)], holder, key)
                    for key, tensor in holder.items()
                    if tensor is not None
                ]

    def __call__(self, step: Step, kv: KV, weights: Weights) -> Tensor:
        for name, holder, key in self._places:
            holder[key] = weights[name]
        logits: Tensor = self._decoder(step, kv)
        return logits


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing is collected meanwhile: freeing a native program is an operator too, and would become
    part of what is traced.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plain(derived: dict[str, Derived]) -> dict[str, Any]:
    return {n: {"operator": d.operator, "arguments": d.arguments} for n, d in derived.items()}
