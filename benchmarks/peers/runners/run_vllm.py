"""vLLM's CPU build, through its engine, driven step by step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from common import longest, measure, read_job, reply

job = read_job()
config = json.loads((Path(job["model"]) / "config.json").read_text())
most = max([work["batch"] for work in job["works"]], default=1)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process

from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402

engine = LLMEngine.from_engine_args(
    EngineArgs(
        model=job["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=longest(job),
        max_num_seqs=most,
        max_num_batched_tokens=max(2048, most * longest(job)),
    )
)


def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[float]]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add_request(f"{start} {i}", {"prompt_token_ids": ids}, greedy)
    times: dict[str, list[float]] = {f"{start} {i}": [] for i in range(len(prompts))}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            each = times[output.request_id]
            each += [now] * (len(output.outputs[0].token_ids) - len(each))
    return start, list(times.values())


reply(measure(job, config["vocab_size"], generate))
