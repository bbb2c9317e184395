"""Checkpoints on disk, and filling a model from one: strict both ways."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.errors import ModelNotFoundError, WeightsError
from penstock.models.registry import read_config
from penstock.models.room import Room
from penstock.models.spec import Ignore, ModelSpec, Rename, Share, Stack
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

_STORED = (torch.float32, torch.bfloat16, torch.float16)
"""Elements of plain values."""

_ELEMENTS = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""By safetensors' names."""


class Source(Protocol):
    """Tensors by the names that a family's weight rules know, read one at a time.

    What belongs to a quantized matrix (scales, zero points, the order of columns) has no name of
    its own: it is in the `Codes` of the matrix.
    """

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` says, or would say."""
        ...

    def files(self) -> list[Path]:
        """The files that tensors are read from, sorted."""
        ...

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it; of a quantized matrix [N, K]."""
        ...

    def dtype(self) -> torch.dtype:
        """What most of the unquantized tensors are stored in."""
        ...

    def scheme(self, name: str) -> Scheme | None:
        """How the matrix `name` is quantized; None where it isn't."""
        ...

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or the codes of one that is quantized."""
        ...


class Checkpoint:
    """A folder's safetensors, memory-mapped; names are known before any tensor is read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in self._shards(folder):
            handle = self._open(file)
            self._files[file.name] = handle
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in self._where:
                    raise WeightsError(
                        f"Tensor {name!r} is in {self._where[name]} and in {file.name}."
                    )
                self._where[name] = file.name

    @staticmethod
    def _shards(folder: Path) -> list[Path]:
        whole = folder / "model.safetensors"  # beside it may lie an adapter or another layout
        if whole.exists():  # before the index of an earlier save, as in transformers
            return [whole]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                text = index.read_text(encoding="utf-8")
                names = sorted({str(name) for name in json.loads(text)["weight_map"].values()})
            except (
                OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
            ) as error:  # fmt: skip
                raise WeightsError(f"{index} is not a valid index: {error!r}") from error
            missing = [n for n in names if not (folder / n).exists()]
            if missing:
                raise WeightsError(
                    f"{index.name} names {len(names)} files, {len(missing)} of them missing in "
                    f"{folder}: {', '.join(missing[:5])}. Download them again."
                )
            return [folder / n for n in names]
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            other = [p.name for p in folder.glob("*.bin")]
            hint = f" It has {', '.join(other[:3])}, which isn't read." if other else ""
            raise ModelNotFoundError(f"{folder} has no *.safetensors file.{hint}")
        return files

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{file} ({file.stat().st_size} bytes) can't be read: {error}. "
                "It is corrupt or was cut off: download or convert it again."
            ) from error

    @property
    def config(self) -> dict[str, Any]:
        """Of config.json."""
        return read_config(self.path)

    def scheme(self, name: str) -> Scheme | None:
        """None: every tensor holds plain values."""
        return None

    def files(self) -> list[Path]:
        """The files in the folder that hold tensors, sorted."""
        return [self.path / name for name in sorted(self._files)]

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> torch.dtype:
        """What a tensor's elements are."""
        text = str(self._files[self._where[name]].get_slice(name).get_dtype())
        if text not in _ELEMENTS:
            raise WeightsError(f"Tensor {name!r} has elements {text!r}, which aren't read.")
        return _ELEMENTS[text]

    def stored_as(self, name: str) -> str:
        """The name of a tensor's elements: `bfloat16`."""
        return str(self.stored_dtype(name)).removeprefix("torch.")

    def dtype(self) -> torch.dtype:
        """What most of the tensors are stored in."""
        return self.dtype_of(self._where)

    def dtype_of(self, names: Iterable[str]) -> torch.dtype:
        """What most of the tensors called `names` are stored in."""
        counts: dict[torch.dtype, int] = {}
        for name in names:
            stored = self.stored_dtype(name)
            if stored in _STORED:
                size = math.prod(self.shape(name))
                counts[stored] = counts.get(stored, 0) + size
        if not counts:
            raise WeightsError(f"{self.path} has no float32, bfloat16 or float16 tensor.")
        return max(counts, key=lambda stored: counts[stored])

    def read(self, name: str) -> Tensor:
        """A tensor, mapped from its file where that is possible."""
        tensor = self.raw(name)
        if tensor.dtype not in _STORED:
            raise WeightsError(
                f"Tensor {name!r} is {tensor.dtype}; float32, bfloat16 and float16 load."
            )
        return tensor

    def raw(self, name: str) -> Tensor:
        """A tensor of whatever elements, mapped from its file where that is possible."""
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor


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


def _short(name: str, spec: ModelSpec) -> str:
    """A tensor's name as rules have it."""
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
        short = _short(name, spec)
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
) -> None:
    """Fill every parameter of `model`, one at a time.

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
    _check_complete(plans, unknown, expected, spec)

    total = sum(torch.Size(shape).numel() for shape in expected.values())
    done, room = 0, Room()
    for target, shape in expected.items():
        if modules[target.rpartition(".")[0]].elsewhere:
            continue
        tensor = _assemble(plans[target], checkpoint, spec, room)
        if tuple(tensor.shape) != shape:
            raise _disagrees(target, plans[target], shape, tuple(tensor.shape))
        name, _, parameter = target.rpartition(".")
        try:
            modules[name].load(parameter, tensor)
        except WeightsError as error:  # of values; which tensor's, only this place knows
            parts = ", ".join(part for part in plans[target].parts if part is not None)
            raise WeightsError(f"{parts}: {error}") from error
        room.leave_to(modules[name])
        keeper = modules[name].keeper
        if stored is not None and keeper.is_complete:
            stored(names[keeper], keeper)
        done += math.prod(shape)
        if progress is not None:
            progress(done, total)


def check_complete(
    spec: ModelSpec, checkpoint: Source, formats: WeightFormats, dtype: torch.dtype
) -> None:
    """Raises what `load_weights` raises for tensors that are missing, in the way, or of another
    shape, by their names and shapes: nothing is read.
    """
    model = Decoder(spec.decoder, formats, dtype, 1)
    modules = ((n, m) for n, m in model.named_modules() if isinstance(m, Loadable))
    expected = {f"{n}.{p}": s for n, m in modules for p, s in m.expected().items()}
    plans, unknown = plan_weights(checkpoint.names(), spec)
    table = plans.pop("embed.weight", None) if spec.decoder.tied else None
    if table is not None:
        plans["head.weight"] = table
    if not isinstance(checkpoint, Checkpoint):  # biases that may be of zeros
        plans = {t: p for t, p in plans.items() if t in expected or not t.endswith(".bias")}
    _check_complete(plans, unknown, expected, spec)
    for target, shape in expected.items():
        plan = plans[target]
        found = [checkpoint.shape(part) for part in plan.parts if part is not None]
        whole = (sum(part[0] for part in found), *found[0][1:])
        if plan.rule.transform is None and whole != shape:
            raise _disagrees(target, plan, shape, whole)


def _disagrees(
    target: str, plan: WeightPlan, needs: tuple[int, ...], has: tuple[int, ...]
) -> WeightsError:
    return WeightsError(
        f"{target} needs shape {list(needs)}, but {plan.parts} give {list(has)}. config.json and "
        "the weights disagree."
    )


def _assemble(plan: WeightPlan, checkpoint: Source, spec: ModelSpec, room: Room) -> Tensor | Codes:
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
    except (RuntimeError, ValueError) as error:
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
        kept = kept and not module.endswith((".router", ".attention.gates"))
        if joint is not None and kept:
            found[module] = format_of(joint)
        else:
            widened += [part for part in parts if checkpoint.scheme(part) is not None]
    if widened:
        logger.warning(
            "%d quantized tensors are widened to %s: this family's matrices have their values in "
            "another order, or put them beside others that are quantized otherwise, or they are "
            "routers, or gates of a delta rule: %s.",
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
            f"{len(unused)} tensors in the checkpoint have no place in {spec.family!r}: "
            f"{_some(unused)}. The architecture differs from what config.json says."
        )
    missing = [t for t in expected if t not in plans]
    for target, plan in plans.items():
        for position, part in enumerate(plan.parts):
            if part is None:
                missing.append(f"{target} (from {plan.rule.sources[position]})")
    if missing:
        raise WeightsError(
            f"The checkpoint lacks {len(missing)} tensors of {spec.family!r}: {_some(missing)}."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
