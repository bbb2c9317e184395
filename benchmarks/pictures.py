"""A prompt with a picture, beside transformers: until the first token, and each one after it.

    python -m benchmarks.pictures [--model lfm2-vl] --out pictures.json

The model has the shape of SmolVLM-256M, or of LFM2-VL-450M, and random weights; both compute in
bfloat16, in turns. The picture is cut before the clock starts, as both cut it alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.models.seeing import IMAGE, LfmProcessor, make_tokenizer, picture
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect
from penstock.roofline import kept_peaks_on

TEXT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49280,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
PROCESSOR = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
LFM2 = {
    "hidden_size": 1024,
    "block_ff_dim": 6656,
    "intermediate_size": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
}
TOKENS = 32


def make_smolvlm(folder: Path) -> tuple[Any, Any]:
    """The checkpoint in `folder`; transformers' model of it, and its processor."""
    config = transformers.Idefics3Config(
        vision_config=VISION,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        scale_factor=4,
        tie_word_embeddings=False,
    )
    model = transformers.Idefics3ForConditionalGeneration(config).bfloat16().eval()
    _write(folder, model, PROCESSOR)
    images = Idefics3ImageProcessorPil(**PROCESSOR)
    return model, transformers.Idefics3Processor(images, make_tokenizer(), image_seq_len=64)


def make_lfm2(folder: Path) -> tuple[Any, Any]:
    """The same of an LFM2-VL, whose own processor needs torchvision."""
    vision = {key: value for key, value in VISION.items() if key != "image_size"}
    config = transformers.Lfm2VlConfig(
        vision_config=transformers.Siglip2VisionConfig(**vision, vision_use_head=False),
        text_config=transformers.Lfm2Config(**LFM2),
        image_token_id=IMAGE,
    )
    model = transformers.Lfm2VlForConditionalGeneration(config).bfloat16().eval()
    _write(folder, model, {})
    return model, LfmProcessor(folder, make_tokenizer())


def _write(folder: Path, model: Any, processor: dict[str, Any]) -> None:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


MAKERS = {"smolvlm": make_smolvlm, "lfm2-vl": make_lfm2}


def theirs(model: Any, inputs: Any) -> tuple[float, float]:
    """Seconds to the first token, and of each further one."""
    times = []
    for count in (1, TOKENS):
        begun = time.perf_counter()
        with torch.no_grad():
            model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        times.append(time.perf_counter() - begun)
    return times[0], (times[1] - times[0]) / (TOKENS - 1)


def ours(llm: LLM, prompt: Any) -> dict[str, float]:
    """The same, and what share of the floor the prompt's step reaches."""
    records = []
    llm.engine.ledger.watch = records.append
    llm.reset_prefix_cache()
    sight = llm.runtime.sight
    assert sight is not None
    sight.forget()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([prompt], params)
    times = output.metrics.token_times
    prefill = [r for r in records if r.size.is_prefill]
    seconds = sum(r.seconds for r in prefill)
    floor = sum(r.floor.seconds for r in prefill if r.floor is not None)
    return {
        "first_s": seconds,
        "each_s": (times[-1] - times[0]) / (TOKENS - 1),
        "floor": floor / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MAKERS, default="smolvlm")
    parser.add_argument("--size", type=int, nargs=2, default=(1024, 768), help="of the picture")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model, processor = MAKERS[asked.model](folder)
        image = picture(*asked.size)
        inputs = processor(text="What is <image>?", images=[image], return_tensors="pt")
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
        found: dict[str, list[Any]] = {"transformers": []}
        engines = {}
        for quantization in (None, "w8a8", "w4a8"):
            engines[quantization or "bfloat16"] = LLM(
                str(folder), quantization=quantization, max_num_seqs=4, max_model_len=4096
            )
        prompt = {"prompt": "What is <image>?", "multi_modal_data": {"image": image}}
        for _ in range(asked.rounds):
            found["transformers"].append(theirs(model, inputs))
            for kind, llm in engines.items():
                found.setdefault(kind, []).append(ours(llm, prompt))
        peaks = kept_peaks_on(torch.device("cpu"))
        tiles = inputs["pixel_values"].flatten(0, -4 if asked.model == "smolvlm" else -3).shape[0]
    first, each = (statistics.median(x[i] for x in found["transformers"]) for i in (0, 1))
    report: dict[str, Any] = {
        **environment(detect()),
        "benchmark": "pictures",
        "model": asked.model,
        "size": asked.size,
        "transformers": transformers.__version__,
        "peaks": str(peaks),
        "tiles": tiles,
        "prompt_tokens": inputs["input_ids"].shape[1],
        "found": {"transformers": {"first_s": first, "each_s": each}},
    }
    for kind in engines:
        mine = {key: statistics.median(x[key] for x in found[kind]) for key in found[kind][0]}
        ratios = {"first_ratio": first / mine["first_s"], "each_ratio": each / mine["each_s"]}
        report["found"][kind] = mine | ratios
    print(json.dumps(report["found"], indent=1))
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
