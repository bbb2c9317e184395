"""A fleet's file and its configuration: what is read, and what is refused and how."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cpus import numa_cpus, parse_cpus, usable_cpus
from penstock.errors import ConfigError
from penstock.fleet.config import FleetConfig, ModelConfig
from penstock.fleet.files import read_fleet
from penstock.fleet.needs import Needs, Node
from penstock.server import Key, Limits, ServerConfig

FILE = """
policy = "least"
max_loaded = 2

[[model]]
name = "chat"
model = "stories-chat"
instances = 1
idle_timeout_s = 60

[model.options]
quantization = "w4a8"
max-num-seqs = 8
enable_prefix_caching = false
log-prompts = true
lora-modules = ["a=x", "b=y"]

[[model]]
name = "rare"
model = "here"
instances = [0, 3]
options = ["--seed", "1"]
target_demand = 0.5

[[model]]
name = "far"
workers = ["http://10.0.0.1:8000", "https://example.org/llm"]

[[ensemble]]
name = "both"
[[ensemble.stage]]
name = "draft"
model = "rare"
prompt = "Write about {input}."
parameters = {max_tokens = 20}
[[ensemble.stage]]
name = "end"
model = "chat"
system = "Be kind."
prompt = "Improve: {draft}"
"""


def read(folder: Path, text: str, **chosen: Any) -> FleetConfig:
    file = folder / "fleet.toml"
    file.write_text(text)
    return read_fleet(file, ServerConfig(), chosen)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    fleet = read(tmp_path, FILE, max_attempts=2)
    chat, rare, far = fleet.models
    assert (fleet.policy, fleet.max_loaded, fleet.max_attempts) == ("least", 2, 2)
    assert chat == ModelConfig(
        "chat",
        "stories-chat",
        idle_timeout_s=60,
        options=(
            "--quantization=w4a8", "--max-num-seqs=8", "--no-enable-prefix-caching",
            "--log-prompts", "--lora-modules=a=x", "--lora-modules=b=y",
        ),
    )  # fmt: skip
    assert rare.instances == (0, 3)
    assert rare.model == str(tmp_path / "here")  # as seen from the file
    assert rare.options == ("--seed", "1")
    assert far.workers == ("http://10.0.0.1:8000", "https://example.org/llm")
    (both,) = fleet.ensembles
    assert [stage.name for stage in both.stages] == ["draft", "end"]
    assert both.stages[0].parameters == {"max_tokens": 20}


def test_what_is_chosen_counts_for_more(tmp_path: Path) -> None:
    assert read(tmp_path, FILE, policy="prefix").policy == "prefix"


MODEL = '[[model]]\nname = "m"\nmodel = "stories"\n'
WRONG = {
    "polcy = 1": "'polcy' isn't known. Did you mean 'policy'?",
    "policy = 1": "policy is 1; it must be a text",
    'policy = "best"\n' + MODEL: "There are: prefix, least, round_robin",
    "max_loaded = true": "max_loaded is True; it must be an integer",
    "max_attempts = 0\n" + MODEL: "max_attempts is 0; it must be at least 1",
    "start_timeout_s = -1\n" + MODEL: "start_timeout_s is -1",
    "start_timeout_s = inf\n" + MODEL: "start_timeout_s is inf",
    "model = 3": "model must be tables, each below [[model]]",
    "[[model]]": "model 1: needs a name",
    "x = ": "can't be read",
    '[[model]]\nname = "m"': "give either model or workers",
    '[[model]]\nname = "a b"\nmodel = "x"': "a name has up to 128",
    MODEL + "instances = 0": "at most 1 or more",
    MODEL + "instances = [2, 1]": "instances is 2 to 1",
    MODEL + "instances = [1]": "write 2, or [0, 3]",
    MODEL + "instances = [1, true]": "write 2, or [0, 3]",
    MODEL + "instances = 1000": "0 to 256",
    MODEL + "sise = 1": "'sise' isn't known",
    MODEL + 'options = ["--port=1"]': "can't have the option --port: the fleet listens",
    MODEL + "options = {api-key = 'x'}": "can't have the option --api-key",
    MODEL + "options = {page = false}": "can't have the option --page",
    MODEL + "options = {x = {}}": "x can't be {}",
    MODEL + "options = [1]": "options must be a list of texts",
    MODEL + 'cpus = "all"': "it must be shared, split, numa, or a list",
    MODEL + 'cpus = ["0", "1"]': "cpus has 2 sets, and there may be 1 instances",
    MODEL + 'cpus = ["9000"]': "9000 isn't usable here",
    MODEL + 'cpus = [""]': "one set is empty",
    MODEL + 'cpus = ["a"]': "write it like 0-3,8",
    MODEL + 'instances = 200\ncpus = "split"': "can't be split among 200",
    '[[model]]\nname="m"\nmodel=""': "model is empty",
    '[[model]]\nname="m"\nworkers = ["http://a"]\ninstances = 2': "are for models started here",
    '[[model]]\nname="m"\nworkers = ["http://a"]\nidle_timeout_s = 3': "models started here",
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "m", prompt = "x",'
    + 'parameters = {foo = 1}}]': "stage 'a': parameters: 'foo' isn't a field",
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "m", prompt = "x",'
    + 'parameters = {max_tokens = "a"}}]': "stage 'a': parameters: max_tokens",
    MODEL + "prefill = -1": "prefill is -1",
    MODEL + "prefill = 1.5": "prefill is 1.5; it must be an integer",
    MODEL + "prefill = 1\ninstances = [0, 1]": "its instances may all rest",
    MODEL + "prefill = 1\nprefill_from = 0": "prefill_from is 0",
    MODEL + "prefill = 1\nprefill_space = inf": "prefill_space inf",
    MODEL + "prefill_from = 100": "prefill_from is for models with prefill",
    MODEL + "prefill_space = 1": "prefill_space is for models with prefill",
    MODEL + "prefill = 1\nprefill_space = 1\noptions = ['--prefix-cache-dir=x']": "of their own",
    MODEL + "prefill = 1\noptions = ['--prefix-cache-disk-space=1']": "give prefill_space",
    MODEL + "prefill = 1\ncpus = ['0']": "cpus has 1 sets, and there may be 2 instances",
    MODEL + 'prefill_workers = ["http://a"]': "prefill_workers are for workers that run elsewhere",
    MODEL + "idle_timeout_s = 0": "idle_timeout_s is 0",
    MODEL + "target_demand = 1.5": "target_demand is 1.5",
    MODEL + 'workers = ["http://a"]': "give either model or workers",
    MODEL + 'api_key_env = "X"': "api_key_env is for workers",
    'ray = "ray://h:1"\n' + MODEL: "ray is 'ray://h:1'; it must be auto, local, or HOST:PORT",
    "ray = 1\n" + MODEL: "ray is 1; it must be a text",
    MODEL + 'on = "ray"': "to run on Ray, and the fleet has no ray. Give it",
    MODEL + "ray = {num_cpus = 2}": "to run on Ray, and the fleet has no ray. Give it",
    MODEL + 'on = "there"': "on is 'there'; it must be here or ray",
    MODEL + 'on = "here"\nray = {}': "runs here, and has a table ray",
    'ray = "auto"\n' + MODEL + 'on = "here"': "and no model is started there",
    'ray = "auto"\n' + MODEL + 'cpus = "split"': "Ray reserves CPUs",
    'ray = "auto"\n' + MODEL + "prefill = 1": "Give it the option --prefix-cache-dir",
    MODEL + "ray = {num_cpus = 0}": "num_cpus is 0; it must be 1 to 4096",
    MODEL + "ray = {num_gpus = -1}": "num_gpus is -1",
    MODEL + "ray = {num_cpu = 1}": "'num_cpu' isn't known. Did you mean 'num_cpus'?",
    MODEL + "ray = {resources = {CPU = 1}}": "resources has 'CPU'; give num_cpus",
    MODEL + "ray = {resources = {memory = 1}}": "resources has 'memory'",
    MODEL + "ray = {resources = {x = 0}}": "x is 0; it must be a number above 0",
    MODEL + "ray = {resources = {x = true}}": "x is True; it must be a number above 0",
    '[[model]]\nname="m"\nworkers = ["http://a"]\non = "ray"': "for models started by the fleet",
    MODEL + MODEL: "named 'm'",
    MODEL + "max_loaded = 1": "'max_loaded' isn't known",
    '[[model]]\nname="m"\nworkers = ["ftp://a"]': "isn't an address like",
    '[[model]]\nname="m"\nworkers = ["http://a/?x"]': "isn't an address like",
    '[[model]]\nname="m"\nworkers = ["http://a", "http://a"]': "an address is there twice",
    '[[model]]\nname="m"\nworkers = ["http://a"]\nprefill = 1': "give prefill_workers",
    '[[model]]\nname="m"\nworkers = ["http://a"]\nprefill_workers = ["http://a"]': "there twice",
    '[[model]]\nname="m"\nworkers = ["http://a"]\noptions=["--x"]': "options are for models",
    '[[model]]\nname="m"\nworkers = ["http://a"]\napi_key_env="PENSTOCK_NO"': "isn't set",
    MODEL + '[[ensemble]]\nname = "e"': "has no stage",
    MODEL + "[[ensemble]]": "ensemble 1: needs a name",
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "a"}]': "stage 1: needs a model",
    MODEL + '[[ensemble]]\nname = "m"\nstage = [{name = "a", model = "m", prompt = "x"}]': "'m'",
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "n", prompt = "x"}]': (
        "there is no model 'n'"
    ),
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "m", prompt = "{b}"}]': (
        "{b} is no stage before it. There is: input"
    ),
    MODEL + '[[ensemble]]\nname = "e"\nstage = [{name = "input", model = "m", prompt = ""}]': (
        "given once"
    ),
    MODEL
    + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "m", prompt = "{input}"},'
    + '{name = "b", model = "m", prompt = "{input}"}]': "nobody reads what the stage 'a' says",
    MODEL
    + '[[ensemble]]\nname = "e"\nstage = [{name = "a", model = "m", prompt = "x",'
    + "parameters = {stream = true}}]": "stream can't be among its parameters",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert WRONG[text] in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_fleet(tmp_path / "none.toml", ServerConfig())


def test_models_that_always_run_are_loaded() -> None:
    models = (ModelConfig("a", "x"), ModelConfig("b", "x"), ModelConfig("c", "x", (0, 1)))
    assert FleetConfig(models, max_loaded=2).max_loaded == 2
    with pytest.raises(ConfigError, match=r"max_loaded is 1, and 2 models always run \(a, b\)"):
        FleetConfig(models, max_loaded=1)


def test_tokens_a_minute_are_refused() -> None:
    keys = (Key.of("x", "alice", Limits(tokens_per_minute=5)),)
    with pytest.raises(ConfigError, match="'alice' has tokens_per_minute"):
        FleetConfig((ModelConfig("a", "x"),), ServerConfig(keys=keys))


def test_cpus() -> None:
    assert parse_cpus("0-2,5, 7-7") == (0, 1, 2, 5, 7)
    assert parse_cpus("") == ()
    assert set(usable_cpus()) == os.sched_getaffinity(0)
    assert {cpu for node in numa_cpus() for cpu in node} == set(usable_cpus())


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="has one CPU")
def test_cpus_are_split() -> None:
    model = ModelConfig("a", "x", (1, 2), cpus="split")
    first, second = model.cpus_of(0), model.cpus_of(1)
    assert first is not None
    assert second is not None
    assert first + second == usable_cpus()
    assert ModelConfig("a", "x").cpus_of(0) is None
    assert ModelConfig("a", "x", cpus="numa").cpus_of(0) == numa_cpus()[0]
    given = ((usable_cpus()[1],), (usable_cpus()[0],))
    assert ModelConfig("a", "x", (2, 2), cpus=given).cpus_of(0) == given[0]


def test_prefillers() -> None:
    assert ModelConfig("a", "x").prefillers is None
    own = ModelConfig("a", "x", (1, 2), ("--x",), prefill=3).prefillers
    assert own is not None
    assert (own.instances, own.options, own.prefill, own.is_prefill) == ((3, 3), ("--x",), 0, True)
    assert own.prefillers is None
    far = ModelConfig("a", workers=("http://a",), prefill_workers=("http://b", "http://c"))
    assert far.prefillers is not None
    assert far.prefillers.workers == ("http://b", "http://c")


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="has one CPU")
def test_prefillers_have_cpus_of_their_own() -> None:
    model = ModelConfig("a", "x", cpus="split", prefill=1)
    assert model.prefillers is not None
    first, second = model.cpus_of(0), model.prefillers.cpus_of(0)
    assert first is not None
    assert second is not None
    assert first + second == usable_cpus()


def test_what_ray_reserves(tmp_path: Path) -> None:
    text = 'ray = "10.0.0.7:6379"\n' + MODEL + """
