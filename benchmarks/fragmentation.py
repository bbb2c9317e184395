"""What of a paged cache holds nothing, for block sizes, on a real trace's lengths.

    python -m benchmarks.fragmentation TRACE.csv --json FILE

Requests with the lengths of Azure's trace (ContextTokens, GeneratedTokens), those that fit, go
through the engine, each block size the same ones. Beside it what would be idle if every sequence
had room for the longest one in one piece, as engines without pages have it. The model is tiny: what
blocks a sequence takes doesn't depend on its size.
Source of the comparison: Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def lengths(trace: Path, count: int, most: int) -> list[tuple[int, int]]:
    """(prompt, answer) of the trace's first requests that fit into `most` tokens."""
    with open(trace, newline="") as opened:
        rows = [
            (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(opened)
        ]
    return [row for row in rows if sum(row) <= most and min(row) > 0][:count]


def measure(
    folder: Path, rows: list[tuple[int, int]], block_size: int, seqs: int
) -> dict[str, Any]:
    """Means over steps, of the shares that hold no token."""
    llm = LLM(
        str(folder), load_format="dummy", dtype="float32", skip_tokenizer_init=True,
        block_size=block_size, max_num_seqs=seqs, enable_prefix_caching=False,
        num_gpu_blocks_override=seqs * -(-MODEL["max_position_embeddings"] // block_size),
    )  # fmt: skip
    engine = llm.engine
    for number, (prompt, answer) in enumerate(rows):
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), [1] * prompt, params)
    paged, whole = [], []
    while engine.requests:
        engine.step()
        running = list(engine.scheduler.running)
        if running:
            paged.append(engine.stats()["kv_fragmentation"])
            held = sum(sequence.num_computed for sequence in running)
            whole.append(1 - held / (len(running) * engine.max_model_len))
    return {
        "block_size": block_size,
        "steps": len(paged),
        "fragmentation": sum(paged) / len(paged),
        "most": max(paged),
        "in_one_piece": sum(whole) / len(whole),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = lengths(asked.trace, asked.requests, MODEL["max_position_embeddings"])
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODEL))
        found = [
            measure(Path(name), rows, size, asked.max_num_seqs) for size in (32, 64, 128, 256, 512)
        ]
    print("block size  idle (mean)  idle (most)  in one piece")
    for row in found:
        shares = "".join(f"{row[key]:>13.1%}" for key in ("fragmentation", "most", "in_one_piece"))
        print(f"{row['block_size']:>10}{shares}")
    if asked.json:
        prompts, answers = zip(*rows, strict=True)
        report = {
            **environment(detect()),
            "benchmark": "fragmentation",
            "trace": asked.trace.name,
            "requests": len(rows),
            "mean_prompt": sum(prompts) / len(rows),
            "mean_answer": sum(answers) / len(rows),
            "max_num_seqs": asked.max_num_seqs,
            "max_model_len": MODEL["max_position_embeddings"],
            "found": found,
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
