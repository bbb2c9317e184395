"""Random requests, aborts and failures on a toy: what must hold after every step."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from penstock.engine import RequestOptions, RequestOutput
from penstock.errors import RequestError
from penstock.sampling import SamplingParams

from .toy import BLOCK_GIB, IS_NAN, RAISES, check, drain, reference, toy_engine

EOS = (1, 2)
LENGTH = 40


def _prompts() -> st.SearchStrategy[list[int]]:
    """Many begin alike, so that they share blocks; a few break the toy."""
    tail = st.lists(st.integers(0, 61), max_size=12)
    return st.builds(
        lambda head, rest, bad: ([7, 8, 9, 10] * 5)[:head] + rest + bad or [3],
        st.integers(0, 20),
        tail,
        st.sampled_from([[]] * 8 + [[RAISES], [IS_NAN]]),
    )


def _params() -> st.SearchStrategy[SamplingParams]:
    common: dict[str, Any] = {
        "max_tokens": st.sampled_from([1, 2, 5, 17, None]),
        "stop_token_ids": st.sampled_from([(), (4, 5, 6)]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
    }
    greedy = st.builds(SamplingParams, temperature=st.just(0.0), **common)
    drawn = st.builds(
        SamplingParams,
        temperature=st.just(0.7),
        seed=st.integers(0, 9),
        n=st.integers(1, 3),
        **common,
    )
    return st.one_of(greedy, drawn)


class Simulation(RuleBasedStateMachine):
    names = Bundle("names")

    @initialize(
        seqs=st.sampled_from([3, 5, 8]),
        budget=st.sampled_from([8, 13, 64]),
        blocks=st.sampled_from([10, 11, 14, 60]),  # 10 hold one sequence of LENGTH
        chunked=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "sjf", "edf"]),
        mode=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        slots=st.sampled_from([3, 9, 1000]),
    )
    def start(
        self,
        seqs: int,
        budget: int,
        blocks: int,
        chunked: bool,
        caching: bool,
        policy: str,
        mode: str,
        slots: int,
    ) -> None:
        self.now = 0.0
        self.policy = policy
        more: dict[str, Any] = {} if policy == "fcfs" else {"starvation_s": 30.0}
        if mode != "recompute":
            more["swap_space"] = slots * BLOCK_GIB
        self.engine = toy_engine(
            blocks,
            LENGTH,
            eos=EOS,
            clock=lambda: self.now,
            policy=policy,
            preemption_mode=mode,
            **more,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget if chunked else 64,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
        )
        self.count = 0
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()

    def _options(self, urgency: int) -> RequestOptions:
        """What this policy heeds of it."""
        if self.policy == "priority":
            return RequestOptions(priority=urgency)
        if self.policy == "edf" and urgency:
            return RequestOptions(ttft_slo_s=4.0 * urgency, tpot_slo_s=float(urgency))
        return RequestOptions()

    @rule(target=names, prompt=_prompts(), params=_params(), urgency=st.integers(0, 9))
    def add(self, prompt: list[int], params: SamplingParams, urgency: int) -> str:
        name = str(self.count)
        self.count += 1
        self.engine.add_request(name, prompt, params, options=self._options(urgency))
        self.asked[name] = (prompt, params)
        return name

    @rule(name=consumes(names))
    def abort(self, name: str) -> None:
        if name in self.engine.requests:
            self.aborted.add(name)
        self.engine.abort(name)
        check(self.engine)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1.0
            for output in self.engine.step():
                self.judge(output)
            check(self.engine)

    @rule()
    def forget(self) -> None:
        self.engine.reset_prefix_cache()
        check(self.engine)

    def judge(self, output: RequestOutput) -> None:
        assert output.finished
        prompt, params = self.asked.pop(output.request_id)
        reasons = {sample.finish_reason for sample in output.outputs}
        if output.request_id in self.aborted:
            assert "abort" in reasons <= {"abort", "stop", "length"}
        elif {RAISES, IS_NAN} & set(prompt):
            assert reasons == {"error"}
            wanted = RequestError if IS_NAN in prompt else RuntimeError
            assert isinstance(output.error, wanted)
            return
        else:
            assert output.error is None and reasons <= {"stop", "length"}
            if params.prompt_logprobs is not None:
                assert output.prompt_logprobs is not None
                assert len(output.prompt_logprobs) == len(prompt)
        for sample in output.outputs:
            wanted = reference(prompt, params, index=sample.index, eos=EOS, max_model_len=LENGTH)
            if sample.finish_reason == "abort":
                wanted = wanted[: len(sample.token_ids)]
            assert sample.token_ids == wanted

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for output in drain(self.engine).values():
                self.judge(output)
            assert not self.asked
            assert self.engine.pool.num_used == self.engine.swap_space.num_used == 0
            assert not self.engine.scheduler.has_work
            self.engine.reset_prefix_cache()
            assert len(self.engine.pool._free) == self.engine.pool.num_blocks


TestSimulation = Simulation.TestCase
TestSimulation.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