[model.ray]
num_cpus = 4
num_gpus = 1
resources = {fast = 0.5}
[[model]]
name = "plain"
model = "stories"
[[model]]
name = "near"
model = "stories"
on = "here"
[[model]]
name = "far"
workers = ["http://a"]
"""  # fmt: skip
    fleet = read(tmp_path, text)
    assert [fleet.needs_of(x) for x in fleet.models] == [
        Needs(4, 1, {"fast": 0.5}), Needs(), None, None,
    ]  # fmt: skip
    assert read(tmp_path, text, ray="auto").ray == "auto"
    folder = '[model.options]\nprefix-cache-dir = "/shared"'
    own = read(tmp_path, 'ray = "auto"\n' + MODEL + "prefill = 1\n" + folder)
    assert own.models[0].prefillers is not None
    assert own.needs_of(own.models[0].prefillers) == Needs()


def test_what_ray_lacks() -> None:
    def node(i: int, free: float, **others: float) -> Node:
        return Node(f"10.0.0.{i}", {"CPU": 8.0, **others}, {"CPU": free})

    assert Needs(4).lack([node(1, 2), node(2, 4)]) == ""
    assert Needs(4).lack([node(1, 2), Node("10.0.0.9", {}, {}), node(2, 3.5)]) == (
        "It waits for what Ray is to reserve: CPU 4. Free: CPU 2 of 8 on 10.0.0.1; CPU 3.5 of 8 on "
        "10.0.0.2."
    )
    assert Needs(2, 1).lack([node(1, 8)]) == (
        "It waits for what Ray is to reserve: CPU 2, GPU 1. Free: CPU 8 of 8, GPU 0 of 0 on "
        "10.0.0.1. No node is large enough."
    )
    assert Needs().lack([node(i, 0) for i in range(10)]).endswith("10.0.0.7; 2 nodes more.")
    assert "Free: nothing, there is no node. No node is large" in Needs().lack([])


def test_what_options_say() -> None:
    options = ("--lora-modules", "a=x", "--lora-modules=b=y", "--scheduling-policy=edf")
    model = ModelConfig("m", "x", options=options)
    assert (model.adapters, model.policy) == (["a", "b"], "edf")
    assert (ModelConfig("m", "x").adapters, ModelConfig("m", "x").policy) == ([], "fcfs")
    assert ModelConfig("m", workers=("http://a",)).policy is None
