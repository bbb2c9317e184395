"""Bytes and FLOPs that a step can't avoid, operator by operator and in all.

From memory: every weight matrix once (of experts, those that any token chose), the rows of an
embedding as they are used, the visible keys and values once per sequence and layer, this step's
keys and values written. Activations, norm weights and biases stay in cache: they are counted for
each operator but not in the floor. Products are what matrices and attention multiply; other
operators' FLOPs run beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.hardware import Compute
from penstock.nn.decoder import MATRICES, matrices_of
from penstock.nn.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec
from penstock.ops.kivi import KEY_GROUP, recent_from
from penstock.quant import Dense, WeightFormat, WeightFormats
from penstock.roofline.counts import Cost, OpCost, StepSize, Unit
from penstock.roofline.tower import TowerCost

OPS = (
    "embedding", "norm", "qkv", "gate", "mixed", "q", "q_down", "q_up", "kv", "gates", "delta",
    "mamba", "conv", "rotary", "heads", "attention", "out",
    "up", "down", "narrow", "experts", "widen", "shared_up", "shared_down", "projection",
    "input_gate", "input_out", "head", "softcap",
)  # fmt: skip
"""The rows, in the order in which a step first meets them. `rotary` writes the cache; `heads` are
products of each head's own matrix, between queries, latents and values; `delta`, `mamba` and `conv`
read and write states, `gates` say how much of them fades; `projection` makes layers' inputs."""

_NORM_FLOPS = {"rms": 4, "layer": 7}  # an element: square, sum, scale, weight; mean, shift, bias
_ROTATION_FLOPS = 3  # an element: two products and their sum
_SOFTCAP_FLOPS = 3
_DELTA_FLOPS = 7  # a value of a state: two that are read, one that fades, one that is added
_MAMBA_FLOPS = 5  # one that fades, one that is added, one that is read
_NOTHING_SEEN = TowerCost()


class KvLayout(Protocol):
    """What a cost asks of the cache's layout."""

    @property
    def recent_window(self) -> int:
        """Tokens that are kept as they were written beside what is stored of all; 0: none."""
        ...

    def bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value in one layer, read or written."""
        ...

    def recent_bytes_per_token(self, layer: int) -> int:
        """Of one recent token's in one layer; written beside the others, read instead of them."""
        ...

    def state_bytes(self, layer: int) -> int:
        """Of a sequence's state in one layer that has one, read or written."""
        ...


def matrices(spec: DecoderSpec, layer: LayerSpec) -> dict[str, tuple[int, int]]:
    """[N, K] of a layer's matrices; of its experts, where it has some, one's."""
    a, m, hidden = layer.attention, layer.mlp, spec.hidden
    q, halves = a.num_heads * a.head_dim, 2 if m.gated else 1
    shapes = {
        "qkv": (sum(a.qkv_columns), hidden),
        "q": (q, hidden),
        "gate": (a.out_dim, hidden),
        "mixed": (sum(a.qkv_columns) + a.out_dim, hidden),
        "out": (hidden, a.out_dim),
        "up": (m.intermediate * halves, hidden),
        "down": (hidden, m.intermediate),
    }
    if a.latent is not None:
        down = a.latent.query_rank
        shapes |= {"q_down": (down, hidden), "q_up": (q, down), "kv": (a.cached[1], hidden)}
    if m.experts is not None:
        shared, inner = m.experts.shared, m.experts.latent or hidden
        shapes |= {"shared_up": (shared * halves, hidden), "shared_down": (hidden, shared)}
        shapes |= {"up": (m.intermediate * halves, inner), "down": (inner, m.intermediate)}
        shapes |= {"narrow": (inner, hidden), "widen": (hidden, inner)}
    if layer.input_dim:
        shapes |= {"input_gate": (layer.input_dim, hidden), "input_out": (hidden, layer.input_dim)}
    return {name: shapes[name] for name in matrices_of(layer)}


