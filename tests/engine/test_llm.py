"""`LLM`: what it takes and what it gives back."""

from __future__ import annotations

import _thread
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.config import DEFAULT_MODEL
from penstock.errors import (
    ConfigError,
    InvalidPromptError,
    InvalidSamplingError,
    OutOfCacheError,
    RequestError,
    TokenizerError,
)
from penstock.step import KV, Step

from .letters import tokenizer
from .toy import GREEDY, VOCAB, Toy, reference, toy_runtime

STORIES = Path(__file__).resolve().parents[2].parent / "shared/data/models/stories260K"
needs_stories = pytest.mark.skipif(not (STORIES / "hf").is_dir(), reason=f"no {STORIES}")


def toy_llm(monkeypatch: pytest.MonkeyPatch, *, runtime: Any = None, **kwargs: Any) -> LLM:
    made = runtime or toy_runtime(tokenizer=tokenizer(), eos=(1,))
    monkeypatch.setattr("penstock.engine.llm.load_runtime", lambda config, progress: made)
    return LLM(**kwargs)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return toy_llm(monkeypatch)


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def test_every_kind_of_prompt(llm: LLM) -> None:
    ids = tokenizer().encode("hello")
    want = llm.generate("hello", greedy())[0].outputs[0].token_ids
    assert want == reference(ids, greedy(), eos=(1,))
    kinds: list[Any] = [
        ["hello"],
        ids,
        [ids],
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        [{"prompt": "something else", "prompt_token_ids": ids}],
        ("hello",),
        [tuple(ids)],
    ]
    for prompts in kinds:
        (output,) = llm.generate(prompts, greedy())
        assert output.outputs[0].token_ids == want
        assert output.prompt_token_ids == ids
        assert output.finished and output.outputs[0].finished
    outputs = llm.generate(["hello", ids, {"prompt": "hello"}], greedy())
    assert [output.prompt for output in outputs] == ["hello", None, "hello"]
    assert [output.outputs[0].token_ids for output in outputs] == [want] * 3
    assert llm.generate([], greedy()) == []


def test_what_is_cached_is_forgotten(llm: LLM) -> None:
    prompt, params = {"prompt_token_ids": [3] * 40}, SamplingParams(max_tokens=1, temperature=0)
    found = []
    for _ in range(2):
        llm.generate([prompt], params)
        (output,) = llm.generate([prompt], params)
        found.append(output.metrics.cached_tokens)
        llm.reset_prefix_cache()
        (output,) = llm.generate([prompt], params)
        found.append(output.metrics.cached_tokens)
    assert found == [36, 0, 36, 0]


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i + 2] * (1 + 7 * i % 5) for i in range(20)]
    params = [greedy(1 + 5 * i % 9) for i in range(20)]
    outputs = llm.generate(prompts, params)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == reference(prompt, one, eos=(1,))
    assert len({output.request_id for output in outputs}) == 20


def test_text_of_the_output(llm: LLM) -> None:
    output = llm.generate("hello", greedy(20, ignore_eos=True))[0].outputs[0]
    assert output.text == tokenizer().decode(output.token_ids)


def test_an_empty_text_is_what_the_tokenizer_puts_before_one() -> None:
    llm = LLM("stories")
    (start,) = llm.get_tokenizer().encode("")
    empty, given = llm.generate(["", [start]], greedy(5))
    assert empty.prompt_token_ids == [start]
    assert empty.outputs[0].token_ids == given.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", InvalidPromptError, "The prompt is empty.* Give at least one character"),
        ([[]], InvalidPromptError, "The prompt is empty. Give at least one token"),
        ({}, InvalidPromptError, "prompt or prompt_token_ids"),
        ({"prmpt": "a"}, InvalidPromptError, "'prmpt'. Did you mean 'prompt'"),
        ([3.5], InvalidPromptError, "not float"),
        ([None], InvalidPromptError, "not (NoneType|object)"),
        (7, InvalidPromptError, "not int"),
        (b"hello", InvalidPromptError, "not bytes"),
        ({"prompt": 5, "prompt_token_ids": [2]}, InvalidPromptError, "text .* not int"),
        ("hello \ud800", InvalidPromptError, "lone surrogate"),
        ("hello \udce4", InvalidPromptError, "isn't UTF-8: it has the byte 0xe4 at character 6"),
        ([2] * 64, InvalidPromptError, "64 tokens, but .* max_model_len=64"),
        ([2, 99], InvalidPromptError, "Token id 99"),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, greedy())
    with pytest.raises(error, match=message):  # nothing of the good ones is left behind
        llm.generate(["hello", prompts], greedy())
    assert not llm.engine.has_unfinished and llm.stats()["used_blocks"] == 0
    assert llm.generate("hello", greedy())[0].outputs[0].token_ids


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def test_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["hello", "hello"], [greedy(2), greedy(5)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["hello", "hello"], [greedy()])
    wrong: Any = {"temperature": 0.0}
    with pytest.raises(InvalidSamplingError, match="not dict"):
        llm.generate("hello", wrong)


