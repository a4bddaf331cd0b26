"""`python -m benchmarks.replay`: continue with no replay, public replay, and samples of the base itself (arXiv 2605.26097).

Writes benchmarks/results/replay.json and its table in benchmarks/README.md; `--page` only writes the table, `--speed` only measures what the KL term costs (3 minutes).
"""  # noqa: E501

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from transformers.utils.logging import disable_progress_bar

from benchmarks.library_corpus import build_corpus
from benchmarks.readme import table, write_part
from cpt.command_line import show_log
from cpt.contrib.tokenizers.train_bpe import train_bpe
from cpt.data.readers.standard_library import Kind
from cpt.evaluation.paired import LEVEL, t_quantile
from cpt.evaluation.scoring import read_course
from cpt.recipe.load import load_recipe
from cpt.train import train

RESULTS = Path(__file__).parent / "results" / "replay.json"
RECIPES = Path(__file__).parents[1] / "recipes"
BASE = "base"
DOMAIN: Kind = "domain"  # the library's code, far from the base's prose
GENERAL: Kind = "general"  # its docstrings
SHARE = 0.25  # of the tokens: arXiv 2403.08763, for a strong shift
LEARNING_RATE = 2.5e-3  # the demo's
BASE_LEARNING_RATE = 4e-3
BASE_FLOOR = 0.1  # the last learning rate as a share of the highest one
BASE_WARMUP = 0.05  # of the tokens
BASE_TOKENS = 600_000
TOKENS = 150_000  # of each arm
BATCH_TOKENS = 512  # of an optimizer step
EVALUATED_DOCUMENTS = 40  # of each held-out set at most
TOKENIZER_BYTES = 50_000_000  # of each kind of text
NONE, PUBLIC, SELF = "no replay", "public replay", "self-replay"
KL_WEIGHTS = (1.0, 10.0)
ARMS: dict[
    str, float | None
] = {  # arm -> weight of the KL divergence from the base, on the replayed rows
    NONE: None,
    PUBLIC: None,
    SELF: None,
    **{f"{SELF} + KL {weight:g}": weight for weight in KL_WEIGHTS},
}
SPEED_STEPS, SPEED_TURNS = 50, 5
KINDS: tuple[Kind, ...] = (DOMAIN, GENERAL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each arm, each from a base model of its own"
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps the runs; finished ones are not run again"
    )
    parser.add_argument("--page", action="store_true", help="only write the table again")
    parser.add_argument("--speed", action="store_true", help="only measure the speeds again")
    options = parser.parse_args()
    if not options.page:
        show_log()
        disable_progress_bar()
        results = json.loads(RESULTS.read_text()) if options.speed else {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)).resolve()
            if not options.speed:
                results = measure(folder, options.seeds)
            results["speed"] = measure_speed(folder)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_part("benchmarks.replay", page(json.loads(RESULTS.read_text())))


def measure(folder: Path, seeds: int) -> dict[str, Any]:
    """Train the base and every arm of every seed: bits per byte of both held-out sets after the last step."""
    experiment = prepare(folder)
    runs: dict[str, list[Mapping[str, float]]] = {arm: [] for arm in (BASE, *ARMS)}
    for seed in range(1, seeds + 1):
        runs[BASE].append(experiment.train_base(seed))
        samples = generate(
            folder / f"{BASE}-seed{seed}" / "final", folder / f"samples-seed{seed}", seed
        )
        for arm, kl in ARMS.items():
            replayed = {NONE: None, PUBLIC: experiment.train[GENERAL]}.get(arm, samples)
            metrics = run_arm(experiment, arm, seed, replayed, kl)
            runs[arm].append(read_course(metrics)[-1].bits_per_byte)
    return {
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers")},
        "tokens": {
            "base": BASE_TOKENS,
            "continued": TOKENS,
            "step": BATCH_TOKENS,
        },
        "share": SHARE,
        "learning_rate": LEARNING_RATE,
        "arms": {arm: compare(arm, runs) for arm in runs},
    }


