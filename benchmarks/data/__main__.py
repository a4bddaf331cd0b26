"""`python -m benchmarks.data`: every system in turn, several times; writes benchmarks/results/data.json and its tables
in benchmarks/README.md."""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers.processors import ByteLevel

from benchmarks.data import page
from benchmarks.data.corpus import Facts, path_of, texts_of, write_corpora, write_parts
from benchmarks.data.peers.clock import LENGTH, Job, Measured
from benchmarks.data.results import RESULTS, write_results
from benchmarks.data.systems import SYSTEMS, measure, system_ended
from cpt.contrib.tokenizers.train_bpe import train_bpe
from cpt.data.store.parallel import num_workers

SLOW_SECONDS = 20  # a point of a growth curve that takes longer is measured once
DOCUMENTS_FOR_THE_TOKENIZER = 5000
SHARE_FOR_REPETITIONS = 0.6  # of the time


@dataclass
class Bench:
    """What is measured, where, and what came out so far."""

    options: argparse.Namespace
    folder: Path
    corpora: dict[int, Facts]
    samples: dict[str, Any] = field(default_factory=lambda: {"systems": {}, "growth": []})
    start: float = field(default_factory=time.perf_counter)

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self.start) / 60

    def say(self, line: str) -> None:
        print(f"{self.minutes:5.1f} min  {line}", flush=True)

    def job(self, name: str, size: int) -> Job:
        """What a program is asked for, on the corpus of a size, with a folder of its own."""
        return Job(
            path_of(self.folder, size),
            self.folder / f"{size}-parts",
            self.folder / "tokenizer",
            self.folder / name,
            num_workers(),
        )

    def keep(self, name: str, measured: Measured) -> Measured:
        self.samples[name] = measured
        self.say(f"{name}: {json.dumps(measured)[:300]}")
        return measured


def main() -> None:
    options = parse()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bench-data-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Corpora and stores: {folder}", flush=True)
    sizes = [options.mb, options.slow_mb, *options.growth]
    bench = Bench(options, folder, write_corpora(folder, sizes))
    slow = path_of(folder, options.slow_mb)
    write_parts(slow, folder / f"{options.slow_mb}-parts", num_workers())
    make_tokenizer(
        texts_of(slow, DOCUMENTS_FOR_THE_TOKENIZER), options.vocabulary, folder / "tokenizer"
    )
    bench.say("corpora and tokenizer are ready")
    try:
        measure_all(bench)
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    if not options.results:
        page.main()


def make_tokenizer(texts: list[str], vocabulary: int, folder: Path) -> None:
    """A byte-level BPE that adds nothing by itself, so that documents have one more token everywhere, their end."""
    tokenizer = train_bpe(texts, vocabulary, folder)
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    tokenizer.save_pretrained(folder)


def measure_all(bench: Bench) -> None:
    """Everything, with the results written again after each part."""
    systems(bench)
    write(bench)
    waste(bench)
    single_measurements(bench)
    write(bench)
    growth(bench)
    write(bench)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--mb", type=int, default=320, help="of text for us and for gigatoken")
    parser.add_argument(
        "--slow-mb",
        type=int,
        default=48,
        help="of text for the others: the first part of the same corpus",
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--growth",
        type=sizes_of,
        default=[20, 80, 320, 1280],
        help="MB of the growth curves; `0` for none",
    )
    parser.add_argument(
        "--systems",
        type=lambda names: names.split(","),
        default=list(SYSTEMS),
        help="those to measure, by name",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=25,
        help="after 60 %% of these no further repetition is begun",
    )
    parser.add_argument("--vocabulary", type=int, default=24_000)
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the corpora and stores, which then stay; by default a temporary one",
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="folder for them; by default benchmarks/results, and then benchmarks/README.md is updated too",
    )
    return parser.parse_args()


def sizes_of(text: str) -> list[int]:
    return [size for size in map(int, text.split(",")) if size]


