"""`penstock chat`: turns, commands, and Ctrl-C that stops a reply only."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from typer.testing import Result

from penstock import LLM, SamplingParams

Run = Callable[..., Result]
GREEDY = ("--temperature", 0, "--max-tokens", 6)


def replies(model: Path, *texts: str, system: str | None = None) -> list[str]:
    """What the Python interface answers, turn by turn."""
    llm, params = LLM(model), SamplingParams(temperature=0, max_tokens=6)
    messages = [{"role": "system", "content": system}] if system else []
    found = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        (output,) = llm.chat(messages, params)
        found.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


def lines(*texts: str) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_turns_share_their_history(penstock: Run, chat_model: Path) -> None:
    result = penstock("chat", chat_model, *GREEDY, stdin="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == lines(*replies(chat_model, "hello", "again"))
    assert "cut after --max-tokens 6" in result.stderr


def test_reset_forgets_all_but_the_system(penstock: Run, chat_model: Path) -> None:
    result = penstock(
        "chat", chat_model, *GREEDY, "--system", "Be brief.", stdin="one\n/reset\ntwo\n/exit\nno\n"
    )
    (one,) = replies(chat_model, "one", system="Be brief.")
    (two,) = replies(chat_model, "two", system="Be brief.")
    assert result.stdout == lines(one, two)


def test_commands(penstock: Run, chat_model: Path) -> None:
    result = penstock("chat", chat_model, *GREEDY, stdin="/stats\n/help\nhello\n/stats\n")
    assert "There is no reply yet." in result.stderr
    assert "Ctrl-C stops a reply" in result.stderr
    assert "generated 6 tokens" in result.stderr and "hardware floor" in result.stderr
    unknown = penstock("chat", chat_model, stdin="/quit\n")
    assert unknown.exit_code == 1
    assert "no command /quit" in unknown.stderr and "/exit" in unknown.stderr


def test_a_line_that_fails_does_not_end_a_piped_chat(penstock: Run, chat_model: Path) -> None:
    result = penstock("chat", chat_model, *GREEDY, stdin="/foo\nhello\n/reset\nhello\n")
    alone = penstock("chat", chat_model, *GREEDY, stdin="hello\n")
    assert result.exit_code == 1
    assert "no command /foo" in result.stderr
    assert result.stdout == 2 * alone.stdout


def test_stats_are_of_the_last_replys_drafts(penstock: Run, chat_model: Path) -> None:
    asked = {"model": str(chat_model), "num_speculative_tokens": 2, "adaptive": False}
    options = (*GREEDY, "--speculative-config", json.dumps(asked))
    result = penstock("chat", chat_model, *options, stdin="hello\n/stats\nhello\n/stats\n")
    shown = [line for line in result.stderr.splitlines() if line.startswith("drafts")]
    assert len(shown) == 2 and shown[0] == shown[1]  # not both replies' together
    assert "3 of 3 tokens accepted (100%) in 2 drafts" in shown[0]


def test_a_full_context_says_so(penstock: Run, chat_model: Path) -> None:
    result = penstock("chat", chat_model, "--max-model-len", 64, stdin="hello\n")
    assert result.exit_code == 0
    assert "context of 64 tokens is full" in result.stderr
    result = penstock("chat", chat_model, "--max-model-len", 64, stdin="X" * 99)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The prompt has ")


def test_a_model_without_template_names_generate(penstock: Run, base_model: Path) -> None:
    result = penstock("chat", base_model, stdin="hello\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr
    assert f"penstock generate {base_model} -p" in result.stderr


def test_ctrl_c_stops_the_reply_only(
    process: Callable[..., subprocess.Popen[bytes]], chat_model: Path
) -> None:
    terminal, theirs = pty.openpty()
    running = process("chat", chat_model, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        read_until(terminal, rb"> $")
        os.write(terminal, b"hello\n")
        read_until(terminal, rb"hello\r\n.")  # the reply has begun
        running.send_signal(signal.SIGINT)
        os.write(terminal, b"/stats\n")
        shown = read_until(terminal, rb"generated [\d,]+ tokens?.*> $")
        match = re.search(rb"generated ([\d,]+) token", shown)
        assert match is not None
        assert 0 < int(match[1].replace(b",", b"")) < 1900  # of about 2,030 that fit
        time.sleep(0.5)  # readline overlooks a signal between showing its prompt and waiting
        running.send_signal(signal.SIGINT)  # at the prompt it doesn't leave either
        read_until(terminal, rb"/exit leaves\)\r\n> $")
        os.write(terminal, b"\x04")  # Ctrl-D
        assert running.wait(timeout=30) == 0
    finally:
        os.close(terminal)


def read_until(terminal: int, pattern: bytes, timeout_s: float = 120) -> bytes:
    """What the terminal shows, up to `pattern`."""
    shown, end = b"", time.monotonic() + timeout_s
    while not re.search(pattern, shown, re.DOTALL):
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096)
    return shown
