"""`penstock export`: a checkpoint folder with a graph and a manifest, whole or not at all."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.models.checkpoint import Checkpoint
from penstock.models.experts import warn_of_names
from penstock.models.exported import FORMAT, MANIFEST, Exported, read_exported, sha256
from penstock.models.files import INDEX, copy_settings
from penstock.models.finite import check_finite
from penstock.models.gguf.container import is_gguf
from penstock.models.gguf.folder import write_weights
from penstock.models.gguf.source import GgufSource
from penstock.models.hub import EMBEDDED, resolve
from penstock.models.load import LoadedModel, load_model, max_positions
from penstock.models.registry import check_blind, read_spec
from penstock.models.sources import stored_quantization
from penstock.pipeline.card import note_in_card
from penstock.pipeline.graph import Graph, export_graph
from penstock.pipeline.new_folder import check_apart, named, new_folder
from penstock.pipeline.new_weights import NewWeights, Progress
from penstock.pipeline.vocabulary import VocabularyChoice
from penstock.runtime.engine_folder import is_engine
from penstock.runtime.fingerprint import fingerprint
from penstock.runtime.sizing import layout_of

logger = logging.getLogger("penstock")

GRAPH = "graph.pt2"
WORK = ".work"
"""How the name of the folder ends where an export keeps what it has done until all of it is."""


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
    reduce_vocab: VocabularyChoice | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Write `model` to the folder `output`: checkpoint, tokenizer, graph, manifest.

    kv_cache_dtype, max_model_len: what engines of this folder use unless told otherwise, and the
    graph's cache. weights: what becomes of the checkpoint's own, which else are copied as they are.
    reduce_vocab: which tokens stay. The graph is made of what was written, read back. force:
    replace an earlier export. What is computed is kept in `output` with `.work` until the whole is
    done: the same export, started again, goes on there.
    Raises ConfigError when `output` can't be written; what loading the model raises.
    """
    source, report = resolve(model), progress or (lambda *_: None)
    if is_engine(source):
        raise ConfigError(f"{source} is an engine: export the model that it was built from.")
    check_apart(source, output)
    check_blind(source, "an export")
    changes = _Changes(weights or NewWeights(), reduce_vocab)
    changes.check(source)
    settings = _settings(source, kv_cache_dtype, max_model_len)
    engine = EngineConfig.of(model=model, kv_cache_dtype=settings["kv_cache_dtype"])
    origin = str(model) if isinstance(model, str) and _is_name(model) else source.name
    work = named(output).with_name(named(output).name + WORK)
    with new_folder(output, force=force, own_files=_own_files) as folder:
        try:
            chosen = changes.write(source, folder, work, report)
            note_in_card(folder, origin, chosen)
            report("graph", 0, 0)
            loaded = load_model(folder, max_model_len=settings["max_model_len"])
            for name, tensor in loaded.model.named_parameters():
                check_finite(name, tensor)
        except (OSError, PenstockError, KeyboardInterrupt) as error:
            goes_on = isinstance(error, (OSError, KeyboardInterrupt))
            if not goes_on and not isinstance(error.__cause__, OSError):
                shutil.rmtree(work, ignore_errors=True)  # what failed so fails again
            elif work.exists():
                logger.warning("%s keeps what was done; started again, this goes on.", work)
            raise
        layout = layout_of(engine, loaded)
        graph = export_graph(loaded.model, layout.allocate(2))
        graph.save(folder / GRAPH)
        report("checksums", 0, 0)
        manifest = Exported(
            choices={**settings, "weights": chosen},
            graph={
                "file": GRAPH,
                "digest": graph.digest,
                "operators": len(graph.operators()),
                "block_size": layout.block_size,
                "cache": layout.stored,
                "formats": loaded.model.formats.name,
            },
            files=_files(folder),
            made_by={"penstock": fingerprint().penstock, "torch": torch.__version__},
            source=origin,
        )
        text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(work, ignore_errors=True)
    return Export(output, graph, loaded, manifest)


def _settings(source: Path, kv_cache_dtype: str, max_model_len: int | None) -> dict[str, Any]:
    """What engines of the export use, checked before anything takes long."""
    before = read_exported(source)
    if before is not None:  # what it was exported for holds on
        max_model_len = max_model_len or before.max_model_len
        if kv_cache_dtype == "auto":
            kv_cache_dtype = before.kv_cache_dtype
    longest = max_positions(read_spec(source).decoder)
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {longest} positions of the model."
        )
    return {"kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len}


@dataclass(frozen=True, slots=True)
class _Changes:
    """What becomes of a model on its way into an export."""

    weights: NewWeights
    vocabulary: VocabularyChoice | None

    def check(self, source: Path) -> None:
        """Raise ConfigError for a GGUF file that can't be changed: it is quantized already."""
        asked = self.weights.is_anything or self.vocabulary is not None
        if not asked or not is_gguf(source):
            return
        quantized = stored_quantization(GgufSource(source))
        if quantized is not None:
            raise ConfigError(
                f"{source} is quantized already ({quantized}), so it can only be exported as it "
                "is. Give the unquantized checkpoint to quantize it, to merge an adapter into it, "
                "or to leave out tokens."
            )

    def write(self, source: Path, folder: Path, work: Path, report: Progress) -> dict[str, Any]:
        """Write checkpoint and tokenizer into `folder`; returns the choices, for the manifest."""
        chosen, stages = dict[str, Any](), folder / "stages"
        if self.vocabulary is not None:
            report("vocabulary", 0, 0)
            source, chosen["reduce_vocab"] = self._reduced(self.vocabulary, source, stages)
        report("weights", 0, 0)
        if self.weights.is_anything:
            chosen |= self.weights.write(source, folder, work, report)
        else:
            _copy_weights(source, folder)
        report("tokenizer", 0, 0)
        copy_settings(source, folder, but=("config.json", MANIFEST))
        shutil.rmtree(stages, ignore_errors=True)
        return chosen

    def _reduced(
        self, vocabulary: VocabularyChoice, source: Path, stages: Path
    ) -> tuple[Path, dict[str, Any]]:
        """The model with fewer tokens, in a folder under `stages`."""
        stages.mkdir()
        if is_gguf(source):
            whole = stages / "whole"
            whole.mkdir()
            _copy_weights(source, whole)
            copy_settings(source, whole, but=("config.json",))
            source = whole
        reduced = stages / "reduced"
        reduced.mkdir()
        return reduced, vocabulary.write(source, reduced)


def _copy_weights(source: Path, folder: Path) -> None:
    """What loading `source` would read, and config.json."""
    if is_gguf(source):
        found = GgufSource(source)
        found.announce()
        warn_of_names(found.config)
        write_weights(found, folder)
        return
    for file in (*Checkpoint(source).files(), source / INDEX, source / "config.json"):
        if file.exists():
            shutil.copyfile(file, folder / file.name)


def _own_files(folder: Path) -> frozenset[str] | None:
    """What an export has put into `folder`, by its manifest, however damaged the rest is."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return frozenset((MANIFEST, *files)) if isinstance(files, dict) else None


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        found[file.relative_to(folder).as_posix()] = entry
    return found


def _is_name(model: str) -> bool:
    """Whether `model` names an embedded model or one of a hub, not a place on this machine."""
    return model in EMBEDDED or not Path(model).expanduser().exists()
