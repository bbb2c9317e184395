"""A smaller vocabulary: the tokens that a text needs, and a checkpoint with only their rows.

The head is a large part of a small model, and a domain uses a small part of its rows. Rows are
left out; what stays is the same, so logits of the kept tokens are the same, bit for bit. The
tokenizer's files stay as they are: `vocab_map.safetensors` says which of its ids are left and how
the others are written (`tokenizer.vocab_map`).
Source: Ushio et al. 2023, arXiv:2305.15020 (vocabulary trimming).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError, WeightsError
from penstock.models import read_spec
from penstock.models.checkpoint import Checkpoint
from penstock.models.files import INDEX, copy_settings
from penstock.models.hub import resolve
from penstock.models.registry import read_json
from penstock.models.weights import plan_weights
from penstock.pipeline.calibration import documents
from penstock.pipeline.new_folder import new_folder
from penstock.pipeline.store import writing
from penstock.tokenizer import Tokenizer, VocabMap
from penstock.tokenizer.bpe import Bpe
from penstock.tokenizer.vocab_map import FILE

REPORT = "vocabulary.json"
"""In the reduced checkpoint: the sizes, and every token that it can't give."""

_LEFT = (REPORT, "penstock.json", "graph.pt2")
"""Files of a checkpoint that speak of its weights as they were."""

_ROWS = ("embed.weight", "head.weight", "head.bias")
"""Parameters of the decoder with a row for each token."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What became of a vocabulary."""

    vocab_map: VocabMap
    always: int  # tokens that are kept whatever the text: special ones, bytes, those in configs
    fallen: tuple[tuple[int, str], ...]  # (id, text) of each that is left out
    share: float | None  # of the text's tokens that are kept; None where a list was given

    def as_dict(self) -> dict[str, Any]:
        """For the report file."""
        return {
            "original_tokens": self.vocab_map.original_size,
            "kept_tokens": len(self.vocab_map),
            "always_kept_tokens": self.always,
            "share_of_text_kept": self.share,
            "unreachable": [{"id": token, "text": text} for token, text in self.fallen],
        }


def reduce_vocabulary(
    source: str | Path,
    output: Path,
    *,
    size: int | None = None,
    texts: Sequence[str] = (),
    keep: Sequence[int | str] | None = None,
) -> Reduction:
    """Write the checkpoint `source` with a reduced vocabulary to the new folder `output`.

    Either the `size` (at most so many tokens) and `texts` whose most frequent tokens are kept, or
    `keep`: ids, and texts whose tokens are kept. It is there whole or not at all. Raises
    ConfigError for sizes and lists that can't be, TokenizerError for a tokenizer that isn't BPE
    over bytes, UnsupportedModelError for a quantized checkpoint.
    """
    folder = resolve(source)
    if output.exists():
        raise ConfigError(f"{output} exists already. Give a new folder, or remove it.")
    found = choose_vocabulary(folder, size=size, texts=texts, keep=keep)
    output.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(output, force=False, own_files=lambda _: None) as partial:
        write_reduced(folder, partial, found)
    return found


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """Which tokens an export keeps: the most frequent of texts, or those of a list."""

    size: int | None = None
    texts: tuple[Path, ...] = ()
    keep: Path | None = None  # a file with a list of them

    @classmethod
    def parse(cls, words: str, texts: tuple[Path, ...]) -> VocabularyChoice:
        """Of `--reduce-vocab`: a number of tokens, counted in the texts, or a file with a list."""
        if words.isdecimal():
            if not texts:
                raise ConfigError(
                    f"--reduce-vocab {words} keeps the most frequent tokens of a text: give it by "
                    "--calib."
                )
            return cls(int(words), texts)
        if not Path(words).is_file():
            raise ConfigError(f"--reduce-vocab {words} is neither a number nor a file of tokens.")
        return cls(keep=Path(words))

    def write(self, source: Path, folder: Path) -> dict[str, Any]:
        """The model in `source` with fewer tokens, in the empty `folder`; what was chosen."""
        if self.keep is not None:
            found = choose_vocabulary(source, keep=read_keep_list(self.keep))
        else:
            found = choose_vocabulary(source, size=self.size, texts=_read_all(self.texts))
        write_reduced(source, folder, found)
        vocab_map = found.vocab_map
        return {
            "tokens": len(vocab_map),
            "of": vocab_map.original_size,
            "by": self.keep.name if self.keep else [file.name for file in self.texts],
        }


