"""Rewrite the documents of a source with a local model, and record where each text comes from.

Texts are processed in groups of 256. A group becomes one output file, written atomically, so a killed run loses at
most one group; the next run recognizes finished groups by the hash of their texts. An answer depends only on the
text, the model, the prompt, the sampling and the seed, except for rounding in kernels: in float32 all batch sizes
gave the same texts; in bfloat16 the batch size may decide between two tokens that are almost equally likely.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.commands.rewriting_model import TEXT, Answer, Answerer, RewriteQuestion, Sampling, cut
from cpt.data.readers.documents import Document
from cpt.data.readers.sources import open_source
from cpt.errors import DISTRIBUTION, RecipeError
from cpt.files import output_locked, write_atomic
from cpt.models.build import build_model
from cpt.models.config import hash_weights, weights_folder
from cpt.plugins import did_you_mean
from cpt.recipe.paths import is_local
from cpt.recipe.schema import DocumentSource, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

GROUP = 256
WRAP_TOKENS = 300  # arxiv.org/abs/2401.16380, section 3.1: models omit parts of longer texts
KEY = "source"  # for messages: `source.path`
OWN_FOLDER = ".rewrite"  # sources skip hidden folders

# Four styles as in WRAP (arxiv.org/abs/2401.16380): web text mixed with such rewritten text was learned faster. The
# wording is ours. Each prompt ends with the beginning of the answer, so that base models without a chat format
# continue it.
STYLES = {  # name -> instruction, beginning of the answer
    "clear_prose": (
        "Rewrite the text below in clear, well organised prose, as a good encyclopedia would put it. Keep every fact,"
        " number, name and formula. Add nothing that is not there. Leave out navigation, advertisements and"
        " repetitions.",
        "The text in clear prose:",
    ),
    "easy": (
        "Rewrite the text below so that a child of ten understands it: short sentences, everyday words, hard ones"
        " explained. Keep what it says, add nothing that is not there.",
        "The text in easy words:",
    ),
    "scholarly": (
        "Rewrite the text below as a scholar writes for others of the field: terse, exact, with the proper technical"
        " terms. Keep every fact and number. Add nothing that is not there.",
        "The text in scholarly prose:",
    ),
    "question_answers": (
        "Turn the text below into questions and answers. Ask about everything of importance in it, one thing at a"
        " time, and answer each question in whole sentences from the text alone. Write `Question:` and `Answer:`"
        " before them.",
        "Questions and answers:",
    ),
}
PROMPTS = {name: f"{order}\n\nText:\n{TEXT}\n\n{start}\n" for name, (order, start) in STYLES.items()}


@dataclass(frozen=True)
class Prompt:
    name: str
    template: str  # contains `{text}`, the place of the text

    @property
    def sha256(self) -> str:
        return sha256(self.template)


@dataclass(frozen=True)
class Task:
    """The documents to rewrite, and the options."""

    source: DocumentSource
    model: Model
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_input_tokens: int = WRAP_TOKENS
    """Longer documents are split at the ends of paragraphs, and each piece is a separate text."""
    seed: int = 42
    cut_off: Literal["drop", "keep"] = "drop"  # for answers that do not end within `max_new_tokens`
    min_characters: int = 40  # shorter answers are dropped
    batch_size: int = 8


@dataclass
class Rewritten:
    """Counts of `rewrite`, including groups of earlier runs."""

    documents: int = 0
    pieces: int = 0  # texts given to the model: documents, split if long
    texts: int = 0  # rewritten texts
    dropped: Counter[str] = field(default_factory=Counter)
    groups_done_before: int = 0


@dataclass(frozen=True)
class TextPiece:
    """A document, or a part of it."""

    text: str
    text_hash: str
    where: str
    number: int
    of: int


def rewrite(task: Task, output: Path, report: Callable[[Rewritten], None] = lambda done: None) -> Rewritten:
    """Prompt the model with each document, and write its answers to `output` as jsonl for a recipe's source.

    Raises:
        RecipeError: the model's context window is too small, or `output` has texts of another task.
        LaunchError: another process writes to `output`.
    """
    provenance: dict[str, object] = {
        **model_provenance(task.model),
        "prompt": task.prompt.name,
        "prompt_sha256": task.prompt.sha256,
        "sampling": asdict(task.sampling),
        "run_seed": task.seed,
        "cpt_version": version(DISTRIBUTION),
    }
    rules = {
        # A source may grow, so its texts are compared per group.
        "source": task.source.model_dump(mode="json", exclude={"name", "max_documents"}),
        "max_input_tokens": task.max_input_tokens,
        "cut_off": task.cut_off,
        "min_characters": task.min_characters,
    }
    tokenizer = load_tokenizer(Tokenizer(), task.model)
    question = RewriteQuestion(tokenizer, task.prompt.template)
    answerer, done = load_answerer(task, tokenizer, question), Rewritten()
    with output_locked(output, output / OWN_FOLDER / "lock", "cpt data rewrite"):
        refuse_another_task(output, {**provenance, **rules})
        number, texts = 0, cut_all(open_source(task.source, KEY), task.max_input_tokens, tokenizer)
        while pieces := list(islice(texts, GROUP)):
            files, asked = files_of_group(output, number), sha256("".join(piece.text_hash for piece in pieces))
            counts = read_counts(*files, asked)
            if counts is not None:
                done.groups_done_before += 1
            else:
                rows, dropped = rewrite_group(task, pieces, question, answerer, provenance)
                counts = {"asked_sha256": asked, "texts": len(rows), "dropped": dropped}
                write_group(*files, rows, counts)
            done.documents += sum(piece.number == 0 for piece in pieces)
            done.pieces, done.texts = done.pieces + len(pieces), done.texts + counts["texts"]
            done.dropped.update(counts["dropped"])
            report(done)
            number += 1
        while any(file.exists() for file in files_of_group(output, number)):  # the source was longer before
            for file in files_of_group(output, number):
                file.unlink(missing_ok=True)
            number += 1
    return done


def model_provenance(model: Model) -> dict[str, object]:
    path, revision = str(model.path), model.revision
    hashes = hash_weights(path, revision).items()
    return {
        "model": path,
        "model_revision": None if is_local(path) else weights_folder(path, revision).name,
        "model_sha256": sha256("".join(f"{name} {digest}\n" for name, digest in hashes)),
    }


def load_answerer(task: Task, tokenizer: PreTrainedTokenizerBase, question: RewriteQuestion) -> Answerer:
    """Load the model; RecipeError if question and answer do not fit into its window."""
    model, window = load_to_generate(task.model, tokenizer)
    new = task.sampling.max_new_tokens
    needed = len(question.ids("")) + task.max_input_tokens + new
    if window is not None and needed > window:
        raise RecipeError(
            f"{task.model.path}: question, text and answer need up to {needed:,} tokens, and the model's window has"
            f" {window:,}. Lower --max-input-tokens ({task.max_input_tokens:,}) or --max-new-tokens ({new:,})."
        )
    return Answerer(model, tokenizer, task.sampling, task.batch_size)


def load_to_generate(section: Model, tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedModel, int | None]:
    """Load the model, on the GPU in bfloat16 if there is one, else in float32; with its window in tokens, if known."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(section, tokenizer, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    assert isinstance(model, PreTrainedModel), "no adapters were requested"
    config = model.config.get_text_config()
    model.config.use_cache = True  # off in training
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation of `to`
    return model, vars(config).get("max_position_embeddings") or vars(config).get("n_positions")


