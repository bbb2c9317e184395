"""The whole recipe in one command: `python -m recipes.stories`, from the repository's root."""

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from recipes.stories.evaluate import publish, report
from recipes.stories.model import CONTEXT
from recipes.stories.prepare import load_corpus, prepare
from recipes.stories.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer
from recipes.stories.train import TrainConfig, Trainer

ROOT = Path(__file__).resolve().parents[2]
TALES_FOR_MERGES = 600  # passages; the vocabulary should serve the stories first


def arguments() -> argparse.Namespace:
    """Command-line options; the defaults are the shipped model's."""
    default = TrainConfig()
    parser = argparse.ArgumentParser(prog="recipes.stories", description=__doc__)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "stories")
    parser.add_argument("--output", type=Path, default=ROOT / "src/penstock/assets/stories")
    parser.add_argument("--minutes", type=float, default=default.minutes)
    parser.add_argument("--max-steps", type=int, default=default.max_steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="keep so many documents of each source")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--hidden-size", type=int, default=default.hidden_size)
    parser.add_argument("--layers", type=int, default=default.num_layers)
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--fresh", action="store_true", help="ignore an earlier run's checkpoint")
    return parser.parse_args()


def main() -> None:
    """Prepare, train (or resume), publish the best model, report on it."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if args.fresh:
        (args.work / "checkpoint.pt").unlink(missing_ok=True)
    if not (args.work / "checkpoint.pt").exists():  # a resumed run keeps its data
        corpus = load_corpus(args.data, args.limit)
        tokenizer = train_tokenizer(
            corpus.stories + corpus.tales[:TALES_FOR_MERGES], args.vocab_size
        )
        save_tokenizer(tokenizer, args.work, CONTEXT)
        print("tokens:", prepare(corpus, tokenizer, args.work), flush=True)
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    print(f"prepared in {time.perf_counter() - started:.0f} s", flush=True)
    config = TrainConfig(
        minutes=args.minutes,
        max_steps=args.max_steps,
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        compile=not args.no_compile,
    )
    progress = Trainer(args.work, tokenizer.get_vocab_size(), config).run()
    print(f"trained for {progress.elapsed_s:.0f} s, {progress.tokens:,} tokens", flush=True)
    publish(args.work, args.output)
    report(args.output, args.work)
    print(f"whole recipe: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