def _read_all(files: Sequence[Path]) -> list[str]:
    try:
        return [file.read_text(encoding="utf-8") for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"A text of the vocabulary can't be read: {error}") from error


def choose_vocabulary(
    folder: Path,
    *,
    size: int | None = None,
    texts: Sequence[str] = (),
    keep: Sequence[int | str] | None = None,
) -> Reduction:
    """Which tokens of the model in `folder` stay, and how the others are written.

    Special and added tokens, bytes and ids that the configs name always stay; so does whatever a
    kept token is merged from. By `size`: the most frequent of `texts`, and if these are too few,
    the first of the vocabulary, which were merged first because they are frequent everywhere.
    """
    config = read_json(folder / "config.json")
    if (folder / FILE).exists():
        raise ConfigError(f"{folder} has a reduced vocabulary already. Reduce the whole model.")
    whole = read_spec(folder).decoder.vocab_size
    tokenizer = Tokenizer.from_folder(folder, vocab_size=whole)
    bpe = tokenizer.bpe()
    named = {i for level in _levels(config, folder) for i in _named_ids(level) if i < whole}
    always = {*bpe.byte_ids, *bpe.added, *tokenizer.special_ids, *named}
    share = None
    if keep is not None:
        if size is not None or texts:
            raise ConfigError("Give a list of tokens, or a size with a text; not both.")
        kept = _listed(keep, tokenizer, bpe, whole) | always
    else:
        kept, share = _frequent(size, texts, tokenizer, bpe, always, whole)
    rewritten = {}
    for token in range(tokenizer.vocab_size):
        if token not in kept:
            ids = bpe.rewrite(token, kept)
            if ids and b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.token_bytes(token):
                rewritten[token] = ids
    fallen = tuple(
        (token, tokenizer.decode([token], skip_special_tokens=False))
        for token in range(whole)
        if token not in kept
    )
    return Reduction(VocabMap.of(whole, kept, rewritten), len(always), fallen, share)


def read_keep_list(file: Path) -> list[int | str]:
    """A list for `keep`: a JSON list of ids and texts, or lines; a line of digits is an id.

    Raises ConfigError for a file that holds neither.
    """
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else text.split("\n")
        if file.suffix != ".json":
            found = [int(line) if line.isdecimal() else line for line in found if line]
    except (ValueError, RecursionError, OSError) as error:  # too many digits, nested too deep
        raise ConfigError(f"{file} isn't a list of tokens: {error}.") from error
    right = isinstance(found, list) and all(
        isinstance(one, int | str) and not isinstance(one, bool) for one in found
    )
    if not right or not found:
        raise ConfigError(f"{file} holds no list of token ids (numbers) and texts (strings).")
    return list(found)