def cut_all(documents: Iterable[Document], max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[TextPiece]:
    for document in documents:
        texts = [text for text in cut(document.text, max_tokens, tokenizer) if text.strip()]
        for number, text in enumerate(texts):
            yield TextPiece(text, sha256(text), document.where, number, len(texts))


def rewrite_group(
    task: Task,
    pieces: Sequence[TextPiece],
    question: RewriteQuestion,
    answerer: Answerer,
    provenance: Mapping[str, object],
) -> tuple[list[dict[str, object]], Counter[str]]:
    """The output's rows, and reason -> how many answers were dropped."""
    # A text's seed: 64 bits of the hash of text, prompt and `seed`.
    fixed = f"{task.seed} {task.prompt.sha256}"
    seeds = [int.from_bytes(hashlib.sha256(f"{fixed} {piece.text_hash}".encode()).digest()[:8]) for piece in pieces]
    answers = answerer.answer([question.ids(piece.text) for piece in pieces], seeds)
    rows: list[dict[str, object]] = []
    dropped = Counter[str]()
    for piece, answer, seed in zip(pieces, answers, seeds, strict=True):
        if (reason := why_dropped(answer, piece.text, task)) is not None:
            dropped[reason] += 1
            continue
        row: dict[str, object] = {
            "text": answer.text,
            "source_text_hash": piece.text_hash,
            "source_where": piece.where,
            "piece": piece.number,
            "pieces": piece.of,
            **provenance,
            "seed": seed,
        }
        if answer.is_cut_off:
            row["cut_off"] = True
        rows.append(row)
    return rows, dropped


def why_dropped(answer: Answer, text: str, task: Task) -> str | None:
    if not answer.text:
        return "empty"
    if answer.is_cut_off and task.cut_off == "drop":
        return "cut off at max_new_tokens"
    if " ".join(answer.text.casefold().split()) in " ".join(text.casefold().split()):
        return "copied from the text"
    return "too short" if len(answer.text) < task.min_characters else None


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_another_task(folder: Path, task: Mapping[str, object]) -> None:
    """Record this task; RecipeError if the folder has texts of another task."""
    file = folder / OWN_FOLDER / "task.json"
    now = orjson.loads(orjson.dumps(task))
    before = orjson.loads(file.read_bytes()) if file.exists() else now
    if differing := sorted(key for key in now.keys() | before.keys() if now.get(key) != before.get(key)):
        names = ", ".join(differing)
        raise RecipeError(f"{folder} has texts of another task ({names} differ). Choose another --output.")
    if not file.exists():
        write_atomic(file, orjson.dumps(now, option=orjson.OPT_INDENT_2))


def files_of_group(folder: Path, number: int, name: str = "rewritten") -> tuple[Path, Path]:
    """The files of a group: its texts, and its counts, which mark the group as finished."""
    return folder / f"{name}-{number:05}.jsonl", folder / OWN_FOLDER / f"{number:05}.json"


def read_counts(texts: Path, counts: Path, asked: str) -> dict[str, Any] | None:
    """The counts of a group if an earlier run made it from the same texts."""
    if not counts.exists():
        return None
    found: dict[str, Any] = orjson.loads(counts.read_bytes())
    # An empty group has no file, because sources refuse empty files.
    return found if found["asked_sha256"] == asked and texts.exists() == (found["texts"] > 0) else None


def write_group(texts: Path, counts: Path, rows: Sequence[Mapping[str, object]], content: Mapping[str, Any]) -> None:
    counts.unlink(missing_ok=True)
    texts.unlink(missing_ok=True)
    if rows:
        write_atomic(texts, b"".join(orjson.dumps(row) + b"\n" for row in rows), durable=True)
    write_atomic(counts, orjson.dumps(content), durable=True)


def find_prompt(name: str) -> Prompt:
    """Return a prompt by name, or from a file that contains `{text}`; RecipeError if not found."""
    if name in PROMPTS:
        return Prompt(name, PROMPTS[name])
    path = Path(name).expanduser()
    if not path.is_file():
        known = f"{did_you_mean(name, list(PROMPTS))} Prompts: {', '.join(PROMPTS)}; or a file that contains {TEXT}."
        raise RecipeError(f"--prompt {name}: no such prompt or file.{known}")
    try:
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        reason = f"the file is not UTF-8 (byte {problem.start:,}). Save it as UTF-8."
        raise RecipeError(f"--prompt {name}: {reason}") from problem
    if TEXT not in template:
        raise RecipeError(f"--prompt {name}: {TEXT} is missing. Insert it at the place of the text.")
    return Prompt(path.name, template)