@dataclass(frozen=True)
class Experiment:
    """The texts and the tokenizer of all runs, and the folder of the runs."""

    train: Mapping[str, Path]
    held_out: Mapping[str, Path]
    tokenizer: Path
    folder: Path

    def overrides(self, name: str, seed: int, tokens: int) -> list[str]:
        """What the base and the arms have in common."""
        sets = [
            {"path": str(path), "name": kind, "max_documents": EVALUATED_DOCUMENTS}
            for kind, path in self.held_out.items()
        ]
        return [
            f"name={name}-seed{seed}",
            f"seed={seed}",
            f"output_dir={self.folder}",
            f"budget.tokens={tokens}",
            f"budget.global_batch_tokens={BATCH_TOKENS}",
            "training.per_device_train_batch_size=2",
            f"evaluation.perplexity={json.dumps(sets)}",
        ]

    def train_base(self, seed: int) -> dict[str, float]:
        """Train it on general text; returns bits per byte of both held-out sets after the last step."""
        schedule = {
            "name": "cosine",
            "warmup_tokens": round(BASE_WARMUP * BASE_TOKENS),
            "floor": BASE_FLOOR,
        }
        sources = [{"path": str(self.train[GENERAL]), "name": GENERAL, "weight": 1.0}]
        overrides = [
            *self.overrides(BASE, seed, BASE_TOKENS),
            f"tokenizer.path={self.tokenizer}",
            f"data.sources={json.dumps(sources)}",
            f"optimizer.learning_rate={BASE_LEARNING_RATE!r}",
            f"schedule={json.dumps(schedule)}",
        ]
        final = train(load_recipe(RECIPES / "demo" / "pretrain.yaml", overrides))
        return read_course(final.parent / "metrics.jsonl")[-1].bits_per_byte


def prepare(folder: Path) -> Experiment:
    """Write the texts, and train a tokenizer on all of them, so that no arm has an advantage by it."""
    corpus = build_corpus(folder / "corpus", has_reference=False)
    experiment = Experiment(
        train={kind: corpus.files[kind, "train"] for kind in (GENERAL, DOMAIN)},
        held_out={kind: corpus.files[kind, "held_out"] for kind in (GENERAL, DOMAIN)},
        tokenizer=folder / "tokenizer",
        folder=folder,
    )
    if not experiment.tokenizer.exists():
        keys = [f"tokenizer.path={experiment.tokenizer}"]
        model = load_recipe(RECIPES / "demo" / "pretrain.yaml", keys).model
        vocabulary = int((model.config or {})["vocab_size"])
        train_bpe(tokenizer_texts(experiment.train.values()), vocabulary, experiment.tokenizer)
    return experiment


def tokenizer_texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        bytes_left = TOKENIZER_BYTES
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                document = json.loads(line)["text"]
                bytes_left -= len(document.encode())
                if bytes_left < 0:
                    break
                yield document


def measure_speed(folder: Path) -> dict[str, Any]:
    """Tokens per second with the KL term, relative to the same rows without it; both take turns."""
    experiment = prepare(folder)
    experiment.train_base(1)
    base = folder / f"{BASE}-seed1" / "final"
    samples = folder / "samples-seed1"
    if not samples.exists():
        generate(base, samples, 1)
    ratios = []
    for turn in range(SPEED_TURNS):
        speeds = [
            tokens_per_second(
                run_arm(experiment, f"speed{turn} {kl}", 1, samples, kl, steps=SPEED_STEPS)
            )
            for kl in (None, KL_WEIGHTS[-1])
        ]
        ratios.append(speeds[1] / speeds[0])
    return {"share": SHARE, "ratio": median(ratios), "ratios": sorted(ratios)}


def tokens_per_second(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)


