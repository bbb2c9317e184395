"""`penstock export --onnx`: a model as one ONNX file, in float32."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.errors import ConfigError, MissingExtraError, UnsupportedModelError, get_extra
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.models.registry import check_blind
from penstock.pipeline.onnx_decoder import DecoderWriter
from penstock.tokenizer.vocab_map import FILE as VOCAB_MAP

INLINE_BYTES = 1_800_000_000
"""Weights beyond this lie in a second file: protobuf ends at 2 GiB."""


def export_onnx(
    model: str | Path, file: Path, *, max_model_len: int | None = None, force: bool = False
) -> int:
    """Write `model` to `file`; returns the bytes written.

    Weights of more than 1.8 GB go to `<file>_data` beside it, as optimum names it. max_model_len:
    rows of the rotary tables. force: replace an earlier file.
    Raises MissingExtraError without the `onnx` package, ConfigError when `file` can't be written,
    UnsupportedModelError for what the writer doesn't know.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(
            f"Writing ONNX needs the onnx package; {get_extra('onnx')}."
        ) from error
    data = file.with_name(file.name + "_data")
    taken = next((path for path in (file, data) if path.exists()), None)
    if taken is not None and (taken.is_dir() or not force):
        raise ConfigError(f"{taken} exists. Give another file, or replace it by --force.")
    source = resolve(model)
    if (source / VOCAB_MAP).is_file():
        raise UnsupportedModelError(
            f"{source} has a reduced vocabulary, whose rows aren't its tokenizer's ids: ONNX has "
            "no place for the map. Write the whole model."
        )
    check_blind(source, "ONNX")
    decoder = load_model(source, dtype="float32", max_model_len=max_model_len).model
    graph = DecoderWriter(decoder).write()
    made = graph.model("decoder")
    external = graph.weight_bytes > INLINE_BYTES
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
            partial = Path(folder) / file.name
            if external:
                onnx.save_model(made, partial, save_as_external_data=True, location=data.name)
            else:
                onnx.save_model(made, partial)
            onnx.checker.check_model(str(partial), full_check=True)
            if data.exists():  # what is killed between these leaves no file over another's weights
                file.unlink(missing_ok=True)
                data.unlink()
            if external:
                (Path(folder) / data.name).replace(data)
            partial.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error.strerror or error}.") from error
    return file.stat().st_size + (data.stat().st_size if external else 0)
