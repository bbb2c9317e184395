"""Prefixes that outlive the engine: the same bits, found by those and only those they belong to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, AsyncLLM, SamplingParams, ops
from penstock.cache import disk
from penstock.engine import RequestOptions, remembering
from penstock.engine.remembering import Remembering
from penstock.errors import ConfigError, RequestError
from penstock.models.hub import adapter_folder
from tests.models.seeing import make_qwen3, picture

PROMPTS = [[(7 * i + k) % 500 + 3 for i in range(n)] for k, n in enumerate((200, 97, 33, 64, 150))]
PROMPTS.append(PROMPTS[0][:100] + PROMPTS[1])


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, **more)


def run(llm: LLM, prompts: Any = None, **more: Any) -> tuple[list[Any], list[int]]:
    """(what was said, tokens of each prompt that were found)."""
    items = PROMPTS if prompts is None else prompts
    outputs = llm.generate(items, greedy(), **more)
    exact = ops.has_native("linear")
    said = [
        (s.token_ids, [{t: p.logprob for t, p in at.items()} for at in s.logprobs or []] * exact)
        for output in outputs
        for s in output.outputs
    ]
    return said, [output.metrics.cached_tokens for output in outputs]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes engines over one folder; those before have written what they had when one is made."""
    engines: list[LLM] = []

    def make(**more: Any) -> LLM:
        for engine in engines:
            assert engine.runtime.disk is not None
            engine.runtime.disk.close()
        given = {"dtype": "float32", "prefix_cache_dir": tmp_path / "kept", **more}
        engines.append(LLM(**given))
        return engines[-1]

    yield make
    for engine in engines:
        if engine.runtime.disk is not None:
            engine.runtime.disk.close()


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return run(LLM(dtype="float32", enable_prefix_caching=False, max_num_seqs=1))[0]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 17, "max_model_len": 512},
        {"policy": "sjf"},
    ],
)
def test_after_a_restart(how: dict[str, Any], made: Any, alone: list[Any]) -> None:
    said, found = run(made())
    assert said == alone and found[0] == 0
    said, found = run(made(**how))
    assert said == alone
    if "num_gpu_blocks_override" not in how:
        assert found == [(len(prompt) - 1) // 32 * 32 for prompt in PROMPTS]
    assert sum(found) > 200


def test_outputs_are_found_too(made: Any) -> None:
    """A conversation that goes on."""
    first = made()
    output = first.generate({"prompt_token_ids": PROMPTS[0]}, greedy())[0]
    longer = PROMPTS[0] + output.outputs[0].token_ids + [5, 6]
    want, _ = run(LLM(dtype="float32"), [longer])
    said, found = run(made(), [longer])
    assert said == want and found == [(len(longer) - 2) // 32 * 32]


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "bfloat16"},
        {"dtype": "auto", "quantization": "w8a8"},
        {"dtype": "auto", "kv_cache_dtype": "int8"},
        {"dtype": "auto", "kv_cache_dtype": "int4"},
        {"dtype": "auto", "block_size": 64},
        {"model": "stories-chat"},
    ],
)
def test_of_another_model_nothing_is_found(how: dict[str, Any], made: Any) -> None:
    """And of the same one again all is, in each format."""
    run(made())
    said, found = run(made(**how))
    fresh = made(**how)
    again, later = run(fresh)
    assert found[:3] == [0, 0, 0] and again == said and later[0] >= 128
    assert fresh.stats()["disk_blocks_read"] > 5


def test_salts_keep_apart(made: Any) -> None:
    hers = RequestOptions(cache_salt="alice")
    run(made(), options=hers)
    assert run(made())[1][0] == 0
    assert run(made(), options=RequestOptions(cache_salt="bob"))[1][0] == 0
    assert run(made(), options=hers)[1][0] == 192