def systems(bench: Bench) -> None:
    """Every system cold and warm, in turn, as often as asked and as there is time; one that failed is not tried
    again."""
    names, samples = bench.options.systems, bench.samples["systems"]
    for name in names:
        samples[name] = {
            "megabytes": size_for(bench, name),
            "cold": [],
            "warm": [],
            "failed": SYSTEMS[name].why_not,
        }
    for repetition in range(bench.options.repetitions):
        if bench.minutes > SHARE_FOR_REPETITIONS * bench.options.minutes:
            bench.say(f"only {repetition} repetitions: there is no time for more")
            return
        for name in names:
            if not samples[name]["failed"]:
                repeat(bench, name, f"{repetition + 1}/{bench.options.repetitions}")
        write(bench)


def repeat(bench: Bench, name: str, which: str) -> None:
    sample = bench.samples["systems"][name]
    for action in SYSTEMS[name].actions:
        measured = measure(name, action, bench.job(name, sample["megabytes"]))
        if "failed" in measured:
            sample["failed"] = f"{action}: {measured['failed']}"
            bench.say(f"{which} {name} FAILED {sample['failed']}")
            return
        sample[action].append(measured)
        bench.say(
            f"{which} {name} {action}: "
            + ", ".join(f"{key} {value:.4g}" for key, value in measured.items())
        )


def size_for(bench: Bench, name: str) -> int:
    return bench.options.mb if SYSTEMS[name].is_whole else bench.options.slow_mb


def waste(bench: Bench) -> None:
    """Padding, lost tokens and cuts of each on the smaller corpus, so that they can be compared; once, since they are
    always the same."""
    found: dict[str, Measured] = {}
    for name, sample in bench.samples["systems"].items():
        if sample["failed"] or SYSTEMS[name].is_encoder or SYSTEMS[name].wastes_like:
            continue
        job = bench.job(f"{name}-waste" if SYSTEMS[name].is_whole else name, bench.options.slow_mb)
        found[name] = measure(name, "waste", job)
    encoded = measure("hugging_face", "cold", bench.job("hugging_face", bench.options.slow_mb))
    bench.keep("waste", {"systems": found, "encoded": encoded})


def single_measurements(bench: Bench) -> None:
    """Resuming and the mixture's shares, each in a process of its own."""
    ours, small = bench.job("ours", bench.options.mb), bench.job("single", bench.options.slow_mb)
    cold = bench.samples["systems"].get("ours", {}).get("cold")
    if cold:
        rows = replace(ours, variant=str(cold[-1]["positions"] // LENGTH))
        bench.keep("resume", program("benchmarks.data.resume", "real", rows))
    bench.keep("resume_synthetic", program("benchmarks.data.resume", "synthetic", small))
    bench.keep("mixture", program("benchmarks.data.mixture", "shares", small))


def program(name: str, action: str, job: Job) -> Measured:
    """What a program says that is no system."""
    job.folder.mkdir(parents=True, exist_ok=True)
    return system_ended([sys.executable, "-m", name, action, job.as_json()], job.folder)


def growth(bench: Bench) -> None:
    """Cold starts on corpora of many sizes, twice where they are quick."""
    slow = set()
    for _ in range(2):
        for size in bench.options.growth:
            if size in slow or bench.minutes > 0.95 * bench.options.minutes:
                continue
            measured = measure("ours", "cold", bench.job("growth", size))
            shutil.rmtree(bench.folder / "growth", ignore_errors=True)
            bench.samples["growth"].append({"system": "ours", "megabytes": size, **measured})
            bench.say(f"growth {size} MB: {measured}")
            if "failed" in measured or measured["total_seconds"] > SLOW_SECONDS:
                slow.add(size)


def write(bench: Bench) -> None:
    write_results(bench.options.results or RESULTS, bench.samples, bench.corpora, bench.minutes)


if __name__ == "__main__":
    main()
