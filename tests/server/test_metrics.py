"""What `/metrics` says, read by Prometheus' own parser."""

from __future__ import annotations

import math
import re
import time

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.hardware import Peaks
from tests.engine.guessing import Guesser, speculate
from tests.server.conftest import Running

# As vLLM's documentation of its V1 engine lists them, without the suffixes of a series.
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:cache_config_info": "gauge",
}
OWN = {
    "penstock:http_requests": "counter",
    "penstock:jumped_tokens": "counter",
    "penstock:grammar_cache_queries": "counter",
    "penstock:grammar_cache_hits": "counter",
    "penstock:request_rejections": "counter",
    "penstock:tool_calls": "counter",
    "penstock:sequences_running": "gauge",
    "penstock:stored_responses": "gauge",
    "penstock:stored_response_bytes": "gauge",
    "penstock:kv_cache_blocks": "gauge",
    "penstock:kv_cache_idle_blocks": "gauge",
    "penstock:kv_cache_pinned_blocks": "gauge",
    "penstock:max_sequences": "gauge",
    "penstock:structured_outputs": "counter",
    "penstock:demand": "gauge",
    "penstock:kv_fragmentation": "gauge",
    "penstock:preemptions_swap": "counter",
    "penstock:steps": "counter",
    "penstock:step_seconds": "counter",
    "penstock:floor_ratio": "gauge",
    "penstock:request_floor_ratio": "histogram",
}
BASE = ("model_name", "engine")
HTTP = (
    "penstock:http_requests",
    "penstock:request_rejections",
    "penstock:structured_outputs",
    "penstock:tool_calls",
)  # counted by the server, not of one engine
MISNAMED = ("vllm:iteration_tokens_total",)  # by vLLM
PER_STEP = ("vllm:iteration_tokens_total", "vllm:inter_token_latency_seconds")
LABELS = {
    "vllm:request_success": {*BASE, "finished_reason"},
    "vllm:cache_config_info": {*BASE, "block_size", "cache_dtype", "enable_prefix_caching",
                               "gpu_memory_utilization", "num_gpu_blocks",
                               "num_gpu_blocks_override", "swap_space"},
}  # fmt: skip


def _text(server: Running) -> str:
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


def _families(server: Running) -> dict[str, Metric]:
    families = list(text_string_to_metric_families(_text(server)))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def _values(server: Running) -> dict[str, float]:
    """Series by name and those labels that aren't the model's name or engine."""
    found = {}
    for family in _families(server).values():
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in BASE}
            shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return found


@pytest.fixture
def moved(server: Running) -> dict[str, float]:
    """What the requests of a test have added, once all have ended."""
    before = _values(server)

    class Change(dict[str, float]):
        def __missing__(self, name: str) -> float:
            server.rest()
            return _values(server).get(name, 0.0) - before.get(name, 0.0)

    return Change()


def test_names_and_kinds_are_vllms(server: Running) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
    families = _families(server)
    kinds = {name: family.type for name, family in families.items()}
    assert {name: kinds.get(name) for name in VLLM | OWN} == VLLM | OWN
    rest = [n for n in kinds if ":" in n and n.removesuffix("_created") not in VLLM | OWN]
    assert rest == []
    assert "process_resident_memory_bytes" in kinds
    for name in VLLM | OWN:
        assert {sample.labels["model_name"] for sample in families[name].samples} <= {"stories"}
        engines = {sample.labels.get("engine") for sample in families[name].samples}
        assert engines <= ({None} if name in HTTP else {"0"}), name
    rest = [n for n, family in families.items() for s in family.samples
            if n in VLLM and set(s.labels) - {"le"} != LABELS.get(n, set(BASE))]  # fmt: skip
    assert rest == []


