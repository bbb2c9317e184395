"""Whether engines of a whole model give its bits, in every weight and cache format.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b checkpoints/qwen
    python benchmarks/engine_proof.py checkpoints/qwen \
        --json benchmarks/results/engines-qwen2.5-0.5b.json --docs docs

For each form: `penstock export`, `penstock build`; then prompts of 40 tokens and 8 decoding steps
of three sequences, by the exported model's operators one by one, by its graph, and by the engine.
All logits and hidden states must be equal by ==, and nothing may be traced or compiled while the
engine runs. Ends with 1 where a form isn't so. Folders go form by form. --quick: one of each kind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pages import fill
from penstock.config import EngineConfig
from penstock.errors import PenstockError
from penstock.pipeline import load_graph
from penstock.pipeline.export import GRAPH
from penstock.pipeline.graph import weights_of
from penstock.quant import parse_scheme
from penstock.quant.files import layouts_for
from penstock.quant.names import head_scheme
from penstock.runtime import HiddenRunner, Runner, Runtime, compile_counter, load_runtime
from penstock.runtime.loader import runner_over
from penstock.step import Step
from rows import Row, Rows

SEQUENCES, PROMPT, DECODES = 3, 40, 8
CONTEXT = PROMPT + DECODES + 1  # one more for the hidden states
MAX_MODEL_LEN = 64
BLOCKS = 4 * SEQUENCES
RECENT = 8
"""Tokens that a kivi cache keeps as they are: few, so that codes are read within the context."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a model is exported as."""

    weights: str | None = None  # a scheme's name; None: bfloat16
    cache: str = "auto"


