"""Filling a model from a checkpoint: strict both ways."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.models.checkpoint import Checkpoint, Source
from penstock.models.finite import blamed
from penstock.models.room import Room
from penstock.models.spec import Ignore, ModelSpec, Ones, Rename, Share, Stack
from penstock.nn.decoder import Decoder, matrices_of, stored_in
from penstock.nn.parameters import Loadable, plain
from penstock.nn.spec import DecoderSpec
from penstock.ops.panels import COLUMNS
from penstock.quant import Codes, Dense, Scheme, WeightFormat, WeightFormats, format_of
from penstock.quant.codes import mixture

logger = logging.getLogger("penstock")

Progress = Callable[[int, int], None]
"""Called with (values loaded, values in all)."""

Stored = Callable[[str, Loadable], None]
"""Called with a module and its name after it has taken one of its tensors: it may take it away."""


@dataclass(slots=True)
class WeightPlan:
    """One parameter and the checkpoint tensors it is made of, in order."""

    rule: Rename | Stack
    parts: list[str | None]


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for number in "ie":
        pattern = pattern.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
    return re.compile(pattern.replace(r"\{p\}", r"(?P<p>weight|bias)"))


def rules_name(name: str, spec: ModelSpec) -> str:
    """A tensor's name as rules have it: what a checkpoint and an adapter may spell apart."""
    for prefix in spec.prefixes:
        name = name.removeprefix(prefix)
    for beginning, meaning in spec.aliases:
        if name.startswith(beginning):
            name = meaning + name.removeprefix(beginning)
    return name


def _fill(template: str, found: dict[str, str]) -> str:
    for key, value in found.items():
        template = template.replace("{" + key + "}", value)
    return template


def plan_weights(names: Iterable[str], spec: ModelSpec) -> tuple[dict[str, WeightPlan], list[str]]:
    """Match checkpoint names to parameters: (parameter → parts, names that no rule knows)."""
    patterns = [
        (rule, position, _compile(source))
        for rule in spec.rules
        if not isinstance(rule, Ignore)
        for position, source in enumerate(rule.sources)
    ]
    ignores = [rule for rule in spec.rules if isinstance(rule, Ignore)]
    plans: dict[str, WeightPlan] = {}
    unknown: list[str] = []
    for name in names:
        short = rules_name(name, spec)
        if any(rule.matches(short) for rule in ignores):
            continue
        taken = False
        for rule, position, pattern in patterns:
            match = pattern.fullmatch(short)
            if match and (isinstance(rule, Share) or not taken):
                target = _fill(rule.target, match.groupdict())
                plan = plans.setdefault(target, WeightPlan(rule, [None] * len(rule.sources)))
                if plan.rule is not rule or plan.parts[position] is not None:
                    rival = next(part for part in plan.parts if part is not None)
                    raise WeightsError(f"{rival} and {name} both give {target}. Remove one.")
                plan.parts[position] = name
                taken = taken or not isinstance(rule, Share)
        if not taken:
            unknown.append(name)
    return plans, unknown


def load_weights(
    model: nn.Module,
    spec: ModelSpec,
    checkpoint: Source,
    progress: Progress | None = None,
    stored: Stored | None = None,
) -> dict[str, tuple[str, ...]]:
    """Fill every parameter of `model`, one at a time; returns what each is made of, by its name.

    Raises WeightsError when the checkpoint has a tensor that nothing takes, lacks one that
    something needs, or has one of another shape.
    """
    modules = {n: m for n, m in model.named_modules() if isinstance(m, Loadable)}
    names = {module: name for name, module in modules.items()}
    expected = {f"{n}.{p}": s for n, m in modules.items() for p, s in m.expected().items()}
    plans, unknown = plan_weights(checkpoint.names(), spec)
    if spec.decoder.tied:
        _drop_tied_copy(plans, checkpoint)
    _drop_zero_biases(plans, expected, checkpoint)
    _add_ones(plans, expected, spec)
    _check_complete(plans, unknown, expected, spec)

    tensors = {
        target: tuple(part for part in plan.parts if part is not None)
        for target, plan in plans.items()
    }
    total = sum(torch.Size(shape).numel() for shape in expected.values())
    done, room = 0, Room()
    for target, shape in expected.items():
        if modules[target.rpartition(".")[0]].elsewhere:
            continue
        _check_halves(plans[target], modules[target.rpartition(".")[0]], checkpoint)
        tensor = _assemble(plans[target], shape, checkpoint, spec, room)
        if tuple(tensor.shape) != shape:
            raise _disagrees(target, plans[target], shape, tuple(tensor.shape), spec)
        name, _, parameter = target.rpartition(".")
        try:
            modules[name].load(parameter, tensor)
        except WeightsError as error:  # of values; which tensor's, only this place knows
            raise WeightsError(f"{', '.join(tensors[target])}: {error}") from error
        room.leave_to(modules[name])
        keeper = modules[name].keeper
        if stored is not None and keeper.is_complete:
            try:
                stored(names[keeper], keeper)
            except WeightsError as error:  # of any that it was given
                given = [t for t in tensors if _kept_in(t) == names[keeper]]
                parts = blamed((part for t in given for part in tensors[t]), checkpoint)
                raise WeightsError(f"{', '.join(parts)}: {error}") from error
        done += math.prod(shape)
        if progress is not None:
            progress(done, total)
    return tensors