def test_the_text_passes_a_linter(server: Running) -> None:
    """What `promtool check metrics` looks at."""
    text = _text(server)
    assert text.endswith("\n")
    helps = re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in helps}) == len(helps)
    assert [name for name, _ in helps] == [name for name, _ in kinds]
    assert all(what.strip() for _, what in helps)
    for name, kind in kinds:
        if kind == "counter":
            assert name.endswith("_total"), name
        elif kind in ("gauge", "histogram"):
            assert not re.search(r"_(total|count|sum|bucket)$", name) or name in MISNAMED, name
        assert not re.search(r"(milliseconds|_ms|kilobytes|_mb)\b", name), name
        assert name.lower() == name
    for family in text_string_to_metric_families(text):
        seen = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(set(seen)) == len(seen)
        if family.type == "histogram":
            _check_buckets(family)


def _check_buckets(family: Metric) -> None:
    counts = [s for s in family.samples if s.name.endswith("_bucket")]
    edges = [float(s.labels["le"]) for s in counts]
    assert edges == sorted(set(edges))
    assert math.isinf(edges[-1])
    values = [s.value for s in counts]
    assert values == sorted(values)
    (total,) = [s.value for s in family.samples if s.name.endswith("_count")]
    assert values[-1] == total


def test_a_request_is_counted(server: Running, moved: dict[str, float]) -> None:
    with server.client() as client:
        answer = client.post(
            "/v1/completions", json={"prompt": "Once upon", "max_tokens": 6, "ignore_eos": True}
        ).json()
    prompt, made = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    assert made == 6
    assert moved["vllm:prompt_tokens_total"] == prompt
    assert moved["vllm:generation_tokens_total"] == made
    assert moved["vllm:request_success_total{finished_reason=length}"] == 1
    for name, kind in VLLM.items():
        if kind == "histogram" and name not in PER_STEP:
            assert moved[f"{name}_count"] == 1, name
    assert moved["vllm:request_params_n_sum"] == 1
    assert moved["vllm:request_params_max_tokens_sum"] == made
    assert moved["vllm:request_max_num_generation_tokens_sum"] == made
    assert moved["vllm:request_prompt_tokens_sum"] == prompt
    assert moved["vllm:request_generation_tokens_sum"] == made
    assert moved["vllm:inter_token_latency_seconds_count"] == made - 1
    ttft = moved["vllm:time_to_first_token_seconds_sum"]
    between = moved["vllm:inter_token_latency_seconds_sum"]
    whole = moved["vllm:e2e_request_latency_seconds_sum"]
    assert 0 < moved["vllm:request_queue_time_seconds_sum"] <= ttft
    assert ttft + between <= whole + 1e-6
    queue = moved["vllm:request_queue_time_seconds_sum"]
    prefill = moved["vllm:request_prefill_time_seconds_sum"]
    decode = moved["vllm:request_decode_time_seconds_sum"]
    inference = moved["vllm:request_inference_time_seconds_sum"]
    assert queue + prefill == pytest.approx(ttft, abs=1e-6)
    assert prefill + decode == pytest.approx(inference, abs=1e-6)
    assert queue + inference == pytest.approx(whole, abs=1e-6)
    assert min(prefill, decode) > 0
    mean = moved["vllm:request_time_per_output_token_seconds_sum"]
    assert mean == pytest.approx(between / (made - 1), rel=1e-6)
    assert moved["penstock:steps_total"] == made  # the prompt's step gives the first token
    assert moved["vllm:iteration_tokens_total_count"] == made
    assert moved["vllm:iteration_tokens_total_sum"] == prompt + made
    assert moved["vllm:iteration_tokens_total_bucket{le=1.0}"] == made - 1
    assert moved["vllm:iteration_tokens_total_bucket{le=8.0}"] == made
    forward = moved["penstock:step_seconds_total{cause=forward,phase=decode}"]
    assert 0 < forward < whole
    assert _values(server)["vllm:num_requests_running"] == 0
    assert _values(server)["vllm:kv_cache_usage_perc"] == 0


