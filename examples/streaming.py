"""Requests that arrive at any time, streamed: `python examples/streaming.py`."""

import asyncio

from penstock import AsyncLLM, SamplingParams


async def tell(llm: AsyncLLM, prompt: str, name: str) -> None:
    shown = 0
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    async for output in llm.generate(prompt, params, request_id=name):
        text = output.outputs[0].text
        print(f"{name}: {text[shown:]!r}")
        shown = len(text)


async def main() -> None:
    llm = AsyncLLM()
    try:
        await asyncio.gather(
            tell(llm, "Once upon a time", "first"), tell(llm, "A big red ball", "second")
        )
    finally:
        llm.shutdown()


asyncio.run(main())
