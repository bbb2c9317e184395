"""Workloads against closed forms, independent readings of the traces, and themselves."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from penstock.bench.serve import traces, workload
from penstock.bench.serve.arrivals import gamma_arrivals, trace_arrivals
from penstock.bench.serve.benchmark import build_workload
from penstock.bench.serve.options import Options
from penstock.bench.serve.prefix_oracle import reusable_tokens
from penstock.bench.serve.vocabulary import of_ids, of_words
from penstock.bench.serve.workload import Lengths, Workload
from penstock.errors import ConfigError
from penstock.models.hub import resolve
from penstock.tokenizer import Tokenizer

TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces"
AZURE = TRACES / "azure" / "AzureLLMInferenceTrace_code.csv"
MOONCAKE = TRACES / "mooncake" / "synthetic_trace.jsonl"
needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="the Azure trace isn't here")
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="Mooncake's trace isn't here")


@pytest.mark.parametrize(("rate", "burstiness"), [(3.0, 1.0), (50.0, 1.0), (3.0, 0.3), (8.0, 4.0)])
def test_gaps_have_their_distribution(rate: float, burstiness: float) -> None:
    """Kolmogorov-Smirnov against the exponential and the gamma distribution."""
    times = gamma_arrivals(20_001, rate, burstiness, seed=5)
    gaps = np.diff(times)
    expected = (
        stats.expon(scale=1 / rate)
        if burstiness == 1
        else stats.gamma(burstiness, scale=1 / (rate * burstiness))
    )
    assert times[0] == 0 and len(gaps) == 20_000
    assert stats.kstest(gaps, expected.cdf).pvalue > 0.01


def test_a_poisson_process_counts_as_one() -> None:
    """Arrivals in disjoint seconds: mean and variance are the rate (dispersion test)."""
    times = gamma_arrivals(40_000, 20.0, 1.0, seed=1)
    counts = np.bincount(times.astype(int))[:-1]
    dispersion = counts.var(ddof=1) * (len(counts) - 1) / counts.mean()
    assert 0.005 < stats.chi2(len(counts) - 1).cdf(dispersion) < 0.995


def test_arrivals_at_the_ends() -> None:
    assert gamma_arrivals(3, math.inf, 1.0, seed=0).tolist() == [0, 0, 0]
    assert gamma_arrivals(1, 5.0, 1.0, seed=0).tolist() == [0]
    same = [gamma_arrivals(50, 5.0, 1.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def content(work: Workload) -> list[tuple[list[list[int]], list[int], float | None]]:
    return [
        ([t.prompt.tolist() for t in c.turns], [t.output_len for t in c.turns], c.arrival_s)
        for c in work.conversations
    ]


@pytest.mark.parametrize("name", ["random", "shared-prefix", "multi-turn", "mooncake", "azure"])
def test_the_same_seed_is_the_same_workload(name: str, tmp_path: Path) -> None:
    path = None
    if name == "mooncake":
        path = write_mooncake(tmp_path, [(0, 600, 3, [0, 1]), (10, 100, 2, [0])])
    if name == "azure":
        path = tmp_path / "a.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,50,2\n")
    made = [
        content(
            build_workload(
                Options(
                    dataset_name=name,  # type: ignore[arg-type]
                    dataset_path=path,
                    num_prompts=5,
                    range_ratio=0.0 if path else 0.5,
                    seed=seed,
                ),
                1000,
            )
        )
        for seed in (3, 3, 4)
    ]
    assert made[0] == made[1] != made[2]


def test_random_lengths() -> None:
    work = workload.random_prompts(4000, Lengths(100, 0.25), Lengths(10), vocab_size=50, seed=0)
    lengths = [len(c.turns[0].prompt) for c in work.conversations]
    counts = np.bincount(lengths, minlength=126)[75:126]
    assert sum(counts) == 4000 and stats.chisquare(counts).pvalue > 0.01
    assert {c.turns[0].output_len for c in work.conversations} == {10}
    drawn = np.concatenate([c.turns[0].prompt for c in work.conversations])
    assert stats.chisquare(np.bincount(drawn, minlength=50)).pvalue > 0.01


def test_shared_prefixes() -> None:
    work = workload.shared_prefix(
        30, num_groups=4, prefix_len=32, suffix_len=8, outputs=Lengths(5), vocab_size=9999, seed=0
    )
    prompts = [c.turns[0].prompt for c in work.conversations]
    groups = {p[:32].tobytes() for p in prompts}
    assert len(groups) == 4 and len({p.tobytes() for p in prompts}) == 30
    # all but each group's first prompt find the whole prefix
    assert sum(reusable_tokens(prompts, 16)) == (30 - 4) * 32


def test_limits_are_counted() -> None:
    work = workload.random_prompts(100, Lengths(100, 0.5), Lengths(10, 0.5), vocab_size=9, seed=0)
    lengths = [len(c.turns[0].prompt) for c in work.conversations]
    outputs = [c.turns[0].output_len for c in work.conversations]
    over, more = sum(n > 120 for n in lengths), sum(n > 12 for n in outputs)
    dropped = workload.limit(work, max_input_len=120, max_output_len=None, cut=False)
    assert len(dropped.conversations) == 100 - over
    assert dropped.remarks == (f"{over} of 100 left out: longer than 120 tokens.",)
    cut = workload.limit(work, max_input_len=120, max_output_len=12, cut=True)
    assert [len(c.turns[0].prompt) for c in cut.conversations] == [min(n, 120) for n in lengths]
    assert [c.turns[0].output_len for c in cut.conversations] == [min(n, 12) for n in outputs]
    assert cut.remarks == (
        f"{over} of 100 cut to 120 tokens.",
        f"{more} of 100 asked for an answer cut to 12 tokens.",
    )
    with pytest.raises(ConfigError, match="--max-input-len 3"):
        workload.limit(work, max_input_len=3, max_output_len=None, cut=False)


def test_what_the_server_cannot_hold_is_refused() -> None:
    work = workload.random_prompts(3, Lengths(100), Lengths(28), vocab_size=9, seed=0)
    workload.check_positions(work, 128)
    workload.check_positions(work, None)
    with pytest.raises(ConfigError, match=r"100 tokens and asks for 28.*127 positions"):
        workload.check_positions(work, 127)


@needs_azure
def test_the_azure_trace() -> None:
    with AZURE.open() as file:
        rows = list(csv.DictReader(file))
    work = traces.azure(AZURE, 500, vocab_size=100, seed=0)
    start = datetime.fromisoformat(rows[0]["TIMESTAMP"])
    for row, c in zip(rows, work.conversations, strict=False):
        assert len(c.turns[0].prompt) == int(row["ContextTokens"])
        assert c.turns[0].output_len == int(row["GeneratedTokens"])
        assert c.arrival_s == (datetime.fromisoformat(row["TIMESTAMP"]) - start).total_seconds()
    assert len(work.conversations) == 500
    doubled = trace_arrivals(work, 0.5)
    assert doubled.tolist() == [
        0.5 * c.arrival_s for c in work.conversations if c.arrival_s is not None
    ]


def write_mooncake(folder: Path, rows: list[tuple[int, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def test_mooncake_blocks(tmp_path: Path) -> None:
    rows = [(5, 1100, 7, [3, 4, 5]), (1005, 1024, 0, [3, 9]), (2005, 512, 1, [4])]
    file = write_mooncake(tmp_path, rows)
    work = traces.mooncake(file, None, block_tokens=64, vocab_size=5000, seed=1)
    a, b, c = (c.turns[0].prompt for c in work.conversations)
    assert [len(p) for p in (a, b, c)] == [64 + 64 + round(76 / 8), 128, 64]
    assert (a[:64] == b[:64]).all() and (a[64:128] == c).all() and not (a[64:128] == b[64:]).all()
    assert [c.arrival_s for c in work.conversations] == [0, 1, 2]
    assert [c.turns[0].output_len for c in work.conversations] == [7, 1, 1]


@needs_mooncake
def test_mooncake_shares_what_the_trace_shares() -> None:
    """The oracle over tokens finds just what the hash ids say, request by request."""
    block_tokens = 16
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()[:1000]]
    seen: set[int] = set()
    expected = []
    for row in rows:
        full = row["hash_ids"][: row["input_length"] // 512]
        hits = 0
        for h in full:
            if h not in seen:
                break
            hits += 1
        seen.update(full)
        expected.append(hits * block_tokens)
    work = traces.mooncake(MOONCAKE, 1000, block_tokens=block_tokens, vocab_size=30_000, seed=0)
    prompts = [c.turns[0].prompt for c in work.conversations]
    # a shortened last block may be full after rounding: leave it out on both sides
    whole = [
        p[: row["input_length"] // 512 * block_tokens] for p, row in zip(prompts, rows, strict=True)
    ]
    found = reusable_tokens(whole, block_tokens)
    assert found == expected
    assert any(found)


def test_the_oracle_against_whole_prefixes() -> None:
    """An independent oracle: the set of every full-block prefix, as bytes from the start."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 2, draw.integers(1, 40), dtype=np.int32) for _ in range(300)]
    for size in (1, 3, 4):
        seen: set[bytes] = set()
        for prompt, found in zip(prompts, reusable_tokens(prompts, size), strict=True):
            ends = range(size, len(prompt) + 1, size)
            assert found == max((e for e in ends if prompt[:e].tobytes() in seen), default=0)
            seen.update(prompt[:e].tobytes() for e in ends)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,x,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4\n", "line 2"),
    ],
)
def test_broken_azure_traces(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        traces.azure(file, None, vocab_size=9, seed=0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "no requests"),
        (b"{", "line 1 isn't JSON"),
        (b"[1]", "isn't a JSON object"),
        (b'{"timestamp": 0}', "KeyError"),
        (b"\xff\xfe", "isn't JSON"),
        (
            b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "1 hash_ids for 513 tokens, where blocks of 512 make 2",
        ),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "0 tokens"),
        (
            b'{"timestamp": [0], "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "TypeError",
        ),
    ],
)
def test_broken_mooncake_traces(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(line)
    with pytest.raises(ConfigError, match=words):
        traces.mooncake(file, None, block_tokens=16, vocab_size=9, seed=0)


def test_words_stay_one_token_each() -> None:
    tokenizer = Tokenizer.from_folder(resolve("stories"))
    words = of_words(tokenizer, "stories")
    prompt = workload.tokens(np.random.default_rng(0), words.size, 3000)
    text = words.as_text(prompt)
    assert tokenizer.encode(text, add_special_tokens=False) == words.as_ids(prompt)
    ids = of_ids(tokenizer, "stories")
    assert not tokenizer.special_ids & set(ids.ids.tolist())
    assert ids.size == tokenizer.vocab_size - len(
        [i for i in tokenizer.special_ids if i < tokenizer.vocab_size]
    )


class Bytes:
    """A tokenizer whose tokens are bytes: none is a word."""

    vocab_size = 256
    special_ids: frozenset[int] = frozenset()
    token_bytes: Callable[[int], bytes] = staticmethod(lambda i: bytes([i]))


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 words.*--prompt-form ids"):
        of_words(Bytes(), "bytes")  # type: ignore[arg-type]