WEIGHTS = (
    *("w8a16", "w8a16-asym", "w8a8", "w8a8-asym"),
    *(f"w4a16-{shared}{zero}" for shared in ("g128", "g32") for zero in ("", "-asym")),
    *(f"w4a8-{shared}{zero}" for shared in ("g128", "g32") for zero in ("", "-asym")),
    *("fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "nf4", "mxfp4", "nvfp4"),
    *("fp8-w8a8", "fp8-w8a8-tensor", "fp8-w8a8-block"),
)
CACHES = ("int8", "fp8", "int4", "kivi")
FORMS = (
    Form(),
    *(Form(name) for name in WEIGHTS),
    *(Form(name, cache) for cache in CACHES for name in (None, "w4a8")),
)
QUICK = (Form(), Form("w8a8"), Form("w4a16-g128"), Form("fp8"), Form("nf4"), Form("w4a8", "kivi"))


def steps(vocab: int) -> Iterator[Step]:
    """Random ids below `vocab`: three prompts in one step, then a token of each, step by step."""
    size = EngineConfig().cache.block_size
    width = -(-MAX_MODEL_LEN // size)
    table = torch.arange(SEQUENCES * width, dtype=torch.int32).view(SEQUENCES, width)
    ids = torch.randint(0, vocab, (SEQUENCES, CONTEXT), generator=torch.manual_seed(0))
    start = 0
    for end in (PROMPT, *range(PROMPT + 1, CONTEXT + 1)):
        at = torch.arange(start, end).repeat(SEQUENCES)
        owner = torch.arange(SEQUENCES).repeat_interleave(end - start)
        query_start = torch.arange(SEQUENCES + 1) * (end - start)
        slots = table[owner, at // size] * size + at % size
        yield Step(
            tokens=ids[:, start:end].reshape(-1).int(),
            positions=at.int(),
            slots=slots.int(),
            query_start=query_start.int(),
            context_len=torch.full((SEQUENCES,), end, dtype=torch.int32),
            block_table=table,
            sample_at=(query_start[1:] - 1).int(),
        )
        start = end


def run(runner: Runner, hidden: HiddenRunner | None, vocab: int) -> list[Tensor]:
    """Logits [3, V] of every step but the last; of that, hidden states [3, D]."""
    *most, last = steps(vocab)
    found = [runner.forward(step).clone() for step in most]
    if hidden is not None:
        found.append(hidden.forward(last).clone())
    return found


def load(folder: Path, cache: str, *, eager: bool = False) -> Runtime:
    """The runtime of an export or an engine."""
    recent = {"kv_cache_dtype": cache, "kv_recent_window": RECENT} if cache == "kivi" else {}
    return load_runtime(
        EngineConfig.of(
            model=folder,
            enforce_eager=eager,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=SEQUENCES * PROMPT,
            num_blocks=BLOCKS,
            skip_tokenizer_init=True,
            **recent,
        )
    )


def pooling(runtime: Runtime) -> HiddenRunner:
    """Its steps that end with hidden states."""
    return HiddenRunner(runtime.model.model, runtime.runner)


def command(*words: object) -> str:
    """What `penstock` prints; raises PenstockError with what it says where it fails."""
    program = Path(sys.executable).with_name("penstock")
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PenstockError(f"penstock {words[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def export(model: Path, form: Form, folder: Path) -> None:
    """`penstock export`, the head in 8 bits where its layout takes that."""
    words: list[object] = ["--kv-cache-dtype", form.cache, "--max-model-len", MAX_MODEL_LEN]
    if form.weights is not None:
        scheme = parse_scheme(form.weights)
        layout = layouts_for(scheme)[0]
        words += ["--quant", form.weights, "--layout", layout]
        if layout == "compressed-tensors":
            words += ["--head", head_scheme(scheme).name]
    command("export", model, "-o", folder, *words)


def prove(model: Path, form: Form, folder: Path) -> Row:
    """Export and build one form in `folder`, and hold its graph and its engine to the model."""
    begin = time.perf_counter()
    exported, engine = folder / "export", folder / "engine"
    export(model, form, exported)
    exported_at = time.perf_counter()
    sizes = "--max-num-seqs", SEQUENCES, "--profile", f"1,8,{SEQUENCES * PROMPT}"
    report = json.loads(command("build", exported, "-o", engine, *sizes, "--json"))
    built_at = time.perf_counter()

    eager = load(exported, form.cache, eager=True)
    vocab = eager.model.spec.decoder.vocab_size
    want = run(eager.runner, pooling(eager), vocab)
    graph = load_graph(exported / GRAPH).bind(weights_of(eager.model.model))
    by_graph = run(runner_over(graph, eager.layout.allocate(BLOCKS), eager.layout), None, vocab)
    before = compile_counter.total()
    built = load(engine, form.cache)
    by_engine = run(built.runner, pooling(built), vocab)
    compiled = compile_counter.total() - before
    return {
        "formats": built.model.model.formats.name,
        "stored": built.layout.stored,
        "graph_equal": all(map(torch.equal, by_graph, want[:-1])),
        "engine_equal": all(map(torch.equal, by_engine, want)),
        "sound": all(bool(x.isfinite().all()) and float(x.std()) > 0 for x in want),
        "compiled": compiled,
        "operators": len(report["operators"]),
        "weights_bytes": report["bytes"]["weights"],
        "workspace_bytes": report["bytes"]["workspace"],
        "export_s": round(exported_at - begin, 1),
        "build_s": round(built_at - exported_at, 1),
        "build_phases_s": report["seconds"],
        "build_peak_bytes": report["peak_bytes"],
    }


def holds(row: Row) -> bool:
    """Whether a form is proved."""
    return (
        "error" not in row
        and row["graph_equal"]
        and row["engine_equal"]
        and row["sound"]
        and row["compiled"] == 0
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| format | cache | graph equal | engine equal | compiled | operators | weights | build |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"| {row['weights'] or 'bfloat16'} | {row['cache']} "
        if "error" in row:
            lines.append(f"{name}| {row['error']} | | | | | |")
            continue
        equal = ["yes" if row[key] else "NO" for key in ("graph_equal", "engine_equal")]
        lines.append(
            f"{name}| {equal[0]} | {equal[1]} | {row['compiled']} | {row['operators']} "
            f"| {row['weights_bytes'] / 1e6:,.0f} MB | {row['build_peak_bytes'] / 1e6:,.0f} MB |"
        )
    return "\n".join([*lines, ""])


def tables(rows: list[Row]) -> dict[str, Callable[[], str]]:
    """The tables that pages may ask for."""
    return {"forms": partial(table, rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} forms of {len(FORMS)}")
    parser.add_argument("--work", type=Path, help="where folders are made; default: the system's")
    parser.add_argument("--json", type=Path, help="write the figures here, form by form")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in --json")
    parser.add_argument("--docs", type=Path, help="fill in the tables of the pages there")
    options = parser.parse_args()
    setup = {
        "model": options.model.name, "sequences": SEQUENCES, "prompt": PROMPT, "decodes": DECODES,
    }  # fmt: skip
    rows = Rows("engines", setup, options.json, options.resume)
    for form in QUICK if options.quick else FORMS:
        if rows.find(weights=form.weights, cache=form.cache) is not None:
            continue
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            try:
                row = prove(options.model, form, Path(folder))
            except PenstockError as error:
                row = {"error": str(error)}
        rows.add({"weights": form.weights, "cache": form.cache, **row})
        print(form, "holds" if holds(row) else f"FAILS: {row}", flush=True)
    failed = [row for row in rows.all if not holds(row)]
    print(f"\n{table(rows.all)}\n{len(rows.all) - len(failed)} of {len(rows.all)} forms hold")
    if options.docs:
        fill(options.docs, "engines", tables(rows.all))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
