"""`python -m benchmarks.data`: run every system in turn, several times, and write benchmarks/results/data.json."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.data.corpus import texts_of, write_corpus
from cpt.data.parallel import num_workers
from cpt.tokenizer.train_bpe import train_bpe

RESULTS = Path(__file__).parents[1] / "results"
SLOW = ("hugging_face", "run_clm")  # they may run on a part of the corpus
SYSTEMS = ("json_alone", "hugging_face", "gigatoken", "run_clm", "ours_cold", "ours_warm", "resume")
Samples = dict[str, list[dict[str, float]]]


def main() -> None:
    """Measure, and write what was measured."""
    arguments = parse()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="bench-data-"))
    folder.mkdir(parents=True, exist_ok=True)
    corpora = {"whole": folder / "corpus.jsonl", "part": folder / "part.jsonl"}
    facts = {name: write_corpus(path, size) for (name, path), size in zip(corpora.items(), (arguments.mb, arguments.slow_mb), strict=True)}
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        train_bpe(texts_of(corpora["part"]), arguments.vocabulary, tokenizer)
    samples: Samples = {name: [] for name in SYSTEMS}
    for repetition in range(arguments.repetitions):
        for name in SYSTEMS:
            shutil.rmtree(folder / "run_clm", ignore_errors=True)
            corpus = corpora["part" if name in SLOW else "whole"]
            samples[name].append(run(name, corpus, tokenizer, folder))
            print(f"{repetition + 1}/{arguments.repetitions} {name}: {samples[name][-1]}", flush=True)
    write_results(samples, facts)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--mb", type=int, default=320, help="of text in the corpus")
    parser.add_argument("--slow-mb", type=int, default=320, help="of text for the slow systems (Hugging Face's tokenizer, run_clm)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=24_000)
    parser.add_argument("--folder", help="for the corpus and the stores; by default a new one in the temporary folder")
    return parser.parse_args()


def run(name: str, corpus: Path, tokenizer: Path, folder: Path) -> dict[str, float]:
    """One system in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.data.systems", name, str(corpus), str(tokenizer), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    measured: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return measured


def write_results(samples: Samples, facts: dict[str, dict[str, float]]) -> None:
    """Medians beside their targets, and the raw samples."""

    def middle(name: str, key: str) -> float:
        return median(sample[key] for sample in samples[name])

    whole, part = facts["whole"]["text_megabytes"], facts["part"]["text_megabytes"]
    cold = whole / middle("ours_cold", "first_batch_seconds")  # MB of text a second, from the file to the first batch
    hugging_face, run_clm = part / middle("hugging_face", "seconds"), part / middle("run_clm", "first_batch_seconds")
    gigatoken = whole / middle("gigatoken", "seconds")
    steady, run_clm_steady = middle("ours_warm", "steady_tokens_per_second"), middle("run_clm", "steady_tokens_per_second")
    positions = [key for key in samples["resume"][0] if key.isdigit()]
    slowest = max(middle("resume", position) for position in positions)
    memory = max(middle("ours_cold", "peak_memory_mb"), middle("ours_cold", "peak_memory_of_a_worker_mb"))
    first_share = (middle("ours_cold", "first_batch_seconds") / whole) / (middle("run_clm", "first_batch_seconds") / part)
    parsing = middle("json_alone", "seconds") / num_workers() / middle("ours_cold", "first_batch_seconds")
    measurements = [
        measurement("cold, jsonl to batches", None, cold, "MB/s"),
        measurement("raw tokenizers encode_batch_fast, all cores", None, hugging_face, "MB/s"),
        measurement("gigatoken encode_batch", None, gigatoken, "MB/s"),
        measurement("run_clm cold", None, run_clm, "MB/s"),
        measurement("cold / raw tokenizers", ">= 10", cold / hugging_face, "times"),
        measurement("cold / gigatoken", ">= 0.5", cold / gigatoken, "times"),
        measurement("cold / run_clm", ">= 25", cold / run_clm, "times"),
        measurement("share of json parsing in cold, spread over the cores", None, parsing, "share"),
        measurement("cold time to first batch", None, middle("ours_cold", "first_batch_seconds"), "s"),
        measurement("cold time to first batch / run_clm's, per MB", "<= 0.15", first_share, "times"),
        measurement("warm time to first batch", None, middle("ours_warm", "first_batch_seconds"), "s"),
        measurement("warm steady", None, steady / 1e6, "Mtok/s"),
        measurement("run_clm's warm steady", None, run_clm_steady / 1e6, "Mtok/s"),
        measurement("warm steady / run_clm's", ">= 5", steady / run_clm_steady, "times"),
        measurement("slowest resume, at positions to 10^9", "<= 1", slowest, "s"),
        measurement("padding", "<= 0.003", middle("ours_cold", "padding"), "share"),
        measurement("peak memory of a process, cold", "<= 600", memory, "MB"),
    ]
    RESULTS.mkdir(exist_ok=True)
    result = {"device": device(), "versions": versions(), "corpus": facts, "measurements": measurements}
    (RESULTS / "data.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "data_samples.json").write_text(json.dumps(samples, indent=1) + "\n")
    for one in measurements:
        met = {None: "", True: "met", False: "NOT MET"}[one["met"]]
        print(f"{one['name']:55} {one['measured']:10.4g} {one['unit']:7} {one['target'] or '':8} {met}")


def measurement(name: str, target: str | None, measured: float, unit: str) -> dict[str, Any]:
    """A row of the results."""
    met = None
    if target is not None:
        sign, _, bound = target.partition(" ")
        met = measured >= float(bound) if sign == ">=" else measured <= float(bound)
    return {"name": name, "target": target, "measured": measured, "unit": unit, "met": met}


def device() -> str:
    """The processor and its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {num_workers()} cores, load before the end {os.getloadavg()[1]:.1f}"


def versions() -> dict[str, str]:
    """Of everything that was measured."""
    packages = ("torch", "transformers", "tokenizers", "gigatoken", "datasets", "orjson", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


if __name__ == "__main__":
    main()
