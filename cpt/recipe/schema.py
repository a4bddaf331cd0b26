"""The recipe: every key a user may write, with its default and its meaning."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cpt.recipe.written_numbers import Positive, Share, whole_number

LORA_PRESETS = ("cpt",)


def named_lora(value: object) -> object:
    """`lora: cpt` is short for `lora: {preset: cpt}`."""
    return {"preset": value} if value in LORA_PRESETS else value


class Section(BaseModel):
    """Part of a recipe: unknown keys are errors, values are not bent into shape, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class Component(BaseModel):
    """Something chosen by name, with its own options beside it: `{name: length, min_characters: 200}`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    name: str
    """A built-in's name, or your own `package.module:function`."""

    @property
    def options(self) -> dict[str, Any]:
        """What stands beside the name."""
        return dict(self.model_extra or {})


class Model(Section):
    """Which model is trained, and from which weights."""

    path: str | None = None
    """Hub id or local folder of the weights to start from."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; `trust_remote_code` needs a full commit hash."""
    from_scratch: bool = False
    """Keep the architecture, draw new weights."""
    config: dict[str, Any] | None = None
    """The architecture's own config, `model_type` included. From scratch it is the model; beside a `path`, the weights' shape."""
    parameters: Positive | None = None
    """Number of parameters that the architecture is known to have (a tied head counted once); the built model must agree."""
    active_parameters: Positive | None = None
    """Of a mixture of experts: parameters that one token passes through."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory. `auto`: bfloat16 where something else keeps fp32 master weights (DeepSpeed's bf16), else float32."""
    attention: str = "auto"
    """auto, sdpa, eager, flash_attention_2, ...: what transformers calls attn_implementation. `auto` takes the fastest that is right."""
    lora: Annotated[dict[str, Any], BeforeValidator(named_lora)] | None = None
    """Options of peft's LoraConfig; `{}` takes our defaults (r 16, alpha 32, all linear layers). `cpt`, or `{preset: cpt, r: 64}`:
    high rank, rank-stabilised, embeddings and head trained whole. Null trains all parameters."""
    train_only: Literal["new_rows"] | None = None
    """new_rows: only the rows of the tokens that `cpt tokenizer extend` added learn, in embedding and head; all else stays bit for bit."""
    resize_embeddings: bool = False
    """Let the vocabulary grow to the tokenizer's size; otherwise a tokenizer larger than the model is an error."""
    trust_remote_code: bool = False
    """Run code that comes with the weights. Needs `revision` to be a full commit hash."""
    hashes: dict[str, str] = {}
    """File name -> sha256 that the weights must have, as the Hub shows it."""
    import_: str | None = Field(default=None, alias="import")
    """Your own `package.module` that registers a model family with AutoConfig and AutoModelForCausalLM."""


class Tokenizer(Section):
    """Which tokenizer turns text into ids."""

    path: str | None = None
    """Hub id or local folder; by default the model's."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; by default the model's where the path is the model's."""


class FillInTheMiddle(Section):
    """Documents whose middle comes last, so that a model of code learns to fill gaps; needs a tokenizer with marks for it."""

    rate: float = Field(default=0.5, gt=0, le=1)
    """Share of the documents, chosen by the hash of their text; the others stay as they are."""
    suffix_first_rate: float = Field(default=0.5, ge=0, le=1)
    """Of these, the share that is written suffix, prefix, middle instead of prefix, suffix, middle."""


