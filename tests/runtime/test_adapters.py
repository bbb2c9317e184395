"""Slots for adapters: what is loaded, what is refused, and who has which."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.config import EngineConfig
from penstock.engine import Engine, RequestOptions
from penstock.errors import (
    AdapterError,
    ConfigError,
    ModelNotFoundError,
    PenstockError,
    RequestError,
    UnsupportedModelError,
    WeightsError,
)
from penstock.models.hub import adapter_folder
from penstock.pipeline.export import export_model
from penstock.runtime import load_runtime
from penstock.runtime.adapters import Adapters
from penstock.runtime.engine_folder import MANIFEST

from ..lora_files import ABOUT, WEIGHTS, write_adapter

HIDDEN, WIDE = 256, 704
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(enable_lora=True, max_loras=2, max_num_seqs=8)


@pytest.fixture
def slots(llm: LLM) -> Adapters:
    """Two, both free."""
    found = llm.runtime.adapters
    assert found is not None
    for name in found.names:
        found.unload(name)
    return found


def shape_of(llm: LLM, at: str) -> tuple[int, int]:
    linear: Any = llm.runtime.model.model.layers[0].get_submodule(at)
    return linear.out_features, linear.in_features


@pytest.fixture
def folder(llm: LLM, tmp_path: Path) -> Path:
    """An adapter of two matrices."""
    attention = llm.runtime.model.spec.decoder.layers[0].attention
    hidden, q = llm.runtime.model.spec.decoder.hidden, attention.num_heads * attention.head_dim
    write_adapter(tmp_path / "one", [(Q, (q, hidden)), (DOWN, shape_of(llm, "mlp.down"))])
    return tmp_path / "one"


def test_a_slot_is_taken_and_given_back(slots: Adapters, folder: Path) -> None:
    first = slots.load("a", folder)
    assert (first.rank, first.users, slots.names) == (4, 0, ["a"])
    assert slots.load("a", folder) is first  # there already
    slots.load("b", folder)
    with pytest.raises(AdapterError, match=r"no slot for the adapter 'c': all 2 are taken \(a, b"):
        slots.load("c", folder)
    slots.unload("a")
    third = slots.load("c", folder)
    assert third.slot == first.slot and third.number > first.number
    assert slots.names == ["b", "c"]


def test_a_name_is_one_adapters(slots: Adapters, folder: Path, tmp_path: Path) -> None:
    slots.load("a", folder)
    other = tmp_path / "other"
    with pytest.raises(AdapterError, match=f"'a' is the adapter in {folder} already"):
        slots.load("a", other)
    slots.load("verse", folder)
    with pytest.raises(AdapterError, match=r"no adapter 'vers'; loaded: a, verse\. Did you"):
        slots.unload("vers")
    with pytest.raises(RequestError, match="There is no adapter 'b'; loaded: a, verse"):
        slots.use("b")
    for name in ("", " ", None, 3):
        with pytest.raises(AdapterError, match="name must be a text"):
            slots.load(name, folder)  # type: ignore[arg-type]


def test_what_nobody_keeps_makes_room(slots: Adapters, folder: Path) -> None:
    """The longest unused goes first; what somebody uses or keeps stays."""
    a, _ = (slots.load(name, folder, keep=False) for name in ("a", "b"))
    slots.release(slots.use("a"))
    slots.load("c", folder, keep=False)
    assert slots.names == ["a", "c"]
    used = slots.use("a")
    assert used is a
    slots.load("d", folder)
    assert slots.names == ["a", "d"]
    with pytest.raises(AdapterError, match="all 2 are taken"):
        slots.load("e", folder)
    slots.release(used)
    slots.load("e", folder, keep=False)
    assert slots.names == ["d", "e"]
    slots.load("e", folder)  # kept from now on
    with pytest.raises(AdapterError, match="all 2 are taken"):
        slots.load("f", folder)


def test_a_slot_is_free_when_its_last_request_has_ended(slots: Adapters, folder: Path) -> None:
    a = slots.load("a", folder)
    slots.load("b", folder)
    used = [slots.use("a"), slots.use("a")]
    slots.unload("a")
    for each in used:
        with pytest.raises(AdapterError, match="all 2 are taken"):
            slots.load("c", folder)
        slots.release(each)
    assert slots.load("c", folder).slot == a.slot


def test_many_threads(slots: Adapters, folder: Path) -> None:
    """One adapter for all who ask for a name at once; nobody's slot is lost."""
    found, wrong = [], []

    def work(seed: int) -> None:
        for i in range(20):
            try:
                held = slots.load("ab"[(seed + i) % 2], folder, keep=False, hold=True)
            except PenstockError as error:
                wrong.append(error)
                continue
            found.append(held.slot)
            slots.release(held)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("no slot" in str(error) for error in wrong)
    assert set(found) == {0, 1} and not any(a.users for a in slots.loaded)
    for name in slots.names:
        slots.unload(name)
    assert sorted(slots._free) == [0, 1]