def _kept_in(target: str) -> str:
    """The module that keeps a parameter's values."""
    return stored_in(target.rpartition(".")[0])


def check_complete(
    spec: ModelSpec, checkpoint: Source, formats: WeightFormats, dtype: torch.dtype
) -> None:
    """Raises what `load_weights` raises for tensors that are missing, in the way, or of another
    shape, by their names and shapes: nothing is read.
    """
    model = Decoder(spec.decoder, formats, dtype, 1)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, Loadable)}
    expected = {f"{n}.{p}": s for n, m in modules.items() for p, s in m.expected().items()}
    plans, unknown = plan_weights(checkpoint.names(), spec)
    table = plans.pop("embed.weight", None) if spec.decoder.tied else None
    if table is not None:
        plans["head.weight"] = table
    if not isinstance(checkpoint, Checkpoint):  # biases that may be of zeros
        plans = {t: p for t, p in plans.items() if t in expected or not t.endswith(".bias")}
    _add_ones(plans, expected, spec)
    _check_complete(plans, unknown, expected, spec)
    for target, shape in expected.items():
        plan = plans[target]
        if isinstance(plan.rule, Ones):
            continue
        _check_halves(plan, modules[target.rpartition(".")[0]], checkpoint)
        found = [checkpoint.shape(part) for part in plan.parts if part is not None]
        whole = (sum(part[0] for part in found), *found[0][1:])
        if plan.rule.transform is None and whole != shape:
            raise _disagrees(target, plan, shape, whole, spec)


def _check_halves(plan: WeightPlan, module: Loadable, checkpoint: Source) -> None:
    """Raises WeightsError for a gate and an up that differ in shape, though together they fit."""
    parts = [part for part in plan.parts if part is not None]
    if len(parts) == 2 and getattr(module, "gated", False):
        gate, up = (checkpoint.shape(part) for part in parts)
        if gate != up:
            raise WeightsError(
                f"{parts[0]} has the shape {list(gate)} and {parts[1]} {list(up)}, which must be "
                "the same."
            )


def _disagrees(
    target: str, plan: WeightPlan, needs: tuple[int, ...], has: tuple[int, ...], spec: ModelSpec
) -> WeightsError:
    return WeightsError(
        f"{target} needs shape {list(needs)}, but {plan.parts} give {list(has)}. config.json and "
        f"the weights disagree.{_unsaid(spec)}"
    )


def _unsaid(spec: ModelSpec) -> str:
    """Which sizes of config.json are defaults, as a sentence behind others; "" where none is."""
    sizes = ", ".join(f"{key} ({value})" for key, value in spec.unsaid)
    return f" config.json doesn't say {sizes}: those are defaults." if sizes else ""


def _sources(target: str, spec: ModelSpec, known: set[str]) -> str:
    """What a parameter is made of: where several rules give it, by the one with most of whose names
    others begin. known: what tensors' names begin with, dot by dot.
    """
    if spec.decoder.tied and target == "head.weight":
        target = "embed.weight"
    found: list[list[str]] = []
    for rule in spec.rules:
        if not isinstance(rule, Ignore):
            match = _compile(rule.target).fullmatch(target)
            if match:
                sources = [_fill(source, match.groupdict()) for source in rule.sources]
                found += map(list, zip(*(_spellings(x, spec) for x in sources), strict=False))

    def begins(sources: list[str]) -> int:
        return max(len(start) for start in _starts(sources[0]) if start in known)

    if not found:
        return target
    best = max(found, key=begins)
    return " and ".join(best)


def _spellings(name: str, spec: ModelSpec) -> list[str]:
    """A tensor's name as files may have it, and as rules do where that means the same."""
    names = [name]
    for beginning, meaning in reversed(spec.aliases):
        names += [beginning + x.removeprefix(meaning) for x in names if x.startswith(meaning)]
    names += [prefix + x for prefix in spec.prefixes for x in names]
    return [x for x in names if rules_name(x, spec) == name] or [name]