def test_wrong_guesses_and_prompts_that_are_read_are_no_tokens(
    server: Running, moved: dict[str, float]
) -> None:
    """What the steps added is what the counters say, however many rows had logits."""
    body = {"prompt": "The cat sat. " * 10, "max_tokens": 40, "temperature": 0,
            "ignore_eos": True, "prompt_logprobs": 1}  # fmt: skip
    engine = server.llm.engine
    guesses = speculate(engine, Guesser(lambda tokens, state: 7, wrong=0.5), most=4)
    try:
        with server.client() as client:
            usage = client.post("/v1/completions", json=body).json()["usage"]
        server.rest()
    finally:
        engine.speculation = None
    assert guesses.counts.draft_tokens > 20 > guesses.counts.accepted_tokens
    whole = usage["prompt_tokens"] + usage["completion_tokens"]
    assert moved["vllm:iteration_tokens_total_sum"] == whole
    assert moved["vllm:generation_tokens_total"] == 40


def test_a_steps_tokens_have_no_time_between_them(server: Running, moved: dict[str, float]) -> None:
    """A gap for each step of a request, as with vLLM, however many tokens a grammar forces."""
    form = {"regex": "the quick [a-z]{3} jumps over the lazy [a-z]{3} by the river"}
    with server.client() as client:
        body = {"prompt": "Once", "max_tokens": 60, "structured_outputs": form}
        made = client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
    gaps = moved["vllm:inter_token_latency_seconds_count"]
    assert gaps == moved["penstock:steps_total"] - 1 < made - 4
    assert moved["vllm:inter_token_latency_seconds_bucket{le=+Inf}"] == gaps


def test_samples_and_several_prompts(server: Running, moved: dict[str, float]) -> None:
    with server.client() as client:
        answer = client.post(
            "/v1/completions",
            json={"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 3, "ignore_eos": True},
        ).json()
    assert moved["vllm:request_success_total{finished_reason=length}"] == 2
    assert moved["vllm:generation_tokens_total"] == answer["usage"]["completion_tokens"] == 12
    assert moved["vllm:request_generation_tokens_sum"] == 12
    assert moved["vllm:request_max_num_generation_tokens_sum"] == 2 * 3
    assert moved["vllm:request_params_n_sum"] == 2 * 2
    assert moved["vllm:prompt_tokens_total"] == answer["usage"]["prompt_tokens"]


def test_counters_move_with_every_step(
    server: Running, moved: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what runs is counted in requests: three samples are one."""
    step = server.llm.engine.step
    slowly = lambda: (time.sleep(0.01), step())[1]  # noqa: E731
    monkeypatch.setattr(server.llm.engine, "step", slowly)
    before = _values(server)
    body = {"prompt": "Once upon a time", "n": 3, "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_bytes(1)  # kept, or the connection would be closed
        next(pieces)
        seen = [_values(server) for _ in range(2) if time.sleep(0.1) is None]
    assert seen[0]["vllm:num_requests_running"] == 1
    assert seen[0]["vllm:num_requests_waiting"] == 0
    assert seen[0]["penstock:sequences_running"] == 3
    made = [
        x["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] for x in seen
    ]
    assert 0 < made[0] < made[1] < 3 * 400
    prompts = [x["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] for x in seen]
    assert prompts == [5, 5]
    assert moved["vllm:request_success_total{finished_reason=abort}"] == 1
    assert moved["vllm:prompt_tokens_total"] == 5


def test_cached_and_refused_prompts(server: Running, moved: dict[str, float]) -> None:
    """A prompt's tokens count once, found in the cache or not; not those of one that is refused."""
    body = {"prompt": "The cat and the dog sat by the warm stove all winter long. " * 6,
            "max_tokens": 1, "cache_salt": "test_cached_and_refused_prompts"}  # fmt: skip
    with server.client() as client:
        length = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"]
        again = client.post("/v1/completions", json=body).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 0
        wrong = client.post("/v1/completions", json=body | {"allowed_token_ids": [10**6]})
        assert wrong.status_code == 400
    assert moved["vllm:prompt_tokens_total"] == 2 * length
    assert moved["vllm:request_prompt_tokens_sum"] == 2 * length
    assert moved["vllm:request_prompt_tokens_count"] == 2
    assert moved["vllm:request_params_n_count"] == 2


def test_the_caches_configuration(server: Running) -> None:
    (sample,) = _families(server)["vllm:cache_config_info"].samples
    assert sample.value == 1
    said = {k: v for k, v in sample.labels.items() if k not in BASE}
    assert said == {
        "block_size": "32",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "num_gpu_blocks": str(server.llm.stats()["blocks"]),
        "num_gpu_blocks_override": "None",
        "swap_space": "None",
    }


def test_prefix_hits(server: Running, moved: dict[str, float]) -> None:
    prompt = "The fox and the hen met at the old mill to talk about the moon. " * 6
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "test_prefix_hits"}
    with server.client() as client:
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert hits > 0
    assert moved["vllm:prefix_cache_hits_total"] == hits
    assert moved["vllm:prefix_cache_queries_total"] >= 2 * (usages[0]["prompt_tokens"] - 1)


def test_how_requests_end(server: Running, moved: dict[str, float]) -> None:
    with server.client() as client:
        free = client.post(
            "/v1/completions", json={"prompt": "Once", "max_tokens": 20, "temperature": 0}
        ).json()
        word = free["choices"][0]["text"].split()[2]
        client.post(
            "/v1/completions",
            json={"prompt": "Once", "max_tokens": 20, "temperature": 0, "stop": word},
        )
        with client.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True},
        ) as stream:
            next(stream.iter_bytes(1))
        refused = client.post("/v1/completions", json={"prompt": "Once", "temperature": -1})
        assert refused.status_code == 400
        wrong = client.post(
            "/v1/completions", json={"prompt": "Once", "allowed_token_ids": [10**6]}
        )
        assert wrong.status_code == 400
    ends = {reason: moved[f"vllm:request_success_total{{finished_reason={reason}}}"]
            for reason in ("length", "stop", "abort", "error", "refused")}  # fmt: skip
    assert ends == {"length": 1, "stop": 1, "abort": 1, "error": 0, "refused": 0}
    assert moved["penstock:request_rejections_total{reason=invalid}"] == 2


