"""What a tutorial says is there before its first command: documents out of this Python's own documentation and code,
and a base model of a few seconds that has read some of them."""

import json
import random
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path

import docx
import torch
from documented import ROOT
from tiny_documents import write_pdf
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.contrib.tokenizers.train_bpe import SPECIAL_TOKENS, train_bpe
from cpt.data.examples.encoder import MARKS
from cpt.data.readers.standard_library import read_topics, split_code

LIBRARY = Path(sysconfig.get_path("stdlib"))
LINKED = ("cpt", "docs", "tests", "benchmarks", "docker", "pyproject.toml", "Makefile")
COPIED = ("recipes", "launch", "deepspeed_configs", "examples")
VOCABULARY_SIZE, ROW, STEPS = 1024, 128, 120


def prepare(page: Path, folder: Path) -> None:
    """A folder like a clone of the repository, with what this page needs."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    PREPARED.get(page.stem, lambda folder: None)(folder)


@cache
def prose() -> tuple[str, ...]:
    """The language reference, one text a topic."""
    topics = sorted(read_topics(LIBRARY / "pydoc_data" / "topics.py").items())
    return tuple(text for _, text in topics if len(text) > 200)


def modules(folder: str = "") -> Iterator[tuple[Path, str]]:
    """The modules of the library, or of one of its packages: the path in it and the text."""
    for path in sorted((LIBRARY / folder).rglob("*.py") if folder else LIBRARY.glob("*.py")):
        if "test" not in path.parts and not path.name.startswith("_sysconfigdata"):
            yield path.relative_to(LIBRARY), path.read_text(encoding="utf-8")


@cache
def manuals(most: int) -> dict[str, list[str]]:
    """The docstrings of so many modules, by the module's name, in paragraphs: a domain that the base has not read."""
    found = {}
    for path, text in modules():
        try:
            _, passages = split_code(text)
        except SyntaxError:
            continue
        if 600 < sum(map(len, passages)) < 12_000:
            found[path.stem] = passages
        if len(found) == most:
            break
    return found