def _starts(name: str) -> Iterator[str]:
    """ "", "a" and "a.b" of "a.b.c"."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts)))


def _assemble(
    plan: WeightPlan, shape: tuple[int, ...], checkpoint: Source, spec: ModelSpec, room: Room
) -> Tensor | Codes:
    if isinstance(plan.rule, Ones):
        return torch.ones(shape)
    found = [checkpoint.read(part) for part in plan.parts if part is not None]
    codes = [part for part in found if isinstance(part, Codes)]
    if len(codes) == len(found) and _keeps(plan, checkpoint, spec):
        whole = codes[0] if len(codes) == 1 else Codes.stack(codes)
        return whole if plan.rule.transform is None else whole.rows(_order(plan, checkpoint, spec))
    tensors = [part.dequantize() if isinstance(part, Codes) else part for part in found]
    try:
        tensor = tensors[0] if len(tensors) == 1 else room.join(tensors)
        if plan.rule.transform is None:
            return tensor
        return plan.rule.transform(tensor, spec.decoder).contiguous()  # packing reads rows
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{p} {list(t.shape)}" for p, t in zip(plan.parts, tensors, strict=True))
        raise WeightsError(f"These tensors don't fit together: {shapes}. {error}") from error


def _keeps(plan: WeightPlan, checkpoint: Source, spec: ModelSpec) -> bool:
    """Whether a parameter stays as it is quantized: all parts alike, and whole rows move in it."""
    parts = [part for part in plan.parts if part is not None]
    joint = _joint_scheme(parts, checkpoint)
    if joint is None or plan.rule.transform is None:
        return joint is not None
    if not plan.rule.of_rows or not joint.rows_apart:
        return False
    if joint.bits:
        return True
    counts = torch.tensor([checkpoint.shape(part)[0] for part in parts])
    kinds = torch.arange(len(parts)).repeat_interleave(counts)[_order(plan, checkpoint, spec)]
    whole = len(kinds) % COLUMNS == 0  # sixteen rows at a time are of one kind
    return whole and bool((kinds.view(-1, COLUMNS) == kinds[::COLUMNS, None]).all())


def _order(plan: WeightPlan, checkpoint: Source, spec: ModelSpec) -> Tensor:
    """Which rows of its parts, one under the other, a rule's `transform` picks."""
    assert plan.rule.transform is not None
    count = sum(checkpoint.shape(part)[0] for part in plan.parts if part is not None)
    try:
        return plan.rule.transform(torch.arange(count).view(-1, 1), spec.decoder).flatten()
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"{plan.parts} have {count} rows, which don't fit: {error}") from error


def _joint_scheme(parts: Sequence[str], checkpoint: Source) -> Scheme | None:
    """What holds all parts of a matrix as they are: their scheme, or a mixture of K-quants."""
    schemes = {checkpoint.scheme(part) for part in parts}
    found = {scheme for scheme in schemes if scheme is not None}
    if found != schemes or not found:
        return None
    if len(found) == 1:
        return next(iter(found))
    alike = all(scheme.is_k for scheme in found) and len({s.activations for s in found}) == 1
    whole = all(checkpoint.shape(part)[0] % COLUMNS == 0 for part in parts)
    return mixture(found) if alike and whole else None


def stored_formats(spec: ModelSpec, checkpoint: Source, dtype: torch.dtype) -> WeightFormats:
    """The formats of a decoder that keeps what `checkpoint` quantized, the rest in `dtype`."""
    plans, _ = plan_weights(checkpoint.names(), spec)
    if spec.decoder.tied:
        _drop_tied_copy(plans, checkpoint)
    plain, found, widened = Dense(dtype), dict[str, WeightFormat](), list[str]()
    for module, those in _by_matrix(plans).items():
        parts = [part for plan in those for part in plan.parts if part is not None]
        schemes = {checkpoint.scheme(part) for part in parts}
        if schemes == {None}:
            continue
        joint = _joint_scheme(parts, checkpoint)
        kept = all(_keeps(plan, checkpoint, spec) for plan in those)
        apart = (".router", ".attention.gates", "inputs.projection")
        kept = kept and not module.endswith(apart)
        if joint is not None and kept:
            found[module] = format_of(joint)
        elif not (module.endswith(".gates") and all(type(plan.rule) is Share for plan in those)):
            widened += [part for part in parts if checkpoint.scheme(part) is not None]
    if widened:
        logger.warning(
            "%d quantized tensors are widened to %s: this family's matrices have their values in "
            "another order, or put them beside others that are quantized otherwise, or they are "
            "routers, or say how far states fade: %s.",
            len(widened), plain.name, _some(widened),
        )  # fmt: skip
    layers = [f for module, f in found.items() if module != "head"]
    matrix = max(layers, key=layers.count) if layers else plain
    head = found.get("head", plain)
    special = {m: f for m, f in found.items() if f != (head if m == "head" else matrix)}
    if layers:
        special |= {m: plain for m in _matrices(spec.decoder) if m not in found and m != "head"}
    return WeightFormats(matrix, head, special)


