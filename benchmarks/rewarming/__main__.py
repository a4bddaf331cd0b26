"""`python -m benchmarks.rewarming`: continue with and without re-warming and replay, or train from scratch (arXiv 2403.08763).

Writes benchmarks/results/rewarming.json, and the tables and the picture of docs/rewarming.md. With a larger model, on a GPU:

  python -m benchmarks.rewarming --model recipes/models/minimind/26m.yaml --general web.jsonl --shift german=german.jsonl --replay 0.25 \\
    --base-tokens 500_000_000 --tokens 200_000_000 --batch-tokens 65_536 --learning-rate 1e-3 --output results.json \\
    training.bf16=true training.per_device_train_batch_size=32 data.sequence_length=1024
"""  # noqa: E501

import argparse
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from benchmarks.rewarming.corpus import GENERAL, SHIFTS, Shift, Text, tokenizer_texts, write_library, write_own
from benchmarks.rewarming.page import tables, write_page
from benchmarks.rewarming.plot import draw
from benchmarks.rewarming.results import RESULTS, write_results
from benchmarks.rewarming.training import ARMS, RECIPES, Experiment, Scale
from cpt.command_line import show_log
from cpt.recipe.load import load_recipe
from cpt.tokenizer.train_bpe import train_bpe

DEFAULTS = Scale()


def main(arguments: Sequence[str] | None = None) -> None:
    """Text, tokenizer, all runs, results."""
    asked = parse(arguments)
    show_log()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        measure(asked, (asked.folder or Path(temporary)).resolve())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rewarming",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm, each from a base model of its own")
    parser.add_argument(
        "--folder", type=Path, help="where the runs go, and what is finished is kept; by default a temporary folder"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="results; with another file than ours the docs stay, and its picture lies beside it",
    )
    parser.add_argument(
        "--model", type=Path, help="a model file such as recipes/models/minimind/26m.yaml; by default the demo's model"
    )
    parser.add_argument(
        "--base-tokens", type=number, default=DEFAULTS.base_tokens, help="of the base model's training"
    )
    parser.add_argument("--tokens", type=number, default=DEFAULTS.tokens, help="of continued training")
    parser.add_argument("--batch-tokens", type=number, default=DEFAULTS.batch_tokens, help="of one optimizer step")
    parser.add_argument(
        "--learning-rate", type=float, default=DEFAULTS.learning_rate, help="the peak; runs end at a tenth of it"
    )
    parser.add_argument(
        "--evaluated-documents", type=number, default=DEFAULTS.evaluated_documents, help="of each held-out set at most"
    )
    parser.add_argument(
        "--general",
        type=Path,
        help="jsonl with text of your own for the base model; by default the standard library's",
    )
    parser.add_argument(
        "--shift",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="jsonl of a domain, beside --general; again for more",
    )
    parser.add_argument(
        "--replay", type=float, default=0.25, help="share of general tokens on the way to the domains of --shift"
    )
    parser.add_argument("overrides", nargs="*", help="key.path=value, any key of the recipes, for all runs")
    asked = parser.parse_intermixed_args(arguments)
    if bool(asked.general) != bool(asked.shift):
        parser.error("text of your own is --general FILE with at least one --shift NAME=FILE")
    if wrong := [text for text in asked.shift if "=" not in text or text.startswith(f"{GENERAL}=")]:
        parser.error(f"--shift takes NAME=FILE, and a name that is not `{GENERAL}`; not {wrong[0]}")
    files = [asked.model, asked.general, *(Path(text.partition("=")[2]) for text in asked.shift)]
    if missing := [file for file in files if file is not None and not file.is_file()]:
        parser.error(f"{missing[0]} is not there")
    if asked.output == RESULTS and (asked.model or asked.general):
        parser.error("the docs tell of our model and text: results of others need an --output of their own")
    return asked


def number(text: str) -> int:
    """As in a recipe: 500_000_000."""
    return int(text)


def measure(asked: argparse.Namespace, folder: Path) -> None:
    """All of it, into the results and what is made from them."""
    shifts, texts = read_text(asked, folder / "corpus")
    scale = Scale(
        asked.model,
        asked.base_tokens,
        asked.tokens,
        asked.batch_tokens,
        asked.learning_rate,
        asked.evaluated_documents,
        tuple(asked.overrides),
    )
    experiment = Experiment(texts, folder / "tokenizer", scale, folder)
    if not experiment.tokenizer.exists():
        train_bpe(tokenizer_texts(texts), vocabulary_size(experiment), experiment.tokenizer)
    results = []
    for seed in range(1, asked.seeds + 1):
        results.append(experiment.run_base(seed))
        results += [experiment.run_arm(arm, shift, seed) for shift in shifts for arm in ARMS]
    content = write_results(asked.output, experiment, shifts, results)
    print(tables(content))
    if asked.output == RESULTS:
        write_page()
    else:
        draw(content, asked.output.with_suffix(".png"))


def read_text(asked: argparse.Namespace, folder: Path) -> tuple[tuple[Shift, ...], dict[str, Text]]:
    """The shifts and the text of every kind: of one's own, or the standard library's."""
    if not asked.general:
        return SHIFTS, write_library(Path(sysconfig.get_path("stdlib")), folder)
    files = {name: Path(path) for name, _, path in (text.partition("=") for text in asked.shift)}
    return tuple(Shift(name, path.stem, asked.replay) for name, path in files.items()), write_own(
        {GENERAL: asked.general, **files}, folder
    )


def vocabulary_size(experiment: Experiment) -> int:
    """As many tokens as the model has rows."""
    recipe = load_recipe(RECIPES / "demo" / "pretrain.yaml", experiment.from_scratch())
    return int((recipe.model.config or {})["vocab_size"])


if __name__ == "__main__":
    main()
