"""`penstock export`: a checkpoint folder with a graph and a manifest, whole or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.models.exported import FORMAT, MANIFEST, Exported, read_exported, sha256
from penstock.models.hub import EMBEDDED, resolve
from penstock.models.load import LoadedModel, load_model, max_positions
from penstock.models.registry import read_spec
from penstock.models.weights import Checkpoint
from penstock.pipeline.graph import Graph, export_graph
from penstock.pipeline.new_folder import check_apart, new_folder
from penstock.pipeline.new_weights import NewWeights, Progress
from penstock.pipeline.vocabulary import VocabularyChoice
from penstock.runtime.fingerprint import fingerprint
from penstock.runtime.loader import layout_of
from penstock.tokenizer.vocab_map import FILE as VOCAB_MAP

GRAPH = "graph.pt2"
_KEPT = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "README.md", VOCAB_MAP)
_INDEX = "model.safetensors.index.json"


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
    replace an earlier export. Layers that are quantized are kept in `output` with `.work` until
    the whole is done: the same export, started again, goes on there.
    Raises ConfigError when `output` can't be written; what loading the model raises.
    """
    source = resolve(model)
    if not source.is_dir():
        raise ConfigError(
            f"{source} is a file. Its weights load and run as they are; an export is made of a "
            "checkpoint's folder."
        )
    check_apart(source, output)
    before = read_exported(source)
    if before is not None:  # what it was exported for holds on
        max_model_len = max_model_len or before.max_model_len
        if kv_cache_dtype == "auto":
            kv_cache_dtype = before.kv_cache_dtype
    longest = max_positions(read_spec(source).decoder)
    if max_model_len is not None and max_model_len > longest:  # before anything takes long
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {longest} positions of the model."
        )
    engine = EngineConfig.of(model=model, kv_cache_dtype=kv_cache_dtype)
    report = progress or (lambda *_: None)

    def say(what: str) -> None:
        report(what, 0, 0)

    with new_folder(output, force=force, replaces=_is_export) as folder:
        chosen, work = dict[str, Any](), output.with_name(output.name + ".work")
        whole, stage = source, folder / "stage"
        if reduce_vocab is not None:
            say("vocabulary")
            stage.mkdir()
            chosen["reduce_vocab"] = reduce_vocab.write(source, stage)
            source = stage
        say("weights")
        if weights is not None and weights.is_anything:
            try:
                chosen |= weights.write(source, folder, None if source is stage else work, report)
            except PenstockError:  # what failed so fails again
                shutil.rmtree(work, ignore_errors=True)
                raise
        else:
            _copy_weights(source, folder)
            shutil.copyfile(source / "config.json", folder / "config.json")
        say("tokenizer")
        _copy_rest(source, folder)
        if source is stage:
            shutil.rmtree(stage)
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
                "weights": chosen,
            },
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
            source=str(model) if isinstance(model, str) and _is_name(model) else whole.name,
        )
        text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    shutil.rmtree(work, ignore_errors=True)
    return Export(output, graph, loaded, manifest)


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


def _is_export(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        found[file.relative_to(folder).as_posix()] = entry
    return found


def _is_name(model: str) -> bool:
    """Whether `model` names an embedded model or one of a hub, not a place on this machine."""
    return model in EMBEDDED or not Path(model).expanduser().exists()
