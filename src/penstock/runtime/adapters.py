"""LoRA adapters beside a model: slots in memory, taken and given back while requests run.

Each matrix of the layers has two tensors with a place for each slot. An adapter is written to the
places of a free slot, and tokens name the slot: nothing is loaded again, and no step waits. The
parts of a joined matrix (queries, keys and values; gate and up) lie in one product: their ranks
one after another, zeros where a part's rank isn't another's.
Source: Hu et al. 2021, arXiv:2106.09685; many at once: Sheng et al. 2023, arXiv:2311.03285.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from penstock import ops
from penstock.cache.pages import lazy_zeros
from penstock.errors import (
    AdapterError,
    ConfigError,
    RequestError,
    UnsupportedModelError,
    WeightsError,
    nearest,
)
from penstock.models.exported import read_exported
from penstock.models.load import LoadedModel
from penstock.models.lora import WEIGHTS, LoraFiles
from penstock.models.registry import ADAPTER
from penstock.models.spec import Stack
from penstock.models.weights import WeightPlan, plan_weights
from penstock.nn import Decoder
from penstock.nn.attention import Attention
from penstock.nn.decoder import OF_HEADS, matrices_of, stored_in
from penstock.nn.delta import DeltaAttention
from penstock.nn.experts import ExpertBank
from penstock.nn.layer import DecoderLayer
from penstock.nn.linear import Change, Linear
from penstock.nn.mamba import MambaAttention
from penstock.nn.spec import DecoderSpec
from penstock.ops.panels import COLUMNS, panel_shape, round_up
from penstock.quant import Dense

_numbers = count(1)


@dataclass(eq=False, slots=True)
class Adapter:
    """One that is in memory."""

    name: str
    folder: Path
    slot: int
    rank: int  # the largest of its matrices'
    nbytes: int  # of its matrices, as they are read
    kept: bool  # until somebody unloads it; otherwise others may take its slot
    at: Path  # the folder, without links
    state: tuple[int, ...] | None  # of its files, when they were read
    number: int = field(default_factory=lambda: next(_numbers))  # of this one, not of its name
    users: int = 0  # requests that run with it
    gone: bool = False  # unloaded, but for those


def _resolved(folder: Path) -> Path:
    """Without links; as it is where no such path can be, which whoever reads it says."""
    try:
        return folder.resolve()
    except (OSError, RuntimeError, ValueError):
        return folder


def _state(folder: Path) -> tuple[int, ...] | None:
    """What tells whether an adapter's files were written again; None where they are gone."""
    try:
        found = [(folder / name).stat() for name in (ADAPTER, WEIGHTS)]
    except (OSError, ValueError):
        return None
    return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size))


@dataclass(frozen=True, slots=True)
class _Place:
    """A matrix that adapters change, and the rows of its parts in a checkpoint."""

    linear: Linear
    rows: tuple[int, ...]


