"""Rewrite the documents of a source with a model, local or behind a server, and record where each text comes from.

Texts are processed in groups of 256. A group becomes one output file, written atomically; the next run recognizes
finished groups by the hash of their texts. Answers of an unfinished group are appended to its journal, so a killed run
pays for no answer twice, and each text has one answer per style although a server may answer differently each time. A
local model's answer depends only on the text, the model, the prompt, the sampling and the seed, except for rounding in
kernels: in float32 all batch sizes gave the same texts; in bfloat16 the batch size may decide between two tokens that
are almost equally likely.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import orjson
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.contrib.rewriting.answers import clean
from cpt.contrib.rewriting.model import (
    Answer,
    Answerer,
    Ask,
    Endpoint,
    RewriteQuestion,
    Sampling,
    all_of,
    cut,
    encode,
)
from cpt.contrib.rewriting.styles import WRAP_TOKENS, Style, fill
from cpt.data.readers.comparing import COMPARISON, words_of
from cpt.data.readers.decontamination import WORDS, decontaminate, runs_of, runs_of_files
from cpt.data.readers.documents import Document
from cpt.data.readers.filters import gopher_repetition
from cpt.data.readers.sources import open_source
from cpt.errors import DISTRIBUTION, CptError, DataError, RecipeError
from cpt.files import append, json_lines, output_locked, write_atomic
from cpt.models.build import build_model
from cpt.models.config import hash_weights, weights_folder
from cpt.recipe.paths import is_local
from cpt.recipe.schema import DocumentSource, Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer

GROUP = 256
GROUPS_AT_ONCE = (
    2  # of a server: while the last answers of a group are written, the next one is sent
)
BYTES_PER_TOKEN = 4  # of English text; a server's tokenizer is not known here
KEY = "source"  # for messages: `source.path`
OWN_FOLDER = ".rewrite"  # sources skip hidden folders
LIKENESS = 0.8  # share of a text's runs of 8 words that are in another text, of near copies
# Half of the text repeats itself: questions and answers repeat more of their words than the web pages for which the
# filter's own limits were made.
REPETITION = partial(gopher_repetition, max_top_n_grams=(), max_duplicate_n_grams=(0.5,) * 6)
FIRST_ANSWERS = 50  # if all are dropped, the run ends, so that the others are not paid for
REMEDY = (
    "Look at the model's answers to a few texts (--max-documents 10) and choose another --output."
    " Only thoughts: switch thinking off in the server, or raise --max-new-tokens."
    " Refusals, framing or equal answers: another --model or --styles."
)
EQUAL = "equal to the answer to another text"
FOCUS_TOKENS = 400  # at most, about, of what a further call is about
RULES = (
    "max_input_tokens",
    "repeats",
    "further_calls",
    "against",
    "cut_off",
    "min_characters",
)  # of `Task`


@dataclass(frozen=True)
class Task:
    """The documents to rewrite, and the options."""

    source: DocumentSource
    model: Model | Endpoint
    styles: Sequence[Style]
    sampling: Sampling = Sampling()
    max_input_tokens: int = WRAP_TOKENS
    """Longer documents are split at the ends of paragraphs, and each piece is a separate text."""
    seed: int = 42
    repeats: int = 1  # texts of each style
    further_calls: int = 8  # at most, after a call that lists entities or strategies
    against: tuple[str, ...] = ()  # evaluation files whose text is dropped
    cut_off: Literal["drop", "keep"] = "drop"  # for answers that do not end within `max_new_tokens`
    min_characters: int = 40  # shorter answers are dropped
    batch_size: int = 8

    def most_calls(self, texts: int = 1) -> int:
        calls_of_styles = 0
        for style in self.styles:
            calls_of_styles += 1 + self.further_calls if style.then else 1
        return texts * self.repeats * calls_of_styles


@dataclass
class Rewritten:
    """Counts of `rewrite`, including groups of earlier runs."""

    documents: int = 0
    pieces: int = 0  # texts given to the model: documents, split if long
    texts: int = 0  # rewritten texts
    dropped: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(
        default_factory=Counter
    )  # from answers of this run, such as thoughts
    groups_done_before: int = 0
    calls: int = 0  # answered in this run
    calls_settled: int = 0  # of `Task.most_calls`: answered, now or before, or not needed


@dataclass(frozen=True)
class TextPiece:
    """A document, or a part of it."""

    text: str
    text_hash: str
    where: str
    number: int
    of: int


@dataclass(frozen=True)
class Call:
    """A text, a style, and for a further call its part of the first one's list."""

    task: Task
    piece: TextPiece
    style: Style
    repeat: int
    focus: str = ""

    @property
    def prompt(self) -> str:
        return fill(
            self.style.then if self.focus else self.style.prompt, self.piece.text, self.focus
        )

    @cached_property
    def key(self) -> str:
        parts = (self.task.seed, self.style.sha256, self.piece.text_hash, self.repeat, self.focus)
        return sha256("\n".join(map(str, parts)))

    @property
    def seed(self) -> int:
        return int(self.key[:8], 16) >> 1  # 31 bits, which every server accepts


