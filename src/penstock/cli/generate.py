"""`penstock generate`: complete prompts, as text while it comes or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli import console
from penstock.cli.form_options import (
    DRAWN,
    LOADED,
    Drawn,
    Form,
    Guided,
    Loaded,
    Search,
    as_given,
)
from penstock.cli.loading import load
from penstock.cli.options import (
    MODEL,
    AsJson,
    Expected,
    IgnoreEos,
    Images,
    MaxTokens,
    Model,
    Prompts,
    Samples,
    Stats,
    Stop,
    TokenHealing,
    given,
    grouped,
    sampling,
)
from penstock.cli.stats import DraftStats, RunStats, machine_peaks, metrics
from penstock.errors import ConfigError, InvalidSamplingError, PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.bench.meter import Meter
    from penstock.engine import CompletionOutput, RequestOptions, RequestOutput
    from penstock.engine.prompts import Prompt
    from penstock.sampling import BeamSearchParams, SamplingParams


@grouped
def generate(
    prompt: Prompts,
    form: Form,
    guided: Guided,
    search: Search,
    model: Model = MODEL,
    max_tokens: MaxTokens = 128,
    drawn: Drawn = DRAWN,
    stop: Stop = None,
    n: Samples = 1,
    ignore_eos: IgnoreEos = False,
    token_healing: TokenHealing = False,
    image: Images = None,
    prediction: Expected = None,
    loaded: Loaded = LOADED,
    stats: Stats = False,
    as_json: AsJson = False,
) -> None:
    """Complete one or several prompts.

    The text of a single prompt is shown as it comes, and stdout has nothing
    else. Several prompts run as one batch. What a search finds is shown at its
    end.
    """
    own = given(
        max_tokens=max_tokens,
        stop=stop or None,
        n=n,
        ignore_eos=ignore_eos,
        token_healing=token_healing or None,
    )
    chosen = drawn.with_(own, form.chosen(), guided.chosen())
    prompts = _read(prompt)
    expected = None if prediction is None else _expecting(prediction)
    # What is out of range is refused before the model is loaded.
    beams = search.params(chosen)
    if beams is None:
        sampling(**chosen)
    elif loaded.speculative_config is not None:
        raise ConfigError(
            "--speculative-config has no effect on a search: nothing guesses for beams. Leave out "
            "it, or --beam-width."
        )
    meter = _engine(model, loaded)
    options = loaded.wishes(meter.runtime, expected)
    params = beams or _defaults(meter).over(**chosen)
    peaks = machine_peaks(meter.runtime.device) if stats or as_json else None
    if peaks is not None:
        meter.engine.ledger.peaks = peaks
    streaming = not as_json and len(prompts) == 1 and n == 1 and beams is None
    outputs = _run(meter, _seen(meter, prompts, image or []), params, options, streaming)
    found = None
    if peaks is not None:
        found = RunStats.of(meter, meter.take(), peaks, DraftStats.of(meter.engine))
    if form.chosen():
        _warn_of_cuts(outputs, params.max_tokens)
    if as_json:
        _print_json(outputs, found)
    elif not streaming:
        _print_texts(outputs)
    if stats and found is not None:
        for line in found.lines(outputs):
            typer.echo(line, err=True)


def _read(prompts: list[str]) -> list[str]:
    """The prompts, `-` replaced by what is on stdin without its last newline."""
    if prompts.count("-") > 1:
        raise typer.BadParameter("stdin can be read once, so '-' can be given once.")
    if "-" not in prompts:
        return prompts
    data = sys.stdin.buffer.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"What is on stdin isn't UTF-8 text: byte {data[error.start]:#04x} at position "
            f"{error.start} of {len(data)}."
        ) from error
    text = text.removesuffix("\n")
    return [text if prompt == "-" else prompt for prompt in prompts]


def _seen(meter: Meter, prompts: list[str], images: list[str]) -> list[Prompt]:
    """The prompts, of which a single one may have pictures: where it says, or before its text."""
    if not images:
        return list(prompts)
    if len(prompts) > 1:
        raise RequestError(f"--image goes with one prompt, and {len(prompts)} are given.")
    (text,), sight = prompts, meter.runtime.sight
    if sight is not None and sight.pictures.placeholder not in text:
        text = sight.pictures.written * len(images) + text
    return [{"prompt": text, "multi_modal_data": {"image": images}}]


def _expecting(file: Path) -> str:
    """What --prediction says, before the model is loaded."""
    from penstock.engine import RequestOptions

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--prediction {file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--prediction {file} isn't UTF-8 text: {error}.") from error
    RequestOptions(prediction=text)  # refuses an empty one
    return text


def _engine(model: str, loaded: Loaded) -> Meter:
    from penstock.bench.meter import Meter

    config = loaded.config(model)
    return Meter(config, load(config))


def _defaults(meter: Meter) -> SamplingParams:
    from penstock.engine.prompts import default_params

    return default_params(meter.runtime.model.generation)


def _run(
    meter: Meter,
    prompts: list[Prompt],
    params: SamplingParams | BeamSearchParams,
    options: RequestOptions,
    streaming: bool,
) -> list[RequestOutput]:
    """Run the prompts to their end, writing the text as it comes when `streaming`."""
    from penstock.engine.llm import interrupt_between_steps

    for i, text in enumerate(prompts):
        add = partial(meter.engine.add_request, params=params, stream=streaming)
        _add(meter, i, text, len(prompts), options, add)
    done: dict[str, RequestOutput] = {}
    writer = TextWriter()
    with interrupt_between_steps() as check:
        while meter.engine.has_unfinished:
            for output in meter.step():
                if streaming:
                    writer.show(output.outputs[0].text)
                if output.finished:
                    done[output.request_id] = output
            check()
    if streaming:
        writer.end()
    outputs = [done[str(i)] for i in range(len(prompts))]
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"Generation failed: {output.error}") from output.error
    return outputs


def _add(
    meter: Meter,
    index: int,
    prompt: Prompt,
    count: int,
    options: RequestOptions,
    add: Callable[..., None],
) -> None:
    from penstock.engine.prompts import encode

    sight = meter.runtime.sight
    pictures = None if sight is None else sight.pictures
    try:
        found = encode(prompt, meter.runtime.tokenizer, pictures)
        add(str(index), found.tokens, prompt=found.text, options=found.options(options))
    except PenstockError as error:
        if isinstance(error, InvalidSamplingError):
            error = as_given(error)
        if count == 1:
            raise error from None
        raise type(error)(f"Prompt {index + 1} of {count}: {error}") from error


class TextWriter:
    """Writes a growing text to stdout, what is new of it each time."""

    def __init__(self) -> None:
        self._shown = ""
        self._clean = console.is_terminal(sys.stdout)

    def show(self, text: str) -> None:
        """`text` begins with all that was shown before."""
        new = text[len(self._shown) :]
        if new:
            sys.stdout.write(console.printable(new) if self._clean else new)
            sys.stdout.flush()
            self._shown = text

    def end(self) -> None:
        """A last newline, where the text has none."""
        if not self._shown.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _warn_of_cuts(outputs: list[RequestOutput], asked: int | None) -> None:
    """Of answers that were to have a form, and may not have all of it."""
    cut = [o for each in outputs for o in each.outputs if o.finish_reason == "length"]
    if cut:
        by_context = asked is None or min(len(o.token_ids) for o in cut) < asked
        console.warning(
            f"{len(cut)} of the answers ended before {'its' if len(cut) == 1 else 'their'} form "
            f"said so, at {'the end of the context' if by_context else f'--max-tokens {asked}'}: "
            "what is there may be only the beginning."
        )


def _print_texts(outputs: list[RequestOutput]) -> None:
    """Headings go to stderr, so that stdout is only text."""
    for i, output in enumerate(outputs, 1):
        for sample in output.outputs:
            parts = [f"prompt {i} of {len(outputs)}"] if len(outputs) > 1 else []
            if len(output.outputs) > 1:
                parts.append(f"sample {sample.index + 1} of {len(output.outputs)}")
            if parts:
                console.note(f"── {', '.join(parts)} ──")
            writer = TextWriter()
            writer.show(sample.text)
            writer.end()


def _print_json(outputs: list[RequestOutput], found: RunStats | None) -> None:
    """One line a sample; the phases are those of the whole run, whose steps are shared."""
    run = found.as_dict() if found is not None else None
    for output in outputs:
        for sample in output.outputs:
            typer.echo(json.dumps(_as_dict(output, sample, run), ensure_ascii=False))


def _as_dict(
    output: RequestOutput, sample: CompletionOutput, run: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        **({} if sample.score is None else {"score": sample.score}),
        "metrics": {**metrics(output), **(run or {})},
    }
