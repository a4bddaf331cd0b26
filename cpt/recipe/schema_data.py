"""The data section of a recipe: its sources, their mixture, and how rows are made of their documents."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cpt.recipe.section import Component, Section
from cpt.recipe.written_numbers import Bytes, Length, Positive, Times, Tokens, Weight


class DocumentSource(Section):
    """Where documents come from, and what of a file is one."""

    path: str = Field(min_length=1)
    """Local file, folder or glob (txt, md, jsonl, json, parquet, csv, tsv, arrow, also .gz and .zst), a URL like
    s3://bucket/*.parquet, a dataset's id on the Hub, or your own `package.module:function` that gives texts or
    rows."""
    name: str | None = None
    """How reports call it; by default the last part of the path."""
    text_column: str = "text"
    """Column or JSON key that holds the text."""
    template: str | None = None
    """Text from several columns instead: `"{title}\\n\\n{body}"`."""
    chat: str | dict[str, str] | None = None
    """Or else the column that holds a chat: a list of {role, content}; the document is what the tokenizer's chat template makes of it. Or
    what an example is made of, each with its column: `{messages: talk, tools: functions}`, `{prompt: question, completion: answer}`,
    `{prompt: question, chosen: good, rejected: bad}`, `{prompt: question, completion: answer, label: liked}`. `user` and `assistant` in
    place of prompt and completion are texts that become messages; `system` and `history` come before them. A column may be a template:
    `{user: "{instruction}\\n{input}", assistant: output}`. Stages that learn from examples find columns of these names by themselves."""  # noqa: E501
    text_documents: str = Field(default="file", min_length=1)
    """What one document is in a txt or md file. file: all of it; line: each line; anything else is a text that stands
    between documents."""
    data_files: list[str] = []
    """Files of a Hub dataset, by name or glob; by default those of its split."""
    streaming: bool = False
    """Read a Hub dataset's files as they are needed, without keeping them on the disk."""
    options: dict[str, Any] = {}
    """Options of your own `package.module:function`."""
    subset: str | None = None
    """Configuration of a Hub dataset."""
    split: str = "train"
    """Split of a Hub dataset."""
    revision: str | None = None
    """Revision of a Hub dataset."""
    max_documents: Positive | None = None
    """Take only the first so many documents (of a Hub dataset: fetch no more than these)."""


class Source(DocumentSource):
    """A part of the mixture."""

    weight: Annotated[Weight, Field(gt=0)] = 1.0
    """Share of the training tokens, relative to the other sources; not used under `phases` or `temperature`."""
    max_tokens: Tokens | None = None
    """Take no more than so many tokens of it; of an endless source, no more is read."""
    max_epochs: Times | None = None
    """Go through it at most so often; a run that would need more is refused."""
    licence: str | None = None
    """What its texts are under, in your words: `CC-BY-4.0`. Told by `cpt mixture` and in the run's record."""
    order_by: str | None = None
    """Read it by a score, lowest first, instead of shuffled: a column of numbers, or your own
    `package.module:function` of the text. Each time through it goes the same way, in 64 parts that are shuffled
    inside."""
    fill_in_the_middle: dict[Literal["rate", "suffix_first_rate"], Annotated[float, Field(ge=0, le=1)]] | None = None
    """For code: documents whose middle comes last, so that a model learns to fill gaps; needs a tokenizer with marks
    for it. `rate`: share of the documents, chosen by the hash of their text (0.5); `suffix_first_rate`: of these, the
    share that is written suffix, prefix, middle instead of prefix, suffix, middle (0.5). `{}` takes both."""
    transforms: list[Component] = []
    """Transforms for this source, after those of `data.transforms`."""
    filters: list[Component] = []
    """Filters for this source, after those of `data.filters`."""


class Phase(Section):
    """Part of the run with weights of its own; each source goes on where the phase before left it."""

    until: Tokens | None = None
    """Where it ends, in tokens from the beginning of the run; the last phase may leave it out."""
    weights: dict[str, Weight]
    """Source's name -> share of the phase's tokens, relative to the others; a source that is left out has none."""
    context_length: Length | None = None
    """A curriculum of lengths: in this phase documents are read in pieces of so many tokens, while rows stay as long
    as `data` says."""
    change: Literal["at_once", "linear"] = "at_once"
    """linear: weights move over the whole phase from those of the phase before to these, in 64 equal blocks. at_once:
    these throughout."""


class Data(Section):
    """What the model reads."""

    sequence_length: Annotated[Length, Field(ge=2)] = 2048
    """Tokens in one row."""
    sources: list[Source] = Field(min_length=1)
    """The mixture: weights are shares of tokens."""
    phases: list[Phase] = []
    """A curriculum: weights that change as tokens go by, instead of the sources' own."""
    temperature: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Weights from sizes instead: each source's tokens to the power of 1/temperature. 1: in proportion; higher: more
    even."""
    window_bytes: Bytes = 256 * 2**20
    """Files of a source that are packed and shuffled together. A larger source is read window by window, in an order
    drawn from the seed, and training begins when the first, of 16 MiB, is there."""
    disk_bytes: Bytes | None = None
    """What the tokens of sources that are larger than a window may take on the disk, about: windows are removed when
    they were read."""
    transforms: list[Component] = []
    """Functions that change a document, or make several of one, before it is filtered; for all sources and held-out
    sets."""
    filters: list[Component] = []
    """Functions that give the reason to drop a document, for all sources."""
    deduplicate: Literal["exact", "near", "exact_across_sources", "near_across_sources"] | None = None
    """Leave out the documents of a source whose text stood there before (exact), or nearly the same text (near, by
    MinHash; needs `pip install 'cpt[dedup]'`). Across sources: of equal documents, that of the source named first
    stays."""
    on_bad_row: Literal["error", "skip", "quarantine"] = "error"
    """A row that is no document ends the run (error), or is left out and listed in bad_rows.jsonl beside the store's
    entry, by its place (skip) or with all that is in it (quarantine)."""
    max_bad_share: float = Field(default=0.001, ge=0, le=1)
    """More than this share of a source's rows bad is an error after all."""
    packing: Literal["best_fit", "concatenate", "sliding_window", "none", "token_budget"] = "best_fit"
    """best_fit: several whole documents in a row. concatenate: documents end to end, cut where a row is full.
    sliding_window: rows that begin each `stride` tokens of a document. none: one document in a row, padded.
    token_budget: a row is a batch of documents of similar length, padded to the longest, of `sequence_length` tokens
    at most. Documents in a row never see each other."""
    stride: Length | None = None
    """Tokens from one window to the next, for `packing: sliding_window`; half of `sequence_length` reads most tokens
    twice."""