def test_default_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy_llm(monkeypatch).get_default_sampling_params() == SamplingParams()
    suggested = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5, "pad": 1}
    llm = toy_llm(monkeypatch, runtime=toy_runtime(generation=suggested))
    want = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=5)
    assert llm.get_default_sampling_params() == want
    assert len(llm.generate([3])[0].outputs[0].token_ids) == 5
    plain = {"do_sample": False, "temperature": 0.6}
    llm = toy_llm(monkeypatch, runtime=toy_runtime(generation=plain))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    assert llm.generate([3])[0].outputs[0].token_ids == reference(
        [3], SamplingParams(temperature=0)
    )


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'max_num_seq' isn't an argument.*'max_num_seqs'"):
        LLM(max_num_seq=3)
    with pytest.raises(ConfigError, match=r"'gpu_memory_utilisation'.*'gpu_memory_utilization'"):
        LLM(gpu_memory_utilisation=0.5)
    with pytest.raises(ConfigError, match="given twice"):
        LLM(num_blocks=3, num_gpu_blocks_override=3)


def test_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch, runtime=toy_runtime())
    (output,) = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY)
    assert output.outputs[0].token_ids == reference([5, 6], GREEDY)
    assert output.outputs[0].text == ""
    with pytest.raises(TokenizerError, match="needs a tokenizer, but skip_tokenizer_init"):
        llm.generate("hello", GREEDY)
    with pytest.raises(TokenizerError, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(TokenizerError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    with pytest.raises(RequestError, match="Stop strings need a tokenizer"):
        llm.generate([5, 6], SamplingParams(stop="a"))


def test_a_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    quiet = llm.generate(["hello", "world"], greedy())
    assert capfd.readouterr() == ("", "")
    shown = llm.generate(["hello", "world"], greedy(), use_tqdm=True)
    assert [o.outputs[0].token_ids for o in shown] == [o.outputs[0].token_ids for o in quiet]


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages, greedy())
    assert output.prompt == "u hello a "
    assert output.prompt_token_ids == tokenizer().encode("u hello a ", add_special_tokens=False)
    assert output.outputs == llm.generate("u hello a ", greedy())[0].outputs
    several = llm.chat([messages, messages], greedy())
    assert [one.prompt for one in several] == ["u hello a "] * 2
    (output,) = llm.chat(messages, greedy(), add_generation_prompt=False)
    assert output.prompt == "u hello "
    template = "{{ messages[0].content }}{{ mark }}"
    (output,) = llm.chat(
        messages, greedy(), chat_template=template, chat_template_kwargs={"mark": "x"}
    )
    assert output.prompt == "hellox"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "has 0 messages; at least 1 is needed"),
        ([[]], "has 0 messages"),
        ([[{"role": "user", "content": "a"}], []], "has 0 messages"),
        ("hi", "must be a list of messages such as .*, not str"),
        (["hi"], r"messages\[0\] must be a mapping such as .*, not str"),
        ({"role": "user", "content": "a"}, "must be a list of messages such as .*, not dict"),
        ([[{"role": "user", "content": "a"}], "hi"], "must be a list of messages .* not str"),
        ([{"role": "user", "content": "a"}, 5], r"messages\[1\] must be a mapping .* not int"),
        ([{"content": "a"}], r"messages\[0\] has no role"),
        ([{"role": 5, "content": "a"}], r"messages\[0\] has 5 for its role"),
        ([{"role": "user"}], r"messages\[0\], of the user, has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\], of the user, has no content"),
        ([{"role": "assistant", "tool_calls": []}], r"of the assistant, has no content"),
        ([{"role": "user", "content": 5}], "must be a text or a list of parts, not int"),
    ],
)
def test_bad_conversations(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        llm.chat(messages, greedy())
    assert not llm.engine.has_unfinished


def test_messages_may_call_tools_or_be_objects(llm: LLM) -> None:
    class Reply:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}

    template = "{% for m in messages %}{{ m.role[0] }} {{ m.content or '' }}{% endfor %}"
    messages: list[Any] = [{"role": "user", "content": "a"}, Reply(), {"role": "b", "content": ""}]
    (output,) = llm.chat(messages, greedy(), chat_template=template)
    assert output.prompt == "u aa b "


# ── Ctrl-C and other ends ────────────────────────────────────────────────────────────────────────