def test_adapters_are_kept_apart(made: Any) -> None:
    asked = {"enable_lora": True, "max_loras": 1, "max_num_seqs": 4}
    first = made(**asked)
    first.load_lora("verse", "stories-verse")
    with_adapter = RequestOptions(adapter="verse")
    want, _ = run(first, options=with_adapter)
    plain, found = run(first)
    assert found[0] == 0 and plain != want
    second = made(**asked)
    second.load_lora("verse", "stories-verse")
    said, found = run(second, options=with_adapter)
    assert said == want and found[0] == 0


def test_pictures_are_found_by_what_they_show(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model").folder
    text = "x" * 40 + "<image>" + "y" * 40
    images = [{"image": picture(90, 70, k)} for k in (0, 0, 1)]
    prompts = [{"prompt": text, "multi_modal_data": image} for image in images]
    want, _ = run(LLM(folder, dtype="float32", enable_prefix_caching=False), prompts)
    for times in range(2):
        llm = LLM(folder, dtype="float32", prefix_cache_dir=tmp_path / "kept")
        found = [run(llm, [prompt]) for prompt in prompts]
        assert [said for (said,), _ in found] == want
        cached = [count for _, (count,) in found]
        assert (cached[0] > 60) == (times == 1) and cached[1] > 60
        assert cached[2] == (32 if times == 0 else cached[0])
        assert llm.runtime.disk is not None
        llm.runtime.disk.close()


def test_pictures_of_another_scale_are_others(tmp_path: Path) -> None:
    """The same bytes, which the processor makes other numbers of."""
    folder = make_qwen3(tmp_path / "model").folder
    prompt = {"prompt": "<image>" + "y" * 40, "multi_modal_data": {"image": picture(90, 70)}}
    file = folder / "preprocessor_config.json"
    for mean in (0.5, 0.25):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [mean] * 3}))
        llm = LLM(folder, dtype="float32", prefix_cache_dir=tmp_path / "kept")
        assert run(llm, [prompt])[1] == [0]
        assert llm.runtime.disk is not None
        llm.runtime.disk.close()


def test_a_damaged_block_is_computed_again(made: Any, alone: list[Any], tmp_path: Path) -> None:
    run(made())
    whole = made()
    for number, file in enumerate(sorted(tmp_path.glob("kept/*/*.kv"))):
        if number % 3 == 0:
            file.write_bytes(file.read_bytes()[:-5] + b"wrong")
    said, _ = run(whole)
    assert said == alone and whole.stats()["disk_blocks_damaged"] > 0
    said, found = run(made())  # what lay behind a damaged block was looked at, too
    assert said == alone and found[0] == 192


