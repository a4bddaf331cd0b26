"""`python -m benchmarks.saving`: what hash, fsync and rename add to a save, and how long a save in the background
stalls training.

A run is saved in turn as the Trainer does, as cpt does, and in the background; medians and quartiles of paired rounds,
in wall time and in processor time of all processes, which other load disturbs less. The Trainer does not wait for the
disk: its save is compared as it is, and with an fsync of its files, without which a power cut may lose them. The stall
is the time that the training thread waits: the snapshot, and the copies if they are not complete when the next update
begins. 10 minutes on 4 idle cores, 6 GiB of memory and 3 GiB of disk. Writes benchmarks/results/saving.json.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measurement import measurement
from benchmarks.saving import saves as program
from cpt.contrib.tokenizers.train_bpe import train_bpe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "saving.json"
ADDED, STALL = 5.0, 10.0  # percent, at most
WAYS = {"plain": (1, None), "ZeRO-2 x 2": (2, 2), "ZeRO-3 x 2": (2, 3)}  # processes, stage
BYTES_PER_PARAMETER = {
    None: 12,
    2: 16,
    3: 14,
}  # weights and AdamW's moments; master weights under DeepSpeed
WIDTH, VOCABULARY, ROW, ROWS_PER_STEP = 1024, 512, 32, 8
PER_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH
Samples = list[dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.1, help="of a checkpoint")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--way",
        choices=WAYS,
        help="measure this one alone; the others' samples stay as they are in the results",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk that is to be measured; by default a temporary folder",
    )
    asked = parser.parse_args()
    samples: dict[str, Samples] = json.loads(RESULTS.read_text())["samples"] if asked.way else {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as temporary:
        for name in [asked.way] if asked.way else WAYS:
            samples[name] = measure(Path(temporary), name, asked.gigabytes, asked.rounds)
    RESULTS.write_text(json.dumps(results_of(samples), indent=1) + "\n")


def measure(folder: Path, name: str, gigabytes: float, rounds: int) -> Samples:
    processes, stage = WAYS[name]
    out = folder / f"stage{stage}.json"
    recipe = write_recipe(folder, stage, rounds=rounds + 1, gigabytes=gigabytes)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    words = [
        *(launcher if processes > 1 else [sys.executable]),
        program.__file__,
        str(recipe),
        str(out),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    samples: Samples = json.loads(out.read_text())
    return samples


def write_recipe(folder: Path, stage: int | None, rounds: int, gigabytes: float) -> Path:
    """So many rounds of a model whose checkpoint has the size that was asked for."""
    layers = max(1, round(gigabytes * 1e9 / BYTES_PER_PARAMETER[stage] / PER_LAYER))
    tokens = ROWS_PER_STEP * ROW
    draw = random.Random(1)
    texts = [
        " ".join(draw.choices(["one", "two", "three", "four", "five"], k=200)) for _ in range(50)
    ]
    (folder / "corpus.txt").write_text("\n".join(texts))
    if not (folder / "tokenizer").exists():
        train_bpe(texts, 270, folder / "tokenizer")
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
    }
    config = {
        "model_type": "llama",
        **shape,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": ROW,
    }
    training: dict[str, Any] = {
        "per_device_train_batch_size": ROWS_PER_STEP // (1 if stage is None else 2),
        "use_cpu": True,
        "logging_steps": 10**6,
    }
    if stage is not None:
        zero: dict[str, Any] = {"stage": stage}
        if stage == 3:
            zero |= {"stage3_gather_16bit_weights_on_model_save": True}
        batch = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        training |= {
            "bf16": True,
            "deepspeed": {**batch, "bf16": {"enabled": "auto"}, "zero_optimization": zero},
        }
    sections = {
        "name": "saving",
        "stage": "pretrain",
        "output_dir": str(folder / f"runs{stage}"),
        "model": {"from_scratch": True, "config": config},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "sequence_length": ROW,
            "sources": [{"path": str(folder / "corpus.txt"), "text_documents": "line"}],
        },
        "budget": {
            "tokens": rounds * program.STEPS_IN_ROUND * tokens,
            "global_batch_tokens": tokens,
        },
        "safety": {"loss_guard": None},
        "training": training,
    }
    path = folder / f"stage{stage}.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def results_of(samples: dict[str, Samples]) -> dict[str, Any]:
    """Measurements with their targets, and the raw samples."""
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {
            name: metadata.version(name)
            for name in ("torch", "transformers", "deepspeed", "safetensors", "xxhash")
        },
        "measurements": [row for name, rounds in samples.items() for row in rows_of(name, rounds)],
        "samples": samples,
    }


def rows_of(name: str, rounds: Samples) -> list[dict[str, Any]]:
    way = f"{name}, {rounds[0]['bytes'] / 1e9:.2f} GB"
    added = f"{way}: hash, fsync and rename add"
    durable = [one["theirs"] + one["syncing_theirs"] for one in rounds]
    stalls = [one["held"] + one["waited"] for one in rounds]
    at_once = [one["held"] + one["copying"] for one in rounds]
    ours, theirs = (column(rounds, key) for key in ("ours", "theirs"))
    ours_worked, theirs_worked = (column(rounds, f"{key}_processor") for key in ("ours", "theirs"))
    alone, during_save = column(rounds, "step"), column(rounds, "step_beside")
    return [
        measurement(f"{added} to the Trainer's save", ADDED, more(ours, theirs), "%"),
        measurement(
            f"{added} to the Trainer's save and fsync of its files", ADDED, more(ours, durable), "%"
        ),
        measurement(
            f"{added} to the Trainer's save, processor time",
            ADDED,
            more(ours_worked, theirs_worked),
            "%",
        ),
        measurement(
            f"{way}: stall of a save in the background / of a blocking one",
            STALL,
            share(stalls, ours),
            "%",
        ),
        measurement(
            f"{way}: the same, if the next update came at once", None, share(at_once, ours), "%"
        ),
        measurement(f"{way}: the Trainer's save", None, theirs, "seconds"),
        measurement(
            f"{way}: fsync of its files after it", None, column(rounds, "syncing_theirs"), "seconds"
        ),
        measurement(f"{way}: ours", None, ours, "seconds"),
        measurement(f"{way}: stall of ours in the background", None, stalls, "seconds"),
        measurement(f"{way}: a step", None, alone, "seconds"),
        measurement(f"{way}: a step while a save is written", None, during_save, "seconds"),
        measurement(f"{way}: load of the machine", None, column(rounds, "load"), "processes"),
    ]


def column(rounds: Samples, key: str) -> list[float]:
    return [one[key] for one in rounds]


def share(these: list[float], those: list[float]) -> list[float]:
    return [100 * this / that for this, that in zip(these, those, strict=True)]


def more(these: list[float], those: list[float]) -> list[float]:
    return [percent - 100 for percent in share(these, those)]


if __name__ == "__main__":
    main()
