"""How much text repeats itself, and past text: guesses by lookup, without a model.

    python benchmarks/speculate_lookup.py ../shared/data --json benchmarks/results/lookup.json
    python benchmarks/speculate_lookup.py ../shared/data --write build/lookup

Documents are replayed as if a model wrote them: at each step a proposer guesses, the guess's tokens
count up to the first that the document doesn't have, and the step brings one more. Workloads:
    rewrite    files of this repository before (the prompt) and after (the output) a commit
    code       the second half of code files, after the first
    dialogue   an assistant's turns with tool calls, each after the turns before it
    tools      calls in JSON, after functions and a question
    summaries  what people wrote who summed up a text, or drew something out of it
    maths      worked answers, after their questions
    stories    the second half of short stories, after the first
Each begins with a proposer that remembers nothing. Prints, by workload and proposer, the tokens a
step, the share of steps with a guess, what of the guessed was right, and the microseconds of a
guess, in the mean (with reading the prompt) and in the median; of all workloads together, the right
tokens a guess by the length of the match; and what it costs to read a prompt, to keep an output,
and to make a draft of the guess.

With --write nothing is replayed here: each workload's first short documents become WORKLOAD.jsonl,
prompts with their outputs in Qwen2.5's tokens, for `penstock bench speculate --prompts`;
expected.jsonl has those of rewrite, with the file as it was for a prediction.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tokenizers import ByteLevelBPETokenizer

from penstock import SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect
from penstock.sampling import SequenceSampling
from penstock.speculate import ngram, suffix
from penstock.speculate.matches import Runs
from penstock.speculate.ngram import NgramProposer
from penstock.speculate.proposer import Draft
from penstock.speculate.suffix import Past, SuffixProposer

ROOT = Path(__file__).resolve().parents[1]
Pair = tuple[str, str]
"""A prompt and what follows."""
Row = dict[str, Any]
REWRITE = "Rewrite this file.\n\n", "\n\nThe new file:\n\n"
"""What stands before a file and after it."""
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
ENTRIES = 151_936  # Qwen2.5's vocabulary
LONGEST_PROMPT = 1500  # tokens, of documents that are written
LEAST_OUTPUT = {  # of these
    **{"rewrite": 256, "code": 256, "stories": 256},
    **{"tools": 64, "maths": 64, "dialogue": 32, "summaries": 16},
}


def halves(texts: Iterator[str]) -> Iterator[Pair]:
    for text in texts:
        at = text.rfind("\n", 0, len(text) // 2) + 1 or len(text) // 2
        yield text[:at], text[at:]


def rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def rewrite(data: Path) -> Iterator[Pair]:
    def git(*words: str) -> str:
        ran = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)
        return ran.stdout.decode()

    changes = git("log", "--diff-filter=M", "--name-only", "--format=%n%H", "--", "src/*.py")
    commit = ""
    for line in changes.split("\n"):
        if line.endswith(".py"):
            before, after = (git("show", f"{at}:{line}") for at in (f"{commit}^", commit))
            yield f"{REWRITE[0]}{before}{REWRITE[1]}", after
        elif line:
            commit = line


def code(data: Path) -> Iterator[Pair]:
    text = (data / "text/exllamav3/standard_cal_data/code.utf8").read_text(encoding="utf-8")
    return halves(text[i : i + 12_000] for i in range(0, len(text), 12_000))


def dialogue(data: Path) -> Iterator[Pair]:
    for row in rows(data / "text/dialogue/sgd_dev.jsonl"):
        before = ""
        for turn in row["turns"]:
            calls = "".join(f"\n{json.dumps(call)}" for call in turn.get("tool_calls", ()))
            said = f"{turn['content']}{calls}\n"
            if turn["role"] == "assistant":
                yield f"{before}assistant: ", said
            before += f"{turn['role']}: {said}"
            before += "".join(f"{json.dumps(one)}\n" for one in turn.get("tool_results", ()))


def tools(data: Path) -> Iterator[Pair]:
    folder = data / "structured/bfcl"
    answers = folder / "possible_answer"
    for name in ("simple_python", "multiple", "parallel", "parallel_multiple"):
        file = f"BFCL_v4_{name}.json"
        if not (answers / file).exists():
            continue
        for row, right in zip(rows(folder / file), rows(answers / file), strict=True):
            functions = json.dumps(row["function"], indent=2)
            calls = [
                {"name": n, "arguments": {key: v[0] for key, v in given.items() if v[0] != ""}}
                for call in right["ground_truth"]
                for n, given in call.items()
            ]
            asked = row["question"][0][-1]["content"]
            yield f"{functions}\nuser: {asked}\nassistant: ", f"{json.dumps(calls)}\n"


def summaries(data: Path) -> Iterator[Pair]:
    asks = re.compile(r"summar|extract|paraphras|brief|concise|retrieve", re.IGNORECASE)
    for name in ("seed_tasks", "user_oriented_instructions"):
        for row in rows(data / f"text/instruct/self-instruct/{name}.jsonl"):
            for one in row["instances"] if asks.search(row["instruction"]) else ():
                if len(one["input"]) >= 300:  # there is something to sum up
                    yield f"{row['instruction']}\n\n{one['input']}\n\n", f"{one['output']}\n"


def maths(data: Path) -> Iterator[Pair]:
    for row in rows(data / "eval/gsm8k/train.jsonl"):
        yield f"Question: {row['question']}\nAnswer: ", f"{row['answer']}\n"


def stories(data: Path) -> Iterator[Pair]:
    return halves(row["text"][:12_000] for row in rows(data / "text/lcats_stories_train.jsonl"))


WORKLOADS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    one.__name__: one for one in (rewrite, code, dialogue, tools, summaries, maths, stories)
}


class Tally:
    """What guesses of one kind came to."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.guesses = self.guessed = self.right = 0
        self.seconds: list[float] = []
        self.by_match: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, match: int, guess: list[int], right: int, seconds: float) -> None:
        self.steps += 1
        self.tokens += right + 1
        self.seconds.append(seconds)
        if guess:
            self.guesses += 1
            self.guessed += len(guess)
            self.right += right
            bucket = max(one for one in BUCKETS if one <= match)
            for i, value in enumerate((1, len(guess), right)):
                self.by_match[bucket][i] += value

    def row(self) -> Row:
        return {
            "steps": self.steps,
            "tokens_per_step": round(self.tokens / self.steps, 3),
            "share_of_steps_with_guess": round(self.guesses / self.steps, 3),
            "tokens_per_guess": round(self.guessed / max(1, self.guesses), 2),
            "right_per_guess": round(self.right / max(1, self.guesses), 2),
            "share_right": round(self.right / max(1, self.guessed), 3),
            "guess_us_mean": round(statistics.mean(self.seconds) * 1e6, 1),
            "guess_us_median": round(statistics.median(self.seconds) * 1e6, 1),
        }

    def include(self, other: Tally) -> None:
        for least, values in other.by_match.items():
            for i, value in enumerate(values):
                self.by_match[least][i] += value

    def matches(self) -> Row:
        """What guesses came to, by the least length of the matches that they are made from."""
        return {
            str(least): {"guesses": n, "tokens": round(m / n, 2), "right": round(r / n, 2)}
            for least, (n, m, r) in sorted(self.by_match.items())
        }