@cache
def trained_base() -> Path:
    """A Llama of 0.2M parameters that has read `prose()`; its tokenizer has marks for filling in the middle, as
    Qwen's."""
    folder = Path(tempfile.mkdtemp(prefix="cpt-guides-")) / "base"
    tokenizer = train_bpe(
        prose(), VOCABULARY_SIZE, folder, special_tokens=[*SPECIAL_TOKENS, *MARKS[0]]
    )
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}
    ends = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY_SIZE, **shape, **ends))
    ids = [
        number
        for text in prose()
        for number in [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    ]
    rows = torch.tensor(ids[: len(ids) // ROW * ROW]).view(-1, ROW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=STEPS, pct_start=0.1
    )
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (8,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def write_base(folder: Path, *, chat_template: bool = False) -> Path:
    shutil.copytree(trained_base(), folder)
    if not chat_template:
        (folder / "chat_template.jinja").unlink()
    return folder


def write_texts(folder: Path, texts: dict[str, str], suffix: str = ".txt") -> None:
    """A file for each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}{suffix}").write_text(text, encoding="utf-8")


def write_general(folder: Path) -> None:
    """The prose that the base has read."""
    write_texts(folder, {f"{number:03}": text for number, text in enumerate(prose())})


def write_manuals(folder: Path, number: int) -> None:
    write_texts(folder, {name: "\n\n".join(passages) for name, passages in manuals(number).items()})


def first_run(folder: Path) -> None:
    (folder / "demo_runs" / "base").mkdir(parents=True)
    write_base(folder / "demo_runs" / "base" / "final")
    write_general(folder / "demo_runs" / "general")


def your_documents(folder: Path) -> None:
    """Manuals as web pages, PDF, DOCX and Markdown; and a code base."""
    papers = folder / "papers"
    papers.mkdir()
    for number, (name, passages) in enumerate(manuals(70).items()):
        if number % 20 == 0:
            lines = [line for passage in passages for line in [*passage.splitlines(), ""]]
            pages = [lines[start : start + 50] for start in range(0, len(lines), 50)]
            write_pdf(papers / f"{name}.pdf", pages, title=name)
        elif number % 20 == 1:
            document = docx.Document()
            document.add_heading(name, 0)
            for passage in passages:
                document.add_paragraph(passage)
            document.save(str(papers / f"{name}.docx"))
        elif number % 5 == 2:
            write_texts(papers, {name: f"# {name}\n\n" + "\n\n".join(passages)}, ".md")
        else:
            body = "".join(f"<p>{escape(passage)}</p>" for passage in passages)
            page = f"<nav>Home</nav><h1>{name}</h1>{body}<footer>We use cookies.</footer>"
            write_texts(papers, {name: page}, ".html")
    for package in ("asyncio", "email", "http", "json", "logging", "unittest", "urllib"):
        for path, text in modules(package):
            write_texts((folder / "project" / path).parent, {path.name: text}, "")
    write_base(folder / "base")
    write_general(folder / "general")


def mixing(folder: Path) -> None:
    write_manuals(folder / "manuals", 60)
    packages = ("email", "http", "json", "logging", "urllib")
    code = [found for package in packages for found in modules(package) if len(found[1]) < 40_000]
    write_texts(
        folder / "code", {".".join(path.with_suffix("").parts): text for path, text in code}
    )
    write_general(folder / "prose")
    write_base(folder / "base")


def evaluating(folder: Path) -> None:
    write_manuals(folder / "manuals", 130)
    write_general(folder / "prose")
    write_base(folder / "base")


UKRAINIAN = (  # when, who, did what, where; subjects and verbs are plural, so that any of them go together
    "Восени|Щоранку|Минулого року|Після дощу|Узимку|Уночі|Навесні|Інколи",
    "старі рибалки|діти з нашого села|молоді вчителі|мої сусіди|лісники|учені|музиканти|школярі",
    "читали довгі листи|будували новий міст|варили борщ|шукали гриби|саджали яблуні|продавали мед",
    "біля річки|у великому місті|за горами|на березі озера|посеред поля|у тихому лісі",
)


def vocabulary(folder: Path) -> None:
    draw = random.Random(0)

    def text() -> str:
        return " ".join(
            " ".join(draw.choice(words.split("|")) for words in UKRAINIAN) + "." for _ in range(18)
        )

    write_texts(folder / "uk", {f"{number:03}": text() for number in range(120)})
    write_texts(folder / "uk_held_out", {f"{number:03}": text() for number in range(30)})
    write_base(folder / "base")
    write_general(folder / "general")


def sft_and_dpo(folder: Path) -> None:
    """Manuals, questions and answers about them, and answers in two tones."""
    found = list(manuals(60).items())
    held_out = {
        f"{name}-{n}": text
        for name, texts in found[::4]
        for n, text in enumerate(texts)
        if len(text) < 500
    }
    texts = {
        name: "\n\n".join(passages) for number, (name, passages) in enumerate(found) if number % 4
    }
    write_texts(folder / "manuals_held_out", held_out)
    write_texts(folder / "manuals", texts)
    chats, pairs = [], []
    for name, text in texts.items():
        question = [{"role": "user", "content": f"What is {name}?"}]
        words = text.split()
        chats.append(
            {"messages": [*question, {"role": "assistant", "content": " ".join(words[:20])}]}
        )
        pair = {"prompt": question}
        for kind, end in (
            ("chosen", "I hope that this helps."),
            ("rejected", "Read the manual yourself."),
        ):
            pair[kind] = [{"role": "assistant", "content": f"{' '.join(words[:8])}. {end}"}]
        pairs.append(pair)
    for name, rows in (("conversations", chats), ("pairs", pairs)):
        write_texts(folder, {name: "".join(json.dumps(row) + "\n" for row in rows)}, ".jsonl")
    write_base(folder / "base", chat_template=True)
    write_general(folder / "general")


def one_24gb_card(folder: Path) -> None:
    """Documents, and the config of Qwen3 8B with a small tokenizer and without weights."""
    write_manuals(folder / "corpus", 60)
    (folder / "Qwen").mkdir()
    base = write_base(folder / "Qwen" / "Qwen3-8B-Base")
    (base / "model.safetensors").unlink()
    shape = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
    }
    shape |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 32768,
        **shape,
    }
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")


TUTORIALS = (first_run, your_documents, one_24gb_card, mixing, vocabulary, sft_and_dpo, evaluating)
PREPARED: dict[str, Callable[[Path], None]] = {one.__name__: one for one in TUTORIALS}
