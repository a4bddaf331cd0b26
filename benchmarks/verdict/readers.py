"""Make the twenty runs of readers.yaml, for readers of their verdicts: `python -m benchmarks.verdict.readers FOLDER`.

15 minutes on 2 cores. Each run is of a tiny model; FOLDER/pages has the pages, under numbers.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.library_corpus import build_corpus
from cpt.contrib.tokenizers.train_bpe import train_bpe

CASES = Path(__file__).with_name("readers.yaml")
TINY = Path(__file__).parents[2] / "recipes" / "tiny" / "data"
LETTERS = "abcdefghijklmnopqrstuvwxyz     "
LONGEST = 1200  # characters of a document
MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}
PROMPTS = ["def read(path):", "The function returns"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict.readers", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="one case by name")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    cases = yaml.safe_load(CASES.read_text())["cases"]
    write_data(folder)
    if not (folder / "runs" / "base" / "final").exists():
        train(folder, "base", recipe_of_base(folder))
    for number, (name, case) in enumerate(cases.items(), 1):
        run = folder / "runs" / f"run-{number:02}"  # a name that tells nothing
        if asked.only not in (None, name):
            continue
        if not (run / "verdict.md").exists():
            train(folder, run.name, recipe_of(folder, name, dict(case["set"])))
        page = folder / "pages" / f"{number:02}.md"
        page.parent.mkdir(exist_ok=True)
        shutil.copy(run / "verdict.md", page)


def write_data(folder: Path) -> None:
    """Code is the domain, prose is what the base knows."""
    data = folder / "data"
    if (data / "pairs.jsonl").exists():
        return
    corpus = build_corpus(folder / "library")
    texts: dict[str, list[str]] = {}
    draw = random.Random(0)
    for (kind, part), path in corpus.files.items():
        found = [json.loads(line)["text"][:LONGEST] for line in path.read_text().splitlines()]
        found = [text for text in found if len(text) > 300]
        draw.shuffle(found)
        texts[f"{kind}_{part}"] = found[: 500 if part == "train" else 60]
    held = texts["domain_held_out"]
    texts["four"] = held[:4]
    texts["little_general"] = texts["general_held_out"][:6]
    texts["giant"] = [*texts["general_held_out"], "\n".join(texts["general_train"][:90])]
    letters = ["".join(draw.choices(LETTERS, k=600)) for _ in range(3)]
    texts["seven"] = [*held[:4], *letters]
    texts["letters"] = ["".join(draw.choices(LETTERS, k=600)) for _ in range(300)]
    texts["copies"] = [*texts["domain_train"][:60], *(f"# copy\n{text[:-5]}" for text in held)] * 2
    for name, some in texts.items():
        write(data / f"{name}.jsonl", ({"text": text} for text in some))
    pairs = [json.loads(line) for line in (TINY / "preferences.jsonl").read_text().splitlines()]
    exchanged = [{**one, "chosen": one["rejected"], "rejected": one["chosen"]} for one in pairs]
    questions = [{"prompt": animal, "answer": "o"} for animal in ("pig", "fox", "owl", "bee")]
    write(data / "questions.jsonl", questions)
    write(data / "pairs.jsonl", pairs)
    write(data / "held_pairs.jsonl", pairs[40:])
    write(data / "exchanged.jsonl", exchanged[:40])
    write(data / "five_pairs.jsonl", pairs[40:45])
    write(data / "first_pairs.jsonl", pairs[:40])
    chats = [chat(number) for number in range(120)]
    write(data / "chats.jsonl", chats)
    train_bpe([*texts["domain_train"], *texts["general_train"]], 1024, folder / "tokenizer")


def chat(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number % 40} and {number % 7}?"}
    answer = {"role": "assistant", "content": f"It is {number % 40 + number % 7}, of course."}
    return {"messages": [question, answer]}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of_base(folder: Path) -> dict[str, Any]:
    return {
        "stage": "pretrain",
        "model": {"from_scratch": True, "config": MODEL},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "data": {
            "sequence_length": 128,
            "sources": [{"path": str(folder / "data" / "general_train.jsonl")}],
        },
        "budget": {"tokens": 1_200_000, "global_batch_tokens": 2048},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"name": "cosine", "floor": 0.1},
        "training": {"per_device_train_batch_size": 16, "logging_steps": 50},
    }


def recipe_of(folder: Path, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a case: `data` and `held_out` choose files, other keys are of the recipe."""
    stage = changes.pop("stage", "cpt")
    recipe = recipe_of_base(folder) | {"stage": stage, "model": {"path": str(folder / "runs/base")}}
    recipe["tokenizer"] = {}
    recipe["budget"] = {"tokens": 150_000, "global_batch_tokens": 2048}
    recipe["optimizer"] = {"learning_rate": 1e-3}
    recipe["data"]["sources"] = sources(folder, stage, changes.pop("data", ""))
    recipe["evaluation"] = evaluation(folder, stage, name, changes.pop("held_out", ""))
    if stage == "pretrain":
        recipe["model"] = {"from_scratch": True, "config": MODEL}
        recipe["tokenizer"] = {"path": str(folder / "tokenizer")}
    if stage in ("dpo", "reward"):
        recipe["budget"], recipe["data"]["sequence_length"] = {"epochs": 5}, 64
        recipe["training"] = {"per_device_train_batch_size": 4, "logging_steps": 5}
        recipe["optimizer"] = {"learning_rate": 1e-3}
    if stage == "grpo":
        tiny = yaml.safe_load((TINY.parent / "grpo.yaml").read_text())
        recipe |= {key: tiny[key] for key in ("budget", "optimizer", "training", "rewards")}
        recipe["budget"] = {"epochs": 20}
    for key, value in changes.items():
        section, _, child = key.partition(".")
        recipe.setdefault(section, {})[child] = value
    return recipe