def _by_matrix(plans: dict[str, WeightPlan]) -> dict[str, list[WeightPlan]]:
    """The parameters' plans by their modules; a layer's experts are stored as one."""
    found: dict[str, list[WeightPlan]] = {}
    for target, plan in plans.items():
        found.setdefault(stored_in(target.removesuffix(".weight")), []).append(plan)
    return found


def _matrices(decoder: DecoderSpec) -> Iterator[str]:
    for i, layer in enumerate(decoder.layers):
        yield from (f"layers.{i}.{name}" for name in matrices_of(layer).values())


def _drop_tied_copy(plans: dict[str, WeightPlan], checkpoint: Source) -> None:
    """With a tied embedding the head's matrix is the table, under whichever name it comes."""
    table = plans.pop("embed.weight", None)
    head = plans.get("head.weight")
    if table is None:
        return
    if head is not None:
        a, b = table.parts[0], head.parts[0]
        assert a is not None and b is not None  # rename rules have one part
        if not _same(checkpoint.read(a), checkpoint.read(b)):
            raise WeightsError(
                f"config.json ties the embeddings, but {a} and {b} differ. "
                "Set tie_word_embeddings to false, or remove one of them."
            )
    plans["head.weight"] = table


def _add_ones(
    plans: dict[str, WeightPlan], expected: dict[str, tuple[int, ...]], spec: ModelSpec
) -> None:
    """What the family's norms have no weights for."""
    for rule in spec.rules:
        if isinstance(rule, Ones):
            pattern = _compile(rule.target)
            for target in expected:
                if pattern.fullmatch(target):
                    plans.setdefault(target, WeightPlan(rule, []))


def _drop_zero_biases(
    plans: dict[str, WeightPlan], expected: dict[str, tuple[int, ...]], checkpoint: Source
) -> None:
    """AutoGPTQ gives every matrix a bias, of zeros where the model has none."""
    if isinstance(checkpoint, Checkpoint):
        return  # of plain values: nobody adds any
    for target in [t for t in plans if t.endswith(".bias") and t not in expected]:
        parts = [part for part in plans[target].parts if part is not None]
        if not any(plain(checkpoint.read(part)).any() for part in parts):
            del plans[target]


def _same(a: Tensor | Codes, b: Tensor | Codes) -> bool:
    whole = [x.dequantize() if isinstance(x, Codes) else x for x in (a, b)]
    return torch.equal(*whole)


def _check_complete(
    plans: dict[str, WeightPlan],
    unknown: list[str],
    expected: dict[str, tuple[int, ...]],
    spec: ModelSpec,
) -> None:
    beyond = [p for t, plan in plans.items() if t not in expected for p in plan.parts if p]
    unused = list(dict.fromkeys(unknown + beyond))  # two rules may take one
    if unused:
        raise WeightsError(
            f"{len(unused)} of the checkpoint's tensors have no place in {spec.family!r}: "
            f"{_some(unused)}. The architecture differs from what config.json says.{_unsaid(spec)}"
        )
    missing = [t for t in expected if t not in plans]
    for target, plan in plans.items():
        for position, part in enumerate(plan.parts):
            if part is None:
                missing.append(f"{target} (from {plan.rule.sources[position]})")
    if missing:
        known = {start for p in plans.values() for x in p.parts if x for start in _starts(x)} | {""}
        shares = [_compile(rule.target) for rule in spec.rules if isinstance(rule, Share)]
        others = [t for t in missing if not any(share.fullmatch(t) for share in shares)]
        missing = others or missing  # what shares a tensor lacks no other one
        shown = [_sources(target, spec, known) for target in missing[:5]]  # of those that are named
        raise WeightsError(
            f"The checkpoint lacks {len(missing)} of the tensors of {spec.family!r}: "
            f"{_some(shown + missing[5:])}. It was cut off, or is another model's than config.json "
            f"says.{_unsaid(spec)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
