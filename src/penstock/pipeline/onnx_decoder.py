"""The plain maths of a decoder in ONNX's standard operators, in float32.

Inputs and outputs are named as optimum names those of a decoder with its past: `input_ids`,
`attention_mask`, `position_ids`, `past_key_values.N.key` and `.value`; `logits`, `present.N.key`
and `.value`. Batch, sequence and past are open dimensions; keys and values [batch, heads, tokens,
head_dim].
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.errors import UnsupportedModelError
from penstock.nn import AttentionSpec, Decoder, LayerSpec
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable
from penstock.nn.rope import RotaryTable
from penstock.pipeline.onnx_graph import GraphWriter

_LEAST = torch.finfo(torch.float32).min


def check_expressible(decoder: Decoder) -> None:
    """Raises UnsupportedModelError for what isn't written here."""
    for i, layer in enumerate(decoder.spec.layers):
        a, foreign = layer.attention, layer.mlp.row_operator
        lacking = {
            "attends over latents": a.latent is not None,
            "has a state": a.has_state,
            "has no attention": a.is_absent,
            "has gated attention": a.gated,
            "norms its values": a.value_norm,
            "reads another layer's keys and values": a.parts < 3,
            "has an input of its own, or a number that it multiplies by": (
                layer.input_dim > 0 or layer.scalar
            ),
            f"keeps keys and values in {a.kv_rank} dimensions (kv_rank)": bool(a.kv_rank),
            "has experts": layer.mlp.experts is not None,
            "has no feed-forward block": not layer.mlp.intermediate,
            f"has the operator {foreign} of another package": bool(foreign),
            "has attention sinks": a.sinks,
        }
        for what, there in lacking.items():
            if there:
                raise UnsupportedModelError(
                    f"Layer {i} {what}, which --onnx can't write: leave it out."
                )


