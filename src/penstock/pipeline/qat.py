"""Quantization-aware training: a short fine-tuning that sees its own rounding.

Forward with rounded weights, backward as if they weren't (straight through): Bengio et al. 2013,
arXiv:1308.3432; Jacob et al. 2017, arXiv:1712.05877. The float model as a teacher: Liu et al. 2023,
arXiv:2305.17888 (LLM-QAT).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.models.checkpoint import Source
from penstock.models.sources import open_source
from penstock.nn.decoder import MATRICES
from penstock.nn.rope import cos_sin_table
from penstock.nn.spec import DecoderSpec, LayerSpec
from penstock.ops.rotary_cache import in_basis, rotate
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.parts import Parts
from penstock.pipeline.store import Result, Store, source_digest
from penstock.quant import Codes, Scheme
from penstock.quant.methods import rtn

_SNAPSHOT, _MOMENTS = "training", ("exp_avg", "exp_avg_sq")

Report = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, the step's loss)."""


@dataclass(frozen=True, slots=True)
class QatOptions:
    """How the model is trained: AdamW, a cosine from `learning_rate` to a tenth of it."""

    steps: int = 100
    batch: int = 4  # windows a step
    learning_rate: float = 2e-4
    weight_decay: float = 0.0
    distillation: float = 1.0  # KL from the float model; what is left of 1: the text's own loss
    seed: int = 0  # of the order of windows

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not 0 < self.learning_rate <= 1:
            raise ConfigError(
                f"steps={self.steps}, batch={self.batch}, learning_rate={self.learning_rate}: "
                "each is above 0, and the rate, by which AdamW moves every weight, 1 at most."
            )
        if not 0 <= self.weight_decay < math.inf or not 0 <= self.seed < 1 << 63:
            raise ConfigError(
                f"weight_decay={self.weight_decay}, seed={self.seed}: neither is below 0, the "
                "first is finite, and the second below 2⁶³."
            )
        if not 0 <= self.distillation <= 1:
            raise ConfigError(f"distillation={self.distillation} doesn't lie from 0 to 1.")


def train(
    source: Path | Source,
    config: QuantizeConfig,
    text: CalibrationSet,
    options: QatOptions = QatOptions(),
    report: Report | None = None,
    *,
    work: Path | None = None,
    replace: bool = False,
) -> Iterator[tuple[str, Tensor | Codes]]:
    """Fine-tune, then round to nearest: the tensors of a checkpoint, as `quantize_model` gives.

    Of `config` the schemes count; text: windows of one length. work, replace: as of
    `quantize_model`; where training stands is kept there, as often as it takes a tenth of the time,
    three times the weights in float32. Memory: five times the weights in float32, and a batch's
    activations.
    Raises UnsupportedModelError for a decoder that isn't shaped like Llama, ConfigError for a
    scheme whose rows share scales.
    """
    parts = Parts.of(open_source(source) if isinstance(source, Path) else source)
    decoder = parts.spec.decoder
    text.check(decoder.vocab_size, decoder.max_position)
    if len({len(window) for window in text.windows}) > 1:
        raise ConfigError("Windows of different lengths can't be trained on together.")
    schemes = {module: config.scheme_of(module) for module in parts.modules()}
    for module, scheme in schemes.items():
        if scheme is not None and (scheme.rows != 1 or scheme.kind == "nvfp4"):
            raise ConfigError(f"{module} in {scheme.name}: rows share a scale, which QAT lacks.")
        if scheme is not None and scheme.static:
            raise ConfigError(f"{module} in {scheme.name}: QAT calibrates no static scales.")
    parts.check_groups(schemes, config.whole_groups)
    store = None
    if work is not None:
        key = {
            "source": source_digest(parts.source),
            "choices": config.key(),
            "training": asdict(options),
            "calibration": text.key(),
        }
        store = Store(work, key, replace=replace)
    model = TrainableDecoder(parts, text.longest)
    _fit(model, schemes, text, options, report, store)
    return _tensors(parts, model, schemes)


