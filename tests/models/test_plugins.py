"""A package beside Penstock: built, installed apart, found, and held against transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock import ops
from penstock.errors import ConfigError, KernelError, UnsupportedModelError
from penstock.kernels import native
from penstock.models import plugins
from penstock.nn.mlp import Mlp
from penstock.nn.spec import ExpertsSpec, MlpSpec
from penstock.plugins import include
from penstock.quant import Dense

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no kernels: {native.reason}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed in it."""
    work = tmp_path_factory.mktemp("plugin")
    source = work / "source"
    subprocess.run(["cp", "-r", str(ROOT / "examples/plugin"), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    installed = work / "site"
    done = subprocess.run(
        [*pip, "--no-index", "--target", str(installed), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return installed


@pytest.fixture(scope="module")
def jais2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny checkpoint, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("jais2")
    config = transformers.Jais2Config(
        vocab_size=320, hidden_size=64, intermediate_size=112, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = transformers.Jais2ForCausalLM(config).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("norm.weight")
            scale = 0.1 if norm or name.endswith("bias") else parameter.shape[-1] ** -0.5
            parameter.copy_(norm + scale * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(folder)
    return folder, model


def run(site: Path, code: str, **environment: str) -> Any:
    """What `code` prints as JSON, in a process that finds the package."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PROMPT = torch.randint(3, 320, (70,), generator=torch.Generator().manual_seed(5)).tolist()
SAYS = """
import json
from penstock import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
every = []
for options in several:
    llm = LLM(folder, skip_tokenizer_init=True, **options)
    found = []
    for given in (prompt, prompt[:9]):
        (out,) = llm.generate([{"prompt_token_ids": given}], params)
        lines = [next(iter(x.values())).logprob for x in out.prompt_logprobs[1:]]
        found.append([out.outputs[0].token_ids, lines])
    every.append(found)
    del llm
print(json.dumps(every))
"""


def says(site: Path, folder: Path, *several: dict[str, Any], **environment: str) -> Any:
    """What it says with each of the options, one after the other in one process."""
    given = f"folder, several, prompt = {str(folder)!r}, {list(several)!r}, {PROMPT!r}"
    return run(site, f"{given}\n{SAYS}", **environment)


@needs_native
def test_as_transformers_has_it(site: Path, jais2: tuple[Path, Any]) -> None:
    """In a native program and called one by one, by C and by the reference."""
    folder, model = jais2
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    want = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    ((tokens, found), short), eager = says(
        site, folder, {"dtype": "float32"}, {"dtype": "float32", "enforce_eager": True}
    )
    torch.testing.assert_close(torch.tensor(found), want, rtol=1e-4, atol=1e-4)
    assert eager == [[tokens, found], short]
    (bare,) = says(site, folder, {"dtype": "float32"}, PENSTOCK_KERNELS="reference")
    torch.testing.assert_close(torch.tensor(bare[0][1]), want, rtol=1e-4, atol=1e-4)


@needs_native
def test_all_that_families_have_comes_with_it(site: Path, jais2: tuple[Path, Any]) -> None:
    """The same bits in small steps and among ranks; in fewer bits; exported and built."""
    folder, _ = jais2
    ways = {"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"tensor_parallel_size": 2}
    plain, *others, quantized = says(
        site,
        folder,
        {"dtype": "bfloat16"},
        *({"dtype": "bfloat16", **way} for way in ways),
        {"quantization": "w8a8"},
    )
    for way, other in zip(ways, others, strict=True):
        assert other == plain, way
    assert len(quantized) == 2
    built = folder.parent / "jais2-engine"
    code = f"""
from pathlib import Path
from penstock.pipeline.build import BuildOptions, build
build(BuildOptions(model={str(folder)!r}, output=Path({str(built)!r}), dtype="bfloat16",
                   profile=(1, 8, 64), max_num_seqs=4))
print(1)
"""
    run(site, code)
    assert says(site, built, {}) == [plain]


@needs_native
def test_c_and_reference_have_the_same_bits(site: Path) -> None:
    code = """
import json, torch
from penstock import ops
from penstock.models.plugins import load_plugins
load_plugins()
one = ops.row_operator("relu2")
same = []
for dtype in (torch.float32, torch.bfloat16):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = every.view(256, 256).to(dtype)
    got, want = ops.foreign_rows(x, "relu2", 256), one.reference(x)
    same.append(torch.equal(got.nan_to_num(), want.nan_to_num()))
    same.append(torch.equal(got.isnan(), want.isnan()))
print(json.dumps([same, bool(one.address)]))
"""
    assert run(site, code) == [[True] * 4, True]


def test_which_are_loaded(site: Path, jais2: tuple[Path, Any]) -> None:
    listed = "import json\nfrom penstock.models.registry import architectures\n"
    listed += "found = 'Jais2ForCausalLM' in architectures()\n"
    assert run(site, f"{listed}print(json.dumps(found))") is True
    assert run(site, f"{listed}print(json.dumps(found))", PENSTOCK_PLUGINS="jais2") is True
    refused = f"""
{listed}
from pathlib import Path
from penstock.models import read_spec
try:
    read_spec(Path({str(jais2[0])!r}))
except Exception as error:
    print(json.dumps([found, str(error)]))
"""
    found, why = run(site, refused, PENSTOCK_PLUGINS="")
    assert found is False and "PENSTOCK_PLUGINS leaves out jais2" in why


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As before any plugin was looked for."""
    monkeypatch.setattr(plugins, "_failed", [])
    monkeypatch.setattr(plugins, "_done", [False])
    return monkeypatch


def test_plugins_that_fail(fresh: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "json:loads", plugins.GROUP)  # called without what it needs
    fresh.setattr(plugins, "entry_points", lambda group: [broken])
    for _ in range(2):  # the same again, whatever it has registered by then
        with pytest.raises(ConfigError, match=r"plugin broken \(json:loads\) failed: TypeError"):
            plugins.load_plugins()
    plugins._failed.clear()
    plugins._done[0] = False
    fresh.setenv("PENSTOCK_PLUGINS", "brokn")
    with pytest.raises(ConfigError, match=r"names 'brokn', which no package brings. Did you mean"):
        plugins.load_plugins()
    fresh.setenv("PENSTOCK_PLUGINS", "")
    plugins.load_plugins()


def test_a_familys_name_is_taken_once() -> None:
    from penstock.models import llama, qwen3
    from penstock.models.registry import register

    register("LlamaForCausalLM")(llama.read_config)  # again: nothing
    with pytest.raises(UnsupportedModelError, match=r"is read by penstock\.models\.llama already"):
        register("LlamaForCausalLM")(qwen3.read_config)


def doubled(x: Tensor) -> Tensor:
    return torch.cat((x, x), dim=1)


def test_operators_that_are_registered() -> None:
    ops.define_row_operator("doubled_here", doubled, columns=lambda n: 2 * n)
    ops.define_row_operator("doubled_here", doubled, columns=lambda n: 2 * n)  # again: nothing
    x = torch.randn(3, 5)
    assert torch.equal(ops.foreign_rows(x, "doubled_here", 10), doubled(x))
    with pytest.raises(KernelError, match="does something else"):
        ops.define_row_operator("doubled_here", lambda x: x)
    with pytest.raises(KernelError, match=r"gives \[3, 10\] of \[3, 5\], but said .* 7 columns"):
        ops.foreign_rows(x, "doubled_here", 7)
    with pytest.raises(KernelError, match=r"no row operator 'doubled_her' here. Did you mean"):
        ops.foreign_rows(x, "doubled_her", 10)
    with pytest.raises(KernelError, match="must be like relu2"):
        ops.define_row_operator("Relu 2", doubled)
    with pytest.raises(KernelError, match="a library has a symbol in it"):
        ops.define_row_operator("no_symbol", doubled, library="x.so")
    with pytest.raises(KernelError, match="no_library has no C function"):
        ops.define_row_operator("no_library", doubled, library="/nowhere.so", symbol="f")


def test_where_it_can_stand() -> None:
    ops.define_row_operator("doubled_here", doubled, columns=lambda n: 2 * n)
    plain = Dense(torch.float32)
    block = Mlp(64, MlpSpec(32, gated=False, row_operator="doubled_here"), plain, plain)
    assert block.down.in_features == 64
    for others in ({}, {"gated": False, "experts": ExpertsSpec(4, 2, True)}):
        with pytest.raises(UnsupportedModelError, match="with a gate, or of experts, none can"):
            MlpSpec(32, row_operator="doubled_here", **others)  # type: ignore[arg-type]


def test_the_header_is_there() -> None:
    assert "penstock_rows" in (include() / "penstock_rows.h").read_text()
