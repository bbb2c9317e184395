"""What lies in a folder or file: an engine, an export, a model or a GGUF file, and if it runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.errors import ConfigError, EngineFolderError, ModelNotFoundError, PenstockError

if TYPE_CHECKING:
    import torch

    from penstock.models.sources import Stored
    from penstock.models.spec import ModelSpec
    from penstock.quant import WeightFormats

Kind = Literal["engine", "export", "model", "GGUF file"]


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices that are stored alike, and what they run as."""

    stored: str  # `w4a16-g128`, `bfloat16`, GGUF's `Q4_K`
    matrices: int
    values: int
    runs_as: str
    how: str


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found; `why` says what keeps it from running here."""

    kind: Kind
    path: str
    runs: bool
    why: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # for readers
    weights: list[Weights] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # for programs

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        found = {"kind": self.kind, "path": self.path, "runs": self.runs, "why": self.why}
        return {**found, **self.details, "weights": [asdict(row) for row in self.weights]}


def examine(name: str) -> Examined:
    """What is at `name`, a path or an embedded model's name; sums are checked where there are any.

    Raises ModelNotFoundError where there is nothing, or nothing that Penstock runs or makes.
    """
    path = _resolve(name)
    if path.is_dir():
        from penstock.runtime.engine_folder import is_engine

        if is_engine(path):
            return _engine(path)
    try:
        return _model(path)
    except PenstockError as error:
        return Examined(_kind(path), str(path), False, str(error))


def _resolve(name: str) -> Path:
    from penstock.models.hub import NAMED, resolve
    from penstock.runtime.engine_folder import is_engine

    path = Path(name).expanduser()
    if name not in NAMED and not path.exists():
        raise ModelNotFoundError(
            f"There is no file or folder {path}. Give an engine, an export, a model's folder or a "
            f".gguf file that is on this machine, or an embedded model ({', '.join(NAMED)})."
        )
    if path.is_dir() and is_engine(path):
        return path
    found = resolve(path if path.exists() else name)
    if found.is_dir() and not (found / "config.json").is_file():
        held = sorted(p.name for p in found.iterdir())
        raise ModelNotFoundError(
            f"{found} is no engine (engine.json), no export (penstock.json), no model (config.json "
            f"with *.safetensors), and holds no .gguf file: it has {len(held)} entries"
            f"{': ' + ', '.join(held[:5]) if held else ''}. Give the folder of one of them; "
            "penstock build makes an engine of a model."
        )
    return found


def _kind(path: Path) -> Kind:
    from penstock.models.exported import MANIFEST

    if path.is_file():
        return "GGUF file"
    return "export" if (path / MANIFEST).exists() else "model"


def _made_for(device: str, made_for: Mapping[str, Any]) -> str:
    """Where an engine runs, and where it was built."""
    if device == "cuda":
        return f"GPUs, Penstock {made_for['penstock']}"
    return (
        f"{made_for['arch']} {made_for['isa']}, Penstock {made_for['penstock']}, "
        f"torch {made_for['torch']} (on {made_for['machine']['processor']})"
    )


def _engine(folder: Path) -> Examined:
    """What an engine folder was built for, its weights held against their sums."""
    from penstock.runtime.engine_folder import EngineFolder, read_manifest

    why = ""
    try:
        EngineFolder.open(folder, verify=True).device("auto")
    except (EngineFolderError, ConfigError) as error:
        why = str(error)
    try:
        manifest = read_manifest(folder)
    except EngineFolderError:
        return Examined("engine", str(folder), False, why)
    choices, made_for = manifest["choices"], manifest["fingerprint"]
    weights, workspace = manifest["weights"]["bytes"], manifest["workspace_bytes"]
    facts = {
        "Model": f"{choices['model']}, {manifest['weight_formats']}",
        "Limits": f"{choices['max_num_seqs']} sequences of up to {choices['max_model_len']} "
        f"tokens, cache in {choices['kv_cache_dtype']}",
        "Made for": _made_for(choices["device"], made_for),
        "Bytes": f"{weights / 1e6:,.1f} MB of weights, {workspace / 1e6:,.1f} MB of workspace",
    }
    details = {
        "weight_formats": manifest["weight_formats"],
        "weights_bytes": weights,
        "workspace_bytes": workspace,
        "choices": choices,
        "fingerprint": made_for,
    }
    why = why or _unread(folder)
    return Examined("engine", str(folder), not why, why, facts, details=details)


def _unread(folder: Path) -> str:
    """Why its config can't be read here: a family that another package brings may be missing."""
    from penstock.models import read_spec

    try:
        read_spec(folder)
    except PenstockError as error:
        return str(error)
    return ""