def test_large_prompts_are_read_in_parts(
    made: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps, in which others go on."""
    run(made())
    wanted = run(made())
    assert wanted[0] == alone
    parts: list[int] = []
    read = Remembering._read

    def counted(self: Remembering, digests: list[str]) -> list[bytes]:
        parts.append(len(digests))
        return read(self, digests)

    monkeypatch.setattr(Remembering, "_read", counted)
    llm = made()
    monkeypatch.setattr(remembering, "READ_BYTES", 2 * llm.runtime.disk.files.size)
    assert run(llm) == wanted and max(parts) == 2 and len(parts) > 4
    llm = made()
    running = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    llm.engine.add_request("runs", [9, 8, 7], running)
    llm.engine.step()
    llm.engine.add_request("reads", PROMPTS[0], greedy())
    for _ in range(3):
        llm.engine.step()
    runs, reads = (llm.engine.requests[name].sequences[0] for name in ("runs", "reads"))
    assert runs.num_output == 4 and reads.num_computed > 0
    assert llm.engine.requests["reads"].metrics.cached_tokens == 192


def test_what_was_left_out_is_kept_later(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the same prompt comes again and its blocks are still in memory."""
    llm, prompt = made(), PROMPTS[0]
    with monkeypatch.context() as patch:
        patch.setattr(disk.Files, "is_busy", True)
        run(llm, [prompt])
    assert len(llm.runtime.disk.files) == 0 and llm.stats()["disk_blocks_dropped"] > 0
    run(llm, [prompt])
    assert run(made(), [prompt])[1] == [192]


@pytest.mark.parametrize("salt", [None, 7])
def test_prompts_of_thousands_of_blocks(salt: Any, made: Any) -> None:
    """Those of adapters, whose salts are numbers, too."""
    llm = made(num_gpu_blocks_override=4000)
    tree, pool, keeper = llm.engine.tree, llm.engine.pool, llm.engine.remembering
    node = tree.root(salt)
    for number in range(3000):
        (block,) = pool.allocate(1)
        node = tree.insert(node, [number] * 32, block)
        node.parent.digest = ""  # as if nobody had asked
    assert bool(keeper._digest(node)) == (salt is None)


def test_what_is_found_in_memory_is_used_too(made: Any) -> None:
    """So of a folder that is full the prompt goes that nobody asked for again, from its end."""
    first = made()
    assert first.runtime.disk is not None
    block = first.runtime.disk.files.nbytes + sum(r[0].nbytes for r in first.runtime.disk._rows)
    ann, bob, carl = ([k + 5] * 257 for k in range(3))
    first = made(prefix_cache_disk_space=20.5 * block / (1 << 30))
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in (ann, bob, ann, carl):
        first.generate([{"prompt_token_ids": prompt}], params)
    later = made()
    cached = [
        later.generate([{"prompt_token_ids": prompt}], params)[0].metrics.cached_tokens
        for prompt in (ann, carl, bob)
    ]
    assert cached == [256, 256, 128]


def test_nothing_of_a_step_is_overwritten(made: Any) -> None:
    """Where there are hardly more blocks than one sequence needs, some give way and are swapped."""
    prompts = [prompt[:64] + [9, 9] * k for k, prompt in enumerate(PROMPTS)] * 2
    want, _ = run(made(), prompts)
    llm = made(
        num_gpu_blocks_override=16, max_model_len=512, preemption_mode="swap", swap_space=1.0
    )
    for _ in range(3):
        assert run(llm, prompts)[0] == want
        assert llm.stats()["used_blocks"] == 0
    assert llm.stats()["preemptions"] > 0


def test_prompts_whose_logits_are_read_are_computed(made: Any) -> None:
    run(made())
    llm = made()
    outputs = llm.generate(PROMPTS, greedy(prompt_logprobs=0))
    assert [x.metrics.cached_tokens for x in outputs] == [0] * len(PROMPTS)
    assert llm.stats()["disk_blocks_read"] == 0


KILLED = """
import os, sys, time
from penstock import LLM, SamplingParams
llm = LLM(prefix_cache_dir=sys.argv[1], dtype="float32")
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
print("ready", flush=True)
while True:
    llm.generate([[byte + 3 for byte in os.urandom(300)] for _ in range(8)], params)
"""


def test_a_killed_process_leaves_whole_blocks(made: Any, alone: list[Any], tmp_path: Path) -> None:
    run(made())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "kept")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        before = len(list(tmp_path.glob("kept/*/*.kv")))
        while len(list(tmp_path.glob("kept/*/*.kv"))) < before + 30:
            assert process.poll() is None
        process.kill()
    llm = made()
    assert run(llm)[0] == alone
    disk = llm.runtime.disk
    assert disk is not None and len(disk.files) > before
    assert all(disk.files.get(name) is not None for name in list(disk.files._times))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"kv_cache_dtype": "kivi"}, "kv_cache_dtype='kivi' goes without one"),
        ({"prefix_cache_disk_space": 1e-7}, "is 107 bytes, and a block takes [0-9,]+: none would"),
        ({"prefix_cache_disk_space": 0}, "must be a number of GiB above 0, not 0"),
        ({"prefix_cache_dir": ""}, "must be a folder, not ''"),
        ({"prefix_cache_dir": 5}, "must be a folder, not 5"),
        ({"prefix_cache_dir": "/proc/nothing"}, "can't be written to"),
        ({"prefix_cache_dir": None, "prefix_cache_disk_space": 3.0}, "without a prefix_cache_dir"),
        (
            {"speculative_config": {"method": "draft_model", "model": "stories-draft"}},
            "isn't built where blocks have a part of a draft model's",
        ),
    ],
)
def test_what_cant_be(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(**{"prefix_cache_dir": tmp_path / "kept", "max_model_len": 64, **given})


def test_weights_that_change_are_another_model(tmp_path: Path) -> None:
    """Of the same shape, under the same name."""
    folder = make_qwen3(tmp_path / "model").folder
    want, prompts = {}, [PROMPTS[0][:60], PROMPTS[1][:64]]
    prompts = [[token % 250 for token in prompt] for prompt in prompts]
    for weights in ("first", "second"):
        if weights == "second":
            from safetensors.torch import load_file, save_file

            file = folder / "model.safetensors"
            save_file({name: t.flip(0) for name, t in load_file(file).items()}, file)
        llm = LLM(folder, dtype="float32", prefix_cache_dir=tmp_path / "kept")
        want[weights], found = run(llm, prompts)
        assert found == [0, 0]
        assert llm.runtime.disk is not None
        llm.runtime.disk.close()
    assert want["first"] != want["second"]
    assert json.dumps(len(list((tmp_path / "kept").iterdir()))) == "2"


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.Files._write_file

    def slowly(self: disk.Files, path: Path, data: bytes) -> None:
        time.sleep(0.01)
        write(self, path, data)

    monkeypatch.setattr(disk.Files, "_write_file", slowly)


class TestHandingOver:
    """One process computes a prompt, another goes on."""

    def test_blocks_are_there_at_the_end(
        self, made: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_disk(monkeypatch)
        first = made()
        (output,) = first.generate(
            PROMPTS[0],
            SamplingParams(temperature=0, max_tokens=1),
            options=RequestOptions(hand_over=True),
        )
        assert output.outputs[0].token_ids == alone[0][0][:1]
        assert first.stats()["disk_blocks_written"] == 200 // 32
        second = LLM(dtype="float32", prefix_cache_dir=first.config.cache.prefix_cache_dir)
        said, cached = run(second, [PROMPTS[0]])
        assert cached == [192]
        assert said == alone[:1]
        assert second.runtime.disk is not None
        second.runtime.disk.close()

    def test_more_than_may_wait_to_be_written(
        self, made: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else's blocks are waited for; these go in several rounds."""
        slow_disk(monkeypatch)
        first = made()
        assert first.runtime.disk is not None
        files = first.runtime.disk.files
        monkeypatch.setattr(disk, "QUEUED_BYTES", 2 * files.size)
        first.generate(
            PROMPTS[0],
            SamplingParams(temperature=0, max_tokens=1),
            options=RequestOptions(hand_over=True),
        )
        assert files.written == 200 // 32
        assert files.dropped > 0
        said, cached = run(made(), [PROMPTS[0]])
        assert (said, cached) == (alone[:1], [192])

    def test_more_than_there_is_room_for(self, made: Any) -> None:
        """Others' prompts make room for one; what is larger than all isn't tried for ever."""
        first = made()
        assert first.runtime.disk is not None
        size = first.runtime.disk.files.size
        params, over = SamplingParams(temperature=0, max_tokens=1), RequestOptions(hand_over=True)
        limited = made(prefix_cache_disk_space=7.5 * size / (1 << 30))
        assert limited.runtime.disk is not None
        files = limited.runtime.disk.files
        for k in range(3):
            limited.generate([5 + k, *PROMPTS[0]], params, options=over)
            assert files.written == 6 * (k + 1)
            assert len(files) <= 7
        limited.generate(list(range(3, 400)), params, options=over)
        assert len(files) <= 7

    def test_a_full_queue_and_a_full_folder(
        self, made: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow_disk(monkeypatch)
        first = made()
        assert first.runtime.disk is not None
        size = first.runtime.disk.files.size
        monkeypatch.setattr(disk, "QUEUED_BYTES", 2 * size)
        limited = made(prefix_cache_disk_space=7.5 * size / (1 << 30))
        assert limited.runtime.disk is not None
        for k in range(3):
            limited.generate(
                [5 + k, *PROMPTS[0]],
                SamplingParams(temperature=0, max_tokens=1),
                options=RequestOptions(hand_over=True),
            )
            assert limited.runtime.disk.files.written == 6 * (k + 1)

    @pytest.mark.parametrize("seconds", [0.0, 0.005])
    def test_a_disk_that_fails(
        self, made: Any, monkeypatch: pytest.MonkeyPatch, seconds: float
    ) -> None:
        def fails(self: disk.Files, path: Path, data: bytes) -> None:
            time.sleep(seconds)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk.Files, "_write_file", fails)
        llm = made()
        assert llm.runtime.disk is not None
        monkeypatch.setattr(disk, "QUEUED_BYTES", 2 * llm.runtime.disk.files.size)
        start = time.monotonic()
        (output,) = llm.generate(
            PROMPTS[0], SamplingParams(max_tokens=1), options=RequestOptions(hand_over=True)
        )
        assert output.finished
        assert time.monotonic() - start < 5

    def test_a_disk_that_is_slow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The answer comes when the request's time is over."""
        write = disk.Files._write_file

        def slowly(self: disk.Files, path: Path, data: bytes) -> None:
            time.sleep(0.5)
            write(self, path, data)

        monkeypatch.setattr(disk.Files, "_write_file", slowly)

        async def ask() -> float:
            llm = AsyncLLM(dtype="float32", prefix_cache_dir=tmp_path / "kept")
            start = time.monotonic()
            async for output in llm.generate(
                {"prompt_token_ids": PROMPTS[0]},
                SamplingParams(max_tokens=1),
                options=RequestOptions(hand_over=True),
                timeout_s=0.8,
            ):
                assert output.finished
            taken = time.monotonic() - start
            await asyncio.to_thread(llm.shutdown)
            return taken

        assert asyncio.run(ask()) < 1.2

    def test_of_an_embedding(self, made: Any) -> None:
        with pytest.raises(RequestError, match="nobody goes on with an embedding"):
            made().embed("a", options=RequestOptions(hand_over=True))

    def test_a_prompt_of_another_type(self, made: Any) -> None:
        first = made()
        first.generate(
            {"prompt_token_ids": torch.tensor(PROMPTS[0])},
            SamplingParams(max_tokens=1),
            options=RequestOptions(hand_over=True),
        )
        assert first.stats()["disk_blocks_written"] == 6

    def test_a_server_waits_too(self, tmp_path: Path) -> None:
        async def ask() -> None:
            llm = AsyncLLM(dtype="float32", prefix_cache_dir=tmp_path / "kept")
            params = SamplingParams(max_tokens=1)
            options = RequestOptions(hand_over=True)
            async for output in llm.generate(
                {"prompt_token_ids": PROMPTS[0]}, params, options=options
            ):
                if output.finished:
                    assert llm.stats()["disk_blocks_written"] == 200 // 32
            llm.shutdown()

        asyncio.run(ask())

    def test_nothing_is_kept(self) -> None:
        with pytest.raises(RequestError, match="nothing is kept on disk"):
            LLM().generate("a", options=RequestOptions(hand_over=True))

    def test_of_an_adapter(self, made: Any) -> None:
        llm = made(enable_lora=True)
        llm.load_lora("verse", adapter_folder("stories-verse"))
        with pytest.raises(RequestError, match="blocks of adapters aren't kept"):
            llm.generate("a", options=RequestOptions(hand_over=True, adapter="verse"))
