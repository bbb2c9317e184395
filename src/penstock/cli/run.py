"""`penstock run`: answer a file of requests with an engine, all of them batched together."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import console
from penstock.cli.device_options import (
    PLACED,
    MmProcessor,
    Mmproj,
    NoMmproj,
    Placed,
    how_to_cut,
    through,
)
from penstock.cli.loading import settle_heap
from penstock.cli.options import (
    KvCacheDtype,
    MaxModelLen,
    SpeculativeConfig,
    given,
    grouped,
    speculation,
)
from penstock.cli.outputs import check_output
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching
from penstock.cli.stats import DraftStats
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.batch import Counts
    from penstock.config import EngineConfig
    from penstock.engine import AsyncLLM


@grouped
def run(
    engine: Annotated[str, typer.Argument(help="An engine folder, or any model.")],
    input_file: Annotated[
        str, typer.Option("--input", "-i", help="Requests, one JSON object a line; - is stdin.")
    ],
    output_file: Annotated[
        str, typer.Option("--output", "-o", help="Answers, a line each; - is stdout.")
    ],
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="At most this many tokens, of lines that don't say. Default: 128; of batch lines "
            "what their url has.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in one step.")] = None,
    max_model_len: MaxModelLen = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    speculative_config: SpeculativeConfig = None,
    mm_processor_kwargs: MmProcessor = None,
    mmproj: Mmproj = None,
    no_mmproj: NoMmproj = False,
    max_attention_window: MaxAttentionWindow = None,
    sink_token_length: SinkTokenLength = None,
    placed: Placed = PLACED,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that batch lines may ask for; may be repeated. Default: any name."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with an output: answer what it doesn't, append."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check an engine's weights against their sums.")
    ] = False,
) -> None:
    """Answer a file of requests.

    A line is {"prompt": …} or {"messages": […]} with sampling parameters beside it,
    or a line of an OpenAI batch file. Answers come in the order in which they end.
    """
    _check_files(input_file, output_file, force, resume)
    names = tuple(served_model_name or ())
    _check_options(max_tokens, names)
    from penstock.config import EngineConfig

    config = EngineConfig.of(
        model=engine,
        **given(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            speculative_config=speculation(speculative_config),
        ),
        **placed.chosen(),
        **given(mm_processor_kwargs=how_to_cut(mm_processor_kwargs)),
        **through(mmproj, no_mmproj),
        **reaching(max_attention_window, sink_token_length),
        kv_cache_dtype=kv_cache_dtype,
        verify=verify,
    )
    counts = _answer(config, input_file, output_file, max_tokens, names, resume)
    if counts.failed and not counts.answered + counts.skipped:
        raise typer.Exit(1)  # some that fail beside others are told of in their answers


def _answer(
    config: EngineConfig,
    input_file: str,
    output_file: str,
    max_tokens: int | None,
    names: tuple[str, ...],
    resume: bool,
) -> Counts:
    """Have an engine answer the file, and say how it went."""
    from penstock.cli.batch import Batch, earlier_in
    from penstock.engine import AsyncLLM
    from penstock.runtime import compile_counter

    before = compile_counter.total()
    with ExitStack() as stack:
        source = stack.enter_context(_reading(input_file))
        llm = AsyncLLM.of(config)
        stack.callback(llm.shutdown)
        settle_heap()
        earlier = earlier_in(_whole_lines(Path(output_file)) if resume else "")
        write = stack.enter_context(_writing(output_file, "a" if resume else "w"))
        advance = stack.enter_context(_bar(input_file))
        batch = Batch(llm, write, max_tokens, names, earlier, advance)
        start = time.perf_counter()
        try:
            counts = asyncio.run(batch.run(_lines(source, input_file)))
        except KeyboardInterrupt:
            console.note(
                f"{batch.counts.answered} answers are in {output_file}; --resume goes on."
                if output_file != "-"
                else f"{batch.counts.answered} were answered."
            )
            raise
        seconds = time.perf_counter() - start
        for line in _summary(llm, counts, seconds, compile_counter.total() - before):
            typer.echo(line, err=True)
        if names and not counts.api_lines:
            console.warning("--served-model-name had no effect: no line was an OpenAI batch line.")
    return counts


def _check_options(max_tokens: int | None, names: tuple[str, ...]) -> None:
    """Raises ConfigError for what every line would be refused by."""
    from penstock.sampling import SamplingParams

    if max_tokens is not None:
        SamplingParams(max_tokens=max_tokens)
    if "" in names:
        raise ConfigError("--served-model-name has an empty name. Leave it out or give one.")


def _check_files(input_file: str, output_file: str, force: bool, resume: bool) -> None:
    if force and resume:
        raise ConfigError("--force writes a new output and --resume goes on with one: choose.")
    for option, name in (("--input", input_file), ("--output", output_file)):
        if not name:
            raise ConfigError(f"{option} is empty: give a file, or - for what is piped.")
    for name, stream, what in (
        (input_file, sys.stdin, "stdin"),
        (output_file, sys.stdout, "stdout"),
    ):
        if name == "-" and stream is None:
            raise ConfigError(f"{what} is closed. Give the name of a file instead of -.")
    if input_file != "-" and not Path(input_file).exists():
        raise ConfigError(f"There is no file {input_file}.")
    if input_file != "-" and Path(input_file).is_dir():
        raise ConfigError(f"{input_file} is a folder. Give a file with a request in each line.")
    if output_file == "-":
        if force or resume:
            raise ConfigError("stdout has nothing to overwrite or go on with.")
        return
    check_output("--output", Path(output_file))
    if Path(output_file).exists():
        if input_file != "-" and Path(output_file).samefile(input_file):
            raise ConfigError(f"{output_file} is the input. Write the answers to another file.")
        if not (force or resume):
            raise ConfigError(
                f"{output_file} exists. --force overwrites it, --resume answers what it doesn't."
            )


def _whole_lines(path: Path) -> str:
    """An output so far, whose last line is cut off where it has no end."""
    if not path.exists():
        return ""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return whole.decode(errors="replace")


@contextmanager
def _reading(name: str) -> Iterator[IO[bytes]]:
    if name != "-" and Path(name).is_file():
        with open(name, "rb") as file:
            yield file
        return
    try:
        source = sys.stdin.fileno() if name == "-" else name
    except OSError:  # not a file: something that stands for one
        yield sys.stdin.buffer
        return
    # A reader of its own, never closed: a thread may wait in it until the process ends, which
    # Python doesn't survive where it has to close sys.stdin's.
    reader = open(source, "rb", closefd=name != "-")  # noqa: SIM115
    with _blocking(reader):
        yield reader


@contextmanager
def _blocking(stream: IO[Any]) -> Iterator[None]:
    """Reading from it and writing to it wait, even where whoever opened it didn't want that: else
    what isn't there yet would seem to be its end.
    """
    try:
        descriptor = stream.fileno()
    except OSError:
        yield
        return
    before = os.get_blocking(descriptor)
    os.set_blocking(descriptor, True)
    try:
        yield
    finally:
        os.set_blocking(descriptor, before)  # others may have it open too


@contextmanager
def _writing(name: str, mode: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one answer, which can be read at once."""

    def to(file: IO[str]) -> Callable[[dict[str, Any]], None]:
        def write(answer: dict[str, Any]) -> None:
            try:
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                file.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise ConfigError(
                    f"{'stdout' if name == '-' else name} can't be written to: "
                    f"{error.strerror or error}."
                ) from error

        return write

    # half a surrogate pair, as an id may have it, becomes the escape that JSON reads as the same
    if name != "-":
        Path(name).absolute().parent.mkdir(parents=True, exist_ok=True)
        file = open(name, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        try:
            yield to(file)
        except BaseException:
            with suppress(OSError):  # what couldn't be written can't be on closing either
                file.close()
            raise
        file.close()
        return
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):  # something that stands for it
        yield to(out)
        return
    encoding, errors = out.encoding, out.errors
    out.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        with _blocking(out):
            yield to(out)
    finally:
        out.reconfigure(encoding=encoding, errors=errors)