def distil(
    student: Parts,
    teacher: Parts,
    text: CalibrationSet,
    options: QatOptions,
    report: Report | None = None,
) -> Iterator[tuple[str, Tensor | Codes]]:
    """Fine-tune `student` to say what `teacher` says: its checkpoint's tensors, nothing rounded.

    Both have one vocabulary and are shaped like Llama: else UnsupportedModelError. Memory: four
    times the student's weights in float32, once the teacher's, and a batch's activations.
    """
    model = TrainableDecoder(student, text.longest)
    whole = TrainableDecoder(teacher, text.longest).requires_grad_(False)
    kept: dict[str, Scheme | None] = dict.fromkeys(student.modules())
    _fit(model, kept, text, options, report, None, whole)
    return _tensors(student, model, kept)


class TrainableDecoder(nn.Module):
    """A decoder of RMS norms and gated feed-forwards in plain torch, float32, differentiable."""

    def __init__(self, parts: Parts, length: int) -> None:
        super().__init__()
        self.spec = parts.spec.decoder
        check_trainable(self.spec, parts.spec.family)
        self.layers = nn.ModuleList(
            nn.ParameterDict({_key(n): nn.Parameter(t) for n, t in parts.layer(i).items()})
            for i in range(parts.num_layers)
        )
        self.embed = nn.Parameter(parts.read(parts.embedding()))
        self.norm = nn.Parameter(parts.read(parts.names["norm.weight"][0]))
        self.head = None if self.spec.tied else nn.Parameter(parts.read(parts.head()[0]))
        tables = {layer.attention.rope for layer in self.spec.layers}
        self.tables = {r: None if r is None else cos_sin_table(r, length) for r in tables}

    def weight(self, module: str) -> Tensor:
        """The matrix in `module`, as it is trained."""
        if module == "head":
            return self.embed if self.head is None else self.head
        _, i, name = module.split(".", 2)
        return self._of(int(i), f"{name}.weight")

    def forward(self, tokens: Tensor, rounded: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]; `rounded(module, W)` is what W is multiplied as."""
        batch, length = tokens.shape
        head = rounded("head", self.weight("head"))
        table = head if self.head is None else self.embed
        x = functional.embedding(tokens.flatten().long(), table) * self.spec.embed_scale
        positions = torch.arange(length).repeat(batch)
        for i, layer in enumerate(self.spec.layers):
            x = x + self._attention(i, layer, x, positions, batch, rounded)
            h = self._linear(i, "mlp.up", self._norm(x, self._of(i, "mlp_norm.weight")), rounded)
            gate, up = h.chunk(2, -1)
            match layer.mlp.activation:
                case "silu":
                    gate = functional.silu(gate)
                case "gelu":
                    gate = functional.gelu(gate)
                case _:
                    gate = functional.gelu(gate, approximate="tanh")
            x = x + self._linear(i, "mlp.down", gate * up, rounded)
        return functional.linear(self._norm(x, self.norm), head).view(batch, length, -1)

    def _attention(
        self,
        i: int,
        layer: LayerSpec,
        x: Tensor,
        positions: Tensor,
        batch: int,
        rounded: Callable[[str, Tensor], Tensor],
    ) -> Tensor:
        a = layer.attention
        normed = self._norm(x, self._of(i, "attention_norm.weight"))
        qkv = self._linear(i, "attention.qkv", normed, rounded)
        q, k, v = (
            x.unflatten(-1, (-1, dim))
            for x, dim in zip(
                qkv.split(a.qkv_columns, -1), (a.head_dim, a.head_dim, a.kept_dim), strict=True
            )
        )
        if a.qk_norm == "head":
            q = self._norm(q, self._of(i, "attention.q_norm.weight"))
            k = self._norm(k, self._of(i, "attention.k_norm.weight"))
        interleaved = a.rope is not None and a.rope.interleaved
        q, k = (rotate(y, self.tables[a.rope], positions, interleaved) for y in (q, k))
        if a.kv_rank:
            bases = self._of(i, "attention.bases.weight")
            q, k = (in_basis(y, bases, side) for side, y in enumerate((q, k)))
        shared = a.num_heads // a.num_kv_heads
        heads = [y.unflatten(0, (batch, -1)).transpose(1, 2) for y in (q, k, v)]
        k, v = (y.repeat_interleave(shared, 1) for y in heads[1:])
        seen = functional.scaled_dot_product_attention(
            heads[0], k, v, is_causal=True, scale=a.scale
        )
        return self._linear(i, "attention.out", seen.transpose(1, 2).flatten(2).flatten(0, 1),
                            rounded)  # fmt: skip

    def _of(self, i: int, name: str) -> Tensor:
        layer = self.layers[i]
        assert isinstance(layer, nn.ParameterDict)
        found: Tensor = layer[_key(name)]
        return found

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight + self.spec.norm.offset
        return functional.rms_norm(x, weight.shape, weight, self.spec.norm.eps)

    def _linear(
        self, i: int, module: str, x: Tensor, rounded: Callable[[str, Tensor], Tensor]
    ) -> Tensor:
        name = f"layers.{i}.{module}"
        layer, bias = self.layers[i], _key(f"{module}.bias")
        assert isinstance(layer, nn.ParameterDict)
        return functional.linear(x, rounded(name, self.weight(name)), layer.get(bias))


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch's parameters have no dots in their names


def check_trainable(spec: DecoderSpec, family: str) -> None:
    """Raises UnsupportedModelError for a decoder that isn't shaped like Llama."""
    lacking = {
        "layer norms": spec.norm.kind != "rms",
        "learned positions": bool(spec.learned_positions),
        "capped logits": bool(spec.final_softcap),
        "scaled logits": spec.logit_scale != 1.0,
        "a biased head": spec.head_bias,
    }
    for layer in spec.layers:
        a = layer.attention
        lacking["parallel blocks"] = layer.parallel
        lacking["norms after a block"] = layer.post_norm or not layer.pre_norm
        lacking["experts"] = layer.mlp.experts is not None
        lacking["latents"] = a.latent is not None
        lacking["layers with states"] = a.has_state
        lacking["normed values"] = a.value_norm
        lacking["layers that read more than the stream"] = spec.reads_beside or layer.scalar
        lacking["layers without attention"] = a.is_absent
        lacking["feed-forwards without a gate"] = not layer.mlp.gated
        lacking["sliding windows"] = bool(a.window)
        lacking["long rope"] = a.rope is not None and a.rope.kind == "longrope"
        lacking["capped scores or sinks"] = bool(a.softcap) or a.sinks
        lacking["norms over all heads"] = a.qk_norm == "full"
        lacking["norms after a rotation"] = a.qk_norm == "turned"
        if found := [name for name, there in lacking.items() if there]:
            raise UnsupportedModelError(
                f"{family!r} has {', '.join(found)}, which training isn't built for "
                "(--method qat, --steps of prune)."
            )


