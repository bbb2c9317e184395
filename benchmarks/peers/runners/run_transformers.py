"""transformers: one `generate` for each work, a stopping criterion as the clock."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from common import measure, read_job, reply
from transformers import AutoModelForCausalLM, StoppingCriteria


class Clock(StoppingCriteria):
    """Notes when each step ended; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):  # type: ignore[no-untyped-def]
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


job = read_job()
torch.set_num_threads(job["threads"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


@torch.inference_mode()
def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[float]]]:
    ids, clock = torch.tensor(prompts), Clock()
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[clock],
    )
    return start, [clock.times] * len(prompts)


config = json.loads((Path(job["model"]) / "config.json").read_text())
reply(measure(job, config["vocab_size"], generate))
