"""Recorded traffic: when requests came, how long they were, and what they shared.

Sources: Azure LLM inference trace 2023 (Patel et al. 2024, arXiv:2311.18677); Mooncake's traces
(Qin et al. 2024, arXiv:2407.00079).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from penstock.bench.serve.options import MOONCAKE_BLOCK
from penstock.bench.serve.vocabulary import Indices
from penstock.bench.serve.workload import Conversation, Turn, Workload, tokens
from penstock.errors import ConfigError


def azure(file: Path, number: int | None, *, vocab_size: int, seed: int) -> Workload:
    """Arrivals and lengths of the Azure trace, its prompts random: it has no contents.

    Columns TIMESTAMP, ContextTokens, GeneratedTokens. number: of rows to read, None for all.
    """
    generator = np.random.default_rng(seed)
    rows: list[tuple[datetime, int, int]] = []
    with open_text(file) as lines:
        reader = csv.DictReader(lines)
        wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        missing = [name for name in wanted if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(
                f"{file} isn't an Azure trace: it has no column {', '.join(missing)}."
            )
        for row in reader:
            if number is not None and len(rows) == number:
                break
            try:
                when = datetime.fromisoformat(row["TIMESTAMP"])
                sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (TypeError, ValueError) as wrong:
                raise ConfigError(f"{file}, line {reader.line_num}: {wrong}.") from wrong
            rows.append((when if when.tzinfo else when.replace(tzinfo=UTC), *sizes))
    _some(rows, file)
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    conversations = tuple(
        Conversation(
            (Turn(tokens(generator, vocab_size, max(1, given)), max(1, generated)),),
            (when - start).total_seconds(),
        )
        for when, given, generated in rows
    )
    return Workload("azure", conversations, {"file": file.name})


def mooncake(
    file: Path, number: int | None, *, block_tokens: int, vocab_size: int, seed: int
) -> Workload:
    """Arrivals, lengths and shared blocks of a Mooncake trace.

    A prompt is a row of blocks of 512 tokens, the last one perhaps shorter; blocks of one hash id
    have the same tokens, so that prompts share exactly the prefixes that they shared in the
    trace. block_tokens: makes every block, and so every prompt, shorter by the same factor.
    """
    blocks: dict[int, Indices] = {}

    def block(hash_id: int) -> Indices:
        if hash_id not in blocks:
            generator = np.random.default_rng([seed, hash_id])
            blocks[hash_id] = tokens(generator, vocab_size, block_tokens)
        return blocks[hash_id]

    rows: list[tuple[float, Indices, int]] = []
    for i, found in json_lines(file):
        if number is not None and len(rows) == number:
            break
        try:
            when_ms, length = float(found["timestamp"]), int(found["input_length"])
            output = int(found["output_length"])
            hashes = [int(h) for h in found["hash_ids"]]
        except (KeyError, TypeError, ValueError) as wrong:
            raise ConfigError(
                f"{file}, line {i} isn't of a Mooncake trace (timestamp, input_length, "
                f"output_length, hash_ids): {type(wrong).__name__} {wrong}."
            ) from wrong
        need = -(-length // MOONCAKE_BLOCK)
        if length < 1 or len(hashes) != need or min(hashes) < 0:
            raise ConfigError(
                f"{file}, line {i}: {len(hashes)} hash_ids for {length} tokens, where blocks of "
                f"{MOONCAKE_BLOCK} make {need}."
            )
        last = length - MOONCAKE_BLOCK * (need - 1)
        kept = block_tokens * (need - 1) + max(1, round(last * block_tokens / MOONCAKE_BLOCK))
        rows.append((when_ms, np.concatenate([block(h) for h in hashes])[:kept], max(1, output)))
    _some(rows, file)
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    conversations = tuple(
        Conversation((Turn(prompt, output),), (when_ms - start) / 1e3)
        for when_ms, prompt, output in rows
    )
    return Workload("mooncake", conversations, {"file": file.name, "block_tokens": block_tokens})


def _some(rows: list[Any], file: Path) -> None:
    if not rows:
        raise ConfigError(f"{file} has no requests.")


def open_text(file: Path) -> TextIO:
    """Raises ConfigError where it can't be read."""
    try:
        return file.open(encoding="utf-8", errors="replace", newline="")
    except OSError as failure:
        raise ConfigError(
            f"--dataset-path {file} can't be read: {failure.strerror or failure}."
        ) from failure


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects with the number of their line."""
    with open_text(file) as lines:
        for i, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError as wrong:
                raise ConfigError(f"{file}, line {i} isn't JSON: {wrong}.") from wrong
            if not isinstance(found, dict):
                raise ConfigError(f"{file}, line {i} isn't a JSON object.")
            yield i, found
