"""From a model to an engine folder: packed weights, plans, timings, and a manifest of all of it.

Tensors are packed and written one by one, so a build needs little memory beside the largest of
them. The folder appears whole at the end (`new_folder`), its manifest written last.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.cache import PagedLayout
from penstock.config import EngineConfig, SchedulerConfig
from penstock.errors import ConfigError, EngineFolderError, listed
from penstock.hardware import cache_folder
from penstock.kernels import interpreting, native
from penstock.models.exported import MANIFEST as EXPORTED
from penstock.models.exported import read_exported, sha256, verify_exported
from penstock.models.files import copy_settings
from penstock.models.gguf.seeing import projector_beside
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.registry import check_blind
from penstock.pipeline import tuning
from penstock.pipeline.compiled import compile_graph
from penstock.pipeline.new_folder import check_apart, new_folder, sync
from penstock.pipeline.passes import check_passes
from penstock.pipeline.planning import Planned, plan_step
from penstock.pipeline.weights_file import WeightsFile
from penstock.runtime import compile_counter
from penstock.runtime.device import Device
from penstock.runtime.engine_folder import (
    KIND,
    MANIFEST,
    PACKAGE,
    PLAN,
    REPORT,
    TIMINGS,
    WEIGHTS,
    EngineFolder,
    Limits,
    digest,
    is_engine,
    own_files,
)
from penstock.runtime.fingerprint import fingerprint
from penstock.runtime.formats import encode
from penstock.runtime.hidden import hidden_tensors
from penstock.runtime.manifest import DEVICES, FORWARDS
from penstock.runtime.package import description
from penstock.runtime.plan import Plan, fixed_tensors, record
from penstock.runtime.program import Program
from penstock.runtime.sizing import layout_of
from penstock.runtime.tuned import Tuned

logger = logging.getLogger("penstock")

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, all of it): phases are PHASES, in their order."""

PHASES = ("pack", "plan", "compile", "time")
USUAL_TOKENS = 512
_NOT_COPIED = (MANIFEST, PLAN, TIMINGS, REPORT, EXPORTED, description(Path(PACKAGE)).name)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build, and for what."""

    model: str | Path
    output: Path
    revision: str | None = None
    quantization: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None  # tokens; None: what the model was made for
    profile: tuple[int, int, int] | None = None  # tokens of a step: fewest, usual, most
    device: str = "cpu"
    forward: str = "program"  # one of FORWARDS
    force: bool = False  # replace an engine that is there
    passes: tuple[str, ...] | None = None  # over the graph; None: all
    timing_cache: bool = True  # replay what an earlier build has measured
    mmproj: str | Path | bool | None = None  # as `ModelConfig` has it

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError(f"device={self.device!r} isn't one of {', '.join(DEVICES)}.")
        if self.forward not in FORWARDS[:2]:
            raise ConfigError(f"forward={self.forward!r} isn't one of {', '.join(FORWARDS[:2])}.")
        check_passes(self.passes or ())
        if self.device == "cuda":
            self._check_gpu()
        low, usual, most = self.steps
        if not 1 <= low <= usual <= most:
            raise ConfigError(
                f"profile={low},{usual},{most} must be the fewest, usual and most tokens of a "
                "step, none smaller than the one before, the first at least 1."
            )
        if self.max_num_seqs > most:
            raise ConfigError(
                f"profile={low},{usual},{most} has steps of up to {most} tokens, fewer than "
                f"max_num_seqs={self.max_num_seqs} sequences. Raise its last, or lower that."
            )
        _ = self.config  # refuses what is out of range

    def _check_gpu(self) -> None:
        """Raises ConfigError for what is of a CPU's engines."""
        for name, given in (
            ("passes", self.passes is not None),
            ("forward='package'", self.forward != "program"),
            (f"kv_cache_dtype={self.kv_cache_dtype!r}", self.kv_cache_dtype in ("int4", "kivi")),
        ):
            if given:
                raise ConfigError(
                    f"{name} is for CPUs, and device='cuda' builds for a GPU. Leave one out."
                )

    @property
    def target(self) -> Device:
        """What weights and cache are laid out for; a GPU needn't be here."""
        return Device(torch.device("cpu"), by_triton=self.device == "cuda")

    @property
    def config(self) -> EngineConfig:
        """Of engines that run what is built."""
        return EngineConfig.of(
            model=self.model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.steps[2],
            mmproj=self.mmproj,
        )

    def of_export(self, source: Path) -> BuildOptions:
        """With what `source` was exported for where nothing was chosen."""
        exported = read_exported(source)
        if exported is None:
            return self
        stored = self.kv_cache_dtype
        return replace(
            self,
            max_model_len=self.max_model_len or exported.max_model_len,
            kv_cache_dtype=exported.kv_cache_dtype if stored == "auto" else stored,
        )

    @property
    def steps(self) -> tuple[int, int, int]:
        """The profile, or the default: up to as many tokens as an engine's steps have anyway."""
        if self.profile is not None:
            return self.profile
        most = max(SchedulerConfig().max_num_batched_tokens, self.max_num_seqs)
        return (1, min(USUAL_TOKENS, most), most)

    @property
    def command(self) -> str:
        """What builds this engine again, in place of a broken one."""
        words = ["penstock", "build", str(self.model), "-o", str(self.output)]
        for name, value, default in (
            ("--revision", self.revision, None),
            ("--quantization", self.quantization, None),
            ("--dtype", self.dtype, "auto"),
            ("--kv-cache-dtype", self.kv_cache_dtype, "auto"),
            ("--max-num-seqs", self.max_num_seqs, 64),
            ("--max-model-len", self.max_model_len, None),
            ("--profile", self.profile and ",".join(map(str, self.profile)), None),
            ("--device", self.device, "cpu"),
            ("--forward", self.forward, "program"),
            ("--mmproj", self.mmproj or None, None),
            ("--passes", None if self.passes is None else ",".join(self.passes) or "none", None),
        ):
            if value != default:
                words += [name, str(value)]
        words += ["--no-mmproj"] if self.mmproj is False else []
        return shlex.join([*words, "--force"])


