"""An engine folder: a model packed for one kind of machine, that starts without being prepared.

    engine.json             manifest: choices, fingerprint, index of the weights, sums of the files
    weights.bin             packed tensors, each from a multiple of 4,096 bytes on, mapped at load
    plan.json               the operators of a step, and of one that ends with hidden states
    package.pt2             the step compiled, where it was asked for; package.json says of what
    timings.json            what was timed, and what was chosen by it
    report.json             for readers
    config.json …           of the model, with its tokenizer's files

`penstock.pipeline` writes it. Here it is read: refused where it can't run, naming the difference.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.cache import kv_dtype, kv_name
from penstock.config import EngineConfig, SchedulerConfig
from penstock.errors import ConfigError, EngineFolderError, KernelError
from penstock.kernels import interpreting, why_not_on
from penstock.models.activations import ACTIVATIONS, activated
from penstock.models.exported import sha256
from penstock.models.load import LoadedModel, stop_ids
from penstock.models.registry import read_spec
from penstock.models.sources import generation_in
from penstock.nn import Decoder
from penstock.nn.parameters import Loadable
from penstock.nn.rope import RotaryTable, inverse_frequencies
from penstock.quant import Dense, WeightFormats, formats_of
from penstock.quant.formats.quantized import Quantized
from penstock.runtime.device import CPU, Device, device_of
from penstock.runtime.fingerprint import Fingerprint, fingerprint
from penstock.runtime.formats import decode_formats
from penstock.runtime.manifest import check_manifest, read_json
from penstock.runtime.mapping import map_file
from penstock.runtime.plan import Plan, fixed_tensors
from penstock.runtime.tuned import Tuned

MANIFEST, WEIGHTS, PLAN, TIMINGS, REPORT, PACKAGE = (
    "engine.json", "weights.bin", "plan.json", "timings.json", "report.json", "package.pt2",
)  # fmt: skip
KIND = "penstock engine"
PARTIAL = ".partial"
"""How the name of a folder ends that is still being written."""

_READ_ALWAYS = (PLAN, TIMINGS, "config.json")
_READ_FIRST = (*_READ_ALWAYS, "generation_config.json")
"""Small files whose sums are checked at every start."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that an engine was built for."""

    max_num_seqs: int
    max_model_len: int  # tokens
    profile: tuple[int, int, int]  # tokens of a step: the fewest, the usual, the most


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """An engine folder whose manifest is whole and fits this machine."""

    folder: Path
    manifest: Mapping[str, Any]
    formats: WeightFormats
    dtype: torch.dtype
    kv_cache_dtype: str
    limits: Limits
    tuned: Tuned
    forward: str = "program"  # what its steps run by: that, or `package`

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> EngineFolder:
        """Read and check a folder; verify: the weights' sums too, which reads all of them.

        Raises EngineFolderError, with the command that mends it, for one that is half-written,
        damaged, or made for another machine or version.
        """
        command = ""
        try:
            manifest = _read(folder)
            command = _again(manifest.get("command"), folder)
            _check_target(manifest)
            check_manifest(manifest, _READ_ALWAYS)
            _check_files(folder, manifest, verify)
            return cls._of(folder, manifest)
        except EngineFolderError as error:
            way_out = _way_out(folder, command)
            raise EngineFolderError(
                f"{folder} can't run: {str(error).rstrip('.')}. {way_out}"
            ) from error

    @classmethod
    def _of(cls, folder: Path, manifest: Mapping[str, Any]) -> EngineFolder:
        choices = manifest["choices"]
        low, usual, most = choices["profile"]
        limits = Limits(choices["max_num_seqs"], choices["max_model_len"], (low, usual, most))
        try:
            tuned = Tuned.from_dict(read_json(folder / TIMINGS)["chosen"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineFolderError(f"{TIMINGS} can't be read: {error!r}") from error
        dtype = getattr(torch, manifest["dtype"])
        formats = decode_formats(manifest["formats"])
        _check_formats(manifest, formats, dtype)
        return cls(
            folder, manifest, formats, dtype, choices["kv_cache_dtype"], limits, tuned,
            choices["forward"],
        )  # fmt: skip

    @property
    def for_gpu(self) -> bool:
        """Whether its weights lie as a GPU's kernels take them."""
        return self.forward == "graphs"

    def device(self, name: str) -> Device:
        """Where it runs, of what was asked for. Raises ConfigError where it can't run there."""
        if self.for_gpu:
            found = device_of(name)
            if not found.by_triton:
                reason = why_not_on(torch.device("cuda")) or f"device={name!r} was chosen"
                raise ConfigError(
                    f"{self.folder} was built for a GPU, and none can be used: {reason}. On a CPU "
                    "load what it was built from, or an engine built with device='cpu'."
                )
            return found
        if name.startswith("cuda"):
            raise ConfigError(
                f"{self.folder} was built for a CPU, so device={name!r} can't take effect. Build "
                "it with device='cuda', or load what it was built from."
            )
        if interpreting():
            raise ConfigError(
                f"{self.folder} was built for a CPU's own kernels, so PENSTOCK_KERNELS=triton "
                "can't take effect. Unset it, or load what the engine was built from."
            )
        return CPU

    # ── what it runs with ────────────────────────────────────────────────────────────────────

    def settle(self, config: EngineConfig) -> EngineConfig:
        """`config` with this engine's own values where nothing was chosen.

        Raises ConfigError, naming both values, for a choice that contradicts how it was built.
        """
        self._check_choices(config)
        limits, scheduler = self.limits, config.scheduler
        seqs = self._size(config, "max_num_seqs", limits.max_num_seqs, limits.max_num_seqs)
        most = limits.profile[2]
        usual = self.tuned.prefill_tokens if scheduler.enable_chunked_prefill else None
        tokens = self._size(
            config, "max_num_batched_tokens", most, min(max(usual or most, seqs), most)
        )
        length = config.model.max_model_len or limits.max_model_len
        self._refuse_beyond("max_model_len", length, limits.max_model_len)
        settled = replace(
            config.storing(self.kv_cache_dtype),
            model=replace(config.model, max_model_len=length),
            scheduler=replace(scheduler, max_num_seqs=seqs, max_num_batched_tokens=tokens),
        )
        settled.check_together()
        return settled

    def _size(self, config: EngineConfig, name: str, most: int, own: int) -> int:
        """What was chosen, if it is within `most`; what was suggested, as far; else `own`."""
        value: int = getattr(config.scheduler, name)
        if config.chose(config.scheduler, name):
            self._refuse_beyond(name, value, most)
            return value
        return own if value == getattr(SchedulerConfig(), name) else min(value, most)

    def _check_choices(self, config: EngineConfig) -> None:
        asked = config.model.dtype
        if asked not in ("auto", _name(self.dtype)) and (asked, self.dtype) != (
            "float",
            torch.float32,
        ):
            self._contradiction("dtype", asked, _name(self.dtype))
        asked_format = config.model.quantization
        if asked_format is not None:
            if not self._has(asked_format):
                self._contradiction("quantization", asked_format, self.formats.name)
        kv = config.cache.kv_cache_dtype
        if kv == "auto":
            return
        kv_dtype(kv, self.dtype)  # refuses what can't stand beside it
        if kv_name(kv, self.dtype) != kv_name(self.kv_cache_dtype, self.dtype):
            self._contradiction("kv_cache_dtype", kv, self.kv_cache_dtype)

    def _has(self, quantization: str) -> bool:
        """Whether its weights are what `quantization` asks for."""
        if quantization not in ACTIVATIONS:
            return formats_of(quantization, self.dtype).name == self.formats.name
        held = [self.formats.matrix, self.formats.head, *self.formats.special.values()]
        schemes = [form.scheme for form in held if isinstance(form, Quantized)]
        return bool(schemes) and all(activated(s, quantization) == s for s in schemes)

    def _contradiction(self, name: str, asked: object, built: object) -> None:
        raise ConfigError(
            f"{name}={asked!r}, but the engine {self.folder} was built with {built!r}. Leave "
            f"{name} out, or build another engine."
        )

    def _refuse_beyond(self, name: str, asked: int, built: int) -> None:
        if asked > built:
            raise ConfigError(
                f"{name}={asked}, but the engine {self.folder} was built for up to {built}. Lower "
                "it, or build another engine."
            )

    # ── what it holds ────────────────────────────────────────────────────────────────────────

    def plans(self) -> tuple[Plan, Callable[[], Plan]]:
        """Of a step that ends with logits, and what gives that of one that ends with hidden states:
        few engines pool.
        """
        data = read_json(self.folder / PLAN)
        try:
            return Plan.from_dict(data["step"]), partial(self._plan, data["hidden"])
        except (KeyError, KernelError) as error:
            raise self.broken(f"{PLAN} holds no plans: {error}") from error

    def _plan(self, data: Mapping[str, Any]) -> Plan:
        try:
            return Plan.from_dict(data)
        except KernelError as error:
            raise self.broken(f"{PLAN} holds no plan of hidden states: {error}") from error

    def _check_read(self, decoder: Decoder) -> None:
        """Plans read what the decoder has, all of it and nothing else."""
        data = read_json(self.folder / PLAN)
        try:
            read = {
                argument["weight"]
                for plan in (data["step"], data["hidden"])
                for operator in plan["operators"]
                for argument in operator["arguments"].values()
                if isinstance(argument, dict) and "weight" in argument
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise self.broken(f"{PLAN} holds no plans: {error!r}") from error
        held = self.manifest["weights"]["tensors"].keys()
        own = {
            n for n in fixed_tensors(decoder.last_hidden_state()) if not n.startswith("decoder.")
        }
        tower = _tower(decoder)
        for names, what in (
            (tower - held, f"{WEIGHTS} lacks {{}} tensors of its tower"),
            (read - held - own, f"its plan reads {{}} tensors that {WEIGHTS} doesn't hold"),
            (held - read - tower, f"{WEIGHTS} holds {{}} tensors that its plan doesn't read"),
        ):
            if names:
                raise self.broken(f"{what.format(len(names))}, {min(names)} among them")

    @property
    def command(self) -> str:
        """What builds this engine again, where it lies."""
        return _again(self.manifest["command"], self.folder)

    def broken(self, reason: str) -> EngineFolderError:
        """The error for a folder that can't run, with the command that mends it."""
        return EngineFolderError(
            f"{self.folder} can't run: {reason.rstrip('.')}. Build it again: {self.command}"
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name: views of one mapping, which can't be written to."""
        index = self.manifest["weights"]
        pages = map_file(self.folder / WEIGHTS, index["bytes"])
        found = {}
        for name, entry in index["tensors"].items():
            held = pages[entry["offset"] : entry["offset"] + entry["bytes"]]
            found[name] = held.view(getattr(torch, entry["dtype"])).view(entry["shape"])
        return found

    def load(
        self,
        max_model_len: int,
        *,
        strict: bool = False,
        device: Device | None = None,
        ordered: bool = True,
    ) -> LoadedModel:
        """The model, its tensors mapped, or copied to the device where that is a GPU.

        max_model_len: at most what it was built for. ordered: of a GPU's products, as `Storage`.
        """
        device = device or CPU
        spec = read_spec(self.folder, strict=strict)
        formats = self.formats.stored_as(device.storage(ordered))
        decoder = Decoder(spec.decoder, formats, self.dtype, 1)  # tables come out of the file
        self._fill(decoder, max_model_len)
        self._check_read(decoder)
        self._check_rope(spec.decoder, max_model_len)
        generation = generation_in(self.folder)
        stops = stop_ids(spec, generation, self.folder)
        decoder.eval().to(device.torch)
        return LoadedModel(decoder, spec, self.dtype, max_model_len, generation, stops)

    def _fill(self, decoder: Decoder, max_model_len: int) -> None:
        """Give every module what it has in the file."""
        modules = dict(decoder.named_modules())
        for name, tensor in self.tensors().items():
            path, _, leaf = name.rpartition(".")
            module = modules.get(path)
            if isinstance(module, Loadable):
                module.restore(leaf, tensor)
            elif isinstance(module, RotaryTable) and tensor.ndim == 2:
                if len(tensor) < self.limits.max_model_len:
                    raise self.broken(
                        f"{name} has {len(tensor):,} positions, fewer than max_model_len="
                        f"{self.limits.max_model_len:,}"
                    )
                setattr(module, leaf, tensor[:max_model_len])
            else:
                raise self.broken(f"{WEIGHTS} holds {name}, which this model has no place for")

    def _check_rope(self, spec: Any, length: int) -> None:
        """longrope chooses its factors by the longest context: a shorter one may have others."""
        built = self.limits.max_model_len
        for layer in spec.layers:
            rope = layer.attention.rope
            if rope is None or rope.kind != "longrope":
                continue
            if (inverse_frequencies(rope, built)[0] != inverse_frequencies(rope, length)[0]).any():
                raise ConfigError(
                    f"max_model_len={length} takes this model's short rope factors, but the engine "
                    f"{self.folder} was built for {built} tokens with its long ones. Leave it out, "
                    f"or build another engine with --max-model-len {length}."
                )


def _tower(decoder: Decoder) -> set[str]:
    """The tensors of what sees, which no plan reads."""
    if decoder.vision is None:
        return set()
    modules = (x for x in decoder.vision.named_modules() if isinstance(x[1], Loadable))
    return {f"vision.{name}.{part}" for name, module in modules for part in module.expected()}


def _again(command: object, folder: Path) -> str:
    """A build's command, for the place where the engine lies now; empty where it is none."""
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return ""
    if "-o" in words[:-1]:
        words[words.index("-o") + 1] = str(folder)
    return shlex.join(words)


def _way_out(folder: Path, command: str) -> str:
    """How to have a working engine at `folder`; command: what built it, as far as that is known."""
    if command:
        return f"Build it again: {command}"
    again = f"penstock build MODEL -o {folder}"
    if own_files(folder) is not None:
        return f"Build it again: {again} --force"
    return f"Delete it and build it again, or build it under another name: {again}"


def is_engine(folder: Path) -> bool:
    """Whether `folder` is an engine, or what is left of one."""
    return (folder / MANIFEST).exists() or is_partial(folder)


def is_partial(folder: Path) -> bool:
    """Whether a build of `folder` has not ended: its name says so, or only the manifest is missing.

    Weights alone say nothing: a model's folder may hold a file of that name.
    """
    if not (folder / WEIGHTS).exists():
        return False
    return folder.name.endswith(PARTIAL) or (
        (folder / PLAN).exists() and not (folder / MANIFEST).exists()
    )


def own_files(folder: Path) -> frozenset[str] | None:
    """What a build has put into `folder`, by its manifest, however damaged the rest is.

    None where that can't be told: it is no engine, or its manifest can't be read.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except (EngineFolderError, OSError):
        return None
    files = manifest.get("files")
    if manifest.get("kind") != KIND or not isinstance(files, dict):
        return None
    return frozenset((MANIFEST, WEIGHTS, *files))


def read_manifest(folder: Path) -> dict[str, Any]:
    """engine.json, whole and with every field. Raises EngineFolderError, without the way out."""
    manifest = _read(folder)
    check_manifest(manifest, _READ_ALWAYS)
    return manifest


def _read(folder: Path) -> dict[str, Any]:
    if is_partial(folder):
        raise EngineFolderError("its build hasn't ended, or was interrupted")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("kind") != KIND:
        raise EngineFolderError(f"{MANIFEST} is of another kind: {manifest.get('kind')!r}")
    if manifest.get("digest") != digest(manifest):
        raise EngineFolderError(f"{MANIFEST} is damaged: its contents don't match its digest")
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of all of a manifest but this."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _check_target(manifest: Mapping[str, Any]) -> None:
    try:
        built = Fingerprint.from_dict(manifest["fingerprint"])
    except (KeyError, TypeError) as error:
        raise EngineFolderError(f"its fingerprint can't be read: {error!r}") from error
    different = built.differences(fingerprint(), _is_for_gpu(manifest))
    if different:
        raise EngineFolderError(" and ".join(different))


def _is_for_gpu(manifest: Mapping[str, Any]) -> bool:
    """Of a manifest that isn't checked yet."""
    choices = manifest.get("choices")
    return isinstance(choices, dict) and choices.get("device") == "cuda"


def _check_formats(manifest: Mapping[str, Any], formats: WeightFormats, dtype: torch.dtype) -> None:
    """What is said of the weights in three places is the same."""
    if formats.described != manifest["weight_formats"]:
        raise EngineFolderError(
            f"weight_formats in its manifest is {manifest['weight_formats']!r}, but formats are "
            f"{formats.described!r}"
        )
    each = (formats.matrix, formats.head, *formats.special.values())
    plain = {held.dtype if isinstance(held, Dense) else torch.bfloat16 for held in each}
    if plain != {dtype}:
        raise EngineFolderError(
            f"dtype in its manifest is {_name(dtype)}, but formats are {formats.name}"
        )


def _check_files(folder: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise EngineFolderError(f"{name} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise EngineFolderError(
                f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
            )
        if (verify or name in _READ_FIRST) and sha256(path) != entry["sha256"]:
            raise EngineFolderError(f"{name} is damaged: its contents don't match their sum")
    path, weights = folder / WEIGHTS, manifest["weights"]
    size = path.stat().st_size if path.exists() else 0
    if size != weights["bytes"]:
        raise EngineFolderError(f"{WEIGHTS} has {size:,} bytes instead of {weights['bytes']:,}")
    if verify:
        _check_tensors(path, weights)


def _check_tensors(path: Path, weights: Mapping[str, Any]) -> None:
    pages = map_file(path, weights["bytes"]).numpy().data
    for name, entry in weights["tensors"].items():
        held = pages[entry["offset"] : entry["offset"] + entry["bytes"]]
        if hashlib.sha256(held).hexdigest() != entry["sha256"]:
            raise EngineFolderError(f"{name} in {WEIGHTS} is damaged: it doesn't match its sum")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