class Adapters:
    """The slots of one model. Loading and unloading may happen in any thread, between steps or in
    them: nobody reads a slot that is written to.
    """

    def __init__(self, loaded: LoadedModel, max_loras: int, max_lora_rank: int) -> None:
        self._spec, self._dtype = loaded.spec, loaded.dtype
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        self._scaling = torch.ones(max_loras)  # in `up`: each part of a matrix has its own
        self._places = dict(_places(loaded.model))
        try:
            for place in self._places.values():
                place.linear.change = self._room(place)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"There is no room for max_loras={max_loras} adapters of rank {max_lora_rank} "
                f"({error}). Lower one of the two."
            ) from error
        self._held: dict[str, Adapter] = {}  # by name, the last used at the end
        self._free = list(range(max_loras))[::-1]
        self._written: list[set[str]] = [set() for _ in range(max_loras)]  # matrices, by slot
        self._lock = threading.Lock()  # of what changes in no time
        self._loading = threading.Lock()

    def _room(self, place: _Place) -> Change:
        """Zeros for every slot of a matrix; committed as slots are first used."""
        linear, rank = place.linear, self._rank(place)
        down = panel_shape(rank, linear.in_features, self._dtype)
        up = panel_shape(linear.columns, rank, self._dtype)
        bias: Tensor | None = linear._parameters["bias"]
        if bias is not None and linear.gated:
            bias = ops.alternate(bias)
        down_room, up_room = (
            lazy_zeros((self.max_loras, *shape), self._dtype) for shape in (down, up)
        )
        return Change(down_room, up_room, self._scaling, bias)

    def _rank(self, place: _Place) -> int:
        """Of all parts, in whole panels."""
        return round_up(self.max_lora_rank * len(place.rows), COLUMNS)

    @property
    def names(self) -> list[str]:
        """Of those that requests may name, in the order in which they were loaded."""
        return [adapter.name for adapter in self.loaded]

    @property
    def loaded(self) -> list[Adapter]:
        """Those that requests may name, in the order in which they were loaded."""
        with self._lock:
            return sorted(self._held.values(), key=lambda adapter: adapter.number)

    def load(self, name: str, folder: Path, *, keep: bool = True, hold: bool = False) -> Adapter:
        """Put the adapter in `folder` into a free slot; requests name it by `name`.

        keep: it stays until it is unloaded; otherwise the slot is another's as soon as one is
        wanted and no request runs with it. hold: as if one did, until `release`. One that is
        loaded under that name from there is returned as it is.
        Raises AdapterError where there is no slot, or another adapter has the name, and what
        `LoraFiles` raises.
        """
        if not isinstance(name, str) or not name.strip():
            raise AdapterError(f"An adapter's name must be a text, not {name!r:.80}.")
        found = self._again(name, folder, keep, hold)
        if found is not None:
            return found
        with self._loading:  # one after another: who asks for the same finds it
            found = self._again(name, folder, keep, hold)
            if found is not None:
                return found
            files, state = LoraFiles(folder), _state(folder)
            plans = self._plans(files)  # before another has to make room for it
            with self._lock:
                slot = self._take_slot(name)
            try:
                nbytes = self._fill(slot, files, plans)
            except BaseException:
                with self._lock:
                    self._free.append(slot)
                raise
            at, rank = _resolved(folder), files.rank
            adapter = Adapter(name, folder, slot, rank, nbytes, keep, at, state, users=int(hold))
            with self._lock:
                self._held[name] = adapter
            return adapter

    def held(self, name: str) -> Adapter | None:
        """The adapter of that name, held until `release`; None where there is none."""
        with self._lock:
            found = self._held.get(name)
            if found is not None:
                found.users += 1
            return found

    def _again(self, name: str, folder: Path, keep: bool, hold: bool) -> Adapter | None:
        """The adapter of that name, if it is there. Raises AdapterError where it is another."""
        at, state = _resolved(folder), _state(folder)  # may take long: the engine needs the lock
        with self._lock:
            found = self._held.get(name)
            if found is None:
                return None
            if found.at != at:
                raise AdapterError(
                    f"{name!r} is the adapter in {found.folder} already. Unload that one first, "
                    f"or give the one in {folder} another name."
                )
            if state not in (None, found.state):  # what is gone has not changed
                raise AdapterError(
                    f"{name!r} was loaded from {folder}, whose files have changed since. Unload "
                    "it first."
                )
            found.kept |= keep
            found.users += hold
            return found

    def _take_slot(self, name: str) -> int:
        if not self._free:
            idle = (a for a in self._held.values() if not a.users and not a.kept)
            oldest = next(idle, None)
            if oldest is None:
                busy = ", ".join(self._held)
                raise AdapterError(
                    f"There is no slot for the adapter {name!r}: all {self.max_loras} are taken "
                    f"({busy or 'by adapters that were unloaded, whose requests still run'}). "
                    "Unload one, or start with a larger max_loras."
                )
            self._drop(oldest)
        return self._free.pop()

    def _drop(self, adapter: Adapter) -> None:
        adapter.gone = True
        del self._held[adapter.name]
        if not adapter.users:
            self._free.append(adapter.slot)

    def unload(self, name: str) -> Adapter:
        """Let nobody name it any more; its slot is free when its last request has ended.

        Raises AdapterError where there is none.
        """
        with self._lock:
            adapter = self._found(name)
            self._drop(adapter)
            return adapter

    def _found(self, name: str) -> Adapter:
        found = self._held.get(name)
        if found is None:
            there = ", ".join(self._held) or "none"
            raise AdapterError(
                f"There is no adapter {name!r:.80}; loaded: {there}.{nearest(name, self._held)}"
            )
        return found

    def use(self, name: str) -> Adapter:
        """The adapter of a new request, which gives it back by `release`. Raises RequestError."""
        with self._lock:
            try:
                adapter = self._found(name)
            except AdapterError as error:
                raise RequestError(str(error)) from error
            self._held[name] = self._held.pop(name)  # to the end
            adapter.users += 1
            return adapter

    def use_held(self, adapter: Adapter) -> Adapter:
        """The same for one that somebody holds, whatever has become of its name."""
        with self._lock:
            if not adapter.users:
                raise RequestError(f"Nobody holds the adapter {adapter.name!r}: give its name.")
            adapter.users += 1
            return adapter

    def release(self, adapter: Adapter) -> None:
        """A request that ran with it has ended."""
        with self._lock:
            adapter.users -= 1
            if adapter.gone and not adapter.users:
                self._free.append(adapter.slot)

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def _fill(self, slot: int, files: LoraFiles, plans: Mapping[str, WeightPlan]) -> int:
        """Write an adapter into a slot; the bytes that steps read of it."""
        nbytes = 0
        for name, place in self._places.items():
            change, plan = place.linear.change, plans.get(name)
            assert change is not None
            if plan is None:
                if name in self._written[slot]:  # else it is zero, and takes no memory
                    change.down[slot].zero_()
                    change.up[slot].zero_()
                continue
            self._written[slot].add(name)
            down, up = _joined(files, plan.parts, _rows(place, plan))
            if plan.rule.transform is not None:
                up = plan.rule.transform(up, self._spec.decoder).contiguous()
            self._write(change, slot, place.linear, down, up, files.folder)
            nbytes += change.down[slot].nbytes + change.up[slot].nbytes
        return nbytes

    def _plans(self, files: LoraFiles) -> dict[str, WeightPlan]:
        """What the adapter changes, by module. Raises what `load` does for one that doesn't fit."""
        found, unknown = plan_weights(files.names, self._spec)
        if unknown:
            raise files.strange(unknown)
        plans = {target.removesuffix(".weight"): plan for target, plan in found.items()}
        beyond = [name for name in plans if name not in self._places]
        apart = (".router", ".shared_gate", ".attention.gates", OF_HEADS)
        mixed = [
            name
            for name in beyond
            if (stored_in(name) != name or name.endswith(apart)) and self._has(name)
        ]
        if mixed:
            parts = [part for name in mixed for part in plans[name].parts if part is not None]
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            raise UnsupportedModelError(
                f"The adapter in {files.folder} changes {parts[0]}{more}: matrices of experts, "
                "routers, gates of shared experts or of a delta rule, and heads over latents are "
                "changed by merging alone: penstock export --merge-lora."
            )
        turned = [name for name in beyond if name.endswith(".conv")]
        if turned:
            raise UnsupportedModelError(
                f"The adapter in {files.folder} changes a convolution ({turned[0]}), which isn't "
                "built, nor is merging it: train one without."
            )
        lacking = [
            part for name in beyond if name.startswith("layers.") for part in plans[name].parts
        ]
        if lacking:
            raise files.strange([part for part in lacking if part is not None])
        if beyond:
            seeing = any(name.startswith("vision.") for name in beyond)
            how = "with PEFT" if seeing else "penstock export --merge-lora"
            raise UnsupportedModelError(
                f"The adapter in {files.folder} changes {', '.join(beyond)}, not only matrices of "
                f"the layers: merge it ({how})."
            )
        for name, plan in plans.items():
            place = self._places[name]
            _check_rule(plan, place, files, self._spec.decoder)
            for part, rows in zip(plan.parts, _rows(place, plan), strict=True):
                if part is not None:
                    files.check(part, (rows, place.linear.in_features))
        if files.rank > self.max_lora_rank:
            raise AdapterError(
                f"The adapter in {files.folder} has rank {files.rank}, but slots have room for "
                f"{self.max_lora_rank}. Start with max_lora_rank={files.rank}, or merge it "
                "(penstock export --merge-lora)."
            )
        return plans

    def _has(self, name: str) -> bool:
        """Whether the model has a module of that name: not all layers have gates."""
        if not name.endswith(".attention.gates"):
            return True
        layer = int(name.split(".")[1])
        layers = self._spec.decoder.layers
        return layer < len(layers) and layers[layer].attention.remembers is not None

    def _write(
        self, change: Change, slot: int, linear: Linear, down: Tensor, up: Tensor, folder: Path
    ) -> None:
        """Pack both into a slot, padded with zeros."""
        rank = change.down.shape[1] * COLUMNS
        whole = functional.pad(down, (0, 0, 0, rank - len(down)))
        wide = functional.pad(up, (0, rank - up.shape[1]))
        form = Dense(self._dtype)
        for room, matrix, gated in ((change.down, whole, False), (change.up, wide, linear.gated)):
            packed = form.pack(matrix, gated)["weight"]
            if not bool(packed.isfinite().all()):
                raise WeightsError(
                    f"The adapter in {folder} has values that are NaN, infinite, or too large for "
                    f"{form.name}."
                )
            room[slot].copy_(packed)


