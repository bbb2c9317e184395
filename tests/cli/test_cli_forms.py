"""Forms, guidance, healing and beams on the command line: what the Python interface gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from typer.testing import Result

from penstock import LLM, SamplingParams
from penstock.sampling import BeamSearchParams

Run = Callable[..., Result]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rex", "Bo"]}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DIGITS = 'root ::= [0-9] [0-9] "."'


@pytest.fixture(scope="module")
def llm(base_model: Path) -> LLM:
    return LLM(base_model)


def written(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def generated(llm: LLM, prompt: str, **params: Any) -> str:
    (output,) = llm.generate(prompt, SamplingParams(**params))
    return output.outputs[0].text


@pytest.mark.parametrize(
    ("option", "text", "form"),
    [
        (
            "--json-schema",
            json.dumps(SCHEMA),
            {"json": SCHEMA, "disable_additional_properties": True},
        ),
        ("--grammar", DIGITS, {"grammar": DIGITS}),
    ],
)
def test_forms_as_text_and_as_files(
    penstock: Run, base_model: Path, llm: LLM, tmp_path: Path, option: str, text: str, form: Any
) -> None:
    file = tmp_path / "form"
    file.write_text(text)
    options = ("-p", "hello", "--seed", 3, "--max-tokens", 60)
    given = written(penstock("generate", base_model, *options, option, text))
    assert written(penstock("generate", base_model, *options, option, file)) == given
    expected = generated(llm, "hello", seed=3, max_tokens=60, structured_outputs=form)
    if "json" in form:
        jsonschema_rs.validate(SCHEMA, json.loads(given))
        assert json.loads(given) == json.loads(expected)  # a terminal's line ends may differ
    else:
        assert given == expected
        assert given[:2].isdigit() and given[2:] == "."


def test_a_regex_and_choices(penstock: Run, base_model: Path) -> None:
    options = ("generate", base_model, "-p", "hello", "--seed", 1)
    assert written(penstock(*options, "--regex", "[A-F]{4}")).strip("ABCDEF") == ""
    assert written(penstock(*options, "--choice", "yes", "--choice", "no")) in ("yes", "no")


def test_a_chat_of_choices(penstock: Run, chat_model: Path) -> None:
    result = penstock("chat", chat_model, "--choice", "yes", "--choice", "no", stdin="a\nb\n")
    assert result.exit_code == 0, result.output
    assert set(result.stdout.split()) <= {"yes", "no"}
    assert len(result.stdout.split()) == 2


def test_guidance(penstock: Run, base_model: Path, llm: LLM) -> None:
    options = ("--temperature", 0, "--max-tokens", 20)
    scale = ("--guidance-scale", 3, "--negative-prompt", "good bye")
    given = written(penstock("generate", base_model, "-p", "hello", *options, *scale))
    greedy = {"temperature": 0, "max_tokens": 20}
    led = generated(llm, "hello", guidance_scale=3.0, negative_prompt="good bye", **greedy)
    assert given == led.removesuffix("\n")
    assert led != generated(llm, "hello", **greedy)


def test_a_healed_prompt(penstock: Run, base_model: Path, llm: LLM) -> None:
    options = ("--temperature", 0, "--max-tokens", 20, "--token-healing")
    given = written(penstock("generate", base_model, "-p", "hello a", *options))
    greedy = {"temperature": 0, "max_tokens": 20}
    healed = generated(llm, "hello a", token_healing=True, **greedy)
    assert given == healed.removesuffix("\n")
    assert healed != generated(llm, "hello a", **greedy)


def test_a_search(penstock: Run, base_model: Path, llm: LLM) -> None:
    options = ("-p", "hello", "--max-tokens", 12, "--stop", "a", "--beam-width", 4)
    more = ("--length-penalty", -1.5, "--sampling", "early_stopping=true", "--n", 3, "--json")
    params = BeamSearchParams(
        beam_width=4, n=3, max_tokens=12, stop="a", length_penalty=-1.5, early_stopping=True
    )
    (expected,) = llm.beam_search("hello", params)
    found = [
        json.loads(line)
        for line in written(penstock("generate", base_model, *options, *more)).splitlines()
    ]
    assert [(x["index"], x["text"], x["score"]) for x in found] == [
        (i, one.output_text, one.score) for i, one in enumerate(expected.sequences)
    ]
    plain = BeamSearchParams(beam_width=4, max_tokens=12, stop="a")
    (best,) = llm.beam_search("hello", plain)
    assert written(penstock("generate", base_model, *options)) == best.sequences[0].output_text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--json-schema", "{"), "--json-schema isn't JSON"),
        (("--json-schema", "no.json"), "looks like the name of a file, and there is none"),
        (("--json-schema", " "), "--json-schema is empty"),
        (("--grammar", "no.gbnf"), "'no.gbnf' looks like the name of a file, and there is none"),
        (("--grammar", "a:b/no.gbnf"), "looks like the name of a file, and there is none"),
        (("--grammar", "/"), "neither written out nor a file"),
        (("--grammar", ""), 'write out root ::= "yes"'),
        (("--regex", "a", "--choice", "b"), "--regex and --choice both"),
        (("--choice", ""), "--choice[0]"),
        (("--length-penalty", 2), "give --beam-width too"),
        (("--beam-width", 2, "--top-p", 0.5), "top_p has no effect on a search"),
        (("--beam-width", 2, "--token-healing"), "token_healing has no effect on a search"),
        (("--beam-width", 2, "--speculative-config", '{"method": "ngram"}'), "guesses for beams"),
        (("--beam-width", 2, "--n", 3), "n is 3"),
        (("--beam-width", 0), "beam_width is 0"),
        (("--guidance-scale", -1), "guidance_scale is -1"),
        (("--negative-prompt", "x"), "Raise the scale"),
        (("--token-healing", "--regex", "a"), "Leave out one of the two"),
        (("--temperature", 1, "--sampling", "temperature=0"), "temperature has an option of its"),
    ],
)
def test_what_cant_be_is_refused_before_a_model_is_loaded(
    penstock: Run, tmp_path: Path, options: tuple[Any, ...], words: str
) -> None:
    result = penstock("generate", tmp_path / "no model", "-p", "hello", *options)
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())


def test_a_form_that_the_model_refuses(penstock: Run, base_model: Path) -> None:
    result = penstock("generate", base_model, "-p", "hello", "--regex", "(a")
    assert result.exit_code == 1
    assert "--regex can't be followed" in " ".join(result.stderr.split())


def test_any_parameter_by_its_name(penstock: Run, base_model: Path) -> None:
    options = ("generate", base_model, "-p", "hello", "--max-tokens", 9)
    named = written(penstock(*options, "--sampling", "temperature=0"))
    assert named == written(penstock(*options, "--temperature", 0))
