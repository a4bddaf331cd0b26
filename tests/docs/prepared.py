"""What a tutorial says is there before its first command: documents, a tiny base model."""

import json
import random
import shutil
from collections.abc import Callable
from html import escape
from pathlib import Path

import docx
from documented import ROOT
from guide_texts import manuals, modules, write_base, write_general
from tiny_documents import write_pdf

LINKED = ("cpt", "docs", "tests", "benchmarks", "docker", "pyproject.toml", "Makefile")
COPIED = ("recipes", "launch", "deepspeed_configs", "examples")


def prepare(page: Path, folder: Path) -> None:
    """A folder like a clone of the repository, with what this page needs."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    PREPARED.get(page.stem, lambda folder: None)(folder)


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """A text file for each."""
    for name, text in texts.items():
        (folder / f"{name}.txt").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def write_manuals(folder: Path, number: int) -> None:
    write_texts(folder, {name: "\n\n".join(passages) for name, passages in manuals(number).items()})


def start(folder: Path) -> None:
    (folder / "demo_runs" / "base").mkdir(parents=True)
    write_base(folder / "demo_runs" / "base" / "final")
    write_general(folder / "demo_runs" / "general")


def own_documents(folder: Path) -> None:
    """Manuals as web pages, PDF, DOCX and Markdown."""
    papers = folder / "papers"
    papers.mkdir()
    for number, (name, passages) in enumerate(manuals(70).items()):
        lines = [line for passage in passages for line in [*passage.splitlines(), ""]]
        if number % 20 == 0:
            pages = [lines[start : start + 50] for start in range(0, len(lines), 50)]
            write_pdf(papers / f"{name}.pdf", pages, title=name)
        elif number % 20 == 1:
            document = docx.Document()
            document.add_heading(name, 0)
            for passage in passages:
                document.add_paragraph(passage)
            document.save(str(papers / f"{name}.docx"))
        elif number % 5 == 2:
            (papers / f"{name}.md").write_text(f"# {name}\n\n" + "\n\n".join(passages), encoding="utf-8")
        else:
            body = "".join(f"<p>{escape(passage)}</p>" for passage in passages)
            (papers / f"{name}.html").write_text(
                f"<nav>Home</nav><h1>{name}</h1>{body}<footer>We use cookies.</footer>"
            )
    write_base(folder / "base")
    write_general(folder / "general")


def mixing(folder: Path) -> None:
    write_manuals(folder / "manuals", 60)
    code = {
        ".".join(path.with_suffix("").parts): text
        for package in ("email", "http", "json", "logging", "urllib")
        for path, text in modules(package)
        if len(text) < 40_000
    }
    write_texts(folder / "code", code)
    write_general(folder / "prose")
    write_base(folder / "base")


def evaluate_and_compare(folder: Path) -> None:
    write_manuals(folder / "manuals", 120)
    write_general(folder / "prose")
    write_base(folder / "base")


def code_base(folder: Path) -> None:
    for package in ("asyncio", "email", "http", "json", "logging", "unittest", "urllib"):
        for path, text in modules(package):
            (folder / "project" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "project" / path).write_text(text, encoding="utf-8")
    write_base(folder / "base")
    write_general(folder / "general")


def new_language(folder: Path) -> None:
    """Ukrainian by a small grammar: subjects and verbs are plural, so that any of them go together."""
    draw = random.Random(0)
    when = ["Восени", "Щоранку", "Минулого року", "Після дощу", "Узимку", "Уночі", "Навесні", "Інколи"]
    who = [
        "старі рибалки",
        "діти з нашого села",
        "молоді вчителі",
        "мої сусіди",
        "лісники",
        "учені",
        "музиканти",
        "школярі",
    ]
    what = [
        "читали довгі листи",
        "будували новий міст",
        "варили борщ",
        "шукали гриби",
        "саджали яблуні",
        "продавали мед",
    ]
    where = ["біля річки", "у великому місті", "за горами", "на березі озера", "посеред поля", "у тихому лісі"]

    def text() -> str:
        return " ".join(f"{' '.join(draw.choice(words) for words in (when, who, what, where))}." for _ in range(18))

    write_texts(folder / "uk", {f"{number:03}": text() for number in range(120)})
    write_texts(folder / "uk_held_out", {f"{number:03}": text() for number in range(30)})
    write_base(folder / "base")
    write_general(folder / "general")


def sft_and_dpo(folder: Path) -> None:
    """Manuals, questions and answers about them, and answers in two tones."""
    found = list(manuals(60).items())
    held_out = {f"{name}-{n}": text for name, texts in found[::4] for n, text in enumerate(texts) if len(text) < 500}
    texts = {name: "\n\n".join(passages) for number, (name, passages) in enumerate(found) if number % 4}
    write_texts(folder / "manuals_held_out", held_out)
    write_texts(folder / "manuals", texts)
    chats, pairs = [], []
    for name, text in texts.items():
        question = [{"role": "user", "content": f"What is {name}?"}]
        words = text.split()
        chats.append({"messages": [*question, {"role": "assistant", "content": " ".join(words[:20])}]})
        ends = {"chosen": "I hope that this helps.", "rejected": "Read the manual yourself."}
        answers = {kind: f"{' '.join(words[:8])}. {end}" for kind, end in ends.items()}
        pairs.append(
            {"prompt": question} | {kind: [{"role": "assistant", "content": end}] for kind, end in answers.items()}
        )
    for name, rows in (("conversations", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_base(folder / "base", chat_template=True)
    write_general(folder / "general")


def qwen3_8b(folder: Path) -> None:
    """Documents, and the config of Qwen3 8B with a small tokenizer and without weights."""
    write_manuals(folder / "corpus", 60)
    (folder / "Qwen").mkdir()
    base = write_base(folder / "Qwen" / "Qwen3-8B-Base")
    (base / "model.safetensors").unlink()
    shape = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 32768, **shape}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")


PREPARED: dict[str, Callable[[Path], None]] = {
    "start": start,
    "own_documents": own_documents,
    "mixing": mixing,
    "evaluate_and_compare": evaluate_and_compare,
    "code_base": code_base,
    "new_language": new_language,
    "sft_and_dpo": sft_and_dpo,
    "8b_on_a_4090": qwen3_8b,
}