def _rows(place: _Place, plan: WeightPlan) -> tuple[int, ...]:
    """How many rows each part of a plan has; what a family has in fewer parts has more in the
    first, and one that is stored whole all.
    """
    parts = len(plan.parts) if isinstance(plan.rule, Stack) else 1
    first = max(len(place.rows) - parts + 1, 1)
    return sum(place.rows[:first]), *place.rows[first:]


def _check_rule(plan: WeightPlan, place: _Place, files: LoraFiles, decoder: DecoderSpec) -> None:
    """Raises UnsupportedModelError for matrices that a checkpoint holds transposed."""
    transform, count = plan.rule.transform, sum(_rows(place, plan))
    whole = (place.linear.out_features * (2 if place.linear.gated else 1), 1)
    if transform is not None and transform(torch.empty((count, 1)), decoder).shape != whole:
        raise UnsupportedModelError(
            f"The adapter in {files.folder} changes matrices that this family of models has "
            "transposed, which isn't built. Merge it with PEFT's merge_and_unload."
        )


def _joined(
    files: LoraFiles, parts: Sequence[str | None], rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """down [R, K] and up [N, R] of all parts in float32, the scales in `up`."""
    found = [None if part is None else (*files.read(part), files.scale(part)) for part in parts]
    ranks = [0 if one is None else one[0].shape[0] for one in found]
    down = torch.cat([one[0] for one in found if one is not None])
    up = torch.zeros((sum(rows), len(down)))
    below, beside = (list(accumulate(sizes, initial=0)) for sizes in (rows, ranks))
    for i, one in enumerate(found):
        if one is not None:
            up[below[i] : below[i + 1], beside[i] : beside[i + 1]] = one[1] * one[2]
    return down, up


def check_foldless(folder: Path) -> None:
    """Raises UnsupportedModelError for an export whose matrices aren't those that an adapter knows.

    SmoothQuant and AWQ scale a matrix's columns and what comes before it: the function stays, but
    what an adapter reads and adds is in other units.
    """
    exported = read_exported(folder)
    weights = None if exported is None else exported.choices.get("weights")
    method = str(weights.get("method", "")) if isinstance(weights, dict) else ""
    if method.startswith(("awq", "smoothquant")):
        raise UnsupportedModelError(
            f"{folder} was quantized by {method}, which moves scales between matrices, so that "
            "adapters of the original model don't fit. Export it by rtn or gptq for adapters, or "
            "with this one in it (penstock export --merge-lora)."
        )


def _rows_of(attention: Attention, linear: Linear) -> tuple[int, ...]:
    """Of queries, keys and values, or of what gates them, beside queries there; () of others."""
    q, k, v = attention.spec.qkv_columns
    beside = q if attention.gate is not None else 0
    if linear is attention.qkv:
        return tuple(rows for rows in (q + beside, k, v) if rows)
    return (q + beside,) if linear is attention.gate else ()


def _places(model: Decoder) -> Iterable[tuple[str, _Place]]:
    """The matrices of the layers, by their modules' names, and how many rows their parts have."""
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        attention = layer.attention
        more = ["attention.gates"] if isinstance(attention, MambaAttention) else []
        for at in (*matrices_of(model.spec.layers[i]).values(), *more):
            linear = layer.get_submodule(at)
            if isinstance(linear, ExpertBank):
                continue  # `_plans` says so of adapters that change experts
            assert isinstance(linear, Linear)
            rows: tuple[int, ...] = (linear.out_features,) * (2 if linear.gated else 1)
            if isinstance(attention, Attention):
                rows = _rows_of(attention, linear) or rows
            elif isinstance(attention, DeltaAttention) and linear is attention.mixed:
                rows = *attention.spec.qkv_columns, attention.spec.out_dim
            elif isinstance(attention, MambaAttention) and linear is not attention.out:
                if at.startswith("attention."):  # both are parts of one projection
                    rows = (attention.mixed.out_features + attention.gates.out_features,)
            yield f"layers.{i}.{at}", _Place(linear, rows)