class _StraightThrough:
    """W as its codes stand for it; the gradient is that of W."""

    def __init__(self, schemes: dict[str, Scheme | None]) -> None:
        self.schemes = schemes

    def __call__(self, module: str, weight: Tensor) -> Tensor:
        scheme = self.schemes[module]
        if scheme is None:
            return weight
        with torch.no_grad():
            lost = rtn.quantize(weight, scheme).dequantize() - weight
        return weight + lost


def _fit(
    model: TrainableDecoder,
    schemes: dict[str, Scheme | None],
    text: CalibrationSet,
    options: QatOptions,
    report: Report | None,
    store: Store | None,
    teacher: TrainableDecoder | None = None,
) -> None:
    teacher = teacher or copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    kept = None if store is None else _Snapshot(store, model, optimizer)
    done = 0 if kept is None else kept.restore()
    rounded = _StraightThrough(schemes)
    for step, batch in enumerate(_batches(text, options)):
        if step < done:
            continue
        share = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * share
        loss = _loss(model(batch, rounded), teacher, batch, options)
        _check_finite(loss, step, options)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        if kept is not None:
            kept.note(step + 1, last=step + 1 == options.steps)
        if report is not None:
            report(step + 1, options.steps, float(loss.detach()))
    for weight in model.parameters():
        _check_finite(weight, options.steps, options)


def _check_finite(found: Tensor, done: int, options: QatOptions) -> None:
    """Raises ConfigError where a loss or a weight isn't a number, or is infinite."""
    if not bool(found.detach().isfinite().all()):
        raise ConfigError(
            f"The training diverged: after {done} of {options.steps} steps what it computes is NaN "
            f"or infinite. Nothing was written. Lower the learning rate, which is "
            f"{options.learning_rate:g}."
        )


