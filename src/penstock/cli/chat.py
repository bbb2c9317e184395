"""`penstock chat`: a conversation in the terminal, through the model's chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import console
from penstock.cli.form_options import DRAWN, LOADED, Drawn, Form, Guided, Loaded
from penstock.cli.generate import TextWriter
from penstock.cli.loading import load
from penstock.cli.options import (
    CHAT_MODEL,
    Images,
    Model,
    grouped,
    sampling,
)
from penstock.cli.stats import DraftStats, RunStats, machine_peaks
from penstock.errors import ChatTemplateError, InvalidPromptError, PenstockError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

    from penstock.bench.meter import Meter
    from penstock.engine import RequestOptions, RequestOutput
    from penstock.engine.prompts import Encoded
    from penstock.models.vision.pictures import Pictures
    from penstock.roofline import StepRecord
    from penstock.sampling import SamplingParams

HELP = """\
/image FILE   a picture, that the next message is about
/reset   forget the conversation
/stats   speed of the last reply, and its share of what this machine allows
/help    this
/exit    leave, as Ctrl-D does; Ctrl-C stops a reply"""


@grouped
def chat(
    form: Form,
    guided: Guided,
    model: Model = CHAT_MODEL,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before the conversation.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="At most this many tokens a reply. Default: as many as fit.",
            rich_help_panel="Sampling",
        ),
    ] = None,
    image: Images = None,
    drawn: Drawn = DRAWN,
    loaded: Loaded = LOADED,
) -> None:
    """Talk with a model. Ctrl-C stops a reply, Ctrl-D leaves.

    When stdin is no terminal, every line of it is a message.
    """
    from penstock.bench.meter import Meter
    from penstock.engine.prompts import check_chat, default_params

    chosen = drawn.with_(form.chosen(), guided.chosen())
    check_chat(sampling(**chosen, max_tokens=max_tokens))  # refuses before the model is loaded
    config = loaded.config(model)
    meter = Meter(config, load(config))
    suggested = default_params(meter.runtime.model.generation)
    params = suggested.over(**chosen, max_tokens=max_tokens)
    options = loaded.wishes(meter.runtime)
    conversation = Conversation(meter, params, options, model, system)
    for file in image or ():
        conversation.show(str(file))
    if console.is_terminal(sys.stdin):
        console.note(f"{model}: type a message; /help lists commands, Ctrl-D leaves.")
        _talk(conversation)
    else:
        _answer_lines(conversation)


class Conversation:
    """Messages so far, and the engine that answers them."""

    def __init__(
        self,
        meter: Meter,
        params: SamplingParams,
        options: RequestOptions,
        model: str,
        system: str | None,
    ) -> None:
        tokenizer = meter.runtime.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ChatTemplateError(
                f"{model} has no chat template: it completes text and doesn't know whose turn it "
                f"is. Use: penstock generate {model} -p TEXT"
            )
        self._tokenizer = tokenizer
        self._meter = meter
        self._params = params
        self._options = options
        self._opening: list[Any] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._last: tuple[list[StepRecord], RequestOutput, DraftStats | None] | None = None
        self._count = 0
        self._images: list[Image] = []  # that the next message brings

    def show(self, file: str) -> None:
        """Bring a picture with the next message. Raises InvalidPromptError."""
        from penstock.models.vision.opening import open_picture

        if self._pictures is None:
            raise InvalidPromptError("This model sees no pictures. Load one that does.")
        self._images.append(open_picture(file))
        width, height = self._images[-1].size
        count = len(self._images)
        typer.echo(
            f"[{width} × {height} pixels; the next message brings {count} "
            f"picture{'s' * (count > 1)}]",
            err=True,
        )

    @property
    def _pictures(self) -> Pictures | None:
        sight = self._meter.runtime.sight
        return None if sight is None else sight.pictures

    def reset(self) -> None:
        """Forget everything but the system's message."""
        self._messages = list(self._opening)

    def ask(self, text: str) -> None:
        """Answer `text` on stdout; an interrupted answer counts as far as it went."""
        from penstock.engine.prompts import encode_chat

        parts: list[Any] = [{"type": "image", "image": image} for image in self._images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        messages = [*self._messages, {"role": "user", "content": content}]
        prompt = encode_chat(messages, self._tokenizer, self._pictures)
        self._images = []
        output = self._stream(prompt)
        if output.error is not None:
            raise RequestError(f"The reply failed: {output.error}") from output.error
        reply = output.outputs[0]
        if reply.text:
            self._messages = [*messages, {"role": "assistant", "content": reply.text}]
        if reply.finish_reason == "length":
            full = len(output.prompt_token_ids) + len(reply.token_ids)
            limit = self._meter.engine.max_model_len
            console.note(
                f"(the context of {limit} tokens is full: /reset starts anew)"
                if full >= limit
                else f"(cut after --max-tokens {self._params.max_tokens})"
            )

    def _stream(self, prompt: Encoded) -> RequestOutput:
        from penstock.engine.llm import interrupt_between_steps

        meter, request_id = self._meter, str(self._count)
        self._count += 1
        meter.take()
        speculation = meter.engine.speculation
        before = None if speculation is None else speculation.counts.copy()
        meter.engine.add_request(
            request_id,
            prompt.tokens,
            self._params,
            stream=True,
            options=prompt.options(self._options),
        )
        writer = TextWriter()
        output: RequestOutput | None = None
        try:
            with interrupt_between_steps() as check:
                while meter.engine.has_unfinished:
                    for output in meter.step():
                        writer.show(output.outputs[0].text)
                    check()
        except KeyboardInterrupt:
            meter.engine.abort(request_id)
            for output in meter.step():
                writer.show(output.outputs[0].text)
        writer.end()
        assert output is not None  # an added request has an output when it ends
        self._last = meter.take(), output, DraftStats.of(meter.engine, before)
        return output

    def stats(self) -> list[str]:
        """Lines about the last reply."""
        if self._last is None:
            return ["There is no reply yet."]
        records, output, drafts = self._last
        peaks = machine_peaks(self._meter.runtime.device)
        return RunStats.of(self._meter, records, peaks, drafts).lines([output])


def _talk(conversation: Conversation) -> None:
    """Messages from somebody at a terminal, until they leave."""
    import readline  # noqa: F401  its import gives input() editing and history

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            console.note("(Ctrl-D or /exit leaves)")
            continue
        if text == "/exit":
            return
        try:
            _take(conversation, text)
        except PenstockError as error:
            console.error(error)
        except KeyboardInterrupt:
            if not text.startswith("/"):  # pressed twice: within a step, of which half is done
                raise
            typer.echo(err=True)


def _answer_lines(conversation: Conversation) -> None:
    """Messages from a file or a pipe. One that fails is told, and the others are answered; then
    the command fails.
    """
    failed = 0
    for line in sys.stdin:
        text = line.strip()
        if text == "/exit":
            break
        try:
            _take(conversation, text)
        except PenstockError as error:
            failed += 1
            console.error(error)
    if failed:
        raise typer.Exit(1)


def _take(conversation: Conversation, text: str) -> None:
    commands: dict[str, Any] = {
        "/reset": conversation.reset,
        "/help": lambda: typer.echo(HELP, err=True),
        "/stats": lambda: typer.echo("\n".join(conversation.stats()), err=True),
    }
    if text.startswith("/image "):
        conversation.show(text.removeprefix("/image ").strip())
    elif text == "/image":
        raise RequestError("/image needs a picture's file: /image FILE.")
    elif text in commands:
        commands[text]()
    elif text.startswith("/") and " " not in text:
        known = ", ".join(["/image FILE", *commands, "/exit"])
        raise RequestError(f"There is no command {text}; there are {known}.")
    elif text:
        conversation.ask(text)
