"""The recipe: every key a user may write, with its default and its meaning."""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cpt.recipe.values import (
    Bytes,
    LearningRate,
    Length,
    Positive,
    Share,
    StepsOrShare,
    Times,
    Tokens,
    Weight,
    whole_number,
)

Value = TypeVar("Value")
Free = Annotated[Value, "free"]
"""A key that may change whenever a run was stopped and continues."""
FromStep = Annotated[Value, "from_step"]
"""A key whose new value may hold from a step on: it decides what is learned, but fits the model and the optimizer."""
Fixed = Annotated[Value, "fixed"]
"""A key whose new value makes another run."""
CLASSES_OF_CHANGE = ("free", "from_step", "fixed")


STRICT = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
"""Values are not bent into shape, and nothing changes after loading."""


class Section(BaseModel):
    """Part of a recipe, without unknown keys. The type of each key says when it may change: `Free`, `FromStep` or
    `Fixed`."""

    model_config = ConfigDict(**STRICT, extra="forbid", use_attribute_docstrings=True)


class Component(BaseModel):
    """Something chosen by name, with its own options beside it: `{name: length, min_characters: 200}`, or `length`."""

    model_config = ConfigDict(**STRICT, extra="allow", use_attribute_docstrings=True)
    name: str
    """A built-in's name, or your own `package.module:function`."""

    @model_validator(mode="before")
    @classmethod
    def by_its_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DocumentSource(Section):
    """Where documents come from, and what of a file is one."""

    path: FromStep[str] = Field(min_length=1)
    """Local file, folder or glob (txt, md, jsonl, json, parquet, csv, tsv, arrow, also .gz and .zst), a URL like
    s3://bucket/*.parquet, a dataset's id on the Hub, or your own `package.module:function` that gives texts or
    rows."""
    name: FromStep[str | None] = None
    """Its name in reports; by default the last part of the path."""
    text_column: FromStep[str] = "text"
    """Column or JSON key that holds the text."""
    template: FromStep[str | None] = None
    """Text from several columns instead: `"{title}\\n\\n{body}"`."""
    chat: FromStep[str | dict[str, str] | None] = None
    """Or else the column that holds a chat: a list of {role, content}; the document is what the tokenizer's chat
    template makes of it. Or what an example is made of, each with its column: `{messages: talk, tools: functions}`,
    `{prompt: question, completion: answer}`, `{prompt: question, chosen: good, rejected: bad}`, `{prompt: question,
    completion: answer, label: liked}`. `user` and `assistant` in place of prompt and completion are texts that become
    messages; `system` and `history` come before them. A column may be a template: `{user:
    "{instruction}\\n{input}", assistant: output}`. Stages that learn from examples find columns of these names
    automatically."""
    text_documents: FromStep[str] = Field(default="file", min_length=1)
    """What one document is in a txt or md file. file: all of it; line: each line; anything else is a text that stands
    between documents."""
    data_files: FromStep[list[str]] = []
    """Files of a Hub dataset, by name or glob; by default those of its split."""
    streaming: FromStep[bool] = False
    """Read a Hub dataset's files as they are needed, without keeping them on the disk."""
    options: FromStep[dict[str, Any]] = {}
    """Options of your own `package.module:function`."""
    subset: FromStep[str | None] = None
    """Configuration of a Hub dataset."""
    split: FromStep[str] = "train"
    """Split of a Hub dataset."""
    revision: FromStep[str | None] = None
    """Revision of a Hub dataset."""
    max_documents: FromStep[Positive | None] = None
    """Take only the first so many documents (of a Hub dataset: fetch no more than these)."""


