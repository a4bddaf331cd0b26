"""`cpt data generate-replay MODEL`: texts that a base writes itself, for replay if its own data are not public.

A language model can sample from its training distribution; training on samples reduces forgetting (arXiv 2605.26097).
As in `cpt data rewrite`, texts are written in groups, and depend only on model, prompts, sampling and seed.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic import TypeAdapter

from cpt.command_line import show_log
from cpt.data.readers.filters import length, reason_to_drop
from cpt.data.readers.sources import open_source
from cpt.data.store.tokenization import adds_bos
from cpt.errors import DISTRIBUTION, DataError, RecipeError
from cpt.files import output_locked
from cpt.recipe.schema import DocumentSource, Model, Tokenizer
from cpt.recipe.tree import resolve_scalar
from cpt.recipe.values import Tokens

LONGEST = 1024  # tokens of a text, if the model's window has them


@dataclass(frozen=True)
class ReplayTask:
    model: Model
    prompts: Sequence[str] = ()
    """Beginnings of texts, used in turn. A text follows BOS; or EOS, which separates documents, if the tokenizer adds
    no BOS to documents."""
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 42
    min_characters: int = 200
    batch_size: int = 8


def generate_replay(task: ReplayTask, tokens: int, output: Path) -> Iterator[Counter[str]]:
    """Let the model write jsonl files to `output`, until the texts that are kept have this many of its tokens. Yields
    counts after each group: tokens, texts, reasons for dropping. A later call with more tokens continues.

    Raises:
        RecipeError: the model's context window is too small, or `output` has texts of another task.
        DataError: all texts of a group were dropped.
        LaunchError: another process writes to `output`.
    """
    from cpt.contrib.rewriting import rewrite  # torch

    writer = ReplayWriter(task)
    done = Counter[str]()
    group = 0
    with output_locked(output, output / rewrite.OWN_FOLDER / "lock", "cpt data generate-replay"):
        rewrite.refuse_another_task(
            output, {**writer.provenance, "min_characters": task.min_characters}
        )
        while (tokens_missing := tokens - done["tokens"]) > 0:
            files = (
                output / f"replay-{group:05}.jsonl",
                output / rewrite.OWN_FOLDER / f"{group:05}.json",
            )
            counts_before: Any = rewrite.read_counts(*files, str(group))
            # the last group may have fewer texts, if fewer tokens were wanted
            if (
                counts_before is None
                or counts_before["written"] < rewrite.GROUP
                and counts_before["tokens"] < tokens_missing
            ):
                numbers = range(group * rewrite.GROUP, (group + 1) * rewrite.GROUP)
                rows, counts = writer.write(numbers, tokens_missing)
                if not rows:
                    shortage = f"{task.model.path}: all {rewrite.GROUP} texts of a group were dropped: {dict(counts)}"
                    raise DataError(
                        f"{shortage}. Lower --min-characters, or write beginnings of texts for --prompts."
                    )
                counts_before = {"asked_sha256": str(group), **counts}
                rewrite.write_group(*files, rows, counts_before)
            for name, count in counts_before.items():
                if isinstance(count, int):
                    done[name] += count
            yield done
            group += 1


class ReplayWriter:
    """The model of a task, and how it writes texts: a text depends on its number and the seed only."""

    def __init__(self, task: ReplayTask) -> None:
        from cpt.contrib.rewriting import rewrite  # torch
        from cpt.contrib.rewriting.model import Answerer, Sampling, encode
        from cpt.tokenizer.load import load_tokenizer

        self.task = task
        self.tokenizer = load_tokenizer(Tokenizer(), task.model)
        has_bos = adds_bos(self.tokenizer) and self.tokenizer.bos_token_id is not None
        token = self.tokenizer.bos_token_id if has_bos else self.tokenizer.eos_token_id
        start = int(cast(int, token))
        prompts = task.prompts or ("",)
        self.beginnings = [[start, *encode(self.tokenizer, prompt)] for prompt in prompts]
        model, window = rewrite.load_to_generate(task.model, self.tokenizer)
        tokens_left = (window or sys.maxsize) - max(map(len, self.beginnings))
        new_tokens = task.max_new_tokens or max(1, min(LONGEST, tokens_left))
        if new_tokens > tokens_left:
            shortage = f"{task.model.path}: its window of {window:,} tokens has {max(0, tokens_left):,} for new ones"
            raise RecipeError(f"{shortage}. Lower --max-new-tokens, or shorten the --prompts.")
        sampling = Sampling(new_tokens, task.temperature, task.top_p)
        self.hash_of_prompts = rewrite.sha256("\n".join(task.prompts))
        self.answerer = Answerer(model, self.tokenizer, sampling, task.batch_size)
        self.answerer.continues = True
        self.filters = (
            partial(length, min_characters=task.min_characters),
            rewrite.REPETITION,
        )
        self.provenance = {
            **rewrite.describe_model(task.model),
            "sampling": asdict(sampling),
            "run_seed": task.seed,
            "prompts_sha256": self.hash_of_prompts if task.prompts else None,
            "cpt_version": version(DISTRIBUTION),
        }

    def write(
        self, numbers: range, tokens_to_write: int
    ) -> tuple[list[Mapping[str, object]], Counter[str]]:
        """Write the texts of these numbers until they have this many tokens; also return counts."""
        from cpt.contrib.rewriting import rewrite  # torch
        from cpt.contrib.rewriting.model import encode

        rows = list[Mapping[str, object]]()
        counts = Counter[str](texts=0)
        batch_size = self.task.batch_size
        for first in range(0, len(numbers), batch_size):
            batch = numbers[first : first + batch_size]
            seeds = list(map(self.seed_of_text, batch))
            beginnings = [self.beginnings[number % len(self.beginnings)] for number in batch]
            answers = self.answerer.answer(beginnings, seeds)
            for number, seed, answer in zip(batch, seeds, answers, strict=True):
                text = answer.text.rstrip("\ufffd")  # the last character may be cut off
                counts["written"] += 1
                reason = reason_to_drop(rewrite.view(text), self.filters)
                if reason:
                    counts[f"dropped: {reason}"] += 1
                    continue
                row = {"text": text, "number": number, **self.provenance, "seed": seed}
                if answer.is_cut_off:
                    row["cut_off"] = True
                rows.append(row)
                counts.update(texts=1, tokens=len(encode(self.tokenizer, text)))
                if counts["tokens"] >= tokens_to_write:
                    return rows, counts
        return rows, counts

    def seed_of_text(self, number: int) -> int:
        """64 bits of a hash."""
        text = f"{self.task.seed} {self.hash_of_prompts} {number}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def command(
    model: Annotated[
        str, typer.Argument(help="Folder or Hub id of the base that will be trained.")
    ],
    tokens: Annotated[str, typer.Option(help="Tokens of all texts that are kept: 5M, 500_000.")],
    output: Annotated[
        Path, typer.Option(help="Folder for the jsonl files; finished texts are not repeated.")
    ],
    prompts: Annotated[
        str | None, typer.Option(help="File with a beginning of a text in each line.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="1: the model's own probabilities.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Length of a text; {LONGEST} by default.")
    ] = None,
    min_characters: Annotated[int, typer.Option(min=1, help="Drop shorter texts.")] = 200,
    seed: Annotated[
        int, typer.Option(min=0, help="Each text's seed derives from it and the text's number.")
    ] = 42,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Texts per batch; does not change texts in float32.")
    ] = 8,
) -> None:
    """Let a base write texts, for replay if its own training data are not public. The same command resumes.

    Texts begin at BOS, without a chat template; repetitive ones are dropped.

    Example: cpt data generate-replay Qwen/Qwen2.5-1.5B --tokens 5M --output self_replay
    """
    show_log()
    try:
        num_tokens = TypeAdapter(Tokens).validate_python(resolve_scalar(tokens), strict=True)
    except ValueError as problem:
        raise RecipeError(
            f"--tokens {tokens}: expected a number of tokens such as 20M or 500_000."
        ) from problem
    beginnings: list[str] = []
    if prompts is not None:
        lines = open_source(DocumentSource(path=prompts, text_documents="line"), "--prompts")
        beginnings = [line.text.strip() for line in lines if line.text.strip()]
        if not beginnings:
            raise RecipeError(
                f"--prompts {prompts}: no text. Write a beginning of a text in each line."
            )
    task = ReplayTask(
        Model(path=model),
        beginnings,
        max_new_tokens,
        temperature,
        top_p,
        seed,
        min_characters,
        batch_size,
    )
    done = Counter[str]()
    for done in generate_replay(task, num_tokens, output):
        typer.echo(f"{done['tokens']:,} of {num_tokens:,} tokens in {done['texts']:,} texts")
    for name, count in done.most_common():
        typer.echo(f"{count:>12,} {name}")
    typer.echo(f"A recipe reads them: data.sources: [{{name: self_replay, path: {output}}}]")