def _model(path: Path) -> Examined:
    """What a model's headers say; of an export, its files are held against their sums."""
    from penstock.models.exported import verify_exported
    from penstock.models.load import chosen_formats
    from penstock.models.sources import open_model
    from penstock.models.weights import check_complete
    from penstock.runtime.loader import vocab_map_of

    kind = _kind(path)
    exported = verify_exported(path) if kind == "export" else None
    spec, source = open_model(path)
    decoder = spec.decoder
    dtype, formats = chosen_formats(spec, source)
    check_complete(spec, source, formats, dtype)
    vocabulary = f"{decoder.vocab_size:,} tokens"
    reduced = vocab_map_of(path, decoder.vocab_size) if path.is_dir() else None
    if reduced is not None:
        vocabulary = f"{decoder.vocab_size:,} of {reduced.original_size:,} tokens (reduced)"
    facts = {
        "Architecture": f"{spec.family}, {decoder.depth} layers of {decoder.hidden}, up to "
        f"{decoder.max_position:,} tokens",
        "Vocabulary": vocabulary,
        "Computes in": f"{_name(dtype)}, weights as {formats.name}",
    }
    details: dict[str, Any] = {
        "family": spec.family,
        "dtype": _name(dtype),
        "weight_formats": formats.described,
        "vocabulary": decoder.vocab_size,
    }
    if exported is not None:
        facts["Exported"] = (
            f"of {exported.source} by Penstock {exported.made_by['penstock']}, cache in "
            f"{exported.kv_cache_dtype}, up to "
            f"{exported.max_model_len or decoder.max_position:,} tokens"
        )
        details["choices"] = exported.choices
    weights = _weights(spec, source, formats, dtype)
    return Examined(kind, str(path), True, "", facts, weights, details)


def _weights(
    spec: ModelSpec, source: Stored, formats: WeightFormats, dtype: torch.dtype
) -> list[Weights]:
    """Its matrices by how they are stored and what they run as, the most values first."""
    from penstock.kernels import native
    from penstock.nn.decoder import OF_HEADS
    from penstock.quant import Dense

    kernel = f"native, {native.isa}" if native.handle is not None else f"reference: {native.reason}"
    matrices, values = Counter[tuple[str, str, bool]](), Counter[tuple[str, str, bool]]()
    for module, part in _matrices(spec, source):
        runs, stored = formats.of(module), source.stored_as(part)
        if module.endswith(OF_HEADS):
            runs = Dense(dtype)
        coded = stored.lower() not in ("float32", "bfloat16", "float16", "f32", "bf16", "f16")
        key = stored, runs.name, coded and isinstance(runs, Dense)
        matrices[key] += 1
        values[key] += math.prod(source.shape(part))
    return [
        Weights(
            stored, matrices[stored, runs, widened], count, runs,
            f"dequantized as it is loaded; {kernel}" if widened else kernel,
        )
        for (stored, runs, widened), count in values.most_common()
    ]  # fmt: skip


def _matrices(spec: ModelSpec, source: Stored) -> Iterator[tuple[str, str]]:
    """The decoder's matrices by their modules, and each tensor that they are made of."""
    from penstock.models.weights import plan_weights
    from penstock.nn.decoder import MATRICES, OF_HEADS, stored_in

    plans, _ = plan_weights(source.names(), spec)
    table = plans.pop("embed.weight", None)
    if spec.decoder.tied and table is not None:
        plans["head.weight"] = table
    for target, plan in plans.items():
        matrix, _, parameter = target.rpartition(".")
        module = stored_in(matrix)
        layers = module.startswith("layers.") and module.endswith((*MATRICES.values(), OF_HEADS))
        if parameter == "weight" and (layers or module == "head"):
            yield from ((module, part) for part in plan.parts if part is not None)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