class Estimate(NamedTuple):
    documents: int
    texts: int
    calls: int  # these three: at most
    input_tokens: int
    output_tokens: int


def estimate(task: Task) -> Estimate:
    """Read the source, and count what its rewriting will cost."""
    count = token_counter(task)
    documents = 0
    texts = 0
    tokens = 0
    for piece in cut_all(open_source(task.source, KEY), task.max_input_tokens, count):
        if piece.number == 0:
            documents += 1
        texts += 1
        tokens += count(piece.text)
    longest = max(count(prompt) for style in task.styles for prompt in (style.prompt, style.then))
    calls = task.most_calls(texts)
    calls_times_text = task.most_calls(tokens)
    return Estimate(
        documents,
        texts,
        calls,
        calls_times_text + calls * longest,
        calls * task.sampling.max_new_tokens,
    )


def token_counter(task: Task) -> Callable[[str], int]:
    if isinstance(task.model, Endpoint):
        return lambda text: -(-len(text.encode()) // BYTES_PER_TOKEN)
    tokenizer = load_tokenizer(Tokenizer(), task.model)
    return lambda text: len(encode(tokenizer, text))


def rewrite(
    task: Task,
    output: Path,
    report: Callable[[Rewritten], None] = lambda done: None,
    most_calls: int | None = None,
) -> Rewritten:
    """Prompt the model with each document, and write its answers to `output` as jsonl for a recipe's source.

    Args:
        most_calls: `estimate(task).calls`, if it is known.

    Raises:
        RecipeError: the model's context window is too small, or `output` has texts of another task.
        LaunchError: another process writes to `output`, or the server refuses a call.
        Interrupted: a server failed for minutes.
        DataError: the first answers are all dropped.
    """
    provenance: dict[str, object] = {"sampling": asdict(task.sampling), "run_seed": task.seed}
    provenance |= {"cpt_version": version(DISTRIBUTION), **describe_model(task.model)}
    rules = {
        # A source may grow, so its texts are compared per group.
        "source": task.source.model_dump(mode="json", exclude={"name", "max_documents"}),
        "styles": [[style.name, style.sha256] for style in task.styles],
        **{name: vars(task)[name] for name in RULES},
    }
    try:
        runs_of_files(task.against, COMPARISON)  # before the model is loaded
    except CptError as problem:
        raise type(problem)(f"--decontaminate-against: {problem}") from problem
    with output_locked(output, output / OWN_FOLDER / "lock", "cpt data rewrite"):
        refuse_another_task(output, {**provenance, **rules})
        if most_calls is None:
            most_calls = estimate(task).calls
        rewriting = Rewriting(task, output, provenance, report, most_calls)
        asyncio.run(rewriting.rewrite())
    return rewriting.done


def describe_model(model: Model | Endpoint) -> dict[str, object]:
    if isinstance(model, Endpoint):
        return {"model": model.model, "model_revision": None, "model_sha256": None}
    path = str(model.path)
    revision = model.revision
    hashes = hash_weights(path, revision).items()
    return {
        "model": path,
        "model_revision": None if is_local(path) else weights_folder(path, revision).name,
        "model_sha256": sha256("".join(f"{name} {digest}\n" for name, digest in hashes)),
    }


@dataclass
class Rewriting:
    """The state of `rewrite`."""

    task: Task
    output: Path
    provenance: Mapping[str, object]
    report: Callable[[Rewritten], None]
    most_calls: int  # each answered once
    done: Rewritten = field(default_factory=Rewritten)
    first_kept: str | None = None  # of the answers of this run
    is_useful: bool = False  # two different answers were kept
    dropped_at_first: Counter[str] = field(default_factory=Counter)

    async def rewrite(self) -> None:
        task = self.task
        texts = cut_all(open_source(task.source, KEY), task.max_input_tokens, token_counter(task))
        groups = enumerate(iter(lambda: list(islice(texts, GROUP)), []))
        model = task.model
        if isinstance(model, Endpoint):
            # Only the texts of unfinished groups need calls, so this is the most.
            asking = model.asking(task.sampling, self.most_calls)
        else:
            asking = local_model(task, model)
        async with asking as ask:

            async def work() -> None:
                for number, pieces in groups:
                    await self.rewrite_group(number, pieces, ask)

            num_groups = GROUPS_AT_ONCE if isinstance(model, Endpoint) else 1
            await all_of(work() for _ in range(num_groups))
        drop_equal_answers(self.output, self.done)
        number = -(-self.done.pieces // GROUP)
        # The source was longer before.
        while any(map(Path.exists, files_of_group(self.output, number))):
            for file in files_of_group(self.output, number):
                file.unlink(missing_ok=True)
            number += 1

    async def rewrite_group(self, number: int, pieces: Sequence[TextPiece], ask: Ask) -> None:
        texts, counted, journal = files_of_group(self.output, number)
        group_hash = sha256("".join(piece.text_hash for piece in pieces))
        done = self.done
        counts = read_counts(texts, counted, group_hash)
        if counts is not None:
            done.groups_done_before += 1
            done.calls_settled += self.task.most_calls(len(pieces))
        else:
            rows, dropped = await self.write_rows(pieces, journal, ask)
            counts = {"asked_sha256": group_hash, "texts": len(rows), "dropped": dropped}
            write_group(texts, counted, rows, counts)
        journal.unlink(missing_ok=True)
        done.documents += sum(piece.number == 0 for piece in pieces)
        done.pieces = done.pieces + len(pieces)
        done.texts = done.texts + counts["texts"]
        done.dropped.update(counts["dropped"])
        self.report(done)

    async def write_rows(
        self, pieces: Sequence[TextPiece], journal: Path, ask: Ask
    ) -> tuple[list[dict[str, object]], Counter[str]]:
        """The output's rows, and reason -> how many texts and answers were dropped."""
        task = self.task
        dropped = Counter[str]()
        calls = list[Call]()
        for piece in pieces:
            reason = decontaminate(view(piece.text), against=task.against)
            if reason:
                dropped[f"the text itself is {reason}"] += 1
                self.done.calls_settled += task.most_calls()
                continue
            for style in task.styles:
                for n in range(task.repeats):
                    calls.append(Call(task, piece, style, n))
        answers = read_journal(journal)
        await self.ask_missing(calls, answers, journal, ask)
        calls_in_order = list[Call]()
        for call in calls:
            if not call.style.then:
                calls_in_order.append(call)
                continue
            listed = clean(answers[call.key], call.piece.text)
            if listed.flaw is not None:
                dropped[listed.flaw] += 1
                self.done.calls_settled += task.further_calls
                continue
            lines = listed.text.rpartition("\n")[0] if listed.is_cut_off else listed.text
            foci = call.style.foci(lines, task.further_calls, call.seed)
            self.done.calls_settled += task.further_calls - len(foci)
            if not foci:
                dropped["no list in the first answer"] += 1
            calls_in_order += [replace(call, focus=focus) for focus in foci]
        await self.ask_missing(
            [call for call in calls_in_order if call.focus], answers, journal, ask
        )
        rows = list[dict[str, object]]()
        accepted = defaultdict[TextPiece, list[str]](list)
        for call in calls_in_order:
            piece = call.piece
            answer = clean(answers[call.key], piece.text)
            self.done.removed.update(answer.removed)
            reason = why_dropped(answer, piece.text, accepted[piece], task)
            if reason is not None:
                dropped[reason] += 1
                continue
            accepted[piece].append(answer.text)
            rows.append(row_of(call, answer, self.provenance))
        return rows, +dropped

    async def ask_missing(
        self, calls: Sequence[Call], answers: dict[str, Answer], journal: Path, ask: Ask
    ) -> None:
        """Add the answers that are missing, and append each to the journal when it arrives."""
        missing = list({call.key: call for call in calls if call.key not in answers}.values())
        self.done.calls_settled += len(calls) - len(missing)

        def take(number: int, answer: Answer) -> None:
            key = missing[number].key
            append(journal, orjson.dumps({"key": key, **vars(answer)}).decode() + "\n")
            answers[key] = answer
            if not self.is_useful:
                self.count_first(missing[number], answer)
            self.done.calls = self.done.calls + 1
            self.done.calls_settled = self.done.calls_settled + 1
            self.report(self.done)

        await ask([(call.prompt, call.seed) for call in missing], take)

    def count_first(self, call: Call, answer: Answer) -> None:
        """Raises DataError if the first answers of this run are all dropped, or equal."""
        answer = clean(answer, call.piece.text)
        reason = answer.flaw
        if not call.style.then or call.focus:
            reason = why_dropped(answer, call.piece.text, (), self.task)
        if reason is None and self.first_kept is None:
            self.first_kept = answer.text
            return
        if reason is None and answer.text != self.first_kept:
            self.is_useful = True
            return
        reason = reason or EQUAL
        self.dropped_at_first[reason] += 1
        if self.dropped_at_first.total() == FIRST_ANSWERS:
            raise DataError(nothing_kept(self.output, FIRST_ANSWERS, self.dropped_at_first))


def nothing_kept(output: Path, num_texts: int, dropped: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in dropped.most_common(3))
    return f"{output}: no text was kept of {num_texts:,}. Dropped: {reasons or 'nothing'}. {REMEDY}"


@asynccontextmanager
async def local_model(task: Task, section: Model) -> AsyncIterator[Ask]:
    """Load the model; RecipeError if question and answer do not fit into its window."""
    tokenizer = load_tokenizer(Tokenizer(), section)
    question = RewriteQuestion(tokenizer)
    model, window = load_to_generate(section, tokenizer)
    new = task.sampling.max_new_tokens
    prompts = [prompt for style in task.styles for prompt in (style.prompt, style.then)]
    of_lists = 0
    if any(style.then for style in task.styles):
        of_lists = FOCUS_TOKENS
    needed = (
        max(len(question.ids(prompt)) for prompt in prompts)
        + of_lists
        + task.max_input_tokens
        + new
    )
    if window is not None and needed > window:
        raise RecipeError(
            f"{section.path}: question, text and answer need up to {needed:,} tokens, and the model's window has"
            f" {window:,}. Lower --max-input-tokens ({task.max_input_tokens:,}) or --max-new-tokens ({new:,})."
        )
    answerer = Answerer(model, tokenizer, task.sampling, task.batch_size)

    async def ask(
        questions: Sequence[tuple[str, int]], take: Callable[[int, Answer], None]
    ) -> None:
        order = sorted(range(len(questions)), key=lambda number: len(questions[number][0]))
        for start in range(0, len(order), task.batch_size):
            batch = order[start : start + task.batch_size]
            ids = [question.ids(questions[number][0]) for number in batch]
            for number, answer in zip(
                batch, answerer.answer(ids, [questions[n][1] for n in batch]), strict=True
            ):
                take(number, answer)
            await asyncio.sleep(0)  # here Ctrl-C takes effect

    yield ask


def load_to_generate(
    section: Model, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, int | None]:
    """Load the model, on the GPU in bfloat16 if there is one, else in float32; with its window in tokens, if known."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(
        section, tokenizer, dtype=torch.bfloat16 if device == "cuda" else torch.float32
    )
    assert isinstance(model, PreTrainedModel), "no adapters were requested"
    config = model.config.get_text_config()
    model.config.use_cache = True  # off in training
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation of `to`
    return model, vars(config).get("max_position_embeddings") or vars(config).get("n_positions")


def cut_all(
    documents: Iterable[Document], max_tokens: int, count: Callable[[str], int]
) -> Iterator[TextPiece]:
    for document in documents:
        texts = [text for text in cut(document.text, max_tokens, count) if text.strip()]
        for number, text in enumerate(texts):
            yield TextPiece(text, sha256(text), document.where, number, len(texts))


def read_journal(journal: Path) -> dict[str, Answer]:
    """The answers of an earlier run, by the keys of their calls."""
    answers = dict[str, Answer]()
    if not journal.exists():
        return answers
    for line in json_lines(journal):
        if line is None:  # cut off by a kill
            continue
        answer = Answer(**{name: value for name, value in line.items() if name != "key"})
        # JSON has lists, not tuples.
        answers[line["key"]] = replace(
            answer, removed=tuple(answer.removed), changed=tuple(answer.changed)
        )
    return answers


def drop_equal_answers(output: Path, done: Rewritten) -> None:
    """Drop answers that equal an earlier one to another text: they were not made from their texts."""
    sources: dict[bytes, str] = {}  # hash of an answer -> hash of the first text that it answers
    for number in range(-(-done.pieces // GROUP)):
        texts, counted, _ = files_of_group(output, number)
        if not texts.exists():
            continue
        rows: list[dict[str, Any]] = [row for row in json_lines(texts) if row is not None]
        unique_rows = []
        for row in rows:
            normalized = " ".join(row["text"].casefold().split())
            answer = hashlib.blake2b(normalized.encode(), digest_size=16).digest()
            if sources.setdefault(answer, row["source_text_hash"]) == row["source_text_hash"]:
                unique_rows.append(row)
        num_equal = len(rows) - len(unique_rows)
        if num_equal:
            counts = orjson.loads(counted.read_bytes())
            dropped = Counter(counts["dropped"]) + Counter({EQUAL: num_equal})
            write_group(
                texts,
                counted,
                unique_rows,
                {**counts, "texts": len(unique_rows), "dropped": dropped},
            )
            done.texts -= num_equal
            done.dropped[EQUAL] += num_equal


def row_of(call: Call, answer: Answer, provenance: Mapping[str, object]) -> dict[str, object]:
    piece = call.piece
    row: dict[str, object] = {
        "text": answer.text,
        "source_text_hash": piece.text_hash,
        "source_where": piece.where,
        "piece": piece.number,
        "pieces": piece.of,
        **provenance,
        "style": call.style.name,
        "prompt_sha256": call.style.sha256,
        "stage": 2 if call.focus else 1,
        "repeat": call.repeat,
        "seed": call.seed,
    }
    more: dict[str, object] = {
        "focus": call.focus,
        "endpoint_model": answer.model,
        "cut_off": answer.is_cut_off,
    }
    if answer.changed:
        more["changed_parameters"] = list(answer.changed)
        left_out = {"temperature", "top_p"} & {
            change.removeprefix("without ") for change in answer.changed
        }
        row["sampling"] = {**cast(dict[str, Any], row["sampling"]), **dict.fromkeys(left_out)}
    return row | {name: value for name, value in more.items() if value}


def why_dropped(
    answer: Answer, text: str, earlier_answers: Sequence[str], task: Task
) -> str | None:
    """Return the reason to drop an answer, or None; `others` are the kept rewritings of the same text."""
    if answer.flaw is not None:
        return answer.flaw
    if not answer.text:
        return "empty"
    if answer.is_cut_off and task.cut_off == "drop":
        return "cut off at max_new_tokens"
    if is_near_copy(answer.text, text):
        return "copied from the text"
    if len(answer.text) < task.min_characters:
        return "too short"
    if any(is_near_copy(answer.text, other) for other in earlier_answers):
        return "near copy of another rewriting"
    return REPETITION(view(answer.text)) or decontaminate(view(answer.text), against=task.against)


def is_near_copy(text: str, other: str) -> bool:
    """Whether the other text contains this one, or `LIKENESS` of its runs of words."""
    if " ".join(text.casefold().split()) in " ".join(other.casefold().split()):
        return True
    words_of_answer = words_of(text)
    words_of_other = words_of(other)
    return (
        min(len(words_of_answer), len(words_of_other)) >= WORDS
        and np.isin(runs_of(words_of_answer), runs_of(words_of_other)).mean() >= LIKENESS
    )


def view(text: str) -> dict[str, str]:
    return {"text": text, "source": KEY, "where": ""}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_another_task(folder: Path, task: Mapping[str, object]) -> None:
    """Record this task; RecipeError if the folder has texts of another task."""
    file = folder / OWN_FOLDER / "task.json"
    task_now = orjson.loads(orjson.dumps(task))
    has_answers = any(file.parent.glob("[0-9]*"))  # not if the server refused the first call
    before = orjson.loads(file.read_bytes()) if has_answers and file.exists() else task_now
    differing = []
    for key in sorted(task_now.keys() | before.keys()):
        if task_now.get(key) != before.get(key):
            differing.append(key)
    if differing:
        names = ", ".join(differing)
        raise RecipeError(
            f"{folder} has texts of another task ({names} differ). Choose another --output."
        )
    write_atomic(file, orjson.dumps(task_now, option=orjson.OPT_INDENT_2))


def files_of_group(folder: Path, number: int) -> tuple[Path, Path, Path]:
    """The files of a group: its texts; its counts, which mark the group as finished; its answers until then."""
    own_folder = folder / OWN_FOLDER
    return (
        folder / f"rewritten-{number:05}.jsonl",
        own_folder / f"{number:05}.json",
        own_folder / f"{number:05}.answers.jsonl",
    )


def read_counts(texts: Path, counts: Path, group_hash: str) -> dict[str, Any] | None:
    """The counts of a group if an earlier run made it from the same texts."""
    if not counts.exists():
        return None
    content: dict[str, Any] = orjson.loads(counts.read_bytes())
    # An empty group has no file, because sources refuse empty files.
    if content["asked_sha256"] == group_hash and texts.exists() == (content["texts"] > 0):
        return content
    return None


def write_group(
    texts: Path, counts: Path, rows: Sequence[Mapping[str, object]], content: Mapping[str, Any]
) -> None:
    counts.unlink(missing_ok=True)
    texts.unlink(missing_ok=True)
    if rows:
        write_atomic(texts, b"".join(orjson.dumps(row) + b"\n" for row in rows), durable=True)
    write_atomic(counts, orjson.dumps(content), durable=True)