class DecoderWriter:
    """Writes one decoder; `write` does it all."""

    def __init__(self, decoder: Decoder) -> None:
        check_expressible(decoder)
        self.decoder = decoder
        self.spec = decoder.spec
        self.g = GraphWriter()
        self._angles: dict[int, tuple[str, str]] = {}
        self._masks: dict[int, str] = {}

    def write(self) -> GraphWriter:
        g, spec = self.g, self.spec
        self.ids = g.input("input_ids", "INT64", ["batch_size", "sequence_length"])
        total = "past_sequence_length + sequence_length"
        self.mask = g.input("attention_mask", "INT64", ["batch_size", total])
        self.positions = g.input("position_ids", "INT64", ["batch_size", "sequence_length"])
        x = self._embed()
        for i, layer in enumerate(spec.layers):
            x = self._layer(i, layer, x)
        logits = self._linear("head", self.decoder.head, self._norm("norm", self.decoder.norm, x))
        if spec.final_softcap:
            logits = self._softcap(logits, spec.final_softcap)
        g.output(logits, "logits", ["batch_size", "sequence_length", spec.vocab_size], 0)
        return g

    def _embed(self) -> str:
        g, spec, embed = self.g, self.spec, self.decoder.embed
        if spec.tied:
            table = g.weight("embed.weight", _matrix(self.decoder.head))
        else:
            assert isinstance(embed, Loadable)
            table = g.weight("embed.weight", embed.parameter("weight"))
        x = g.op("Gather", table, self.ids, axis=0)
        if spec.embed_scale != 1.0:
            x = g.op("Mul", x, g.real(spec.embed_scale))
        learned = self.decoder.positions
        if learned is not None:
            rows = g.weight("positions.weight", learned.parameter("weight"))
            x = g.op("Add", x, g.op("Gather", rows, self.positions, axis=0))
        return x

    def _layer(self, i: int, spec: LayerSpec, x: str) -> str:
        module: Any = self.decoder.layers[i]
        name = f"layers.{i}"

        def normed(which: str, value: str) -> str:
            norm = getattr(module, which)
            return value if norm is None else self._norm(f"{name}.{which}", norm, value)

        def mlp(value: str) -> str:
            rows = self._up(f"{name}.mlp.up", module.mlp.up, normed("mlp_norm", value))
            down = self._linear(f"{name}.mlp.down", module.mlp.down, rows)
            return normed("mlp_post_norm", down)

        read = normed("attention_norm", x)
        seen = self._attention(i, spec.attention, module.attention, read)
        out = self._linear(f"{name}.attention.out", module.attention.out, seen)
        after = self.g.op("Add", x, normed("attention_post_norm", out))
        if spec.one_norm:
            return self.g.op("Add", after, mlp(read))
        return self.g.op("Add", after, mlp(x if spec.parallel else after))

    def _attention(self, i: int, spec: AttentionSpec, module: Any, x: str) -> str:
        g, name = self.g, f"layers.{i}.attention"
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self._linear(f"{name}.qkv", module.qkv, x)
        q, k, v = g.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim])
        norms = {"q": module.q_norm, "k": module.k_norm}
        later = norms if spec.qk_norm == "turned" else {}
        first = dict.fromkeys(norms) if later else norms
        q = self._heads(q, heads, dim, first["q"], f"{name}.q_norm")
        k = self._heads(k, kv_heads, dim, first["k"], f"{name}.k_norm")
        v = self._heads(v, kv_heads, dim, None, "")
        if module.table is not None:
            q, k = self._rotate(q, module.table, dim), self._rotate(k, module.table, dim)
        if later:
            q, k = (
                self._rms(g.weight(f"{name}.{n}_norm", later[n].parameter("weight")[0]), x,
                          later[n].spec.eps)
                for n, x in (("q", q), ("k", k))
            )  # fmt: skip
        shape: list[int | str] = ["batch_size", kv_heads, "past_sequence_length", dim]
        whole: list[int | str] = [*shape]
        whole[2] = "past_sequence_length + sequence_length"
        joined: list[str] = []
        for part, kind in ((k, "key"), (v, "value")):
            past = g.input(f"past_key_values.{i}.{kind}", "FLOAT", shape)
            joined.append(g.op("Concat", past, part, axis=2))
            g.output(joined[-1], f"present.{i}.{kind}", whole, 2 * i + len(joined) - 1)
        # [batch, Hkv, H / Hkv, tokens, dim]: queries that share a key's head stand together
        grouped = g.op("Reshape", q, g.ints(0, kv_heads, heads // kv_heads, -1, dim))
        keys, values = (g.op("Unsqueeze", part, g.ints(2)) for part in joined)
        keys = g.op("Transpose", keys, perm=[0, 1, 2, 4, 3])
        scores = g.op("Mul", g.op("MatMul", grouped, keys), g.real(spec.scale))
        if spec.softcap:
            scores = self._softcap(scores, spec.softcap)
        scores = g.op("Where", self._visible(spec.window), scores, g.real(_LEAST))
        seen = g.op("MatMul", g.op("Softmax", scores, axis=-1), values)
        seen = g.op("Reshape", seen, g.ints(0, heads, -1, dim))
        seen = g.op("Transpose", seen, perm=[0, 2, 1, 3])
        return g.op("Reshape", seen, g.ints(0, 0, heads * dim))

    def _heads(self, x: str, count: int, dim: int, norm: Norm | None, name: str) -> str:
        """[batch, tokens, count · dim] → [batch, count, tokens, dim], normalised where asked."""
        g = self.g
        whole = norm is not None and norm.dim == count * dim
        if norm is not None and whole:
            x = self._rms(g.weight(name, norm.parameter("weight")), x, norm.spec.eps)
        x = g.op("Reshape", x, g.ints(0, 0, count, dim))
        if norm is not None and not whole:
            x = self._rms(g.weight(name, norm.parameter("weight")), x, norm.spec.eps)
        return g.op("Transpose", x, perm=[0, 2, 1, 3])

    def _rotate(self, x: str, table: RotaryTable, dim: int) -> str:
        """x [batch, heads, tokens, dim]: pairs (i, i + R/2) of the first R dimensions; (2i, 2i + 1)
        where the table is interleaved.
        """
        g, size = self.g, table.cos_sin.shape[1]
        if id(table) not in self._angles:
            stored = g.weight(f"cos_sin_{len(self._angles)}", table.cos_sin)
            rows = g.op("Gather", stored, self.positions, axis=0)
            cos, sin = g.split(g.op("Unsqueeze", rows, g.ints(1)), [size // 2, size // 2])
            self._angles[id(table)] = cos, sin
        cos, sin = self._angles[id(table)]
        rest = [dim - size] if dim > size else []
        if table.interleaved:
            turning, *kept = g.split(x, [size, *rest]) if rest else [x]
            pairs = g.op("Reshape", turning, g.ints(0, 0, 0, size // 2, 2))
            a, b = (g.op("Squeeze", each, g.ints(-1)) for each in g.split(pairs, [1, 1]))
        else:
            a, b, *kept = g.split(x, [size // 2, size // 2, *rest])
        first = g.op("Sub", g.op("Mul", a, cos), g.op("Mul", b, sin))
        second = g.op("Add", g.op("Mul", b, cos), g.op("Mul", a, sin))
        if not table.interleaved:
            return g.op("Concat", first, second, *kept, axis=-1)
        apart = (g.op("Unsqueeze", each, g.ints(-1)) for each in (first, second))
        turned = g.op("Reshape", g.op("Concat", *apart, axis=-1), g.ints(0, 0, 0, size))
        return g.op("Concat", turned, *kept, axis=-1) if kept else turned

    def _visible(self, window: int) -> str:
        """[batch, 1, 1, tokens, past + tokens] bool: not padding, not later, within the window."""
        if window in self._masks:
            return self._masks[window]
        g = self.g
        total = g.op("Gather", g.op("Shape", self.mask), g.integer(1))
        new = g.op("Gather", g.op("Shape", self.ids), g.integer(1))
        keys = g.op("Range", g.integer(0), total, g.integer(1))
        queries = g.op("Range", g.op("Sub", total, new), total, g.integer(1))
        column = g.op("Unsqueeze", queries, g.ints(1))
        seen = g.op("LessOrEqual", keys, column)
        if window:
            after = g.op("Sub", column, g.integer(window))
            seen = g.op("And", seen, g.op("Greater", keys, after))
        given = g.op("Cast", self.mask, to=9)  # bool
        given = g.op("Unsqueeze", given, g.ints(1, 2, 3))
        self._masks[window] = g.op("And", given, seen)
        return self._masks[window]

    def _norm(self, name: str, norm: Norm, x: str) -> str:
        g = self.g
        weight = g.weight(f"{name}.weight", norm.parameter("weight"))
        if norm.spec.kind == "rms":
            return self._rms(weight, x, norm.spec.eps)
        bias = norm._parameters["bias"]
        more = [] if bias is None else [g.weight(f"{name}.bias", bias)]
        return g.op("LayerNormalization", x, weight, *more, axis=-1, epsilon=norm.spec.eps)

    def _rms(self, weight: str, x: str, eps: float) -> str:
        g = self.g
        mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1))
        scale = g.op("Sqrt", g.op("Add", mean, g.real(eps)))
        return g.op("Mul", g.op("Div", x, scale), weight)

    def _linear(self, name: str, linear: Linear, x: str) -> str:
        g = self.g
        if linear is self.decoder.head and self.spec.tied:
            weight = g.op("Transpose", "embed.weight", perm=[1, 0])
        else:
            weight = g.weight(f"{name}.weight", _matrix(linear).t())
        y = g.op("MatMul", x, weight)
        bias = linear._parameters["bias"]
        return y if bias is None else g.op("Add", y, g.weight(f"{name}.bias", bias))

    def _up(self, name: str, linear: Linear, x: str) -> str:
        y = self._linear(name, linear, x)
        if not linear.gated:
            return self._activate(y, linear.activation)
        gate, up = self.g.split(y, [linear.out_features] * 2)
        return self.g.op("Mul", self._activate(gate, linear.activation), up)

    def _activate(self, x: str, kind: str) -> str:
        g = self.g
        if kind == "silu":
            return g.op("Mul", x, g.op("Sigmoid", x))
        if kind == "relu2":
            kept = g.op("Relu", x)
            return g.op("Mul", kept, kept)
        if kind == "gelu":
            inner = g.op("Erf", g.op("Mul", x, g.real(0.5**0.5)))
        elif kind == "gelu_tanh":
            cube = g.op("Mul", g.op("Mul", x, x), x)
            sum_ = g.op("Add", x, g.op("Mul", cube, g.real(0.044715)))
            inner = g.op("Tanh", g.op("Mul", sum_, g.real((2 / torch.pi) ** 0.5)))
        else:
            raise UnsupportedModelError(f"--onnx can't write the activation {kind!r}.")
        return g.op("Mul", g.op("Mul", x, g.real(0.5)), g.op("Add", inner, g.real(1.0)))

    def _softcap(self, x: str, cap: float) -> str:
        g = self.g
        return g.op("Mul", g.op("Tanh", g.op("Div", x, g.real(cap))), g.real(cap))


def _matrix(linear: Linear) -> torch.Tensor:
    """[N, K], or gate above up [2·N, K]."""
    return linear.weight_format.unpack(
        linear.packed, linear.out_features, linear.in_features, linear.gated
    )