async def _lines(source: IO[bytes], name: str) -> AsyncIterator[str]:
    """Lines as they come; waiting for one holds nothing up, not even the end of the command.

    Raises ConfigError where the system can't read on.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | BaseException] = asyncio.Queue(maxsize=64)

    def read() -> None:
        goes_on = True
        while goes_on:
            got: bytes | BaseException
            try:
                got = source.readline()
                goes_on = bool(got)
            except BaseException as error:  # whatever it is, somebody waits
                got, goes_on = error, False
            waiting = queue.put(got)
            try:
                asyncio.run_coroutine_threadsafe(waiting, loop).result()
            except (RuntimeError, CancelledError):  # nobody waits for it any more
                waiting.close()
                return

    threading.Thread(target=read, name="penstock-lines", daemon=True).start()
    while line := await queue.get():
        if isinstance(line, OSError):
            raise ConfigError(f"{name} can't be read on: {line.strerror or line}.") from line
        if isinstance(line, BaseException):
            raise line
        yield line.decode(errors="surrogateescape")  # what isn't UTF-8 is refused with its line


@contextmanager
def _bar(name: str) -> Iterator[Callable[[], None]]:
    if not console.is_terminal():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    total = None
    if name != "-" and Path(name).is_file():  # what a pipe holds can be read once
        with suppress(OSError), open(name, "rb") as file:
            total = sum(1 for line in file if line.strip())
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("Requests", total=total)
        yield lambda: bars.advance(task)


def _summary(llm: AsyncLLM, counts: Counts, seconds: float, compiled: int) -> list[str]:
    ledger = llm.engine.ledger
    total = ledger.total
    skipped = f", {counts.skipped} answered before" if counts.skipped else ""
    tokens = counts.prompt_tokens + counts.generated_tokens
    share, drafts = total.share, DraftStats.of(llm.engine)
    floor = "floor unknown: penstock doctor measures it"
    if not total.steps:
        floor = "nothing was computed"
    elif share is not None:
        floor = f"{share:.0%} of the hardware floor ({total.bound}-bound)"
    return [
        f"requests   {counts.answered} answered, {counts.failed} failed{skipped}",
        f"tokens     {counts.prompt_tokens:,} of prompts, {counts.generated_tokens:,} generated; "
        f"{tokens / seconds:,.1f} tok/s over {seconds:.2f} s",
        f"steps      {total.steps}, {total.tokens_per_s:,.1f} tok/s, {floor}",
        *([] if drafts is None else [drafts.line()]),
        f"compiled: {compiled}",
    ]