class Source(DocumentSource):
    """A part of the mixture."""

    weight: FromStep[Annotated[Weight, Field(gt=0)]] = 1.0
    """Share of the training tokens, relative to the other sources; not used under `phases` or `temperature`."""
    max_tokens: FromStep[Tokens | None] = None
    """Take no more than so many tokens of it; of an endless source, no more is read."""
    max_epochs: FromStep[Times | None] = None
    """Go through it at most so often; a run that would need more is refused."""
    licence: Free[str | None] = None
    """The licence of its texts, for example `CC-BY-4.0`. `cpt mixture` and the run's record show it."""
    order_by: FromStep[str | None] = None
    """Read it by a score, lowest first, instead of shuffled: a column of numbers, or your own
    `package.module:function` of the text. Each time through it goes the same way, in 64 parts that are shuffled
    inside."""
    fill_in_the_middle: FromStep[
        dict[Literal["rate", "suffix_first_rate"], Annotated[float, Field(ge=0, le=1)]] | None
    ] = None
    """For code: documents whose middle comes last, so that a model learns to fill gaps; needs a tokenizer with marks
    for it. `rate`: share of the documents, chosen by the hash of their text (0.5); `suffix_first_rate`: of these, the
    share that is written suffix, prefix, middle instead of prefix, suffix, middle (0.5). `{}` takes both."""
    transforms: FromStep[list[Component]] = []
    """Transforms for this source, after those of `data.transforms`."""
    filters: FromStep[list[Component]] = []
    """Filters for this source, after those of `data.filters`."""


class Phase(Section):
    """Part of the run with its own weights; each source continues where the phase before ended."""

    until: FromStep[Tokens | None] = None
    """Where it ends, in tokens from the beginning of the run; the last phase may leave it out."""
    until_learning_rate: FromStep[Share | None] = None
    """Or where it ends: when the learning rate has fallen for good to this share of `optimizer.learning_rate`, its
    peak. The best data from 0.2 on did well for 15B parameters (arXiv 2407.07263)."""
    weights: FromStep[dict[str, Weight]]
    """Source's name -> share of the phase's tokens, relative to the others; a source that is left out has none."""
    context_length: FromStep[Length | None] = None
    """A curriculum of lengths: in this phase documents are read in pieces of so many tokens, while rows stay as long
    as `data` says."""
    change: FromStep[Literal["at_once", "linear"]] = "at_once"
    """linear: weights move over the whole phase from those of the phase before to these, in 64 equal blocks. at_once:
    these throughout."""


class Data(Section):
    """What the model reads."""

    sequence_length: FromStep[Annotated[Length, Field(ge=2)]] = 2048
    """Tokens in one row."""
    sources: FromStep[list[Source]] = Field(min_length=1)
    """The mixture: weights are shares of tokens."""
    phases: FromStep[list[Phase]] = []
    """A curriculum: weights that change as tokens go by, instead of the sources' own."""
    temperature: FromStep[Annotated[float, Field(gt=0, le=1e12)] | None] = None
    """Weights from sizes instead: each source's tokens to the power of 1/temperature. 1: in proportion; higher: more
    even."""
    window_bytes: FromStep[Bytes] = 256 * 2**20
    """Files of a source that are packed and shuffled together. A larger source is read window by window, in an order
    drawn from the seed, and training begins when the first, of 16 MiB, is there."""
    disk_bytes: FromStep[Bytes | None] = None
    """What the tokens of sources that are larger than a window may take on the disk, about: windows are removed when
    they were read."""
    transforms: FromStep[list[Component]] = []
    """Functions that change a document, or make several of one, before it is filtered; for all sources and held-out
    sets."""
    filters: FromStep[list[Component]] = []
    """Functions that give the reason to drop a document, for all sources."""
    deduplicate: FromStep[Literal["exact", "near", "exact_across_sources", "near_across_sources"] | None] = None
    """Leave out the documents of a source whose text stood there before (exact), or nearly the same text (near, by
    MinHash; needs the extra `dedup`). Across sources: of equal documents, that of the source named first
    stays."""
    on_bad_row: FromStep[Literal["error", "skip"]] = "error"
    """A row that is no document ends the run (error), or is left out and listed by its file and line in bad_rows.jsonl
    beside the store's entry (skip)."""
    max_bad_share: FromStep[float] = Field(default=0.001, ge=0, le=1)
    """More than this share of a source's rows bad is an error after all."""
    packing: FromStep[Literal["best_fit", "concatenate", "sliding_window", "none", "token_budget"]] = "best_fit"
    """best_fit: several whole documents in a row. concatenate: documents end to end, cut where a row is full.
    sliding_window: rows that begin each `stride` tokens of a document. none: one document in a row, padded.
    token_budget: a row is a batch of documents of similar length, padded to the longest, of `sequence_length` tokens
    at most. Documents in a row never see each other."""
    stride: FromStep[Length | None] = None
    """Tokens from one window to the next, for `packing: sliding_window`; half of `sequence_length` reads most tokens
    twice."""


