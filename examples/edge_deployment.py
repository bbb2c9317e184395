"""From a model to a small machine that starts in a moment: `python examples/edge_deployment.py`.

Export where there is time: weights in 4 bits, a folder that other tools load too. Build once on the
target: weights packed, the operators of a step written down, steps timed. What is deployed is one
folder; nothing is traced or compiled when it runs.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.runtime import compile_counter

PENSTOCK = [sys.executable, "-c", "from penstock.cli.main import run; run()"]


def penstock(*arguments: object) -> str:
    """What the command `penstock …` says."""
    command = [*PENSTOCK, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


with tempfile.TemporaryDirectory() as folder:
    export, engine = Path(folder) / "export", Path(folder) / "engine"
    print(penstock("export", "stories", "-o", export, "--quant", "w4a8", "--head", "w8a8"))
    print(penstock("build", export, "-o", engine, "--max-num-seqs", 8, "--profile", "1,64,256"))

    # In a program: an engine takes a model's place, and gives the model's tokens.
    params = SamplingParams(temperature=0, max_tokens=24)
    before, start = compile_counter.total(), time.perf_counter()
    llm = LLM(engine)
    (output,) = llm.generate("Once upon a time", params)
    print(f"first answer {time.perf_counter() - start:.2f} s after the start:")
    print(output.outputs[0].text)
    assert compile_counter.total() == before
    (plain,) = LLM(export).generate("Once upon a time", params)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids

    # From a file of requests, as a batch job would.
    requests, answers = Path(folder) / "requests.jsonl", Path(folder) / "answers.jsonl"
    beginnings = ["The little dog", "It was raining", "Tom had a red ball"]
    lines = [{"id": str(i), "prompt": x, "max_tokens": 16} for i, x in enumerate(beginnings)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = penstock("run", engine, "--input", requests, "--output", answers)
    for line in answers.read_text().splitlines():
        answer = json.loads(line)
        print(f"{beginnings[int(answer['id'])]}…{answer['samples'][0]['text']}")
    print(said)
    assert "compiled: 0" in said
