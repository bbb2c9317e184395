"""Export a checkpoint with optimum-intel, its weights compressed by NNCF."""

from __future__ import annotations

from common import read_job
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

job = read_job()
chosen = job["quantization"]
model = OVModelForCausalLM.from_pretrained(
    job["model"],
    export=True,
    compile=False,
    dtype="auto",
    load_in_8bit=False,
    quantization_config=OVWeightQuantizationConfig(**chosen) if chosen else None,
)
model.save_pretrained(job["out"])