def _batches(text: CalibrationSet, options: QatOptions) -> Iterator[Tensor]:
    """The windows of each step [B, T], in an order that the seed alone decides."""
    windows = torch.stack(text.tensors())
    random = torch.Generator().manual_seed(options.seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(options.steps):
        while len(order) < options.batch:
            order = torch.cat((order, torch.randperm(len(windows), generator=random)))
        yield windows[order[: options.batch]]
        order = order[options.batch :]


def _loss(logits: Tensor, teacher: TrainableDecoder, batch: Tensor, options: QatOptions) -> Tensor:
    """KL from the float model and the text's own loss, in their shares."""
    loss = torch.zeros(())
    if options.distillation:
        with torch.no_grad():
            want = teacher(batch, lambda _, weight: weight).log_softmax(-1)
        found = logits.log_softmax(-1)
        kl = (want.exp() * (want - found)).sum(-1).mean()
        loss = loss + options.distillation * kl
    if options.distillation < 1:
        own = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten().long())
        loss = loss + (1 - options.distillation) * own
    return loss


class _Snapshot:
    """Where training stands: steps done, parameters, AdamW's two moments of each."""

    def __init__(
        self, store: Store, model: TrainableDecoder, optimizer: torch.optim.Optimizer
    ) -> None:
        self._store, self._optimizer = store, optimizer
        self._parameters = list(model.parameters())
        self._kept_at, self._took_s = time.monotonic(), 0.0

    def restore(self) -> int:
        """Go on where a run was cut off; how many steps it had done."""
        if not self._store.has(_SNAPSHOT):
            return 0
        found = {key: t for key, t in self._store.load(_SNAPSHOT).items() if isinstance(t, Tensor)}
        state: dict[int, dict[str, Tensor]] = {}
        for i, parameter in enumerate(self._parameters):
            parameter.data.copy_(found[f"{i}.value"])
            names = ("step", *_MOMENTS)
            state[i] = {name: found[f"{i}.{name}"].clone() for name in names}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        return int(state[0]["step"])

    def note(self, step: int, *, last: bool) -> None:
        """Keep it after `step` steps, if it is the last or keeping takes a tenth of the time."""
        start = time.monotonic()
        if not last and start - self._kept_at < 9 * self._took_s:
            return
        found: Result = {}
        for i, parameter in enumerate(self._parameters):
            state = self._optimizer.state[parameter]
            found[f"{i}.value"] = parameter.detach()
            found |= {f"{i}.{name}": state[name] for name in ("step", *_MOMENTS)}
        self._store.save(_SNAPSHOT, found)
        self._kept_at = time.monotonic()
        self._took_s = self._kept_at - start


def _tensors(
    parts: Parts, model: TrainableDecoder, schemes: dict[str, Scheme | None]
) -> Iterator[tuple[str, Tensor | Codes]]:
    with torch.no_grad():
        trained = {"norm.weight": model.norm, "embed.weight": model.embed}
        if model.head is not None:
            trained["head.weight"] = model.head
        for i, layer in enumerate(model.layers):
            assert isinstance(layer, nn.ParameterDict)
            trained |= {f"layers.{i}.{n.replace('/', '.')}": t for n, t in layer.items()}
    for target, names in parts.names.items():
        module = target.removesuffix(".weight")
        if target == "head.weight" and model.head is None and "embed.weight" in parts.names:
            continue  # a second copy of the tied embedding
        if model.head is None and module in ("embed", "head"):
            module, target = "head", "embed.weight"
        whole = trained[target].detach()
        scheme = schemes.get(module) if target.endswith("weight") else None
        matrix = module in ("embed", "head") or module.endswith(tuple(MATRICES.values()))
        for name, piece in _split(parts, names, whole).items():
            if scheme is not None:
                yield name, rtn.quantize(piece, scheme)
                continue
            stored = parts.source.read(name)
            assert isinstance(stored, Tensor)
            yield name, piece.to(stored.dtype) if matrix else piece.clone()


def _split(parts: Parts, names: tuple[str, ...], whole: Tensor) -> dict[str, Tensor]:
    rows = [parts.source.shape(name)[0] for name in names]
    return dict(zip(names, whole.split(rows), strict=True))
