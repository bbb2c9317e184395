"""`--lora` and `--lora-modules`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lora_files import write_adapter
from typer.testing import Result

from penstock import LLM, LoRARequest, SamplingParams
from penstock.cli.lora_options import ServedAdapters, one_adapter
from penstock.errors import ConfigError, ModelNotFoundError
from penstock.models.hub import adapter_folder

Run = Callable[..., Result]
ONCE = "Once upon a time"


def test_generate(penstock: Run) -> None:
    greedy = ("--temperature", 0, "--max-tokens", 20)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    llm = LLM(enable_lora=True, max_num_seqs=2)
    asked = [LoRARequest("stories-verse"), None]
    want = [o.outputs[0].text for o in llm.generate([ONCE] * 2, params, lora_request=asked)]
    for more, text in ((("--lora", "stories-verse"), want[0]), ((), want[1])):
        result = penstock("generate", "-p", ONCE, *greedy, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout.removesuffix("\n") == text.removesuffix("\n")


def test_chat(penstock: Run) -> None:
    greedy = ("--temperature", 0, "--max-tokens", 12)
    plain = penstock("chat", *greedy, stdin="Tell me a story.\n")
    adapted = penstock("chat", *greedy, "--lora", "stories-shakespeare", stdin="Tell me a story.\n")
    assert plain.exit_code == adapted.exit_code == 0
    assert adapted.stdout and adapted.stdout != plain.stdout


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_no_adapter(penstock: Run, tmp_path: Path, command: str) -> None:
    prompt = ("-p", ONCE) if command == "generate" else ()
    result = penstock(command, *prompt, "--lora", tmp_path)
    assert result.exit_code == 1
    assert "is no adapter: it needs adapter_config.json" in result.output


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_one_adapter_a_text(penstock: Run, command: str) -> None:
    prompt = ("-p", ONCE) if command == "generate" else ()
    names = ("stories-verse", "stories-shakespeare")
    result = penstock(command, *prompt, "--lora", names[0], "--lora", names[1])
    assert result.exit_code == 1
    assert "--lora is given 2 times (stories-verse, stories-shakespeare)" in " ".join(
        result.output.split()
    )


def test_room_for_one(tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", [("model.layers.0.mlp.down_proj", (8, 9))], rank=40)
    assert one_adapter(None) == {}
    assert one_adapter("stories-verse")["max_lora_rank"] == 16
    wide = one_adapter(str(tmp_path / "wide"))
    assert wide == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 40}


def test_what_a_server_is_given(tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", [("model.layers.0.mlp.down_proj", (8, 9))], rank=40)
    as_json = json.dumps({"name": "b", "path": "stories-verse", "base_model_name": "stories"})
    served = ServedAdapters([f"a={tmp_path / 'wide'}", as_json])
    modules = served.modules()
    assert modules == {"a": tmp_path / "wide", "b": adapter_folder("stories-verse")}
    assert served.chosen(modules) == {"enable_lora": True, "max_lora_rank": 40}
    many = {str(i): adapter_folder("stories-verse") for i in range(9)}
    assert served.chosen(many)["max_loras"] == 9
    assert ServedAdapters().chosen({}) == {}
    assert ServedAdapters(enable_lora=True, max_loras=2).chosen({}) == {
        "enable_lora": True,
        "max_loras": 2,
    }
    assert ServedAdapters(allow_runtime_lora_updating=True).chosen({}) == {"enable_lora": True}
    for wrong in ("a", "=x", "a=", '{"name": "a"}', "{", '{"name": 3, "path": "x"}'):
        with pytest.raises(ConfigError, match="--lora-modules"):
            ServedAdapters([wrong]).modules()
    with pytest.raises(ConfigError, match="two adapters named 'a'"):
        ServedAdapters(["a=x", "a=y"]).modules()
    with pytest.raises(ConfigError, match="the model's own name, 'a'"):
        ServedAdapters(["a=stories-verse"]).modules(["a"])
    with pytest.raises(ConfigError, match="has 2 adapters, but --max-loras is 1"):
        ServedAdapters(max_loras=1).chosen(modules)
    with pytest.raises(ConfigError, match="of rank 40, but --max-lora-rank is 16"):
        ServedAdapters(max_lora_rank=16).chosen(modules)
    with pytest.raises(ModelNotFoundError, match="is no adapter"):
        ServedAdapters().chosen({"a": tmp_path})