class DocumentSource(Section):
    """Where documents come from, and what of a file is one."""

    path: str
    """Local file, folder or glob (txt, md, jsonl, json, parquet, csv, tsv, arrow, also .gz and .zst), a URL like s3://bucket/*.parquet, a
    dataset's id on the Hub, or your own `package.module:function` that gives texts or rows."""
    name: str | None = None
    """How reports call it; by default the last part of the path."""
    text_column: str = "text"
    """Column or JSON key that holds the text."""
    template: str | None = None
    """Text from several columns instead: `"{title}\\n\\n{body}"`."""
    chat: str | None = None
    """Or else the column that holds a chat: a list of {role, content}; the document is what the tokenizer's chat template makes of it."""
    text_documents: str = Field(default="file", min_length=1)
    """What one document is in a txt or md file. file: all of it; line: each line; anything else is a text that stands between documents."""
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

    weight: float = Field(default=1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""
    max_tokens: Positive | None = None
    """Take no more than so many tokens of it; of an endless source, no more is read."""
    max_epochs: float | None = Field(default=None, gt=0)
    """Go through it at most so often; a run that would need more is refused."""
    licence: str | None = None
    """What its texts are under, in your words: `CC-BY-4.0`. Told by `cpt mixture` and in the run's record."""
    order_by: str | None = None
    """Read it by a score, lowest first, instead of shuffled: a column of numbers, or your own `package.module:function` of the text. Each
    time through it goes the same way, in 64 parts that are shuffled inside."""
    fill_in_the_middle: FillInTheMiddle | None = None
    """For code: `{}` takes the defaults, half of the documents."""
    transforms: list[Component] = []
    """Transforms for this source, after those of `data.transforms`."""
    filters: list[Component] = []
    """Filters for this source, after those of `data.filters`."""


class Phase(Section):
    """Part of the run with weights of its own; each source goes on where the phase before left it."""

    until: Positive | None = None
    """Where it ends, in tokens from the beginning of the run; the last phase may leave it out."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Source's name -> share of the phase's tokens, relative to the others; a source that is left out has none."""
    change: Literal["at_once", "linear"] = "at_once"
    """linear: weights move over the whole phase from those of the phase before to these, in 64 equal blocks. at_once: these throughout."""


class Data(Section):
    """What the model reads."""

    sequence_length: Positive = 2048
    """Tokens in one row."""
    sources: list[Source] = Field(min_length=1)
    """The mixture: weights are shares of tokens."""
    phases: list[Phase] = []
    """A curriculum: weights that change as tokens go by, instead of the sources' own."""
    temperature: float | None = Field(default=None, gt=0)
    """Weights from sizes instead: each source's tokens to the power of 1/temperature. 1: in proportion; higher: more even."""
    when_exhausted: Literal["wrap", "stop"] = "wrap"
    """When the run needs more of a source than there is. wrap: begin it anew, in another order, with a warning. stop: refuse to start."""
    window_bytes: Positive = 256 * 2**20
    """Files of a source that are packed and shuffled together. A larger source is read window by window, in an order drawn from the seed,
    and training begins when the first, of 16 MiB, is there."""
    disk_bytes: Positive | None = None
    """What the tokens of sources that are larger than a window may take on the disk, about: windows are removed when they were read."""
    total_tokens: Positive | None = None
    """Length that the mixture was designed for; `budget` must agree."""
    transforms: list[Component] = []
    """Functions that change a document, or make several of one, before it is filtered; for all sources and held-out sets."""
    filters: list[Component] = []
    """Functions that give the reason to drop a document, for all sources."""
    deduplicate: Literal["exact", "near"] | None = None
    """Leave out the documents of a source whose text stood there before (exact), or nearly the same text (near, by MinHash; needs
    `pip install 'cpt[dedup]'`)."""
    deduplicate_across_sources: bool = False
    """Compare the documents of all sources with each other; of equal ones, that of the source named first stays."""
    on_bad_row: Literal["error", "skip", "quarantine"] = "error"
    """A row that is no document ends the run (error), or is left out and listed in bad_rows.jsonl beside the store's entry, by its place
    (skip) or with all that is in it (quarantine)."""
    max_bad_share: float = Field(default=0.001, ge=0, le=1)
    """More than this share of a source's rows bad is an error after all."""
    packing: Literal["best_fit", "concatenate", "sliding_window", "none", "token_budget"] = "best_fit"
    """best_fit: several whole documents in a row. concatenate: documents end to end, cut where a row is full. sliding_window: rows that
    begin each `stride` tokens of a document. none: one document in a row, padded. token_budget: a row is a batch of documents of similar
    length, padded to the longest, of `sequence_length` tokens at most. Documents in a row never see each other."""
    stride: Positive | None = None
    """Tokens from one window to the next, for `packing: sliding_window`; half of `sequence_length` reads most tokens twice."""


class Budget(Section):
    """How long to train, in tokens (positions of rows, padding included)."""

    tokens: Positive | None = None
    """Stop after so many tokens."""
    epochs: float | None = Field(default=None, gt=0)
    """Or after so many times the tokens of all sources together."""
    global_batch_tokens: Positive | None = None
    """Tokens in one optimizer step over all GPUs; gradient accumulation follows from it, whatever the number of GPUs."""


class Optimizer(Component):
    """The optimizer with its options: `{name: adamw, learning_rate: 1e-5, weight_decay: 0.1}`."""

    name: str = "adamw"
    """A built-in's name, or your own `package.module:function`."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate; the schedule multiplies it."""


class Schedule(Component):
    """The learning rate over tokens: `{name: cosine, warmup_tokens: 10_000_000, floor: 0.1}`."""

    name: str = "cosine"
    """A built-in's name, or your own `package.module:function`."""


class Checkpoints(Section):
    """What is saved on the way."""

    every_tokens: Positive | None = None
    """Save each time so many tokens were trained."""
    every_steps: Positive | None = None
    """Or each so many optimizer steps. Neither: only the end is saved."""
    keep: Positive | None = 3
    """How many checkpoints stay; null keeps all."""
    average: Annotated[int, Field(ge=2)] | None = None
    """At the end, also write the mean of the last so many checkpoints' weights, to `average/` in the run's folder."""


class Monitoring(Section):
    """Who watches the run."""

    trackers: list[str] = []
    """tensorboard, wandb, trackio, ...: what transformers calls report_to. The metrics always go to metrics.jsonl."""
    project: str | None = None
    """The tracker's project; the run is called like the recipe."""


class HeldOut(DocumentSource):
    """Documents that the model is judged by and never trained on."""


class Evaluation(Section):
    """What the run is judged by, before, during and after."""

    every_tokens: Positive | None = None
    """Evaluate each time so many tokens were trained."""
    every_steps: Positive | None = None
    """Or each so many optimizer steps. Neither: before the first and after the last step."""
    held_out_share: Share | None = None
    """Share of each source's documents, chosen by the hash of their text, that is kept from training and evaluated."""
    perplexity: list[HeldOut] = []
    """Further held-out sets: loss, perplexity and bits per byte of each."""
    retain: dict[str, Annotated[float, Field(gt=0)] | None] = {}
    """Held-out sets of general text, which the model must not forget: `{general: 0.02}` stops the run once bits per byte are 2 % above
    those before the first step; null never stops, and only tells gain from loss. The other sets are the domain."""
    prompts: list[str] = []
    """Beginnings that the model continues greedily before and after the run."""


class Recipe(Section):
    """One YAML file is one run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is output_dir/name."""
    description: str = ""
    """What the run is for, in a sentence."""
    tags: list[str] = []
    """Words to find the run by."""
    stage: str = "cpt"
    """pretrain, cpt, or your own `package.module` with CONFIG, COLUMNS and build_trainer."""
    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(whole_number)] = 42
    """Decides the order of the data, new weights and dropout."""
    output_dir: Annotated[Path, Field(strict=False)] = Path("runs")
    """Folder of the runs, relative to where the command is started."""
    model: Model
    tokenizer: Tokenizer = Tokenizer()
    data: Data
    budget: Budget
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoints: Checkpoints = Checkpoints()
    monitoring: Monitoring = Monitoring()
    evaluation: Evaluation = Evaluation()
    training: dict[str, Any] = {}
    """Hugging Face's own keys, passed on unchanged to the stage's config class (TrainingArguments)."""