LORA_PRESETS = ("cpt",)
LORA_QUANTIZATION: dict[str, tuple[str | bool, ...]] = {"quantize": ("nf4", "fp4"), "double_quantize": (True, False)}
"""Keys of `model.lora` that are not peft's, and what they may be: the frozen weights in 4 bit."""


def named_lora(value: object) -> object:
    """`lora: cpt` is short for `lora: {preset: cpt}`."""
    return {"preset": value} if value in LORA_PRESETS else value


class Rope(Section):
    """Longer contexts for rotary positions."""

    theta: Fixed[Annotated[float, Field(gt=0, le=1e12)] | None] = None
    """Another base."""
    type: Fixed[Literal["linear", "dynamic", "yarn"] | None] = None
    """How positions are scaled; needs `factor`."""
    factor: Fixed[Annotated[float, Field(gt=1, le=10_000)] | None] = None
    """How many times as far scaled positions reach."""
    length: Fixed[Length | None] = None
    """The longest row afterwards; by default what `factor` gives."""


class Model(Section):
    """Which model is trained, and from which weights."""

    path: Fixed[str | None] = None
    """Hub id or local folder of the weights to start from, or the folder of a finished run (runs/NAME), which means
    its exported model."""
    revision: Fixed[str | None] = None
    """Commit, tag or branch on the Hub; `trust_remote_code` needs a full commit hash."""
    from_scratch: Fixed[bool] = False
    """Keep the architecture, draw new weights."""
    config: Fixed[dict[str, Any] | None] = None
    """The architecture's own config, `model_type` included. From scratch it is the model; beside a `path`, the
    weights' shape."""
    parameters: Fixed[Positive | None] = None
    """Number of parameters that the architecture is known to have (a tied head counted once); the built model must
    agree."""
    dtype: Fixed[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Type of the weights in memory. `auto` with `training.bf16: true`: bfloat16 where updates are made in fp32
    elsewhere (DeepSpeed, adapters, and on a GPU `adamw` with its fp32 master copy), else float32. A resumed run keeps
    the type of its checkpoint."""
    attention: FromStep[str] = "auto"
    """auto, varlen, sdpa, eager, flash_attention_2, ...: what transformers calls attn_implementation. `auto` takes the
    fastest that is right: on a GPU in half precision kernels that keep packed documents apart without a mask
    (`varlen`), else sdpa."""
    fused_loss: FromStep[bool | Literal["auto"]] = "auto"
    """Compute the loss in chunks of tokens, without all logits in memory. `auto`: on a GPU, where the model allows
    it."""
    rope: Fixed[Rope | None] = None
    """Longer contexts for rotary positions: `{theta: 1e6, length: 32768}`, another base; or `{type: yarn, factor:
    8}` (linear, dynamic), positions pressed together, which reach eight times as far. By default as the weights
    have it."""
    lora: Fixed[Annotated[dict[str, Any], BeforeValidator(named_lora)] | None] = None
    """Options of peft's LoraConfig; `{}` takes our defaults (r 16, alpha 32, all linear layers). `cpt`, or `{preset:
    cpt, r: 64}`: high rank, rank-stabilised, embeddings and head trained whole. `{method: loha}`: another of peft's
    methods, with its own options; `{use_dora: true}`; `{quantize: nf4}`, the base in 4 bit. Null trains all
    parameters."""
    train_only: Fixed[Literal["new_rows"] | None] = None
    """new_rows: only the rows of the tokens that `cpt tokenizer extend` added learn, in embedding and head; all else
    stays bit for bit."""
    resize_embeddings: Fixed[bool] = False
    """Let the vocabulary grow to the tokenizer's size; otherwise a tokenizer larger than the model is an error."""
    trust_remote_code: Fixed[bool] = False
    """Run code that comes with the weights. Needs `revision` to be a full commit hash."""
    import_: Fixed[str | None] = Field(default=None, alias="import")
    """Your own `package.module` that registers a model family with AutoConfig and AutoModelForCausalLM."""


class Tokenizer(Section):
    """Which tokenizer turns text into ids."""

    path: Fixed[str | None] = None
    """Hub id or local folder; by default the model's."""
    revision: Fixed[str | None] = None
    """Commit, tag or branch on the Hub; by default the model's where the path is the model's."""


class Budget(Section):
    """How long to train, in tokens (positions of rows, padding included)."""

    tokens: FromStep[Tokens | None] = None
    """Stop after so many tokens."""
    epochs: FromStep[Times | None] = None
    """Or after this many epochs. One epoch reads every row of all sources once."""
    global_batch_tokens: FromStep[Tokens | None] = None
    """Tokens in one optimizer step over all GPUs; gradient accumulation follows from it, whatever the number of
    GPUs."""


class Optimizer(Component):
    """The optimizer with its options: `{name: adamw, learning_rate: 1e-5, weight_decay: 0.1}`."""

    name: Fixed[str] = "adamw"
    """A built-in's name, or your own `package.module:function`."""
    learning_rate: FromStep[LearningRate] = 1e-5
    """Peak learning rate; the schedule multiplies it."""


class Schedule(Component):
    """The learning rate over tokens: `{name: cosine, warmup_tokens: 10_000_000, floor: 0.1}`."""

    name: str = "cosine"
    """A built-in's name, or your own `package.module:function`."""


class Keep(Component):
    """Which checkpoints are kept."""

    name: str = "newest"
    """newest, or your own `package.module:function`."""


class Checkpoints(Section):
    """When and where checkpoints are saved."""

    every_tokens: Free[Tokens | None] = None
    """Save each time so many tokens were trained."""
    every_steps: Free[StepsOrShare | None] = None
    """Or each so many optimizer steps; below 1, a share of the run's steps: `0.1` saves ten times. Neither: only the
    end is saved."""
    keep: Free[Positive | Keep | None] = 3
    """Which checkpoints stay: `3`, the last three, or `{last: 3, every: 1000, best: eval_general_loss}`: also those
    whose step is a multiple of `every`, and the one where a figure of the evaluation was lowest. Null keeps all."""
    archive: Free[str | None] = None
    """A second place for checkpoints, copied there in the background: a folder, or a URL that fsspec knows, like
    s3://bucket/runs."""
    in_background: Free[bool] = False
    """Continue training while a checkpoint is written. Each process keeps a copy of what it writes in host memory:
    with AdamW in fp32, 12 bytes for each trained parameter over all processes; under DeepSpeed in bf16, 16."""
    weights_every_steps: Free[Positive | None] = None
    """Also publish the weights alone, as `weights-N`, each so many optimizer steps; `keep` holds for these too."""
    average: Free[Annotated[int, Field(ge=2)] | None] = None
    """At the end, also write the mean of the weights of so many last checkpoints to `average/` in the run's folder."""

    @property
    def kept(self) -> Keep | None:
        """`keep` in its long form."""
        return Keep.model_validate({"last": self.keep}) if isinstance(self.keep, int) else self.keep


class Monitoring(Section):
    """Trackers, profiling and callbacks."""

    trackers: Free[list[str]] = []
    """tensorboard, wandb, trackio, ...: what transformers calls report_to. The metrics always go to metrics.jsonl."""
    profile: Free[Positive | None] = None
    """Profile three steps with torch.profiler from this one on: a trace and the most expensive operations, in
    `profile/` of the run's folder."""
    callbacks: Free[list[Component]] = []
    """`{name: cost, dollars_per_gpu_hour: 2.5}`; `{name: alert, figure: grad_norm, above: 10}`; your own
    TrainerCallback as `package.module:Class`, or `package.module:function` that is shown the figures of each log and
    returns a sentence for an alert."""


class HeldOut(DocumentSource):
    """Documents for evaluation, never trained on."""


class Evaluation(Section):
    """How the run is evaluated, before, during and after."""

    every_tokens: Free[Tokens | None] = None
    """Evaluate each time so many tokens were trained."""
    every_steps: Free[StepsOrShare | None] = None
    """Or each so many optimizer steps; below 1, a share of the run's steps. Neither: before the first and after the
    last step."""
    held_out_share: FromStep[Annotated[float, Field(gt=0, le=0.5)] | None] = None
    """Share of each source's documents, chosen by the hash of their text, that is kept from training and evaluated.
    Very long documents are never held out."""
    perplexity: FromStep[list[HeldOut]] = []
    """Further held-out sets: loss, perplexity and bits per byte of each."""
    retain: Free[dict[str, Annotated[float, Field(gt=0, le=1)] | None]] = {}
    """Held-out sets of general text, which the model must not forget: `{general: 0.02}` stops the run once bits per
    byte are 2 % above those before the first step; null never stops, and only tells gain from loss. The other sets are
    the domain."""
    prompts: Free[list[str]] = []
    """Prompts that the model continues greedily before and after the run."""
    tasks: Free[list[Component]] = []
    """Tasks of lm-eval for model and base when the run has ended: `[{name: hellaswag, limit: 500}]`. Options: `limit`,
    `num_fewshot`, `folder` (YAML files of your own tasks), `allow_code_execution` (of code that the model writes, with
    your rights). The domain test is made without being named; `{name: domain_test, questions: 0}` refuses it, another
    number bounds it."""


class LossGuard(Component):
    """How a step's loss and gradient are checked before its update."""

    name: str = "robust"
    """robust, or your own `package.module:function`."""


class Safety(Section):
    """Protection against loss spikes and out-of-memory errors."""

    loss_guard: Free[LossGuard | None] = LossGuard()
    """Steps whose loss or gradient is not finite, or far above the last ones, are skipped; in the first steps a loss
    above 10 x ln(vocabulary size), or 11 times the steps before. Options: `window` (the last 128 steps), `sigmas` (6
    robust standard deviations), `skips` (more than 4 in the window: restart from the checkpoint before them, without
    their rows), `rollbacks` (3, then the run stops). Null applies every update."""
    on_oom: Free[Literal["split_batch", "abort"]] = "split_batch"
    """split_batch: after out of memory the run restarts with half the micro-batch and twice the accumulation.
    abort: the run ends."""


class Reward(Component):
    """What a completion is worth: `{name: exact_match, column: answer, weight: 2}`."""

    weight: FromStep[Annotated[float, Field(ge=-1000, le=1000)]] = 1.0
    """Its factor in the sum of all rewards."""


class Recipe(Section):
    """One YAML file is one run."""

    name: Free[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is output_dir/name."""
    description: Free[str] = ""
    """What the run is for, in a sentence."""
    tags: Free[list[str]] = []
    """Words to find the run by."""
    stage: Fixed[str] = "cpt"
    """pretrain, cpt, sft, dpo, kto, orpo, cpo, reward, grpo, rloo, ppo, spo, distill, distill_text, distill_on_policy,
    gkd; or your own `package.module` with CONFIG, COLUMNS and build_trainer."""
    seed: Fixed[Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(whole_number)]] = 42
    """Decides the order of the data, new weights and dropout."""
    output_dir: Free[Annotated[Path, Field(strict=False)]] = Path("runs")
    """Folder of the runs, relative to where the command is started."""
    model: Fixed[Model]
    tokenizer: Fixed[Tokenizer] = Tokenizer()
    data: FromStep[Data]
    budget: FromStep[Budget]
    optimizer: FromStep[Optimizer] = Optimizer()
    schedule: FromStep[Schedule] = Schedule()
    checkpoints: Free[Checkpoints] = Checkpoints()
    monitoring: Free[Monitoring] = Monitoring()
    safety: Free[Safety] = Safety()
    evaluation: Free[Evaluation] = Evaluation()
    rewards: FromStep[list[Reward]] = []
    """What completions are worth, for the stages that learn from rewards (grpo, rloo, ppo, spo): built-ins by name, or
    your own `package.module:function`."""
    training: FromStep[dict[str, Any]] = {}
    """Hugging Face's own keys, passed on unchanged to the stage's config class (TrainingArguments, DPOConfig,
    GRPOConfig, ...)."""