class Earliest(NgramProposer):
    """Prompt lookup that takes the earliest of equal matches."""

    def match(self, key: object, tokens: list[int]) -> tuple[int, int]:
        if not super().match(key, tokens)[1]:
            return 0, 0
        runs = self._runs[key]
        length, places = runs.find(tokens, tokens[-self._max :], runs.hashes)
        return length, places[-1]


VARIANTS: dict[str, tuple[type[NgramProposer | SuffixProposer], Any, str, int]] = {
    "ngram": (NgramProposer, ngram, "TOKENS_PER_MATCHED", ngram.TOKENS_PER_MATCHED),
    "suffix": (SuffixProposer, suffix, "TOKENS_PER_MATCHED", suffix.TOKENS_PER_MATCHED),
    "ngram, 1 token a match": (NgramProposer, ngram, "TOKENS_PER_MATCHED", 1),
    "ngram, any length": (NgramProposer, ngram, "TOKENS_PER_MATCHED", 1000),
    "ngram, the earliest": (Earliest, ngram, "TOKENS_PER_MATCHED", ngram.TOKENS_PER_MATCHED),
    "suffix, 2 tokens a match": (SuffixProposer, suffix, "TOKENS_PER_MATCHED", 2),
    "suffix, matches of 2": (SuffixProposer, suffix, "MIN_MATCH", 2),
}
"""A proposer, and the constant of a module that makes it another."""


class Lookup:
    """A proposer's guess, and how long the match was that it is made from."""

    def __init__(self, kind: type[NgramProposer | SuffixProposer], limit: int) -> None:
        self._proposer, self._limit = kind(), limit
        self.forget = self._proposer.forget

    def guess(self, key: object, tokens: list[int], prompt: int) -> tuple[int, list[int], float]:
        start = time.perf_counter()
        if isinstance(self._proposer, NgramProposer):
            found = self._proposer.guess(key, tokens, self._limit)
        else:
            found = self._proposer.guess(key, tokens, prompt, self._limit)
        seconds = time.perf_counter() - start
        if isinstance(self._proposer, NgramProposer):
            return self._proposer.match(key, tokens)[0], found, seconds
        return self._proposer.match(key, tokens, prompt, None)[0], found, seconds


