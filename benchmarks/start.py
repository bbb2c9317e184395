"""From nothing to the first token: a fresh process for every measurement, formats in turns.

    python benchmarks/start.py checkpoints/qwen --out start.json

The checkpoint's files are read once beforehand, and so are Python's modules with their bytecode:
what is timed is a start on a machine that knows both. `wall_s` is the whole process as its parent
sees it, interpreter's start and end included. A checkpoint needs no tokenizer. The format `default`
is what an engine folder was built for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FORMATS = ("bfloat16", "w8a8", "w8a16", "w4a16", "w4a8")
PARTS = ("import_s", "load_s", "first_token_s", "total_s")
PROMPT = 64

_CHILD = """
import json, sys, time
marks = [time.perf_counter()]
from penstock import LLM, SamplingParams
marks.append(time.perf_counter())
model, form, prompt = sys.argv[1], sys.argv[2], int(sys.argv[3])
chosen = {} if form == "default" else {"dtype": "bfloat16"}
if form not in ("default", "bfloat16"):
    chosen["quantization"] = form
llm = LLM(model, skip_tokenizer_init=True, **chosen)
marks.append(time.perf_counter())
given = {"prompt_token_ids": list(range(10, 10 + prompt))}
found = llm.generate([given], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
assert len(found[0].outputs[0].token_ids) == 1
marks.append(time.perf_counter())
parts = [b - a for a, b in zip(marks, marks[1:])]
print(json.dumps([*parts, marks[-1] - marks[0]]))
"""


def once(model: Path, form: str) -> dict[str, float]:
    """One start, its parts in seconds. Raises RuntimeError with what the process said."""
    # without bytecode a third of the time is Python's compiler, which a user sees once
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _CHILD, str(model), form, str(PROMPT)]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"{form}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**dict(zip(PARTS, found, strict=True)), "wall_s": wall}


def measure(model: Path, forms: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of `rounds` starts of each format, which take turns."""
    for form in forms:
        once(model, form)
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            runs[form].append(once(model, form))
    return {
        form: {
            **{part: statistics.median(run[part] for run in each) for part in each[0]},
            "least_total_s": min(run["total_s"] for run in each),
        }
        for form, each in runs.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON there")
    asked = parser.parse_args(argv)
    if not (asked.model / "config.json").is_file():
        parser.error(f"{asked.model} has no config.json: benchmarks/make_checkpoint.py writes one")
    if asked.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {asked.rounds}")
    found = measure(asked.model, asked.formats, asked.rounds)
    columns = [*PARTS, "wall_s", "least_total_s"]
    print(f"{'':10}" + "".join(f"{name:>15}" for name in columns))
    for form, parts in found.items():
        print(f"{form:10}" + "".join(f"{parts[name]:15.2f}" for name in columns))
    if asked.out is not None:
        from penstock.bench.environment import environment
        from penstock.hardware import detect

        where = environment(detect())
        document = {"benchmark": "start", **where, "rounds": asked.rounds, "found": found}
        asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