def write_reduced(source: Path, folder: Path, found: Reduction) -> None:
    """Write the checkpoint with the rows, configs and files of a reduction into `folder`."""
    vocab_map = found.vocab_map
    rows = _row_tensors(source, vocab_map.original_size)
    shards = _shards(source)
    copy_settings(source, folder, but=_LEFT)
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            _write_json(folder / name, _reduced_config(read_json(source / name), vocab_map))
    sizes: dict[str, int] = {}
    where: dict[str, str] = {}
    for file in shards:
        with safe_open(file, framework="pt", device="cpu") as handle:
            names = list(handle.keys())
            metadata = handle.metadata()
            if not rows.intersection(names):
                shutil.copyfile(file, folder / file.name)
                sizes |= {name: handle.get_tensor(name).nbytes for name in names}
            else:
                tensors = {n: _reduced(handle.get_tensor(n), n in rows, vocab_map) for n in names}
                with writing(folder / file.name):
                    save_file(tensors, folder / file.name, metadata)
                sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}
            where |= dict.fromkeys(names, file.name)
    if len(shards) > 1 or shards[0].name != "model.safetensors":
        total = {"total_size": sum(sizes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": where})
    with writing(folder / FILE):
        vocab_map.save(folder)
    _write_json(folder / REPORT, found.as_dict())


def _frequent(
    size: int | None,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    bpe: Bpe,
    always: set[int],
    whole: int,
) -> tuple[set[int], float]:
    """The most frequent tokens of the texts with all they are made of, and their share of it."""
    if size is None:
        raise ConfigError("Say how many tokens are to stay, or list them.")
    counts: Counter[int] = Counter()
    for text in documents(texts):
        counts.update(tokenizer.encode(text, add_special_tokens=False))
    if not counts:
        raise ConfigError(
            f"{len(texts)} texts hold no token to count. Give a text like those that the model "
            "will read and write."
        )
    if not len(always) <= size <= whole:
        raise ConfigError(
            f"A vocabulary of {size:,} tokens can't be: {len(always):,} always stay (special ones, "
            f"bytes), and the model has {whole:,}."
        )
    kept = set(always)
    ordered = sorted(counts, key=lambda i: (-counts[i], i))
    for token in (*ordered, *range(tokenizer.vocab_size)):
        if len(kept) == size:
            break
        if token not in kept and tokenizer.id_to_token(token) is not None:
            more = bpe.closure(token) - kept
            if len(kept) + len(more) <= size:
                kept |= more
    return kept, sum(counts[i] for i in kept) / counts.total()


def _listed(keep: Sequence[int | str], tokenizer: Tokenizer, bpe: Bpe, whole: int) -> set[int]:
    """The tokens of a list, and all that they are made of."""
    kept: set[int] = set()
    for one in keep:
        if isinstance(one, str):
            for form in (one, f" {one}"):
                for token in tokenizer.encode(form, add_special_tokens=False):
                    kept |= bpe.closure(token)
        elif not 0 <= one < whole:
            raise ConfigError(f"The list has token id {one}, but ids go from 0 to {whole - 1:,}.")
        else:
            kept |= bpe.closure(one)
    return kept


def _levels(config: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """The objects of a model's configs that name ids."""
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]
    file = folder / "generation_config.json"
    if file.is_file():
        yield read_json(file)


def _named_ids(level: dict[str, Any]) -> Iterator[int]:
    for key, value in level.items():
        if key.endswith(("token_id", "token_ids", "token_index")):
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
                    yield one


def _reduced_config(config: dict[str, Any], vocab_map: VocabMap) -> dict[str, Any]:
    """The config of the smaller model, whose ids are its rows."""

    def row(value: Any) -> Any:
        if isinstance(value, list):
            return [row(one) for one in value]
        known = isinstance(value, int) and not isinstance(value, bool) and vocab_map.has(value)
        return int(vocab_map.new[value]) if known else value

    found = dict(config)
    for key, value in config.items():
        if key.endswith(("token_id", "token_ids", "token_index")):
            found[key] = row(value)
        elif key == "vocab_size":
            found[key] = len(vocab_map)
        elif key == "text_config" and isinstance(value, dict):
            found[key] = _reduced_config(value, vocab_map)
    return found


def _row_tensors(folder: Path, vocab_size: int) -> set[str]:
    """Names of the checkpoint's tensors that have a row for each token."""
    if "quantization_config" in read_json(folder / "config.json"):
        raise UnsupportedModelError(
            f"{folder} is quantized. Reduce the vocabulary of the model before quantizing it."
        )
    checkpoint, spec = Checkpoint(folder), read_spec(folder)
    plans, _ = plan_weights(checkpoint.names(), spec)
    found: set[str] = set()
    for target in _ROWS:
        for name in plans[target].parts if target in plans else ():
            if name is None:
                continue
            shape = checkpoint.shape(name)
            if shape[0] != vocab_size:
                raise WeightsError(
                    f"{name} has shape {list(shape)}, but the vocabulary {vocab_size:,} tokens: "
                    "config.json and the weights disagree."
                )
            found.add(name)
    return found


def _shards(folder: Path) -> list[Path]:
    """The files of a checkpoint that `Checkpoint` has read."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if (folder / INDEX).is_file():
        names = set(read_json(folder / INDEX)["weight_map"].values())
        return sorted(folder / name for name in names)
    return sorted(folder.glob("*.safetensors"))


def _reduced(tensor: Tensor, has_rows: bool, vocab_map: VocabMap) -> Tensor:
    return tensor[vocab_map.kept].contiguous() if has_rows else tensor


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