def head_matrices(a: AttentionSpec) -> list[tuple[int, int]]:
    """[N, K] of the matrices that each head has of its own."""
    if a.latent is None:
        return []
    return [(a.latent.rank, a.head_dim - a.turning), (a.latent.value_dim, a.latent.rank)]


def _gates(a: AttentionSpec) -> int:
    """Numbers that say how much of a layer's states fades, and comes to them."""
    return a.num_heads * (2 if a.delta is not None else 1)


_OF_EXPERTS = ("up", "down")
"""Matrices that each expert has its own of."""


def _pair_flops(a: AttentionSpec) -> int:
    """Products of a query and a key of all heads, and of what it weighs of a value."""
    if a.has_state:
        return 0
    return 2 * a.num_heads * (a.asked_dim + a.seen_dim)


def pairs(count: int, context: int, window: int) -> int:
    """Query-key pairs that `count` last tokens of a context see: token i sees min(i, window)."""
    first = context - count
    if not window or context <= window:
        return (context * (context + 1) - first * (first + 1)) // 2
    inside = min(first, window)
    ramp = (window * (window + 1) - inside * (inside + 1)) // 2
    return ramp + window * (context - max(first, window))


@dataclass(slots=True)
class _Span:
    """Layers that see the same number of tokens, added up."""

    read_bytes: int = 0  # a visible token
    recent_bytes: int = 0  # a recent one
    pair_flops: int = 0


@dataclass(slots=True)
class _Coefficients:
    """What a step's cost is linear in."""

    layer_bytes: int = 0  # weights of the layers, but for experts
    expert_bytes: int = 0  # one expert of every layer that has some
    expert_layers: int = 0  # how many those are
    least_experts: int = 0  # that one token chooses in them
    head_bytes: int = 0
    row_bytes: int = 0  # of embeddings, a token; those of a tied one only where no head is read
    tied_row_bytes: int = 0
    written_bytes: int = 0  # keys and values, a token
    state_bytes: int = 0  # states, read and written, a sequence
    token_flops: dict[Compute, int] = field(default_factory=dict)  # of the layers, a token
    head_flops: int = 0  # a sampled row
    spans: dict[tuple[int, int], _Span] = field(default_factory=dict)  # by window and sink tokens