def replay(lookup: Lookup, prompt: list[int], output: list[int], tally: Tally) -> None:
    """One document; its first token is the prefill's."""
    key, whole = object(), prompt + output
    tokens = whole[: len(prompt) + 1]
    while len(tokens) < len(whole):
        matched, guess, seconds = lookup.guess(key, tokens, len(prompt))
        rest = whole[len(tokens) : len(tokens) + len(guess) + 1]
        right = 0
        while right < min(len(guess), len(rest) - 1) and guess[right] == rest[right]:
            right += 1
        tally.add(matched, guess, right, seconds)
        tokens += rest[: right + 1]
    lookup.forget(key)


def least_s(run: Callable[[], object], rounds: int = 5) -> float:
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def costs() -> Row:
    """Of reading a prompt, of outputs that are kept, of a draft; the best of five."""
    rng = random.Random(0)
    found: Row = {}
    for length in (8_000, 30_000):
        prompt = [rng.randrange(3000) for _ in range(length)]
        runs = Runs(2, 16, 2 * length)
        runs.read(prompt)
        taken = least_s(lambda: Runs(2, 16, 2 * length).read(prompt))  # noqa: B023
        found[f"read_{length}_tokens_ms"] = round(taken * 1e3, 2)
        found[f"index_of_{length}_bytes_per_token"] = round(runs.nbytes / length, 1)
    past = Past(24, 1_000_000)
    for _ in range(1000):
        past.add([rng.randrange(3000) for _ in range(999)], None)
    found["kept_outputs_bytes_per_token"] = round(past.nbytes / past.num_tokens, 1)
    found["kept_tokens"] = past.num_tokens
    output = [rng.randrange(3000) for _ in range(999)]
    found["keep_999_tokens_ms"] = round(least_s(lambda: past.add(output, None)) * 1e3, 2)
    sampling = SequenceSampling(SamplingParams(), output, ENTRIES, 0, frozenset())
    taken = least_s(lambda: Draft(sampling).extend(output[:16]), 50)
    found["draft_us_per_token"] = round(taken / 16 * 1e6, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokens", type=int, default=40_000, help="of output, a workload")
    parser.add_argument("--limit", type=int, default=16, help="tokens in a draft")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="prompts and outputs")
    parser.add_argument("--documents", type=int, default=6, help="of a workload, with --write")
    given = parser.parse_args()
    folder = given.data / "tokenizers/qwen2.5"
    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    if given.write is not None:
        write(given.write, given.data, tokenizer, given.documents)
        return
    results: list[Row] = []
    together = {name: Tally() for name in VARIANTS}
    for workload, pairs in WORKLOADS.items():
        documents = chosen(list(pairs(given.data)), tokenizer, given.tokens)
        for name, (kind, module, constant, value) in VARIANTS.items():
            lookup, tally = Lookup(kind, given.limit), Tally()
            with mock.patch.object(module, constant, value):
                for prompt, output in documents:
                    replay(lookup, prompt, output, tally)
            together[name].include(tally)
            row = {"workload": workload, "proposer": name, "documents": len(documents)}
            results.append(row | tally.row())
            print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
    matches = {name: together[name].matches() for name in ("ngram", "suffix")}
    known = costs()
    print(json.dumps({"by_match": matches, "costs": known}, indent=1))
    if given.json is not None:
        setup = {"tokens": given.tokens, "limit": given.limit, "tokenizer": "qwen2.5"}
        found = {"setup": setup, "results": results, "by_match": matches, "costs": known}
        given.json.write_text(json.dumps(found | environment(detect()), indent=1) + "\n")


def write(folder: Path, data: Path, tokenizer: Any, count: int) -> None:
    """Each workload's first documents that are short enough to be computed often."""
    folder.mkdir(parents=True, exist_ok=True)
    expected: list[Row] = []
    for workload, pairs in WORKLOADS.items():
        found: list[Row] = []
        for prompt, output in pairs(data):
            ids = tokenizer.encode(prompt).ids, tokenizer.encode(output).ids
            if len(ids[0]) <= LONGEST_PROMPT and len(ids[1]) >= LEAST_OUTPUT[workload]:
                found.append({"prompt": ids[0], "output": ids[1]})
                if workload == "rewrite":
                    before = prompt[len(REWRITE[0]) : -len(REWRITE[1])]
                    expected.append(found[-1] | {"prediction": tokenizer.encode(before).ids})
            if len(found) == count:
                break
        write_rows(folder / f"{workload}.jsonl", found)
    write_rows(folder / "expected.jsonl", expected)


def write_rows(file: Path, found: list[Row]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
    print(f"{file.stem}: {len(found)} documents")


def chosen(pairs: list[Pair], tokenizer: Any, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Documents one after the other, from a random one on, with so many tokens of output."""
    start = random.Random(0).randrange(max(1, len(pairs) // 2))
    found = []
    for prompt, output in pairs[start:]:
        ids = tokenizer.encode(prompt).ids[-6000:], tokenizer.encode(output).ids[:2000]
        if len(ids[1]) < 2:
            continue
        found.append(ids)
        tokens -= len(ids[1])
        if tokens <= 0:
            break
    return found


if __name__ == "__main__":
    main()