class Interrupting(Toy):
    """Presses Ctrl-C in its third step."""

    def __call__(self, step: Step, kv: KV) -> Tensor:
        if len(self.steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return super().__call__(step, kv)


def test_ctrl_c_ends_the_requests_and_leaves_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Interrupting()
    llm = toy_llm(monkeypatch, runtime=toy_runtime(forward=toy), max_num_seqs=4)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i + 1] * 9 for i in range(10)], greedy(20))
    assert len(toy.steps) == 3  # the step was finished
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm.engine.has_unfinished and not llm.engine.scheduler.has_work
    assert llm.stats()["used_blocks"] == 0
    assert llm.generate([7], GREEDY)[0].outputs[0].token_ids == reference([7], GREEDY)


def test_ctrl_c_while_requests_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = toy_llm(monkeypatch)
    add, count = llm.engine.add_request, 0

    def pressed(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        add(*args, **kwargs)
        if count == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "add_request", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[2], [3], [4], [5]], greedy())
    assert count == 3
    assert not llm.engine.has_unfinished and not llm.engine.scheduler.has_work


def test_somebody_elses_handler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that handles Ctrl-C itself keeps doing so."""
    pressed = []

    def handler(number: int, frame: object) -> None:
        pressed.append(number)

    llm = toy_llm(monkeypatch, runtime=toy_runtime(forward=Interrupting()))
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert len(llm.generate([7], greedy())[0].outputs[0].token_ids) == 8
        assert pressed == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread(llm: LLM) -> None:
    found: list[list[int]] = []
    thread = threading.Thread(
        target=lambda: found.append(llm.generate([7], greedy())[0].outputs[0].token_ids)
    )
    thread.start()
    thread.join()
    assert found == [reference([7], greedy(), eos=(1,))]
    assert thread.ident != _thread.get_ident()


def test_a_failed_request_is_an_output_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(step: Step, kv: KV) -> Tensor:
        logits = torch.zeros(step.sample_at.shape[0], VOCAB)
        logits[:, 3] = 1.0
        logits[step.context_len == 4] = float("nan")
        return logits

    llm = toy_llm(monkeypatch, runtime=toy_runtime(forward=forward))
    good, bad = llm.generate([[1] * 5, [1] * 3], greedy(4))
    assert good.outputs[0].token_ids == [3] * 4 and good.error is None
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == [3]
    assert isinstance(bad.error, RequestError)


# ── a published model ────────────────────────────────────────────────────────────────────────────


@needs_stories
def test_stories260k_to_the_byte() -> None:
    """The text that llama2.c itself writes, through every way of running it."""
    want = (STORIES / "expected_greedy_200steps.txt").read_text(encoding="utf-8")
    params = greedy(200, ignore_eos=True)
    for kwargs in ({}, {"max_num_batched_tokens": 5, "max_num_seqs": 5, "num_blocks": 16}):
        llm = LLM(STORIES / "hf", dtype="float32", **kwargs)
        outputs = llm.generate([{"prompt_token_ids": [1]}, "One day", [1]], params)
        assert outputs[0].outputs[0].text == want
        assert outputs[2].outputs[0].text == want
        assert outputs[1].outputs[0].text != want
        assert llm.stats()["used_blocks"] == 0


@needs_stories
def test_a_real_folder() -> None:
    llm = LLM(
        STORIES / "hf", max_model_len=128, num_gpu_blocks_override=8, skip_tokenizer_init=True
    )
    assert llm.stats()["blocks"] == 8
    assert llm.runtime.model.max_model_len == 128
    assert len(llm.generate([1, 2, 3], greedy(5))[0].outputs[0].token_ids) == 5
    with pytest.raises(OutOfCacheError, match=r"num_blocks is 3\. .* max_model_len to 96"):
        LLM(STORIES / "hf", max_model_len=128, num_blocks=3)
    with pytest.raises(ConfigError, match=r"prompt of max_model_len \(512\) must fit"):
        LLM(STORIES / "hf", enable_chunked_prefill=False, max_num_batched_tokens=511)


def test_the_default_is_the_embedded_model() -> None:
    (output,) = LLM().generate(["Once upon a time"], greedy(8))
    assert output.outputs[0].text
    assert LLM(DEFAULT_MODEL).generate("Once upon a time", greedy(8))[0].outputs == output.outputs


def test_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, leave = threading.Event(), threading.Event()
    slow = Toy()

    def forward(step: Step, kv: KV) -> Tensor:
        inside.set()
        assert leave.wait(60)
        return slow(step, kv)

    llm = toy_llm(monkeypatch, runtime=toy_runtime(forward=forward))
    first = threading.Thread(target=lambda: llm.generate([[1, 2]], SamplingParams(max_tokens=1)))
    first.start()
    assert inside.wait(60)
    try:
        with pytest.raises(RequestError, match="Another thread is in this LLM"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=1))
    finally:
        leave.set()
        first.join()
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].finished