def sources(folder: Path, stage: str, choice: str) -> list[dict[str, Any]]:
    data = folder / "data"
    if stage == "grpo":
        return [{"path": str(TINY / "questions.jsonl")}]
    if stage == "sft":
        return [{"path": str(data / "chats.jsonl"), "name": "chats"}]
    if stage in ("dpo", "reward"):
        file = "exchanged" if choice == "exchanged" else "first_pairs"
        return [{"path": str(data / f"{file}.jsonl"), "name": "pairs"}]
    own = {"letters": "letters", "copies": "copies"}.get(choice, "domain_train")
    domain = {"path": str(data / f"{own}.jsonl"), "name": "code", "weight": 0.5}
    if choice in ("no_replay", "letters"):
        return [domain]
    return [domain, {"path": str(data / "general_train.jsonl"), "name": "prose", "weight": 0.5}]


def evaluation(folder: Path, stage: str, name: str, choice: str) -> dict[str, Any]:
    data = folder / "data"
    if stage == "sft":
        return {"held_out_share": 0.3, "prompts": ["What is 3 and 4?"]}
    if stage == "grpo":
        return {"perplexity": [{"path": str(data / "questions.jsonl"), "name": "questions"}]}
    if stage in ("dpo", "reward"):
        file = "five_pairs" if name == "five_pairs" else "held_pairs"
        return {"perplexity": [{"path": str(data / f"{file}.jsonl"), "name": "answers"}]}
    domain = choice if choice in ("four", "seven") else "domain_held_out"
    general = choice if choice in ("little_general", "giant") else "general_held_out"
    files = {"domain": domain, "general": general}
    if choice == "domain_only" or stage == "pretrain":
        del files["general"]
    if choice == "two_domains":
        files = {"code": "domain_held_out", "manuals": "general_held_out"}
    sets = [{"path": str(data / f"{file}.jsonl"), "name": key} for key, file in files.items()]
    retain = {"retain": {"general": None}} if "general" in files else {}
    return {"perplexity": sets, **retain, "prompts": PROMPTS}


def train(folder: Path, name: str, recipe: dict[str, Any]) -> None:
    path = folder / "recipes" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"name": name, "output_dir": str(folder / "runs"), **recipe}))
    subprocess.run([sys.executable, "-m", "cpt", "train", str(path)], check=True)


if __name__ == "__main__":
    main()