def changed(**config: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        about = json.loads((folder / ABOUT).read_text()) | config
        (folder / ABOUT).write_text(json.dumps(about))

    return edit


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        edit(held)
        save_file(held, folder / WEIGHTS)

    return apply


A = f"base_model.model.{Q}.lora_A.weight"


def moved_to(module: str) -> Any:
    return tensors(lambda t: t.update({A.replace("self_attn.q_proj", module): t[A].clone()}))


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (lambda f: (f / ABOUT).unlink(), ModelNotFoundError, "is no adapter: it needs"),
        (lambda f: (f / WEIGHTS).write_bytes(b"x" * 99), WeightsError, "can't be read"),
        (changed(use_dora=True), UnsupportedModelError, "asks for use_dora=True"),
        (changed(use_qalora=True), UnsupportedModelError, "asks for use_qalora=True"),
        (changed(kasa_config={"beta": 1e-4}), UnsupportedModelError, "asks for kasa_config"),
        (changed(r=5), WeightsError, "says rank 5 for"),
        (changed(r="4"), WeightsError, "says rank '4' for .*, which isn't an integer"),
        (changed(lora_alpha=float("nan")), UnsupportedModelError, "lora_alpha must be a number"),
        (
            tensors(lambda t: t.update({A: torch.full_like(t[A], float("nan"))})),
            WeightsError,
            "NaN, infinite",
        ),
        (tensors(lambda t: t.update({A: t[A] * 1e38 * 1e4})), WeightsError, "NaN, infinite"),
        (tensors(lambda t: t.pop(A)), WeightsError, "only half of"),
        (tensors(lambda t: t.update({A: t[A][:, :-1].clone()})), WeightsError, "another model"),
        (
            tensors(lambda t: t.update({A.replace(".0.", ".99."): t[A].clone()})),
            WeightsError,
            r"model lacks: model\.layers\.99\.self_attn\.q_proj",
        ),
        *(
            (moved_to(x), WeightsError, "experts that lie in one tensor")
            for x in ("mlp.experts", "mlp.experts.base_layer", "block_sparse_moe.input_linear")
        ),
        (tensors(lambda t: t.update({A: t[A].to(torch.int8)})), UnsupportedModelError, "holds I8"),
        (
            tensors(
                lambda t: t.update(
                    {
                        "base_model.model.lm_head.lora_A.weight": torch.zeros(4, HIDDEN),
                        "base_model.model.lm_head.lora_B.weight": torch.zeros(99, 4),
                    }
                )
            ),
            UnsupportedModelError,
            "changes head, not only matrices of the layers: merge it",
        ),
    ],
)
def test_what_cannot_be_loaded(
    llm: LLM, slots: Adapters, folder: Path, edit: Any, kind: type[Exception], said: str
) -> None:
    """Says why, and takes no slot; the others go on."""
    slots.load("good", folder)
    want = llm.generate("Once", GREEDY, options=RequestOptions(adapter="good"))
    edit(folder)
    with pytest.raises(kind, match=said):
        slots.load("bad", folder)
    assert slots.names == ["good"] and len(slots._free) == 1
    got = llm.generate("Once", GREEDY, options=RequestOptions(adapter="good"))
    assert got[0].outputs[0].token_ids == want[0].outputs[0].token_ids


def test_keys_that_nothing_reads_are_named(slots: Adapters, folder: Path) -> None:
    changed(gate="sigmoid", twist=2, nothing=None, lora_dropout=0.1, target_modules=["q"])(folder)
    with pytest.warns(UserWarning, match=r"has keys that nothing reads: gate, twist\. If one"):
        slots.load("a", folder)


