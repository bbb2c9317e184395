"""What `penstock plan` says a model takes of memory, beside what an engine has once it has run.

    python -m benchmarks.plan_memory --model FOLDER … [--quantization w4a8] [--json FILE]

An engine of its own process fills the cache that was planned: as many prompts at once as sequences,
each with its answer. Its resident memory then is what was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = """
import json, sys
import numpy as np
from penstock import LLM, SamplingParams
from penstock.hardware import resident_bytes
model, given, sequences, prompt, answer = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, max_model_len=prompt + answer,
          max_num_seqs=sequences, enable_prefix_caching=False, **given)
draw = np.random.default_rng(0)
prompts = [{"prompt_token_ids": draw.integers(0, 1000, prompt).tolist()} for _ in range(sequences)]
llm.generate(prompts, SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))

print(resident_bytes())
"""


def main() -> None:
    """Plan, run and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--quantization", nargs="*", default=[], help="beside as they are")
    parser.add_argument("--input-len", type=int, default=1900)
    parser.add_argument("--output-len", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = [
        compare(model, given, asked)
        for model in asked.model
        for given in ({}, *({"quantization": name} for name in asked.quantization))
    ]
    if asked.json is not None:
        from penstock.bench.environment import environment
        from penstock.hardware import detect

        asked.json.write_text(
            json.dumps({"environment": environment(detect()), "rows": rows}, indent=2) + "\n"
        )


def compare(model: str, given: dict[str, str], asked: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    sizes = asked.concurrency, asked.input_len, asked.output_len
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    loads = zip(("concurrency", "input-len", "output-len"), sizes, strict=True)
    command = [sys.executable, "-c", "from penstock.cli.main import run; run()", "plan", model]
    command += [*options, *(f"--{name}={size}" for name, size in loads), "--json"]
    planned = json.loads(_output(command))
    measured = int(_output([sys.executable, "-c", RUN, json.dumps([model, given, *sizes])]))
    total = planned["memory"]["total_bytes"]
    row = {
        "model": Path(model).name, "weights": planned["weight_formats"], **planned["memory"],
        "load": planned["load"], "measured_bytes": measured,
        "planned_of_measured": total / measured,
    }  # fmt: skip
    print(
        f"{row['model']}, {row['weights']}: planned {total / 1e6:,.0f} MB, measured "
        f"{measured / 1e6:,.0f} MB, {total / measured - 1:+.1%}",
        flush=True,
    )
    return row


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