def test_the_floor_is_told_where_peaks_are_known(
    server: Running, moved: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = Peaks(1e12, 1e12, 0.0, 1, "", 1e12)
    monkeypatch.setattr(server.llm.engine.ledger, "peaks", peaks)
    with server.client() as client:
        body = {"prompt": "Once upon", "max_tokens": 4, "ignore_eos": True}
        ratio = client.post("/v1/completions", json=body).json()["penstock"]["floor_ratio"]
    assert moved["penstock:request_floor_ratio_count"] == 1
    assert moved["penstock:request_floor_ratio_sum"] == pytest.approx(ratio, abs=1e-6)
    values = _values(server)
    edges = {float(name.split("=")[1][:-1]) for name in values
             if name.startswith("penstock:request_floor_ratio_bucket")}  # fmt: skip
    assert {0.5, 1.0, 1.25, 1.5, 2.0, 3.0} <= edges  # a cache can be faster than the memory
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", _text(server), re.MULTILINE))
    for name in ("penstock:floor_ratio", "penstock:request_floor_ratio"):
        assert "can pass 1" in helps[name]
    for phase in ("prefill", "decode"):
        assert values[f"penstock:floor_ratio{{phase={phase}}}"] > 0


def test_embeddings_are_counted(server: Running, moved: dict[str, float]) -> None:
    with server.client() as client:
        answer = client.post("/v1/embeddings", json={"input": ["a dog", "the sea"]}).json()
    assert moved["vllm:prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert moved["vllm:request_success_total{finished_reason=stop}"] == 2
    assert moved["vllm:generation_tokens_total"] == 0
    assert moved["vllm:request_prompt_tokens_count"] == 2
    assert moved["vllm:request_params_n_count"] == 0
    assert moved["vllm:e2e_request_latency_seconds_count"] == 2
    assert moved["vllm:request_queue_time_seconds_count"] == 2
    assert moved["vllm:time_to_first_token_seconds_count"] == 0
