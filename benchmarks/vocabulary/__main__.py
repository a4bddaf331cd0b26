"""`python -m benchmarks.vocabulary`: extend the demo's vocabulary for code, and evaluate it: about 20 minutes on one
core.

Writes benchmarks/results/vocabulary.json and its tables in benchmarks/README.md.
"""

import argparse
import tempfile
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.library_corpus import build_corpus
from benchmarks.vocabulary.lengths import measure_lengths, texts_of
from benchmarks.vocabulary.results import write_results, write_tables
from benchmarks.vocabulary.training import budgets, extend_base, measure_starts, run_arm, train_base
from cpt.command_line import show_log
from cpt.tokenizer.train_bpe import train_bpe

VOCABULARY_SIZE = 4096
ADDED = 1000
TOKENS = 220_000  # of continued training with the model's own tokens: the demo's


def main() -> None:
    """Lengths, then training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vocabulary", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="that the model's own tokens are trained on"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the runs go, and what is finished is kept; by default a temporary folder",
    )
    asked = parser.parse_args()
    show_log()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        measure(asked.folder or Path(temporary), asked.seeds, asked.tokens)
    write_tables()


def measure(folder: Path, seeds: int, tokens: int) -> None:
    """All of it, into benchmarks/results/vocabulary.json."""
    corpus = build_corpus(folder / "corpus")
    tokenizers = {"of prose": folder / "prose", "of prose and code": folder / "both"}
    prose, code = texts_of(corpus, "general", "train"), texts_of(corpus, "domain", "train")
    for path, texts in zip(tokenizers.values(), (prose, [*prose, *code]), strict=True):
        if not path.exists():
            train_bpe(texts, VOCABULARY_SIZE, path)
    lengths = measure_lengths(corpus, tokenizers)
    base = train_base(corpus, tokenizers["of prose"], folder)
    extended = extend_base(corpus, base, ADDED, folder / "extended")
    spent = budgets(corpus, base, extended, tokens)
    results = [
        run_arm(arm, seed, corpus, base, extended, budget, folder)
        for seed in range(1, seeds + 1)
        for arm, budget in spent.items()
    ]
    starts = measure_starts(corpus, tokenizers["of prose"], ADDED, folder)
    write_results(lengths, ADDED, results, starts)


if __name__ == "__main__":
    main()
