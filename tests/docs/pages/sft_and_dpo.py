"""Manuals, questions and answers about them, answers in two tones; a base whose tokenizer has a chat template."""

import json
from pathlib import Path

from guide_texts import manuals, write_base, write_general

SHORT = 500  # characters, which are less than a row of 256 tokens
ENDING = {"chosen": "I hope that this helps.", "rejected": "Read the manual yourself."}
SUITE = "long"


def prepare(folder: Path) -> None:
    """`manuals`, `manuals_held_out`, `general`, `conversations.jsonl`, `pairs.jsonl` and `base`."""
    texts = {}
    for number, (name, passages) in enumerate(manuals(60).items()):
        if number % 4 == 0:
            for part, passage in enumerate(passages):
                if len(passage) < SHORT:
                    write(folder / "manuals_held_out" / f"{name}-{part}.txt", passage)
        else:
            texts[name] = "\n\n".join(passages)
            write(folder / "manuals" / f"{name}.txt", texts[name])
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


def write(path: Path, text: str) -> None:
    """In its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def said(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


def write_rows(path: Path, rows: list[dict]) -> None:
    """As jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
