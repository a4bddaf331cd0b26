"""Texts and a base model of a few seconds, for the commands of the guides: prose out of this Python's own
documentation, and its code."""

import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from cpt.commands.demo_corpus import read_topics, split_code
from cpt.data.examples.encoder import MARKS
from cpt.tokenizer.train_bpe import SPECIAL_TOKENS, train_bpe

LIBRARY = Path(sysconfig.get_path("stdlib"))
VOCABULARY_SIZE, ROW, ROWS_AT_ONCE, STEPS = 1024, 128, 8, 120


def write_base(folder: Path, *, chat_template: bool = False) -> Path:
    """A Llama of 0.2M parameters that has read `prose()`; its tokenizer has marks for filling in the middle, as
    Qwen's."""
    shutil.copytree(trained_base(), folder)
    if not chat_template:
        (folder / "chat_template.jinja").unlink()
    return folder


@cache
def trained_base() -> Path:
    """Made once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="cpt-guides-")) / "base"
    texts = prose()
    tokenizer = train_bpe(texts, VOCABULARY_SIZE, folder, special_tokens=[*SPECIAL_TOKENS, *MARKS[0]])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    train(model, rows_of(texts, tokenizer))
    model.save_pretrained(folder)
    return folder


def train(model: LlamaForCausalLM, rows: torch.Tensor) -> None:
    """AdamW with a rate that falls to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (ROWS_AT_ONCE,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def rows_of(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """All tokens end to end, cut into rows."""
    ids = [number for text in texts for number in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    return torch.tensor(ids[: len(ids) // ROW * ROW]).view(-1, ROW)


@cache
def prose() -> tuple[str, ...]:
    """The language reference, one text a topic."""
    return tuple(
        text for _, text in sorted(read_topics(LIBRARY / "pydoc_data" / "topics.py").items()) if len(text) > 200
    )


def write_general(folder: Path) -> Path:
    """The prose that the base has read, as a folder of text files."""
    folder.mkdir(parents=True)
    for number, text in enumerate(prose()):
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def modules(folder: str = "") -> Iterator[tuple[Path, str]]:
    """The modules of the library, or of one of its packages: the path in it and the text."""
    for path in sorted((LIBRARY / folder).rglob("*.py") if folder else LIBRARY.glob("*.py")):
        if "test" not in path.parts and not path.name.startswith("_sysconfigdata"):
            yield path.relative_to(LIBRARY), path.read_text(encoding="utf-8")


@cache
def manuals(most: int) -> dict[str, list[str]]:
    """What the docstrings of so many modules say, by the module's name, in paragraphs: documents of a domain that the
    base has not read."""
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
