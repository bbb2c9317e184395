"""Penstock, through its public `LLM`."""

from __future__ import annotations

from common import longest, measure, read_job, reply

from penstock import LLM, SamplingParams

job = read_job()
most = max([work["batch"] for work in job["works"]], default=1)
# a batch's prompts in one step, as every peer runs them
prompt_tokens = max([work["batch"] * work["context"] for work in job["works"]], default=1)
length = longest(job)
llm = LLM(
    job["model"],
    skip_tokenizer_init=True,
    enable_prefix_caching=False,
    max_model_len=length,
    max_num_seqs=most,
    max_num_batched_tokens=max(prompt_tokens, 2048),
    num_blocks=most * (-(-length // 32) + 1),
    **job["arguments"],
)


def generate(prompts: list[list[int]], tokens: int) -> tuple[float, list[list[float]]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    for output in outputs:
        if output.error is not None:
            raise output.error
    start = min(output.metrics.arrival_time for output in outputs)
    return start, [output.metrics.token_times for output in outputs]


def weight_bytes() -> int | None:
    """Read for each token, as Penstock's own floor counts them."""
    try:
        from penstock.bench.meter import Meter
        from penstock.bench.workload import setup

        return int(setup(Meter(llm.config, llm.runtime))["weight_bytes"])
    except (ImportError, AttributeError, KeyError, TypeError):
        return None


speeds = measure(job, llm.engine.vocab_size, generate)
reply(speeds, weight_bytes=weight_bytes())
