"""The held-out sets of a recipe or a command line: rows for a model's tokenizer, and texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from cpt.cache import default_cache_dir
from cpt.data.readers.columns import form_of_stage, with_form
from cpt.data.rows.build import build_data, check_texts, shards_of, unrestored
from cpt.data.rows.held_out import HeldOutSet, whole_set
from cpt.data.rows.open_sources import open_source
from cpt.data.rows.packing import Layout, PackedRows
from cpt.data.rows.stretches import EndedStretch, ended_stretches
from cpt.data.store.shards import texts_of
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, make_shards
from cpt.distributed import main_process_first
from cpt.errors import DataError
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.schema import Data, Evaluation, HeldOut, Recipe, Source
from cpt.runs.history import part_after, read_history

DEFAULT_LENGTH = 2048


class HeldOutText(NamedTuple):
    text: str
    where: str


@dataclass(frozen=True)
class EvaluationData:
    data: Data
    """Transforms, policies, and sources for shares of them."""
    evaluation: Evaluation
    seed: int = 0
    form: str = "document"
    """The form of the rows: see `cpt.data.readers.columns`."""
    earlier: Sequence[EndedStretch] = ()
    """Of a run whose mixture changed: they decide which documents are held out of later sources."""


@dataclass(frozen=True)
class EvaluationSet:
    rows: HeldOutSet
    tokenized: TokenizedSource

    def texts(self) -> Iterator[HeldOutText]:
        """Yield the documents in order, read from their files again."""
        assert self.rows.chosen is not None
        hashes = cast(PackedRows, self.rows.rows).documents.hashes
        chosen_hashes = set(hashes[self.rows.chosen].tolist())
        plan = self.tokenized.plan
        pieces = []
        for shard in plan.held_out:
            pieces += plan.shards[shard]
        for text, document in texts_of(self.tokenized.work, pieces):
            if xxh3_64_intdigest(text.encode()) in chosen_hashes:
                yield HeldOutText(text, document.where)


def has_held_out(recipe: Recipe) -> bool:
    return recipe.evaluation.held_out_share is not None or bool(recipe.evaluation.perplexity)


def data_of_recipe(recipe: Recipe, run: Path | None = None) -> EvaluationData:
    """The held-out sets of a recipe, or of a run with this recipe; raises DataError if there are none."""
    evaluation = recipe.evaluation
    if not has_held_out(recipe):
        raise DataError(
            f"the recipe `{recipe.name}` has no held-out documents. Set `evaluation.held_out_share` or"
            " `evaluation.perplexity`, or name files here: --text domain=held_out.jsonl"
        )
    history = read_history(run) if run is not None else []
    last_step = max((line["step"] for line in history), default=0)
    stretches = part_after(history, last_step, recipe).stretches
    return EvaluationData(
        data=phases_in_tokens(recipe),
        evaluation=evaluation,
        seed=recipe.seed,
        form=form_of_stage(recipe.stage),
        earlier=ended_stretches(stretches),
    )


def data_of_texts(texts: Sequence[str], sequence_length: int = DEFAULT_LENGTH) -> EvaluationData:
    """The held-out sets of a command line, `name=path` each; a path is a file, folder or glob, as in a recipe."""
    sets = []
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise DataError(
                f"`--text {text}`: expected name=path, for example --text domain=held_out.jsonl"
            )
        sets.append(HeldOut(name=name, path=path))
    # The source is never opened: a data section must have one.
    data = Data(sequence_length=sequence_length, sources=[Source(path=sets[0].path)])
    return EvaluationData(data, Evaluation(perplexity=sets))


def open_evaluation_sets(
    held: EvaluationData, tokenizer: PreTrainedTokenizerBase
) -> dict[str, EvaluationSet]:
    """Open all sets by name, tokenised for one tokenizer; one process does the work for all."""
    cache = default_cache_dir()
    if held.evaluation.held_out_share is None:
        return main_process_first(lambda: sets_by_name(held, DocumentEncoder(tokenizer), cache))
    prepared = build_data(
        held.data,
        tokenizer,
        seed=held.seed,
        evaluation=held.evaluation,
        cache_dir=cache,
        form=held.form,
        earlier=held.earlier,
    )
    tokenized = prepared.tokenized
    return {name: EvaluationSet(rows, tokenized[name]) for name, rows in prepared.held_out.items()}


def sets_by_name(
    held: EvaluationData, encoder: DocumentEncoder, cache: Path
) -> dict[str, EvaluationSet]:
    """The sets with separate files."""
    sets: dict[str, EvaluationSet] = {}
    data, evaluation = with_form(held.data, held.evaluation, held.form)
    layout = Layout(data.sequence_length, data.packing, None, encoder.pad)
    for number, source in enumerate(evaluation.perplexity):
        key = f"evaluation.perplexity[{number}]"
        tokenized = open_source(data, source, key, encoder, cache, held.seed)
        make_shards(shards_of([tokenized]))
        tokenized.finish()
        losses = check_texts(shards_of([tokenized]), data.max_text_loss)
        if unrestored(losses):
            continue
        rows = whole_set(tokenized, layout, cache)
        if rows.name in sets:
            raise DataError(
                f"two held-out sets are called `{rows.name}`. Give each a different name."
            )
        sets[rows.name] = EvaluationSet(rows, tokenized)
    return sets
