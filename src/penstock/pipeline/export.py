"""`penstock export`: a checkpoint folder with a graph and a manifest, whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.config import EngineConfig
from penstock.models.exported import FORMAT, MANIFEST, Exported, sha256
from penstock.models.hub import EMBEDDED, resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.registry import read_json
from penstock.models.weights import Checkpoint
from penstock.pipeline.graph import Graph, export_graph
from penstock.pipeline.partial import writing
from penstock.runtime.loader import layout_of

GRAPH = "graph.pt2"
SHARD_BYTES = 4 << 30
_KEPT = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "README.md")
_INDEX = "model.safetensors.index.json"

Named = Iterable[tuple[str, Any]]
"""Checkpoint names and what they hold: a Tensor, or what the writer in use knows to store."""

Writer = Callable[[Path, Named], dict[str, Any]]
"""Stores tensors in a folder as safetensors; returns what config.json gains (its
`quantization_config`).
"""

Progress = Callable[[str], None]
"""Called with what is being done."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """What replaces the checkpoint's own weights, how it is stored, and the choices behind it."""

    tensors: Named
    write: Writer
    choices: dict[str, Any] = field(default_factory=dict)  # scheme, calibration text and its hash


@dataclass(frozen=True, slots=True)
class Export:
    """What was written."""

    folder: Path
    graph: Graph
    model: LoadedModel
    manifest: Exported


def export_model(
    model: str | Path,
    output: Path,
    *,
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    weights: NewWeights | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Write `model` to the folder `output`: checkpoint, tokenizer, graph, manifest.

    kv_cache_dtype, max_model_len: what engines of this folder use unless told otherwise, and the
    graph's cache. weights: instead of the checkpoint's own, which are copied as they are. The
    graph is made of what was written, read back. force: replace an earlier export.
    Raises ConfigError when `output` can't be written; what loading the model raises.
    """
    source = resolve(model)
    engine = EngineConfig.of(model=model, kv_cache_dtype=kv_cache_dtype)
    say = progress or (lambda _: None)
    with writing(output, force=force) as folder:
        say("weights")
        config = read_json(source / "config.json")
        if weights is None:
            _copy_weights(source, folder)
        else:
            config |= weights.write(folder, weights.tensors)
        say("tokenizer")
        _copy_rest(source, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        say("graph")
        loaded = load_model(folder, max_model_len=max_model_len)
        layout = layout_of(engine, loaded)
        graph = export_graph(loaded.model, layout.allocate(2))
        graph.save(folder / GRAPH)
        say("checksums")
        manifest = Exported(
            choices={
                "kv_cache_dtype": kv_cache_dtype,
                "max_model_len": max_model_len,
                "weights": {} if weights is None else weights.choices,
            },
            graph={
                "file": GRAPH,
                "digest": graph.digest,
                "operators": len(graph.operators()),
                "block_size": layout.block_size,
                "formats": loaded.model.formats.name,
            },
            files=_files(folder),
            made_by={"penstock": version("penstock"), "torch": torch.__version__},
            source=str(model) if isinstance(model, str) and _is_name(model) else source.name,
        )
        text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return Export(output, graph, loaded, manifest)


def write_tensors(folder: Path, tensors: Named) -> dict[str, Any]:
    """A `Writer` of plain tensors, in files of up to SHARD_BYTES; holds one file's in memory."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = 0

    def put() -> None:
        save_file(held, folder / f"shard-{len(shards)}.safetensors", {"format": "pt"})
        shards.append(list(held))
        held.clear()

    total = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD_BYTES:
            put()
            size = 0
        held[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    put()
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return {}
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{i}.safetensors").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return {}


def _copy_weights(source: Path, folder: Path) -> None:
    """The files that loading `source` would read."""
    for name in (*Checkpoint(source).files(), _INDEX):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _copy_rest(source: Path, folder: Path) -> None:
    """Tokenizer, templates, generation settings, licence."""
    skipped = {"config.json", MANIFEST, _INDEX}
    for pattern in _KEPT:
        for file in sorted(source.glob(pattern)):
            if file.name not in skipped and file.is_file():
                shutil.copyfile(file, folder / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        found[file.relative_to(folder).as_posix()] = entry
    return found


def _is_name(model: str) -> bool:
    """Whether `model` names an embedded model or one of a hub, not a place on this machine."""
    return model in EMBEDDED or not Path(model).expanduser().exists()
