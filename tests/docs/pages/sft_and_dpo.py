"""Manuals, questions and answers about them, answers in two tones; a base whose tokenizer has a chat template."""

import json
from pathlib import Path

from guide_texts import manuals, write_base, write_general

ENDING = {"chosen": "I hope that this helps.", "rejected": "Read the manual yourself."}


def prepare(folder: Path) -> None:
    """`manuals`, `manuals_held_out`, `general`, `conversations.jsonl`, `pairs.jsonl` and `base`."""
    texts = {name: "\n\n".join(passages) for name, passages in manuals(60).items()}
    for number, (name, text) in enumerate(texts.items()):
        place = folder / ("manuals_held_out" if number % 4 == 0 else "manuals")
        place.mkdir(exist_ok=True)
        (place / f"{name}.txt").write_text(text, encoding="utf-8")
    answers = {f"What is {name}?": " ".join(text.split()[:20]) for name, text in texts.items()}
    rows = [{"messages": [said("user", question), said("assistant", answer)]} for question, answer in answers.items()]
    write_rows(folder / "conversations.jsonl", rows)
    write_rows(
        folder / "pairs.jsonl",
        [
            {"prompt": [said("user", question)]}
            | {kind: [said("assistant", f"{' '.join(answer.split()[:8])}. {end}")] for kind, end in ENDING.items()}
            for question, answer in answers.items()
        ],
    )
    write_base(folder / "base", chat_template=True)
    write_general(folder / "general")


def said(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


def write_rows(path: Path, rows: list[dict]) -> None:
    """As jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
