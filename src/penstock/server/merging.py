"""The outputs of several prompts of one request, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.engine import RequestOutput


async def merged_of(
    runs: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several, as they come; the first error ends them all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
    queue = asyncio.Queue(2 * len(runs))

    async def pump(number: int, run: AsyncGenerator[RequestOutput, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(run) as outputs:
                async for output in outputs:
                    await queue.put((number, output))
        except Exception as error:
            end = error
        await queue.put((number, end))

    tasks = [asyncio.create_task(pump(i, run)) for i, run in enumerate(runs)]
    left = len(tasks)
    try:
        while left:
            number, output = await queue.get()
            if output is None:
                left -= 1
            elif isinstance(output, Exception):
                raise output
            else:
                yield number, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