class CostModel:
    """Costs of the steps of one model with one kind of weights and cache."""

    def __init__(
        self, spec: DecoderSpec, formats: WeightFormats, layout: KvLayout, dtype: torch.dtype
    ) -> None:
        """dtype: of the activations, which attention multiplies in."""
        self.spec = spec
        self.formats = formats
        self.layout = layout
        self.itemsize = dtype.itemsize
        self.dense = Dense(dtype, formats.matrix.storage)
        self.attention_compute: Compute = "float32" if dtype is torch.float32 else "bfloat16"
        self._terms = self._coefficients()

    def _coefficients(self) -> _Coefficients:
        spec, formats, found = self.spec, self.formats, _Coefficients()
        for i, layer in enumerate(spec.layers):
            experts = layer.mlp.experts
            for name, (n, k) in matrices(spec, layer).items():
                stored, times = formats.of(f"layers.{i}.{MATRICES[name]}"), 1
                if experts is not None and name in _OF_EXPERTS:
                    found.expert_bytes += stored.nbytes(n, k)
                    times = experts.per_token
                else:
                    found.layer_bytes += stored.nbytes(n, k)
                flops = found.token_flops.get(stored.compute, 0)
                found.token_flops[stored.compute] = flops + 2 * n * k * times
            for n, k in head_matrices(layer.attention):
                self._of_dense(found, layer.attention.num_heads, n, k)
            if experts is not None:
                found.expert_layers += 1
                found.least_experts += experts.per_token
                found.layer_bytes += 4 * spec.hidden * experts.shared_gate
                self._of_dense(found, 1, experts.count, spec.hidden)
            a, token = layer.attention, self.layout.bytes_per_token(i)
            read, recent_read = self._read_bytes(i)
            if a.remembers is not None:
                self._of_dense(found, 1, _gates(a), spec.hidden)
            if a.has_state:
                found.state_bytes += 2 * self.layout.state_bytes(i)
            recent = self.layout.recent_bytes_per_token(i)
            found.written_bytes += token + recent
            span = found.spans.setdefault((a.window, a.sink_tokens), _Span())
            span.read_bytes += read
            span.recent_bytes += recent_read
            span.pair_flops += _pair_flops(a)
        found.head_bytes = formats.of("head").nbytes(spec.vocab_size, spec.hidden)
        found.head_flops = 2 * spec.vocab_size * spec.hidden
        row = spec.hidden * self.itemsize
        found.row_bytes = row * bool(spec.learned_positions)
        if spec.tied:
            found.tied_row_bytes = found.head_bytes // spec.vocab_size
        else:
            found.row_bytes += row
        if spec.inputs is not None:
            wide = len(spec.layers) * spec.inputs.dim
            found.row_bytes += wide * self.itemsize
            self._of_dense(found, 1, wide, spec.hidden)
        return found

    def _read_bytes(self, layer: int) -> tuple[int, int]:
        """Of one visible token, and of a recent one, in the cache that a layer reads."""
        reads = self.spec.layers[layer].attention.reads
        at = layer if reads is None else reads
        return self.layout.bytes_per_token(at), self.layout.recent_bytes_per_token(at)

    def _of_dense(self, found: _Coefficients, count: int, n: int, k: int) -> None:
        """So many matrices that no format rounds."""
        compute = self.dense.compute
        found.layer_bytes += count * self.dense.nbytes(n, k)
        found.token_flops[compute] = found.token_flops.get(compute, 0) + 2 * count * n * k

    def cost(self, size: StepSize) -> Cost:
        """Of the whole step: a few multiplications, whatever the number of layers."""
        terms, sampled, tokens = self._terms, size.sampled, size.tokens
        kv = tokens * terms.written_bytes + len(size.contexts) * terms.state_bytes
        attention = 0
        for (window, sink_tokens), span in terms.spans.items():
            seen, read = self._seen(size, window, sink_tokens)
            kv += span.read_bytes * read
            if span.recent_bytes:
                coded, recent = self._split(size, window)
                kv += span.read_bytes * (coded - read) + span.recent_bytes * recent
            attention += span.pair_flops * seen
        rows = terms.row_bytes + (0 if sampled else terms.tied_row_bytes)
        weights = terms.layer_bytes + rows * tokens + (terms.head_bytes if sampled else 0)
        tower = size.seen or _NOTHING_SEEN
        weights += size.adapter_bytes + tower.weight_bytes
        if terms.expert_layers:  # where layers' formats differ: of an expert on average
            chosen = size.experts or terms.least_experts
            weights += chosen * terms.expert_bytes // terms.expert_layers
        products = {compute: flops * tokens for compute, flops in terms.token_flops.items()}
        for compute, flops in (
            (self.formats.of("head").compute, terms.head_flops * sampled),
            (self.attention_compute, attention),
            (self.dense.compute, tower.flops),
        ):
            products[compute] = products.get(compute, 0) + flops
        return Cost(weights, kv, products)

    def expected_experts(self, tokens: int) -> int:
        """That so many tokens would choose, of all layers together, if each chose at random: for
        predictions. 0 where there are none.
        """
        found = 0.0
        for layer in self.spec.layers:
            experts = layer.mlp.experts
            if experts is not None:
                missed = (1.0 - experts.per_token / experts.count) ** tokens
                found += experts.count * (1.0 - missed)
        return round(found)

    @staticmethod
    def _seen(size: StepSize, window: int, sink_tokens: int) -> tuple[int, int]:
        """Query-key pairs, and keys that any query of their sequence sees."""
        contexts, reach = size.contexts, window + sink_tokens
        if size.tokens == len(contexts):  # one token each
            seen = sum(min(c, reach) for c in contexts) if window else sum(contexts)
            return seen, seen
        found = read = 0
        for count, context in zip(size.queries, contexts, strict=True):
            found += pairs(count, context, reach)
            read += min(context, count + reach - 1) if window else context
        return found, read

    def _split(self, size: StepSize, window: int) -> tuple[int, int]:
        """Of the keys that queries see: those that any sees as codes, and as they were written."""
        coded = recent = 0
        kept = self.layout.recent_window
        for count, context in zip(size.queries, size.contexts, strict=True):
            first = context - count
            low = max(first + 1 - window, 0) if window else 0
            border, end = recent_from(first, kept), recent_from(context - 1, kept)
            recent += context - max(border, low)
            if not window:
                coded += end
                continue
            for codes in range(border, end + 1, KEY_GROUP):  # before the query that sees the most
                low = max(low, max(first, codes + kept) + 1 - window)
                coded += max(codes - low, 0)
                low = max(low, codes)
        return coded, recent

    # ── operator by operator ─────────────────────────────────────────────────────────────────

    def ops(self, size: StepSize) -> list[OpCost]:
        """Every kind of operator in the step, in the order of `OPS`; sampling excluded."""
        spec, formats = self.spec, self.formats
        head = formats.of("head")
        units: dict[str, Unit] = dict.fromkeys(OPS, "vector")
        units |= {
            name: formats.of(f"layers.{i}.{at}").compute
            for i, layer in reversed(list(enumerate(spec.layers)))
            for name, at in matrices_of(layer).items()
        }
        units |= {"head": head.compute, "attention": self.attention_compute}
        units |= {"heads": self.dense.compute, "gates": self.dense.compute}
        rows = {name: OpCost(name, unit) for name, unit in units.items()}
        tokens = size.tokens
        self._embed(rows["embedding"], tokens, size.sampled)
        for i, layer in enumerate(spec.layers):
            for name, (n, k) in matrices(spec, layer).items():
                if layer.mlp.experts is not None and name in _OF_EXPERTS:
                    continue
                out = n // (2 if layer.mlp.gated and name in ("up", "shared_up") else 1)
                stored = formats.of(f"layers.{i}.{MATRICES[name]}")
                self._multiply(rows[name], stored, tokens, n, k, out * self.itemsize)
            if layer.mlp.experts is not None:
                self._mix(rows["experts"], i, layer, layer.mlp.experts, size)
            if layer.attention.is_absent:
                continue
            if layer.attention.conv is not None:
                self._convolve(rows["conv"], layer.attention, size, i)
                continue
            if layer.attention.remembers is not None:
                self._remember(rows, layer.attention, size, i)
                continue
            if layer.attention.gated:
                values = tokens * layer.attention.out_dim
                rows["attention"].add(1, 3 * values * self.itemsize, 5 * values)
            self._of_heads(rows["heads"], layer.attention, tokens)
            self._rotate(rows["rotary"], layer.attention, tokens, i)
            self._attend(rows["attention"], layer.attention, size, i)
        self._normalize(rows["norm"], tokens, size.sampled)
        self._take_inputs(rows, tokens)
        if size.sampled:
            self._multiply(
                rows["head"],
                head,
                size.sampled,
                spec.vocab_size,
                spec.hidden,
                4 * spec.vocab_size,
            )
            if spec.final_softcap:
                logits = size.sampled * spec.vocab_size
                rows["softcap"].add(1, 8 * logits, _SOFTCAP_FLOPS * logits)
        return list(rows.values())

    def _embed(self, row: OpCost, tokens: int, sampled: int) -> None:
        terms, elements = self._terms, tokens * self.spec.hidden
        rows = terms.row_bytes + (0 if sampled else terms.tied_row_bytes)
        learned = bool(self.spec.learned_positions)
        flops = elements * (self.spec.embed_scale != 1.0)
        row.add(1 + learned, elements * self.itemsize * (1 + learned), flops, rows * tokens)
        row.add(1, 2 * sampled * self.spec.hidden * self.itemsize)  # the rows that the head takes

    def _take_inputs(self, rows: Mapping[str, OpCost], tokens: int) -> None:
        """What makes layers' inputs; a layer multiplies by its own, and perhaps by a number."""
        spec, a_byte = self.spec, self.itemsize
        for layer in spec.layers:
            moved, flops = 3 * layer.input_dim, layer.input_dim
            rows["input_gate"].add(layer.input_dim > 0, tokens * moved * a_byte, tokens * flops)
            if layer.input_dim:  # a norm and an addition, as behind the layer's blocks
                each = _NORM_FLOPS[spec.norm.kind] + 1
                rows["norm"].add(2, 5 * tokens * spec.hidden * a_byte, each * tokens * spec.hidden)
            if layer.scalar:
                rows["norm"].add(1, 2 * tokens * spec.hidden * a_byte, tokens * spec.hidden)
        if spec.inputs is None:
            return
        wide = len(spec.layers) * spec.inputs.dim
        self._multiply(rows["projection"], self.dense, tokens, wide, spec.hidden, wide * a_byte)
        rows["embedding"].add(1, tokens * wide * a_byte, tokens * wide)
        moved, flops = 2 + 3, _NORM_FLOPS["rms"] + 1
        rows["norm"].add(2, moved * tokens * wide * a_byte, flops * tokens * wide)

    def _multiply(
        self, row: OpCost, stored: WeightFormat, tokens: int, n: int, k: int, out_bytes: int
    ) -> None:
        moved = tokens * (k * self.itemsize + out_bytes)
        row.multiply(stored.compute, 2 * tokens * n * k)
        row.add(1, moved, weight_bytes=stored.nbytes(n, k))

    def _mix(
        self, row: OpCost, i: int, layer: LayerSpec, experts: ExpertsSpec, size: StepSize
    ) -> None:
        """A layer's router, and its share of the experts that were chosen."""
        terms, tokens = self._terms, size.tokens
        hidden, chosen = self.spec.hidden, size.experts or terms.least_experts
        row.unit = self.formats.of(f"layers.{i}.{MATRICES['up']}").compute
        row.multiply(self.dense.compute, 2 * tokens * experts.count * hidden)
        own = self.dense.nbytes(experts.count, hidden)
        for name in _OF_EXPERTS:
            n, k = matrices(self.spec, layer)[name]
            stored = self.formats.of(f"layers.{i}.{MATRICES[name]}")
            row.multiply(stored.compute, 2 * tokens * experts.per_token * n * k)
            own += stored.nbytes(n, k) * chosen // terms.expert_layers
        between = experts.per_token * (2 * layer.mlp.intermediate + 2 * hidden)
        row.add(1, tokens * (2 * hidden + between) * self.itemsize, weight_bytes=own)
        if experts.shared_gate:
            moved = tokens * (2 * experts.shared + hidden) * self.itemsize
            row.add(1, moved, tokens * (2 * hidden + experts.shared), 4 * hidden)

    def _of_heads(self, row: OpCost, a: AttentionSpec, tokens: int) -> None:
        """To latents and from them; the first also rotates queries."""
        turned = a.turning
        for n, k in head_matrices(a):
            row.multiply(self.dense.compute, 2 * tokens * a.num_heads * n * k)
            row.flops += tokens * a.num_heads * _ROTATION_FLOPS * turned
            moved = tokens * a.num_heads * (n + k + 2 * turned) * self.itemsize
            row.add(1, moved, weight_bytes=a.num_heads * self.dense.nbytes(n, k))
            turned = 0

    def _remember(
        self, rows: Mapping[str, OpCost], a: AttentionSpec, size: StepSize, layer: int
    ) -> None:
        """A gated delta rule, or Mamba 2: what decides how much fades, then states."""
        gates, tokens = _gates(a), size.tokens
        row, each = (rows["delta"], _DELTA_FLOPS) if a.delta else (rows["mamba"], _MAMBA_FLOPS)
        self._multiply(rows["gates"], self.dense, tokens, gates, self.spec.hidden, 4 * gates)
        (state, (width, mixed)) = a.state_shapes or ((), (0, 0))
        moved = mixed + 2 * a.out_dim
        flops = each * math.prod(state) + 2 * (width + 1) * mixed
        row.add(1, tokens * moved * self.itemsize, tokens * flops)
        row.kv_bytes += 2 * len(size.contexts) * self.layout.state_bytes(layer)

    def _convolve(self, row: OpCost, a: AttentionSpec, size: StepSize, layer: int) -> None:
        """A short convolution: a gate, so many inputs of a channel, another gate."""
        (_, (width, _)) = a.state_shapes or ((), (0, 0))
        moved = sum(a.qkv_columns) + 2 * a.out_dim
        row.add(1, size.tokens * moved * self.itemsize, size.tokens * (2 * width + 4) * a.out_dim)
        row.kv_bytes += 2 * len(size.contexts) * self.layout.state_bytes(layer)

    def _rotate(self, row: OpCost, a: AttentionSpec, tokens: int, layer: int) -> None:
        if a.latent is not None:  # of queries `_of_heads` does
            heads, values = 1, 2 * a.cached[1]
            flops = _ROTATION_FLOPS * a.turning + _NORM_FLOPS["rms"] * a.latent.rank
        else:
            heads = a.num_heads + a.num_kv_heads * (a.parts > 1)
            values = heads * (a.head_dim + a.kept_dim)
            flops = _ROTATION_FLOPS * heads * a.turning
            if a.kv_rank:
                flops += 2 * heads * a.head_dim * a.kv_rank
                row.add(0, 0, weight_bytes=4 * 2 * a.num_kv_heads * a.head_dim * a.kv_rank)
        if a.qk_norm != "none":
            flops += _NORM_FLOPS["rms"] * heads * a.head_dim
        moved = values * self.itemsize
        row.add(1, tokens * moved, tokens * flops)
        layout = self.layout
        each = layout.bytes_per_token(layer) + layout.recent_bytes_per_token(layer)
        row.kv_bytes += tokens * each

    def _attend(self, row: OpCost, a: AttentionSpec, size: StepSize, layer: int) -> None:
        seen, read = self._seen(size, a.window, a.sink_tokens)
        both = a.num_heads * (a.asked_dim + a.seen_dim)
        row.multiply(self.attention_compute, _pair_flops(a) * seen)
        row.add(1, size.tokens * both * self.itemsize)
        token_bytes, recent_bytes = self._read_bytes(layer)
        if recent_bytes:
            read, recent = self._split(size, a.window)
            row.kv_bytes += recent * recent_bytes
        row.kv_bytes += read * token_bytes

    def _normalize(self, row: OpCost, tokens: int, sampled: int) -> None:
        """Norms and residual adds that no matrix takes along: it does an RMS norm before it, and
        adds to the residual where no norm comes between."""
        hidden, a_byte = self.spec.hidden, self.itemsize
        each = _NORM_FLOPS[self.spec.norm.kind]
        apart = self.spec.norm.kind != "rms"

        def norm(elements: int) -> None:
            row.add(1, 2 * elements * a_byte, each * elements)

        for layer in self.spec.layers:
            mixes = layer.mlp.experts is not None  # its operator takes no norm and adds to nothing
            blocks = bool(layer.mlp.intermediate) + (not layer.attention.is_absent)
            before = 1 if layer.one_norm else blocks * apart  # one that two blocks read
            norms = before * layer.pre_norm + blocks * layer.post_norm  # stands apart
            if mixes and layer.mlp.experts is not None and layer.mlp.experts.apart:
                norms += 3  # the router's, and after both blocks
                row.add(1, 3 * tokens * hidden * a_byte, tokens * hidden)
            for _ in range(norms + (mixes and layer.pre_norm and not apart)):
                norm(tokens * hidden)
            if mixes and not layer.post_norm:
                row.add(1, 3 * tokens * hidden * a_byte, tokens * hidden)
            if layer.post_norm:
                row.add(blocks, 3 * blocks * tokens * hidden * a_byte, blocks * tokens * hidden)
        if self.spec.learned_positions:
            row.add(1, 3 * tokens * hidden * a_byte, tokens * hidden)
        if apart:
            norm(sampled * hidden)
