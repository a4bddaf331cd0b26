"""Let a local model rewrite the documents of a source, and record where each text comes from.

Texts are taken in groups of 256. A group becomes one file of the output, written at once, so a killed run loses no
more than a group; the next one finds by the hash of a group's texts what is done. An answer depends on the text, the
model, the prompt, the sampling and the seed, and on nothing else, but for the rounding of kernels: in float32 batches
of any size gave the same texts, in bfloat16 another size of batch may tip the balance between two tokens that are
almost equally likely.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.commands.synthesis.answers import Answer, Answerer
from cpt.commands.synthesis.output import RewriteCounts, RewrittenFolder, open_output
from cpt.commands.synthesis.prompts import Prompt
from cpt.commands.synthesis.questions import RewriteQuestion, cut
from cpt.commands.synthesis.sampling import Sampling
from cpt.data.readers.documents import Document
from cpt.data.readers.sources import open_source
from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.config import hash_weights, weights_folder
from cpt.recipe.paths import is_local
from cpt.recipe.schema import DocumentSource, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

GROUP = 256
WRAP_TOKENS = 300  # arxiv.org/abs/2401.16380, section 3.1: of longer texts models leave things out
KEY = "source"  # as messages call it: `source.path`


@dataclass(frozen=True)
class Task:
    """What is to be made of which documents."""

    source: DocumentSource
    model: Model
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_input_tokens: int = WRAP_TOKENS
    """Longer documents are cut at the ends of paragraphs, and each piece is a text of its own."""
    seed: int = 42
    cut_off: Literal["drop", "keep"] = "drop"
    """What becomes of an answer that had not ended at `max_new_tokens`."""
    min_characters: int = 40
    """Shorter answers are dropped."""
    batch_size: int = 8


@dataclass
class Rewritten:
    """What `rewrite` did; groups of earlier runs are counted too."""

    documents: int = 0
    pieces: int = 0
    """What the model was asked about: documents, cut where they were long."""
    texts: int = 0
    """That were made."""
    dropped: Counter[str] = field(default_factory=Counter)
    groups_done_before: int = 0


@dataclass(frozen=True)
class TextPiece:
    """A part of a document, or all of it."""

    text: str
    where: str
    number: int
    of: int


def rewrite(task: Task, output: Path, tell: Callable[[Rewritten], None] = lambda done: None) -> Rewritten:
    """Ask the model about each document, and write what it answers to `output` as jsonl that a recipe's source reads.

    Args:
        tell: is told after each group how far it is.

    Raises:
        RecipeError: the model's window is too small, or `output` holds texts of another task.
        DataError: the source is not there, or a row is bad.
        CheckpointError: the weights are missing or damaged.
        ResourceError: the Hub, memory or disk does not have what is needed.
        LaunchError: another process writes there.
    """
    provenance = provenance_of(task)
    writer, done = RewriteWriter(task, provenance), Rewritten()
    with open_output(output, {**provenance, **rules_of(task)}) as folder:
        number, texts = -1, writer.pieces(open_source(task.source, KEY))
        for number, pieces in enumerate(iter(lambda: list(islice(texts, GROUP)), [])):
            counts = folder.find(number, [piece.text for piece in pieces])
            done.groups_done_before += counts is not None
            counts = counts or writer.write(number, pieces, folder)
            done.documents += sum(piece.number == 0 for piece in pieces)
            done.pieces, done.texts = done.pieces + len(pieces), done.texts + counts.texts
            done.dropped.update(counts.dropped)
            tell(done)
        folder.remove_after(number)
    return done


def load_model(section: Model, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model, on the GPU in bfloat16 where there is one, else in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(section, tokenizer, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    assert isinstance(model, PreTrainedModel), "no adapters were asked for"
    model.config.use_cache = True  # off for training
    model.to(device)  # type: ignore[arg-type]  # as transformers types it
    return model


def provenance_of(task: Task) -> dict[str, object]:
    """Where the texts come from: a part of each line."""
    path = str(task.model.path)
    hashes = hash_weights(path, task.model.revision)
    return {
        "model": path,
        "model_revision": None if is_local(path) else weights_folder(path, task.model.revision).name,
        "model_sha256": (
            hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes.items()).encode()).hexdigest()
        ),
        "prompt": task.prompt.name,
        "prompt_sha256": task.prompt.sha256,
        "sampling": asdict(task.sampling),
        "run_seed": task.seed,
        "cpt_version": version("cpt"),
    }


def rules_of(task: Task) -> dict[str, object]:
    """What else decides which texts come out. A source may grow: its texts are compared one group after the other."""
    source = task.source.model_dump(mode="json", exclude={"name", "max_documents"})
    return {"source": source} | {key: vars(task)[key] for key in ("max_input_tokens", "cut_off", "min_characters")}


class RewriteWriter:
    def __init__(self, task: Task, provenance: dict[str, object]) -> None:
        tokenizer = load_tokenizer(Tokenizer(), task.model)
        model = load_model(task.model, tokenizer)
        self._task, self._tokenizer, self._provenance = task, tokenizer, provenance
        self._question = RewriteQuestion(tokenizer, task.prompt.template)
        self._answerer = Answerer(model, tokenizer, task.sampling, task.batch_size)
        self._check_window(model)

    def pieces(self, documents: Iterator[Document]) -> Iterator[TextPiece]:
        """The documents, cut where they are too long."""
        for document in documents:
            texts = [text for text in cut(document.text, self._task.max_input_tokens, self._tokenizer) if text.strip()]
            yield from (TextPiece(text, document.where, number, len(texts)) for number, text in enumerate(texts))

    def write(self, number: int, pieces: Sequence[TextPiece], folder: RewrittenFolder) -> RewriteCounts:
        """Make the texts of a group, and write them."""
        seeds = [seed_of(piece.text, self._task) for piece in pieces]
        answers = self._answerer.answer([self._question.ids(piece.text) for piece in pieces], seeds)
        rows, dropped = [], Counter[str]()
        for piece, answer, seed in zip(pieces, answers, seeds, strict=True):
            if (reason := why_dropped(answer, piece.text, self._task)) is not None:
                dropped[reason] += 1
                continue
            own = {"text": answer.text, "source_text_hash": sha256(piece.text), "source_where": piece.where}
            place, cut_off = (
                {"piece": piece.number, "pieces": piece.of},
                {"cut_off": True} if answer.is_cut_off else {},
            )
            rows.append({**own, **place, **self._provenance, "seed": seed, **cut_off})
        counts = RewriteCounts(len(rows), dict(dropped))
        folder.write(number, rows, [piece.text for piece in pieces], counts)
        return counts

    def _check_window(self, model: PreTrainedModel) -> None:
        """Stop where question and answer do not fit into what the model was made for."""
        config = model.config.get_text_config()
        window = vars(config).get("max_position_embeddings") or vars(config).get("n_positions")
        new = self._task.sampling.max_new_tokens
        needed = self._question.num_tokens_around() + self._task.max_input_tokens + new
        if window is not None and needed > window:
            raise RecipeError(
                f"{self._task.model.path}: question, text and answer need up to {needed:,} tokens, the model has room"
                f" for {window:,}. Lower --max-input-tokens ({self._task.max_input_tokens:,}) or --max-new-tokens"
                f" ({new:,})."
            )


def why_dropped(answer: Answer, text: str, task: Task) -> str | None:
    """The reason not to keep an answer."""
    if not answer.text:
        return "empty"
    if answer.is_cut_off and task.cut_off == "drop":
        return "cut off at max_new_tokens"
    if " ".join(answer.text.casefold().split()) in " ".join(text.casefold().split()):
        return "copied from the text"
    return "too short" if len(answer.text) < task.min_characters else None


def seed_of(text: str, task: Task) -> int:
    """The seed of a text: 64 bits of the hash of the text, the prompt and the run's seed."""
    return int.from_bytes(hashlib.sha256(f"{task.seed} {task.prompt.sha256} {sha256(text)}".encode()).digest()[:8])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
