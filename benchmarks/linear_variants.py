"""How fast a model's products run, by format, rows and variant, beside what the machine allows.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b checkpoints/qwen
    python benchmarks/linear_variants.py checkpoints/qwen --json variants.json

Products of one form are timed within whole steps, so that weights come from memory as they do
there; all variants take turns, and the shortest sum over the layers counts. A form's floor is the
longer of its weights at the measured read bandwidth and its multiplications at the measured peak.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from penstock.bench.environment import environment
from penstock.config import EngineConfig
from penstock.hardware import Peaks, detect
from penstock.pipeline import tuning
from penstock.pipeline.tuning import VariantTiming, blocks_needed, make_step, time_variants
from penstock.roofline.peaks import measure
from penstock.runtime import Program, load_runtime
from penstock.runtime.engine_folder import Limits
from penstock.runtime.program import LinearVariant

ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
FORMATS = ("bfloat16", "w8a8", "w4a8", "w4a16-g128", "w8a16")


def floor_s(program: Program, form: str, rows: int, peaks: Peaks) -> float:
    """The least seconds that all products of a form take."""
    memory = compute = 0.0
    for number in program.products[form]:
        tensors = program.calls[number].constants
        weight = tensors[0]
        memory += sum(tensor.nbytes for tensor in tensors) / peaks.read_bytes_per_s
        values = weight.numel() * (2 if weight.dtype == torch.uint8 else 1)
        kind = "int8" if " of int8" in form else "bfloat16"  # rotated before, or not
        compute += 2 * rows * values / peaks.of(kind)  # type: ignore[arg-type]
    return max(memory, compute)


def said(variant: LinearVariant) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(variant).items() if value)


def rows_of(
    program: Program, rows: int, timings: list[VariantTiming], peaks: Peaks
) -> list[dict[str, Any]]:
    """A row of the table for each form of product."""
    found: list[dict[str, Any]] = []
    for form in dict.fromkeys(t.product for t in timings):
        seconds = {t.variant: t.seconds for t in timings if t.product == form}
        default = seconds.pop(LinearVariant())
        best = min(seconds, key=lambda how: seconds[how])
        found.append({
            "product": form,
            "rows": rows,
            "us": round(default * 1e6 / len(program.products[form]), 1),
            "of_floor": round(floor_s(program, form, rows, peaks) / default, 3),
            "best": said(best),
            "gain": round(default / seconds[best], 3),
            "gains": {said(how): round(default / s, 3) for how, s in seconds.items()},
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint of random weights will do")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--runs", type=int, default=10, help="of each variant")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    most = max(options.rows)
    limits = Limits(64, 1024, (1, most, most))
    peaks = measure()
    result: dict[str, Any] = {"environment": environment(detect()), "peaks": asdict(peaks)}
    for name in options.formats:
        config = EngineConfig.of(
            model=options.model, skip_tokenizer_init=True, max_model_len=1024,
            quantization=None if name == "bfloat16" else name,
        )  # fmt: skip
        runtime = load_runtime(config)
        kv = runtime.layout.allocate(blocks_needed(limits, runtime.layout.block_size))
        program = Program(runtime.model.model, kv)
        result[name] = []
        for rows in options.rows:
            step = make_step(rows, limits, runtime.layout.block_size)
            program(step, kv)
            before, start = tuning.waited_s(), time.process_time()
            timings = time_variants(program, kv, step, options.runs if rows < 512 else 2)
            share = (tuning.waited_s() - before) / (time.process_time() - start)
            print(f"threads waited {share:.0%} of their work", flush=True)
            for row in rows_of(program, rows, timings, peaks):
                result[name].append(row)
                timed = f"{name:11} {rows:4} {row['us']:10,.1f} µs {row['of_floor']:6.0%}"
                print(f"{timed}  {row['gain']:5.2f} {row['best']:34} {row['product']}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