def build(options: BuildOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Build an engine folder at `options.output`; returns its report.

    Raises ConfigError for choices that can't be or a folder that is in the way, ModelError for a
    checkpoint that is wrong, EngineFolderError when the disk fills up. No folder is left then.
    """
    if interpreting() and options.device == "cpu":
        raise ConfigError(
            "An engine is built for a CPU's own kernels, so PENSTOCK_KERNELS=triton can't take "
            "effect. Unset it to build one."
        )
    source = resolve(options.model, options.revision)
    if is_engine(source):
        raise ConfigError(f"{source} is an engine already. Give the model that it was built from.")
    if (source / EXPORTED).exists():
        verify_exported(source)
    check_apart(source, options.output)
    through = projector_beside(source, options.mmproj)
    if options.forward == "package":
        check_blind(source, "a compiled package", through)
    options = options.of_export(source)
    with new_folder(options.output, force=options.force, own_files=own_files) as partial:
        return _Build(options, source, partial, progress or (lambda *_: None), through).run()


@dataclass(slots=True)
class _Build:
    options: BuildOptions
    source: Path
    folder: Path
    progress: Progress
    mmproj: Path | None = None  # that a model in GGUF sees through
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        with self._timed("pack"):
            loaded, index = self._pack()
        with self._timed("plan"):
            layout = layout_of(self.options.config, loaded, self.options.target)
            planned = self._plan(loaded, layout, index)
            plan = planned.plan
        if self.options.forward == "package":
            with self._timed("compile"):
                self._compile(planned)
        self._copy_files()
        limits = Limits(self.options.max_num_seqs, loaded.max_model_len, self.options.steps)
        manifest = self._manifest(loaded, limits, index)
        with self._timed("time"):
            timings = self._time(loaded, layout, plan, limits, manifest)
        _write(self.folder / TIMINGS, timings)
        report = self._report(manifest, planned, layout, timings)
        _write(self.folder / REPORT, report)
        self._finish(manifest)
        return report

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = round(time.perf_counter() - start, 3)

    def _pack(self) -> tuple[LoadedModel, Mapping[str, Any]]:
        """Pack and write every tensor. What is left of the model has shapes, but no data."""
        options = self.options
        with WeightsFile(self.folder / WEIGHTS) as weights:
            loaded = load_model(
                self.source,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                quantization=options.quantization,
                mmproj=self.mmproj,
                progress=lambda done, total: self.progress("pack", done, total),
                stored=weights.take,
                storage=options.target.storage(),
            )
            for name, table in loaded.model.named_buffers():
                weights.add(name, table)
            return loaded, weights.index(WEIGHTS)

    def _plan(self, loaded: LoadedModel, layout: PagedLayout, index: Mapping[str, Any]) -> Planned:
        """Plan both kinds of step, and write their plans."""
        self.progress("plan", 0, 2)
        passes = () if self.options.device == "cuda" else self.options.passes
        planned = plan_step(loaded, layout, self.source, passes)
        plan, kv = planned.plan, layout.allocate(1)
        self.progress("plan", 1, 2)
        hidden = loaded.model.last_hidden_state()
        hidden_plan, _ = record(hidden, kv, hidden_tensors(hidden))
        unknown = [name for name in plan.weights() if name not in index["tensors"]]
        if unknown:
            raise EngineFolderError(
                f"This model's step reads {len(unknown)} tensors that aren't parameters "
                f"({listed(unknown)}), so no engine can hold them. Run it unbuilt."
            )
        _write(self.folder / PLAN, {"step": plan.as_dict(), "hidden": hidden_plan.as_dict()})
        self.progress("plan", 2, 2)
        return planned

    def _compile(self, planned: Planned) -> None:
        """The graph's package: compiled, or what an earlier build of the same graph compiled."""
        self.progress("compile", 0, 1)
        kept, package = cache_folder() / "packages", self.folder / PACKAGE
        beside = self.folder / "compiling"
        try:
            made = compile_graph(planned.graph, kept)
        except OSError as error:
            logger.warning("The package can't be kept in %s: %s. Set PENSTOCK_CACHE.", kept, error)
            made = compile_graph(planned.graph, beside)
        shutil.copyfile(made, package)
        shutil.copyfile(description(made), description(package))
        if beside.exists():
            shutil.rmtree(beside)
        self.progress("compile", 1, 1)

    def _copy_files(self) -> None:
        copy_settings(self.source, self.folder, but=_NOT_COPIED, mmproj=self.mmproj)

    def _manifest(
        self, loaded: LoadedModel, limits: Limits, index: Mapping[str, Any]
    ) -> dict[str, Any]:
        options = self.options
        choices = {
            "model": str(options.model),
            "revision": options.revision,
            "quantization": options.quantization,
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "device": options.device,
            "forward": "graphs" if options.device == "cuda" else options.forward,
            **asdict(limits),
        }
        return {
            "kind": KIND,
            "fingerprint": fingerprint().as_dict(),
            "command": options.command,
            "choices": choices,
            "family": loaded.spec.family,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "weight_formats": loaded.model.formats.described,
            "formats": encode(loaded.model.formats),
            "weights": index,
        }

    def _time(
        self,
        loaded: LoadedModel,
        layout: PagedLayout,
        plan: Plan,
        limits: Limits,
        manifest: dict[str, Any],
    ) -> dict[str, Any]:
        """Measure what may be chosen, or replay it; notes the workspace in the manifest."""
        if native.handle is None or self.options.device == "cuda":
            manifest["workspace_bytes"] = 0
            on_gpu = "a GPU's kernels are compiled where it is"
            reason = f"nothing to choose: {native.reason if native.handle is None else on_gpu}"
            nothing = tuning.Timings((), 0.0)
            return {"source": reason, **nothing.as_dict(), "chosen": Tuned().as_dict()}
        engine = EngineFolder(
            self.folder, manifest, loaded.model.formats, loaded.dtype,
            self.options.kv_cache_dtype, limits, Tuned(),
        )  # fmt: skip
        mapped = engine.load(limits.max_model_len).model
        kv = layout.allocate(tuning.blocks_needed(limits, layout.block_size))
        if layout.recent_window:  # any place will do to be timed
            kv[0][6].copy_(torch.arange(len(kv[0][6])) % len(kv[0][4]))
        program = Program.of_plan(plan, fixed_tensors(mapped), kv)
        manifest["workspace_bytes"] = program.reserve(limits.profile[2], limits.max_num_seqs)
        key = tuning.cache_key(_timed_facts(manifest, plan, limits))
        timings = tuning.replay(key) if self.options.timing_cache else None
        source = "replayed" if timings is not None else "measured"
        if timings is None:
            timings = tuning.measure(
                program, kv, limits, layout.block_size,
                lambda done, total: self.progress("time", done, total),
            )  # fmt: skip
            try:
                tuning.keep(key, timings)
            except OSError as error:
                logger.warning("The timings can't be kept: %s. Set PENSTOCK_CACHE.", error)
        self.progress("time", 1, 1)
        if timings.disturbed:
            logger.warning(
                "Other programs ran while steps were timed (threads waited %.0f%% of their work), "
                "so nothing is chosen by it. Build again on an idle machine.",
                timings.waited * 100,
            )
        chosen = tuning.choose(timings, limits.profile)
        if self.options.forward == "package":  # which takes its threads and memory as it goes
            manifest["workspace_bytes"] = 0
            chosen = Tuned(prefill_tokens=chosen.prefill_tokens)
        return {
            "source": source,
            **timings.as_dict(),
            "chosen": chosen.as_dict(),
        }

    def _report(
        self,
        manifest: Mapping[str, Any],
        planned: Planned,
        layout: PagedLayout,
        timings: Mapping[str, Any],
    ) -> dict[str, Any]:
        tensors, plan = manifest["weights"]["tensors"], planned.plan
        counts = Counter(operator.op for operator in plan.operators)
        return {
            "choices": manifest["choices"],
            "weight_formats": manifest["weight_formats"],
            "fingerprint": manifest["fingerprint"],
            "operators": [
                {"op": o.op, "weights": o.weights(), "shape": o.shape} for o in plan.operators
            ],
            "operator_counts": dict(counts),
            "graph": {
                "source": planned.source,
                "passes": planned.changes,
                "before": planned.before,
                "after": planned.after,
            },
            "bytes": {
                "weights": sum(entry["bytes"] for entry in tensors.values()),
                "weights_file": manifest["weights"]["bytes"],
                "workspace": manifest["workspace_bytes"],
                "cache_per_token": layout.bytes_per_block // layout.block_size,
            },
            "timings": timings["source"],
            "disturbed": timings["waited"] > tuning.DISTURBED,
            "chosen": timings["chosen"],
            "seconds": self.seconds,
            "peak_bytes": _peak_bytes(),
            "compiled": compile_counter.counts(),
        }

    def _finish(self, manifest: dict[str, Any]) -> None:
        """Sum every file up, and write the manifest when all of them are on the disk."""
        files = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if path.is_file() and name != WEIGHTS:
                files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            sync(path)
        complete = json.loads(json.dumps({**manifest, "files": files}))  # as it will be read
        _write(self.folder / MANIFEST, {**complete, "digest": digest(complete)})


def _timed_facts(manifest: Mapping[str, Any], plan: Plan, limits: Limits) -> dict[str, Any]:
    """What timings depend on: where, which operators, over which tensors, and the sizes."""
    tensors = manifest["weights"]["tensors"]
    return {
        "fingerprint": manifest["fingerprint"],
        "plan": plan.as_dict(),
        "tensors": {name: [entry["dtype"], entry["shape"]] for name, entry in tensors.items()},
        "kv_cache_dtype": manifest["choices"]["kv_cache_dtype"],
        "limits": asdict(limits),
    }


def _peak_bytes() -> int:
    """The most memory that this process has held (proc(5)); getrusage counts its parent's too."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None  # every Linux has it
    return int(found[1]) * 1024


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def parse_profile(text: str) -> tuple[int, int, int]:
    """`1,512,2048` → (1, 512, 2048). Raises ConfigError for anything else."""
    parts = text.split(",")
    if len(parts) != 3 or not all(re.fullmatch(r"\s*\d{1,9}\s*", part) for part in parts):
        raise ConfigError(
            f"profile={text[:80]!r} must be three numbers of tokens of up to nine digits, "
            "MIN,OPT,MAX: 1,512,2048."
        )
    low, usual, most = (int(part) for part in parts)
    return (low, usual, most)