def test_a_rank_that_has_no_room(llm: LLM, slots: Adapters, tmp_path: Path) -> None:
    write_adapter(tmp_path, [(DOWN, shape_of(llm, "mlp.down"))], rank=17)
    with pytest.raises(AdapterError, match=r"has rank 17, but .* room for 16. .*max_lora_rank=17"):
        slots.load("wide", tmp_path)


def test_each_matrix_has_its_scale(llm: LLM, slots: Adapters, folder: Path) -> None:
    changed(alpha_pattern={"q_proj": 40}, use_rslora=True)(folder)
    slots.load("a", folder)
    linear: Any = llm.runtime.model.model.layers[0].attention.qkv
    slot = slots.loaded[0].slot
    b = load_file(folder / WEIGHTS)[A.replace("lora_A", "lora_B")]
    first = (b[:16, 0] * 20).to(llm.runtime.model.dtype)  # 40 / √4
    assert torch.equal(linear.change.up[slot, 0, 0, :, 0], first)


def test_requests_by_vllms_class(llm: LLM, slots: Adapters) -> None:
    """Loaded when first asked for, one for each prompt, more of them than slots in turn."""
    verse, other = LoRARequest("stories-verse", 1), LoRARequest("x", 2, "stories-shakespeare")
    outputs = llm.generate(["Once upon a time"] * 3, GREEDY, lora_request=[verse, None, other])
    texts = [output.outputs[0].text for output in outputs]
    assert llm.list_loras() == ["stories-verse", "x"]
    assert texts[1] == llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    third = LoRARequest("third", 3, adapter_folder("stories-verse"))
    (output,) = llm.generate("Once upon a time", GREEDY, lora_request=third)
    assert output.outputs[0].text == texts[0]
    assert llm.list_loras() == ["x", "third"]
    with pytest.raises(AdapterError, match="no slot for the adapter 'stories-verse'"):
        llm.generate(["a", "b", "c"], GREEDY, lora_request=[other, third, verse])
    assert not any(a.users for a in slots.loaded)
    named = RequestOptions(adapter="y")
    with pytest.raises(RequestError, match="options name the adapter 'y', lora_request 'x'"):
        llm.generate("a", GREEDY, options=named, lora_request=other)
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest, not str"):
        llm.generate("a", GREEDY, lora_request="x")  # type: ignore[arg-type]
    for wrong in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_path": 3}):
        with pytest.raises(RequestError):
            LoRARequest(**{"lora_name": "a", **wrong})  # type: ignore[arg-type]


def test_by_name(llm: LLM, slots: Adapters, folder: Path) -> None:
    llm.load_lora("mine", folder)
    options = RequestOptions(adapter="mine")
    mine = llm.generate("Once", GREEDY, options=options)
    assert mine[0].error is None
    assert llm.embed("Once", options=options)[0].outputs.embedding != (
        llm.embed("Once")[0].outputs.embedding
    )
    llm.unload_lora("mine")
    with pytest.raises(RequestError, match="There is no adapter 'mine'; loaded: none"):
        llm.generate("Once", GREEDY, options=options)


