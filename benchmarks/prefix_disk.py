"""A long prompt after a restart: computed, read from disk, and found in memory.

    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    python -m benchmarks.prefix_disk checkpoints/qwen --out prefix-disk.json

Each run is a process of its own. Files are read from the page cache, as after a restart of the
process alone, unless --cold drops them from it before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.bench.environment import environment
from penstock.hardware import detect

RUN = """
import json, sys
from penstock import LLM, SamplingParams
model, quantization, folder, tokens = json.loads(sys.argv[1])
more = {"prefix_cache_dir": folder} if folder else {}
llm = LLM(model, quantization=quantization, skip_tokenizer_init=True, max_num_seqs=4, **more)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
llm.generate({"prompt_token_ids": [3] * 40}, params)
found = []
for _ in range(2):
    (output,) = llm.generate({"prompt_token_ids": [7 + i % 999 for i in range(tokens)]}, params)
    sample = output.outputs[0]
    logprobs = [next(iter(at.values())).logprob for at in sample.logprobs]
    found.append((output.metrics.ttft_s, output.metrics.cached_tokens, sample.token_ids, logprobs))
print(json.dumps({"found": found, "stats": llm.stats() if folder else {}}, default=str))
"""


def run(*asked: Any) -> Any:
    command = [sys.executable, "-c", RUN, json.dumps(asked)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def drop(folder: str) -> None:
    """Let the page cache forget the folder's files."""
    for file in Path(folder).glob("**/*.kv"):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="w8a8")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, how = str(asked.model), asked.quantization
        run(model, how, folder, asked.tokens)
        for _ in range(asked.rounds):
            plain = run(model, how, None, asked.tokens)["found"]
            warm = run(model, how, folder, asked.tokens)["found"]
            drop(folder)
            cold = run(model, how, folder, asked.tokens)["found"]
            for name, (seconds, cached, *said) in (
                ("computed", plain[0]),
                ("from disk, in the page cache", warm[0]),
                ("from disk, not there", cold[0]),
                ("in memory", plain[1]),
            ):
                times.setdefault(name, []).append(seconds)
                assert said == plain[0][2:], "other tokens"
                assert (cached > 0) == (name != "computed")
        size = sum(file.stat().st_size for file in Path(folder).glob("**/*.kv"))
    found = {name: statistics.median(each) for name, each in times.items()}
    report = {
        **environment(detect()), "benchmark": "prefix_disk", "model": asked.model.name,
        "quantization": how, "tokens": asked.tokens, "bytes": size, "first_token_s": found,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