def generate(base: Path, output: Path, seed: int) -> Path:
    """Samples of the base, enough for one epoch of the replayed tokens."""
    tokens = round(1.1 * SHARE * TOKENS)
    words = ["data", "generate-replay", str(base), "--tokens", str(tokens), "--output", str(output)]
    subprocess.run([sys.executable, "-m", "cpt", *words, "--seed", str(seed)], check=True)
    return output


def run_arm(
    experiment: Experiment,
    arm: str,
    seed: int,
    replayed: Path | None,
    kl: float | None,
    steps: int | None = None,
) -> Path:
    """Train it, for all of the tokens or for some steps, unless it is finished already; returns its metrics."""
    tokens = TOKENS if steps is None else steps * BATCH_TOKENS
    sources: list[dict[str, Any]] = [{"path": str(experiment.train[DOMAIN]), "name": DOMAIN}]
    if replayed is not None:
        sources[0]["weight"] = 1 - SHARE
        sources.append({"path": str(replayed), "name": "replay", "weight": SHARE, "replay_kl": kl})
    overrides = [
        *experiment.overrides(arm.replace(" + ", "-").replace(" ", "_"), seed, tokens),
        f"model.path={experiment.folder / f'{BASE}-seed{seed}' / 'final'}",
        f"data.sources={json.dumps(sources)}",
        f"optimizer.learning_rate={LEARNING_RATE!r}",
        "evaluation.prompts=[]",
    ]
    if steps is not None:
        overrides.append("training.logging_steps=5")
    return train(load_recipe(RECIPES / "demo.yaml", overrides)).parent / "metrics.jsonl"


def compare(arm: str, runs: Mapping[str, list[Mapping[str, float]]]) -> dict[str, Any]:
    """Of both sets: bits per byte, and differences from the base and from no replay, in percent of the base, paired
    by seed; each a mean with the 95 % interval by Student's t."""
    comparison: dict[str, Any] = {}
    for kind in KINDS:
        own = [bits[kind] for bits in runs[arm]]
        base = [bits[kind] for bits in runs[BASE]]
        comparison[kind] = {"bits_per_byte": interval(own)}
        for other in (BASE, NONE):
            others = [bits[kind] for bits in runs[other]]
            comparison[kind][f"against {other}"] = interval(
                [100 * (a - b) / c for a, b, c in zip(own, others, base, strict=True)]
            )
    return comparison


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean, the 95 % interval of the mean by Student's t, and the values; of one value there is no interval."""
    reach = None
    if len(values) > 1:
        reach = t_quantile(LEVEL, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "reach": reach, "values": list(values)}


def page(results: Mapping[str, Any]) -> str:
    tokens, arms = results["tokens"], results["arms"]
    seeds = len(arms[NONE]["domain"]["bits_per_byte"]["values"])
    begin = (
        f"Base: the demo's model, {tokens['base']:,} tokens of prose; continued on {tokens['continued']:,} of code, of"
        f" which replay takes {100 * results['share']:.0f} %. Learning rate {results['learning_rate']:g}. Seeds:"
        f" {seeds}, each with its own base; intervals: 95 %, paired by seed.\n\n"
    )
    rows = []
    for arm in ARMS:
        cells = [arm]
        for name in KINDS:
            of = arms[arm][name]
            cells += [
                percent(of[f"against {BASE}"]),
                "" if arm == NONE else percent(of[f"against {NONE}"]),
            ]
        rows.append(cells)
    heads = [
        "",
        "domain, against the base",
        "against no replay",
        "general, against the base",
        "against no replay",
    ]
    speed = results["speed"]
    end = (
        f"\nSpeed with the KL term: {speed['ratio']:.2f} times the tokens per second of the same rows without it"
        f" ({speed['ratios'][0]:.2f} to {speed['ratios'][-1]:.2f} in {len(speed['ratios'])} turns on a CPU).\n"
    )
    return begin + table(heads, rows) + end


def percent(found: Mapping[str, Any]) -> str:
    reach = "" if found["reach"] is None else f" ± {found['reach']:.1f}"
    return f"{found['mean']:+.1f}{reach} %"


if __name__ == "__main__":
    main()
