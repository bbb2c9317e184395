"""OpenVINO GenAI: its paged, continuously batching pipeline, driven step by step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from common import longest, measure, read_job, reply

BLOCK = 32  # tokens; OpenVINO's on the CPU

job = read_job()
config = json.loads((Path(job["model"]) / "config.json").read_text())
most = max([work["batch"] for work in job["works"]], default=1)

scheduler = openvino_genai.SchedulerConfig()
scheduler.max_num_seqs = most
scheduler.max_num_batched_tokens = most * longest(job)
scheduler.num_kv_blocks = most * (-(-longest(job) // BLOCK) + 1)
scheduler.enable_prefix_caching = False
scheduler.dynamic_split_fuse = False
pipeline = openvino_genai.ContinuousBatchingPipeline(
    job["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": job["threads"]}
)


def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[float]]]:
    greedy = openvino_genai.GenerationConfig(
        max_new_tokens=tokens, ignore_eos=True, do_sample=False
    )
    greedy.set_eos_token_id(0)  # wants one, and ignores it
    tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
    start = time.perf_counter()
    handles = [pipeline.add_request(i, ids, greedy) for i, ids in enumerate(tensors)]
    times: list[list[float]] = [[] for _ in prompts]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for handle, each in zip(handles, times, strict=True):
            if handle.can_read():
                each += [now] * sum(len(out.generated_ids) for out in handle.read().values())
    if any(len(each) != tokens for each in times):
        raise SystemExit(f"Asked for {tokens} tokens, got {[len(each) for each in times]}.")
    return start, times


reply(measure(job, config["vocab_size"], generate))
