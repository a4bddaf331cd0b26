"""The data and the tokenizer of recipes/tiny: tasks small enough to be learned in seconds, whose answers are known.

`python tests/tiny_tasks.py` writes them.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TINY = Path(__file__).resolve().parents[1] / "recipes" / "tiny"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRS = (
    "cat mi, dog wu, cow mo, hen ka, pig oi, fox ya, owl hu, bee zi,"
    " ant ti, bat pe, elk bo, eel lu, emu du, yak ro, cod gi, gnu na"
)
ANIMALS, SOUNDS = zip(*map(str.split, PAIRS.split(",")), strict=True)


def write_tokenizer(folder: Path) -> None:
    """Bytes, and four tokens of a chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def chat(animal: str, sound: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What says the {animal}?"}, {"role": "assistant", "content": sound}]


def answers() -> list[dict]:
    """What SFT learns: each animal's sound."""
    return [{"messages": chat(animal, sound)} for animal, sound in zip(ANIMALS, SOUNDS, strict=True)]


def preferences() -> list[dict]:
    """What DPO and the reward model learn: answers that end politely are the better ones."""
    draw = random.Random(0)
    rows = []
    for number in range(64):
        prompt = [{"role": "user", "content": f"Say {number} to the {draw.choice(ANIMALS)}."}]
        good, bad = (f"{word} {draw.choice(SOUNDS)}{end}" for word, end in (("Yes", ", please."), ("No", "!")))
        rows.append({"prompt": prompt, "chosen": said(good), "rejected": said(bad)})
    return rows


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def judged() -> list[dict]:
    """The same answers, each judged by itself."""
    rows = preferences()
    return [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]


def texts() -> list[dict]:
    """What is there to read before: the same words in plain text."""
    draw = random.Random(1)
    pairs = list(zip(ANIMALS, SOUNDS, strict=True))
    return [
        {"text": " ".join(f"The {animal} says {sound}." for animal, sound in draw.choices(pairs, k=12))}
        for _ in range(200)
    ]


def questions() -> list[dict]:
    """What the stages with rewards learn: the first letter of each animal's sound."""
    return [{"prompt": animal, "answer": sound[0]} for animal, sound in list(zip(ANIMALS, SOUNDS, strict=True))[:4]]


FILES = {"questions": questions, "answers": answers, "preferences": preferences, "judged": judged, "texts": texts}


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    write_tokenizer(TINY / "tokenizer")
    (TINY / "data").mkdir(exist_ok=True)
    for name, rows in FILES.items():
        (TINY / "data" / f"{name}.jsonl").write_text(lines(rows()))
