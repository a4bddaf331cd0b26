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


STRICT = ConfigDict(
    frozen=True,
    strict=True,
    allow_inf_nan=False,
    protected_namespaces=(),
    defer_build=True,  # validators are built when first used: worker processes use none
)
"""Values are not bent into shape, and nothing changes after loading."""
REMOVED = ("disk_bytes", "order_by")
"""Keys of earlier versions, which wrote every key into the recipe of a run."""


class Section(BaseModel):
    """Part of a recipe, without unknown keys. The type of each key says when it may change: `Free`, `FromStep` or
    `Fixed`."""

    model_config = ConfigDict(**STRICT, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def without_removed_keys(cls, values: object) -> object:
        """Null was their default."""
        if isinstance(values, dict):
            return {
                key: value
                for key, value in values.items()
                if key not in REMOVED or value is not None
            }
        return values


class Component(BaseModel):
    """A part chosen by name, with its options: `{name: length, min_characters: 200}`, or `length`."""

    model_config = ConfigDict(**STRICT, extra="allow", use_attribute_docstrings=True)
    name: str
    """A built-in's name, or your own `package.module:function`."""

    @model_validator(mode="before")
    @classmethod
    def by_its_name(cls, value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DocumentSource(Section):
    """The origin of documents, and which part of a file is a document."""

    path: Fixed[str] = Field(min_length=1)
    """Local file, folder or glob (txt, md, jsonl, json, parquet, csv, tsv, arrow, also .gz and .zst), a URL like
    s3://bucket/*.parquet, a dataset's id on the Hub, or your own `package.module:function` that yields texts
    or rows."""
    name: Fixed[str | None] = None
    """Its name in reports; by default the last part of the path."""
    text_column: Fixed[str] = "text"
    """Column or JSON key that holds the text."""
    template: Fixed[str | None] = None
    """Text from several columns instead: `"{title}\\n\\n{body}"`."""
    chat: Fixed[str | dict[str, str] | None] = None
    """Instead of a text, the column with a chat: a list of {role, content}, written by the tokenizer's chat template.
    Or the parts of an example, each with its column: `{messages: talk, tools: functions}`,
    `{prompt: question, completion: answer}`, `{prompt: question, chosen: good, rejected: bad}`, `{prompt: question,
    completion: answer, label: liked}`. `user` and `assistant` instead of prompt and completion are texts that
    become messages; `system` and `history` come before them. A column may be a template: `{user:
    "{instruction}\\n{input}", assistant: output}`. Stages that learn from examples find columns of these names
    automatically."""
    text_documents: Fixed[str] = Field(default="file", min_length=1)
    """The unit of a txt or md file that is one document. file: the whole file; line: each line; any other text: the
    separator between documents."""
    data_files: Fixed[list[str]] = []
    """Files of a Hub dataset, by name or glob; by default those of its split."""
    streaming: Fixed[bool] = False
    """Read a Hub dataset's files as they are needed, without keeping them on the disk."""
    options: Fixed[dict[str, Any]] = {}
    """Options of a `package.module:function`."""
    subset: Fixed[str | None] = None
    """Configuration of a Hub dataset."""
    split: Fixed[str] = "train"
    """Split of a Hub dataset."""
    revision: Fixed[str | None] = None
    """Revision of a Hub dataset."""
    max_documents: Fixed[Positive | None] = None
    """Use only the first documents, at most this many; from the Hub, fetch no more than these."""


class Source(DocumentSource):
    """A part of the mixture."""

    weight: FromStep[Annotated[Weight, Field(gt=0)]] = 1.0
    """Share of the training tokens, relative to the other sources; not used under `phases` or `temperature`."""
    max_tokens: Fixed[Tokens | None] = None
    """Use at most this many tokens of the source; the rest is not read."""
    max_epochs: FromStep[Times | None] = None
    """At most this many epochs of the source; a run that needs more is refused."""
    replay_kl: FromStep[Annotated[float, Field(ge=0, le=1e6)] | None] = None
    """Weight of KL(base, model) on each token of the source, added to its loss: predictions stay close to those of the
    start model (arXiv 2605.26097). Without adapters, a frozen copy of it is kept in memory."""
    licence: Free[str | None] = None
    """The licence of its texts, for example `CC-BY-4.0`. `cpt mixture` and the run's record show it."""
    fill_in_the_middle: Fixed[
        dict[Literal["rate", "suffix_first_rate"], Annotated[float, Field(ge=0, le=1)]] | None
    ] = None
    """For code: documents whose middle comes last, so that a model learns to fill gaps; needs a tokenizer with marks
    for it. `rate`: share of the documents, chosen by the hash of their text (0.5); `suffix_first_rate`: of these, the
    share that is written suffix, prefix, middle instead of prefix, suffix, middle (0.5). `{}` takes both."""
    transforms: Fixed[list[Component]] = []
    """Transforms for this source, after those of `data.transforms`."""
    filters: Fixed[list[Component]] = []
    """Filters for this source, after those of `data.filters`."""


class Phase(Section):
    """Part of the run with its own weights; each source continues where the phase before ended."""

    until: FromStep[Tokens | None] = None
    """End of the phase, in tokens from the beginning of the run; optional for the last phase."""
    until_learning_rate: FromStep[Share | None] = None
    """Or end the phase when the learning rate has fallen for good to this share of `optimizer.learning_rate`, its
    peak. Switching to the best data at 0.2 worked well for 15B parameters (arXiv 2407.07263)."""
    weights: FromStep[dict[str, Weight]]
    """Source's name -> share of the phase's tokens, relative to the others; 0 for a source that is not listed."""
    context_length: FromStep[Length | None] = None
    """A curriculum of lengths: in this phase documents are cut to this many tokens, while rows keep
    `data.sequence_length`."""
    change: FromStep[Literal["at_once", "linear"]] = "at_once"
    """linear: weights move over the whole phase from those of the phase before to these, in 64 equal blocks. at_once:
    these weights from the first token of the phase."""


class Data(Section):
    """Sources, mixture and packing."""

    sequence_length: Fixed[Annotated[Length, Field(ge=2)]] = 2048
    """Tokens in one row."""
    sources: FromStep[list[Source]] = Field(min_length=1)
    """The mixture: weights are shares of tokens."""
    phases: FromStep[list[Phase]] = []
    """A curriculum: weights that change during the run, instead of the sources' weights."""
    temperature: FromStep[Annotated[float, Field(gt=0, le=1e12)] | None] = None
    """Weights from sizes instead: each source's tokens to the power of 1/temperature. 1: in proportion; higher: more
    even."""
    chunk_bytes: Fixed[Bytes] = 256 * 2**20
    """Files of a source that are packed and shuffled together. A larger source is read chunk by chunk, in an order
    drawn from the seed, and training starts as soon as the first 16 MiB are tokenized."""
    transforms: Fixed[list[Component]] = []
    """Functions that change a document, or split it into several, before the filters; for all sources and held-out
    sets."""
    filters: Fixed[list[Component]] = []
    """Functions that return the reason to drop a document, or None to keep it; for all sources."""
    deduplicate: Fixed[
        Literal["exact", "near", "exact_across_sources", "near_across_sources"] | None
    ] = None
    """Drop documents whose text occurred before in the same source (exact), or nearly the same text (near, by MinHash;
    needs the extra `dedup`). Across sources: of equal documents, the one of the first source is kept."""
    on_bad_row: Free[Literal["error", "skip"]] = "error"
    """A malformed row stops the run (error), or is skipped and kept, with file and line, in bad_rows.jsonl, next to
    the stored tokens (skip)."""
    max_bad_share: Free[float] = Field(default=0.001, ge=0, le=1)
    """With `on_bad_row: skip`, a larger share of malformed rows in a source is an error."""
    max_text_loss: Free[float] = Field(default=0.02, ge=0, le=1)
    """A run stops if a larger share of a source's characters is not in its tokens: lost, unknown, or changed by the
    tokenizer's normaliser (lower case, accents). Above 2 % bits per byte are not reported."""
    packing: Fixed[Literal["best_fit", "concatenate", "sliding_window", "none", "token_budget"]] = (
        "best_fit"
    )
    """best_fit: several whole documents in a row. concatenate: documents end to end, cut where a row is full.
    sliding_window: rows that start every `stride` tokens of a document. none: one document in a row, padded.
    token_budget: a row is a batch of documents of similar length, padded to the longest, of `sequence_length` tokens
    at most. Documents in a row never attend to each other."""
    stride: Fixed[Length | None] = None
    """Tokens from one window to the next, for `packing: sliding_window`; half of `sequence_length` reads most tokens
    twice."""

    @property
    def share_near_base(self) -> float:
        """Share of the sources with `replay_kl`, by their weights; 0 if there is none."""
        total = sum(source.weight for source in self.sources)
        return sum(source.weight for source in self.sources if source.replay_kl) / total


LORA_PRESETS = ("cpt",)
LORA_QUANTIZATION: dict[str, tuple[str | bool, ...]] = {
    "quantize": ("nf4", "fp4", "int8"),
    "double_quantize": (True, False),
}
"""Keys of `model.lora` that are not peft's, with their values: the frozen weights in 4 or 8 bit."""
NEW_ROWS = "new_rows"


RETAIN_PRESETS = ("general", "code", "tasks", "python-prose", "python-code")
"""Words of `evaluation.retain`; recipes/presets/retain/ has what each adds."""


def named_lora(value: object) -> object:
    """`lora: cpt` is short for `lora: {preset: cpt}`."""
    if value in LORA_PRESETS:
        return {"preset": value}
    return value


class Rope(Section):
    """Longer contexts for rotary positions."""

    theta: Fixed[Annotated[float, Field(gt=0, le=1e12)] | None] = None
    """The base of the rotary frequencies."""
    type: Fixed[Literal["linear", "dynamic", "yarn"] | None] = None
    """How positions are scaled; needs `factor`."""
    factor: Fixed[Annotated[float, Field(gt=1, le=10_000)] | None] = None
    """The context length is multiplied by this."""
    length: Fixed[Length | None] = None
    """The longest row afterwards; by default from `factor`."""


class Model(Section):
    """Which model is trained, and from which weights."""

    path: Fixed[str | None] = None
    """Hub id or local folder of the weights to start from, or the folder of a finished run (runs/NAME), for
    its exported model."""
    revision: Fixed[str | None] = None
    """Commit, tag or branch on the Hub; `trust_remote_code` needs a full commit hash."""
    from_scratch: Fixed[bool] = False
    """Use the architecture with new random weights."""
    config: Fixed[dict[str, Any] | None] = None
    """The architecture's own config, `model_type` included. From scratch it defines the model; with a `path`, it
    must match the weights. Of weights that also read images, `model_type: gemma3_text` takes the language model."""
    parameters: Fixed[Positive | None] = None
    """Expected number of parameters (a tied head counted once); the built model must match it."""
    dtype: Fixed[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Type of the weights in memory. `auto` with `training.bf16: true`: bfloat16 where updates are made in fp32
    elsewhere (DeepSpeed, adapters, and on a GPU `adamw` with its fp32 master copy), else float32. A resumed run keeps
    the type of its checkpoint."""
    attention: Free[str] = "auto"
    """auto, varlen, sdpa, eager, flash_attention_2, ...: transformers' attn_implementation. `auto` takes the
    fastest correct one: on a GPU in half precision kernels that keep packed documents apart without a mask
    (`varlen`), else sdpa."""
    fused_loss: Free[bool | Literal["auto"]] = "auto"
    """Compute the loss in chunks of tokens, without all logits in memory. `auto`: on a GPU, where the model allows
    it."""
    rope: Fixed[Rope | None] = None
    """Longer contexts for rotary positions: `{theta: 1e6, length: 32768}` changes the base; `{type: yarn, factor: 8}`
    (or linear, dynamic) scales positions for eight times the length. By default unchanged."""
    lora: Fixed[Annotated[dict[str, Any], BeforeValidator(named_lora)] | None] = None
    """Options of peft's LoraConfig; `{}` takes our defaults (r 16, alpha 32, all linear layers). `cpt`, or `{preset:
    cpt, r: 64}`: high rank, rank-stabilised, embeddings and head trained whole. `{method: loha}`: another method of
    peft, with its options; `{use_dora: true}`; `{quantize: nf4}`, the base in 4 bit, or `int8`. Null trains all
    parameters."""
    train_only: Fixed[str | Annotated[list[str], Field(min_length=1)] | None] = None
    """Train only the parameters with these parts in their names, and freeze the others: `[layers.20-31, lm_head]`,
    `layers.0-3.mlp`, `*norm`. Or new_rows: only the embedding and head rows of the tokens that `cpt tokenizer extend`
    added."""
    resize_embeddings: Fixed[bool] = False
    """Let the vocabulary grow to the tokenizer's size; otherwise a tokenizer larger than the model is an error."""
    trust_remote_code: Fixed[bool] = False
    """Run code that comes with the weights. Needs `revision` to be a full commit hash."""
    import_: Fixed[str | None] = Field(default=None, alias="import")
    """Your `package.module` that registers a model family with AutoConfig and AutoModelForCausalLM."""


class Tokenizer(Section):
    """Which tokenizer turns text into ids."""

    path: Fixed[str | None] = None
    """Hub id or local folder; by default the model's."""
    revision: Fixed[str | None] = None
    """Commit, tag or branch on the Hub; by default the model's, if the path is the model's."""


class Budget(Section):
    """How long to train, in tokens (positions of rows, padding included)."""

    tokens: FromStep[Tokens | None] = None
    """Stop after this many tokens."""
    epochs: FromStep[Times | None] = None
    """Or after this many epochs. One epoch reads every row of all sources once."""
    global_batch_tokens: Fixed[Tokens | None] = None
    """Tokens in one optimizer step over all GPUs; gradient accumulation follows from it, on any number of
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
    """Save after every this many tokens."""
    every_steps: Free[StepsOrShare | None] = None
    """Or after every this many optimizer steps; below 1, a share of the run's steps: `0.1` saves ten times. Neither:
    save only at the end."""
    keep: Free[Positive | Keep | None] = 3
    """Which checkpoints are kept: `3`, the last three, or `{last: 3, every: 1000, best: eval_general_loss}`: also
    those whose step is a multiple of `every`, and the one with the lowest value of a metric. Null keeps all."""
    archive: Free[str | None] = None
    """A second place for checkpoints, copied there in the background: a folder, or a URL for fsspec, like
    s3://bucket/runs."""
    in_background: Free[bool] = False
    """Continue training while a checkpoint is written. Each process keeps a copy of what it writes in host memory:
    with AdamW in fp32, 12 bytes for each trained parameter over all processes; under DeepSpeed in bf16, 16."""
    weights_every_steps: Free[Positive | None] = None
    """Also save the weights alone, as `weights-N`, after every this many steps; `keep` applies to them too."""
    max_failed_saves: Free[Positive | None] = 3
    """End the run after this many failed saves in a row, with a last try in `archive` (on several machines only if
    that is a folder). Null: train to the end."""
    average: Free[Annotated[int, Field(ge=2)] | None] = None
    """At the end, also write the mean weights of this many last checkpoints to `average/` in the run's folder."""

    @property
    def kept(self) -> Keep | None:
        """`keep` in its long form."""
        if isinstance(self.keep, int):
            return Keep.model_validate({"last": self.keep})
        return self.keep


class Monitoring(Section):
    """Trackers, profiling and callbacks."""

    trackers: Free[list[str]] = []
    """tensorboard, wandb, trackio, ...: transformers' report_to. Metrics are always written to metrics.jsonl."""
    profile: Free[Positive | None] = None
    """Profile three steps with torch.profiler from this one on: a trace and the most expensive operations, in
    `profile/` of the run's folder."""
    callbacks: Free[list[Component]] = []
    """`{name: cost, dollars_per_gpu_hour: 2.5}`; `{name: alert, metric: grad_norm, above: 10}`; a
    TrainerCallback as `package.module:Class`, or a `package.module:function` that receives the metrics of each log
    and returns a sentence for an alert."""


class HeldOut(DocumentSource):
    """Documents for evaluation, never trained on."""


class EarlyStop(Section):
    """End the run when a held-out set no longer improves."""

    set: Free[str]
    """The held-out set: the name of a source (with `held_out_share`) or of an entry of `perplexity`, or a word of
    `retain`."""
    patience: Free[Positive] = 3
    """Stop after this many evaluations in a row without improvement."""
    margin: Free[Annotated[float, Field(ge=0)]] = 0.0
    """An improvement is a fall of the bits per byte (for sets of examples: of the loss) by more than this below the
    lowest value so far."""


class Evaluation(Section):
    """Evaluation before, during and after the run."""

    every_tokens: Free[Tokens | None] = None
    """Evaluate after every this many tokens."""
    every_steps: Free[StepsOrShare | None] = None
    """Or after every this many optimizer steps; below 1, a share of the run's steps. Neither: before the first and
    after the last step."""
    held_out_share: Fixed[Annotated[float, Field(gt=0, le=0.5)] | None] = None
    """Share of each source's documents, chosen by the hash of their text, that is evaluated and never trained on.
    Very long documents are never held out."""
    perplexity: FromStep[list[HeldOut]] = []
    """Further held-out sets: loss, perplexity and bits per byte of each. Documents longer than four average ones are
    not evaluated."""
    retain: Free[dict[str, Annotated[float, Field(gt=0, le=1)] | None]] = {}
    """Held-out sets of general text, to measure forgetting: `{general: 0.02}` stops the run when bits per byte are 2 %
    above those before the first step; null never stops. The other sets are the domain, except sources with `replay_kl`
    and texts that a model wrote. A word, a list of words, or a word as the key of a limit: `general`, `[code, tasks]`,
    `{general: 0.02}`. If no source and no held-out set has this name, the word adds its own when the recipe is loaded.
    general: web pages; code: HumanEval (both from the Hub); tasks: three lm-eval tasks for `evaluation.tasks`;
    python-prose, python-code: text of this Python's standard library, without a network."""
    stop: Free[EarlyStop | None] = None
    """Stop early: `{set: domain, patience: 3, margin: 0.001}`. The state is in checkpoints, so a resumed run stops at
    the same step. A checkpoint is saved at each improvement, and the best one is kept and named in the log and the
    verdict; `final/` has the last weights, as after every run."""
    prompts: Free[list[str]] = []
    """Prompts that the model continues greedily before and after the run."""
    tasks: Free[list[Component]] = []
    """lm-eval tasks for the model and its base after the run: `[{name: hellaswag, limit: 500}]`. Options: `limit`,
    `num_fewshot`, `folder` (YAML files of tasks), `allow_code_execution` (runs code that the model writes, with your
    rights). Or your `package.module:function` of model and tokenizer, which returns scores by metric. The domain test
    always runs; `{name: domain_test, questions: 0}` turns it off, a number limits it."""
    tasks_every_tokens: Free[Tokens | None] = None
    """Also evaluate `tasks` during training, after every this many tokens, in another process, which writes
    `task_<name>_<metric>` to metrics.jsonl. The weights stay on the disk until then. A failure is only an event."""
    tasks_device: Free[Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\d+)$")]] = "auto"
    """Where: `cpu`, or a GPU that the run does not use (`cuda:7`), while training continues. `auto`: the run's first
    GPU, while training waits for it (weights in bf16 and activations must fit beside the run, which the plan does not
    count); the CPU if the run uses no GPU."""


class LossGuard(Component):
    """How the loss and gradient of a step are checked before the update."""

    name: str = "robust"
    """robust, or your own `package.module:function`."""


class Safety(Section):
    """Protection against loss spikes and out-of-memory errors."""

    loss_guard: FromStep[LossGuard | None] = LossGuard()
    """Steps whose loss or gradient is not finite, or far above the last ones, are skipped; in the first steps a loss
    above 10 x ln(vocabulary size), or 11 times the steps before. Options: `window` (the last 128 steps), `sigmas` (6
    robust standard deviations), `skips` (more than 4 in the window: restart from the checkpoint before them, without
    their rows), `rollbacks` (3, then the run stops). Null checks nothing."""
    on_spike: FromStep[Component | None] = None
    """What follows a skipped step, instead of `skips`: skip, roll_back, abort; or your `package.module:function`,
    which returns one of these, or None for the loss guard's rule."""
    on_oom: FromStep[Component] = Component(name="split_batch")
    """split_batch, the default: after an out-of-memory error the run restarts with half the micro-batch and twice the
    accumulation. abort: the run ends. Or your `package.module:function`, which returns one of these, or None for
    split_batch."""
    max_gpu_memory: Free[Annotated[float, Field(gt=0, le=1)] | None] = None
    """Share of each GPU's memory that torch may allocate in a process, and for which the run is planned, on a GPU that
    other programs use too: `0.8`. A run that needs more is out of memory."""
    first_batch_proof: Free[bool | Literal["auto"]] = "auto"
    """Before the first step, compare fused loss, compiled layers, attention and the optimizer's kernel with torch's
    plain operations on the start of the first row. A part that differs is not used if its key is `auto`, and otherwise
    ends the run. `auto`: on a GPU."""


class Reward(Component):
    """A reward for a completion: `{name: exact_match, column: answer, weight: 2}`."""

    weight: FromStep[Annotated[float, Field(ge=-1000, le=1000)]] = 1.0
    """Its factor in the sum of all rewards."""


class Recipe(Section):
    """One YAML file is one run."""

    name: Free[str] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run's folder is output_dir/name."""
    description: Free[str] = ""
    """The purpose of the run."""
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
    optimizer: Fixed[Optimizer] = Optimizer()
    schedule: FromStep[Schedule] = Schedule()
    checkpoints: Free[Checkpoints] = Checkpoints()
    monitoring: Free[Monitoring] = Monitoring()
    safety: FromStep[Safety] = Safety()
    evaluation: FromStep[Evaluation] = Evaluation()
    rewards: FromStep[list[Reward]] = []
    """Rewards of completions, for grpo, rloo, ppo and spo: built-ins by name, or a `package.module:function`."""
    training: FromStep[dict[str, Any]] = {}
    """Hugging Face's own keys, passed on unchanged to the stage's config class (TrainingArguments, DPOConfig,
    GRPOConfig, ...)."""