def test_where_there_is_no_room() -> None:
    plain = LLM(max_num_seqs=2)
    for call in (lambda: plain.load_lora("a", "stories-verse"), plain.list_loras):
        with pytest.raises(ConfigError, match="Load it with enable_lora=True"):
            call()
    with pytest.raises(ConfigError, match="enable_lora=True"):
        plain.generate("a", GREEDY, lora_request=LoRARequest("stories-verse"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_loras": 4}, "max_loras=4 has no effect without enable_lora=True"),
        ({"max_lora_rank": 8}, "max_lora_rank=8 has no effect without enable_lora=True"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras must be a positive integer"),
        ({"enable_lora": True, "max_lora_rank": 513}, "512 is the most"),
        ({"enable_lora": True, "max_loras": 10**20}, "4096 is the most"),
        ({"enable_lora": 1}, "enable_lora must be True or False"),
        ({"enable_lora": True, "max_cpu_loras": 4}, "adapters lie in the memory"),
        ({"enable_lora": True, "lora_dtype": "float16"}, "what the model computes in"),
    ],
)
def test_configurations(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.of(**asked)


def test_more_than_there_is_memory(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="no room for max_loras=1000000 adapters of rank 512"):
        Adapters(llm.runtime.model, 10**6, 512)


def test_a_built_engine_has_no_place_for_them(tmp_path: Path) -> None:
    export_model("stories", tmp_path / "out")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="a built engine, whose steps have no place for adapters"):
        load_runtime(EngineConfig.of(model=tmp_path / "engine", enable_lora=True))
    exported = LLM(tmp_path / "out", enable_lora=True)  # an export has
    assert exported.generate("a", GREEDY, lora_request=LoRARequest("stories-verse"))[0].finished


def test_what_they_take(llm: LLM, slots: Adapters, folder: Path) -> None:
    """Slots that nobody uses take no memory worth speaking of."""
    whole = adapter_folder("stories-verse")
    adapter = slots.load("verse", whole)
    stored = sum(t.numel() for t in load_file(whole / WEIGHTS).values())
    assert stored * 2 <= adapter.nbytes <= stored * 2 * 2.5


def test_a_draft_model_beside_them() -> None:
    """What it guesses without the adapter is checked with it."""
    asked = [LoRARequest("stories-verse"), None, LoRARequest("stories-shakespeare")]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    guessing = {"method": "draft_model", "model": "stories-draft", "num_speculative_tokens": 3}
    found = []
    for more in ({"speculative_config": guessing}, {}):
        llm = LLM(enable_lora=True, max_num_seqs=4, **more)
        outputs = llm.generate(["Once upon a time"] * 3, params, lora_request=asked)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert not more or llm.stats()["spec_decode_num_accepted_tokens"] > 0
    assert found[0] == found[1]


def test_an_engine_over_a_runtime_that_has_them(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="doesn't go with guesses by 'self'"):
        Engine(EngineConfig.of(speculative_config={"method": "self"}), llm.runtime)


@pytest.mark.parametrize("method", ["smoothquant", "awq"])
def test_exports_whose_matrices_were_scaled(tmp_path: Path, method: str) -> None:
    """An adapter of the original model would be in other units."""
    export_model("stories", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "penstock.json").read_text())
    manifest["choices"]["weights"] = {"quant": "w8a8", "method": method}
    (tmp_path / "out" / "penstock.json").write_text(json.dumps(manifest))
    with pytest.raises(UnsupportedModelError, match=f"was quantized by {method}, which moves"):
        load_runtime(EngineConfig.of(model=tmp_path / "out", enable_lora=True))


def test_files_that_were_written_again(slots: Adapters, folder: Path) -> None:
    slots.load("a", folder)
    changed(lora_alpha=3)(folder)
    with pytest.raises(AdapterError, match=r"whose files have changed since\. Unload it first"):
        slots.load("a", folder)
    slots.unload("a")
    there = slots.load("a", folder)
    for name in (ABOUT, WEIGHTS):
        (folder / name).unlink()
    assert slots.load("a", folder) is there  # it is in memory


def test_nobody_waits_for_anothers_load(
    slots: Adapters, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = slots.load("a", folder)
    begun, end = threading.Event(), threading.Event()

    def fill(*_: Any) -> int:
        begun.set()
        assert end.wait(60)
        return 0

    monkeypatch.setattr(slots, "_fill", fill)
    thread = threading.Thread(target=slots.load, args=("b", folder))
    thread.start()
    assert begun.wait(60)
    assert slots.load("a", folder) is there  # would wait for ever
    end.set()
    thread.join()


def test_paths_that_cannot_be_read(slots: Adapters, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    for name in (ABOUT, WEIGHTS):
        (tmp_path / "odd" / name).mkdir()
    for path in (tmp_path / ("x" * 300), Path("a\0b"), tmp_path / "odd", tmp_path / "none"):
        with pytest.raises(ModelNotFoundError):
            slots.load("a", path)


def test_a_request_names_what_is_loaded(llm: LLM, slots: Adapters, folder: Path) -> None:
    llm.load_lora("mine", folder)
    assert llm.generate("a", GREEDY, lora_request=LoRARequest("mine"))[0].finished
    with pytest.raises(RequestError, match="options must be RequestOptions, not dict"):
        llm.generate("a", GREEDY, options={}, lora_request=LoRARequest("mine"))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", " ", None, 3])
def test_no_folder_at_all(llm: LLM, path: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="An adapter's folder must be a path"):
        llm.load_lora("x", path)
