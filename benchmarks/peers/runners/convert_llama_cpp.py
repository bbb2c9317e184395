"""llama.cpp's own converter, without a vocabulary: llama-bench draws token ids at random.

    python convert_llama_cpp.py SOURCE CHECKPOINT --outfile FILE --outtype bf16

SOURCE is llama.cpp's source tree; the rest are `convert_hf_to_gguf.py`'s arguments.
"""

from __future__ import annotations

import sys
from typing import Any

source = sys.argv.pop(1)
sys.path[:0] = [source, f"{source}/gguf-py"]

import conversion  # noqa: E402
import convert_hf_to_gguf  # noqa: E402

found = conversion.get_model_class


def without_vocabulary(name: str, mmproj: bool = False) -> Any:
    """The converter of an architecture, which doesn't look for a tokenizer."""
    kind = found(name, mmproj=mmproj)

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    kind.set_vocab = set_vocab
    if getattr(kind, "supports_mtp_export", False):
        kind.no_mtp = True  # layers that guess ahead: a checkpoint of random weights has none
    return kind


convert_hf_to_gguf.get_model_class = without_vocabulary
convert_hf_to_gguf.main()
