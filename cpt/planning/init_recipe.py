"""Choose a recipe for these documents, this model and this machine, by rules with sources."""

import importlib.util
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from cpt.data.readers.documents import BadRow, Piece, complaint
from cpt.data.readers.filters import language_identifier
from cpt.data.readers.sources import CONVERTED, files_of, kind_of, pieces_of, read_piece
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import DataError, RecipeError, ResourceError
from cpt.hardware import GIB
from cpt.models.adapters import adaptable, count_lora_parameters
from cpt.models.config import load_config
from cpt.models.inventory import (
    build_on_meta,
    count_model_parameters,
    isolates_documents,
    longest_row,
    rows_needed,
    vocabulary_size,
)
from cpt.models.known_bases import KnownBase, known_base
from cpt.planning.fitting import (
    BUSY_TOKENS,
    USABLE_OF_HOST,
    choose_batch,
    fits,
    shipped_profiles,
)
from cpt.planning.memory import MemoryPlan, plan_memory
from cpt.planning.speed import MFU_RANGE, Target, assumed_mfu, planned_speed
from cpt.recipe.keys import AUTO, CHECKPOINTING, MICRO_BATCH
from cpt.recipe.load import REPOSITORY, load_recipe
from cpt.recipe.paths import TEXT_FILES, format_of, is_local, result_of_run
from cpt.recipe.schema import DocumentSource, Model, Recipe, Tokenizer
from cpt.runs.folder import read_objects
from cpt.runs.record import EXPORT, RECIPE
from cpt.tokenizer.load import load_tokenizer

READ_BYTES = 64 * 2**20  # of files; larger files are sampled
PIECE_BYTES = 4 * 2**20
TOKENISED = 400  # documents
LONGEST_TOKENISED = 100_000  # characters of one document
TEXT_COLUMNS = (
    "text",
    "content",
    "body",
    "document",
    "article",
    "raw_content",
    "page_content",
    "markdown",
    "code",
)
FEWEST_DOCUMENTS = 50  # a fifth of them, 10, can be held out
MOST_BAD = 0.05
ENGLISH = (
    "The question of how a machine can learn from what people have written is an old one. A reader who opens a book"
    " brings along most of what is needed to understand it: the words, the order in which they may stand, and a large"
    " part of the world that they speak about."
)
Shift = Literal["weak", "strong"]
LONGEST_ROW = 4096
LONGEST_ROW_ON_CPU = 512
SHIFT_BELOW = 0.75  # of English's bytes per token
WEAK_REPLAY = 0.05  # arXiv 2403.08763
STRONG_REPLAY = 0.25
# Tokens of the documents, and how often they are read: up to 4 times is nearly as good as new text (arXiv 2305.16264)
EPOCHS = ((500_000_000, 1), (50_000_000, 2), (0, 4))
WANTED_STEPS = 400
FEWEST_STEPS_ON_GPU = 100
FEWEST_STEPS = 10
LARGEST_BATCH = 524_288
# Adam's second moment forgets by tokens, not by steps (arXiv 2507.07101): as beta2 0.95 does at LARGEST_BATCH.
HALF_LIFE_TOKENS = 7_100_000
SHORTEST_BETA2 = 0.95
REPEATED_DECAY = 3.0  # 30 times the usual decay (arXiv 2509.14786)
MEAN_OF_SCHEDULE = 0.55  # of the peak rate
# Tokens of the documents; our choice, above what was measured.
FEW_TOKENS = 50_000_000
TOO_FEW_FOR_FACTS = 10_000_000
BITS_OF_PARAMETER = 2  # that it can store (arXiv 2404.05405); we assume a bit of news in each token
RATES_BY_SIZE = (
    (200_000_000, 1e-4),
    (1_000_000_000, 5e-5),
    (5_000_000_000, 2e-5),
    (math.inf, 1e-5),
)
REWARMED_TO = 0.3  # of the base's peak, for a strong shift: between the usual end, 0.1, and arXiv 2403.08763's 1
LORA_FACTOR = 10
LARGEST_LORA_RATE = 5e-4
LEAST_RATE = 1e-6
ADAPTERS_ONLY = {"r": 64, "lora_alpha": 16, "use_rslora": True}
METHODS = {
    "full": "all parameters",
    "lora": "LoRA with embeddings and head",
    "adapters": "LoRA",
}
# In order of preference; above MOST_FOR_ZERO2 parameters, ZeRO-2 leaves too little of 24 GB.
PROFILES = (
    "ds_config_zero1.json",
    "ds_config_production.json",
    "ds_config_prototype.json",
    "ds_config_8b_24gb.json",
)
MOST_FOR_ZERO2 = 4_000_000_000
HELD_OUT_DOCUMENTS = 100
MOST_HELD_OUT = 0.2
LEAST_HELD_OUT = 0.005
MOST_EVALUATIONS = 5
EVALUATION_SHARE = 0.1


@dataclass
class DocumentStatistics:
    source: DocumentSource
    formats: Counter[str]
    documents: int = 0
    """Estimated unless everything was read."""
    text_bytes: int = 0
    bad_rows: int = 0
    first_bad: str = ""
    repeats: int = 0
    """Repeated documents among those read."""
    documents_read: int = 0
    is_whole: bool = True
    languages: Counter[str] | None = None
    """Languages of the sample; None if py3langid is not installed."""
    sample: list[str] = field(default_factory=list)
    tokens: int = 0
    """Estimated from the sample, unless it has all documents."""
    bytes_per_token: float = 0.0
    compared_with_english: float = 1.0
    """Bytes per token relative to plain English; far below 1, the tokenizer does not fit these documents."""

    @property
    def bad_share(self) -> float:
        return self.bad_rows / max(1, self.bad_rows + self.documents_read)


def read_documents(
    path: str, text_column: str | None, encoder: DocumentEncoder
) -> DocumentStatistics:
    """Read the documents of a file, folder or glob, or a random 64 MiB of them, and tokenize a sample.

    Raises:
        DataError: no documents, too few to evaluate on, or too many bad rows.
    """
    source = find_source(path, text_column)
    files = files_of(source, "DOCUMENTS")
    formats = Counter(format_of(file.name).removeprefix(".") for file in files)
    statistics = DocumentStatistics(source, formats)
    read_bytes = read_sample(statistics)

    scale = 1.0
    if not statistics.is_whole:
        scale = sum(file.size for file in files) / read_bytes
    statistics.documents = round(statistics.documents_read * scale)
    statistics.text_bytes = round(statistics.text_bytes * scale)
    refuse_unusable(statistics)

    if importlib.util.find_spec("py3langid") is not None:
        identifier = language_identifier()
        statistics.languages = Counter(
            identifier.classify(text[:2000])[0] for text in statistics.sample[:200]
        )

    texts = [text[:LONGEST_TOKENISED] for text in statistics.sample]
    statistics.bytes_per_token = bytes_per_token(texts, encoder)
    statistics.tokens = round(statistics.text_bytes / statistics.bytes_per_token)
    _, english_tokens = encoder.encode([ENGLISH])
    statistics.compared_with_english = (
        statistics.bytes_per_token * int(english_tokens.sum()) / len(ENGLISH.encode())
    )
    return statistics


def read_sample(statistics: DocumentStatistics) -> int:
    """Read pieces of the files in random order, and return their number of bytes."""
    source = statistics.source
    draw = random.Random(0)
    digests: set[int] = set()
    read_bytes = 0
    pieces = list(pieces_of(source, "DOCUMENTS", PIECE_BYTES))
    for piece in draw.sample(pieces, len(pieces)):
        if read_bytes >= READ_BYTES:
            statistics.is_whole = False
            break
        for row in read_piece(source, piece, "DOCUMENTS"):
            if isinstance(row, BadRow):
                count_bad_row(statistics, row)
                continue
            encoded = row.text.encode()
            digest = xxh3_64_intdigest(encoded)
            statistics.documents_read += 1
            statistics.text_bytes += len(encoded)
            if digest in digests:
                statistics.repeats += 1
            digests.add(digest)
            # each document has the same probability to be in the sample
            if len(statistics.sample) < TOKENISED:
                statistics.sample.append(row.text)
                continue
            index = draw.randrange(statistics.documents_read)
            if index < TOKENISED:
                statistics.sample[index] = row.text
        end = piece.stop or Path(piece.path).stat().st_size
        read_bytes += end - piece.start
    return read_bytes


def count_bad_row(statistics: DocumentStatistics, row: BadRow) -> None:
    if row.loses_file:
        raise DataError(complaint(row, "DOCUMENTS"))
    statistics.bad_rows += row.num_rows
    if not statistics.first_bad:
        statistics.first_bad = f"{row.where}: {row.detail}"


def bytes_per_token(texts: list[str], encoder: DocumentEncoder) -> float:
    _, lengths = encoder.encode(texts)
    return sum(len(text.encode()) for text in texts) / max(1, int(lengths.sum()))


def find_source(path: str, text_column: str | None) -> DocumentSource:
    if kind_of(path) != "local":
        raise DataError(f"{path}: DOCUMENTS must be a local file, folder or glob.")
    try:
        files = [file.name for file in files_of(DocumentSource(path=path), "DOCUMENTS")]
    except DataError as problem:
        reason = str(problem).split(" Set `DOCUMENTS.path`")[0]
        raise DataError(f"{reason} {to_convert(path) or 'Use another DOCUMENTS.'}") from problem
    first = next((name for name in files if format_of(name) not in TEXT_FILES), files[0])
    missing: list[BadRow] = []
    columns = (text_column,) if text_column else TEXT_COLUMNS
    for column in columns:
        source = DocumentSource(path=path, text_column=column)
        row = next(read_piece(source, Piece(first), "DOCUMENTS"), None)
        if not isinstance(row, BadRow) or row.reason != "missing column":
            return source
        missing.append(row)
    raise DataError(
        f"{missing[0].where}: {missing[0].detail}. Set the column with the text: --text-column NAME."
    )


def to_convert(path: str) -> str:
    """Return the command for a folder with files that only `cpt data ingest` reads."""
    folder = Path(path).expanduser()
    suffixes = {file.suffix for file in folder.rglob("*") if file.suffix.lower() in CONVERTED}
    if not suffixes:
        return ""
    command = f"cpt data ingest {folder} --output {folder.name}-text"
    return f"Convert its {', '.join(sorted(suffixes))} files with: {command}"


def refuse_unusable(statistics: DocumentStatistics) -> None:
    path = statistics.source.path
    converted = to_convert(path)
    if statistics.bad_share > MOST_BAD:
        rows = statistics.bad_rows + statistics.documents_read
        raise DataError(
            f"{path}: {statistics.bad_rows:,} of {rows:,} rows are not documents; the first:"
            f" {statistics.first_bad}. Fix them, or remove these files. {converted}"
        )
    if statistics.documents < FEWEST_DOCUMENTS:
        remedy = converted or "Add more."
        if statistics.formats.keys() & {"txt", "md"}:
            remedy = f"A txt or md file is one document: split long ones. {remedy}"
        raise DataError(
            f"{path}: {statistics.documents:,} document(s), but {FEWEST_DOCUMENTS} are needed, since some are"
            f" held out for the evaluation. {remedy}"
        )


@dataclass(frozen=True)
class BaseModel:
    path: str
    model: PreTrainedModel
    """On the meta device."""
    tokenizer: PreTrainedTokenizerBase
    parameters: int
    longest_row: int | None
    packs_documents: bool
    known: KnownBase | None


@dataclass(frozen=True)
class TrainingMethod:
    name: str
    """`full`, `lora` (with embeddings and head) or `adapters`."""
    profile: str | None
    micro_batch: int
    checkpointing: bool
    memory_gib: float
    trained: int
    """Parameters."""
    hours: tuple[float, float, float]
    """Expected, and for the lowest and highest published efficiency, without evaluation and saving."""
    refused: list[str]
    """Methods that do not fit, with the memory they need."""


@dataclass(frozen=True)
class RecipeChoices:
    way: TrainingMethod
    sequence_length: int
    shift_reason: str
    replay: float
    """Share of the tokens."""
    epochs: float
    tokens: int
    batch_tokens: int
    learning_rate: float
    rate_reason: str
    warmup_tokens: int
    held_out_share: float
    evaluations: int

    @property
    def is_strong_shift(self) -> bool:
        return self.replay == STRONG_REPLAY

    @property
    def beta2(self) -> float:
        """A half-life in tokens, at most a tenth of the run."""
        half_life = min(HALF_LIFE_TOKENS, self.tokens / 10)
        return round(max(SHORTEST_BETA2, 0.5 ** (self.batch_tokens / half_life)), 4)

    @property
    def shrinking(self) -> float:
        """The share of a weight without gradients that `REPEATED_DECAY` would remove during the run."""
        steps = self.tokens / self.batch_tokens
        return 1 - math.exp(-REPEATED_DECAY * self.learning_rate * MEAN_OF_SCHEDULE * steps)

    def tokens_between(self, times: int) -> int:
        return max(self.batch_tokens, self.tokens // times)


def read_base(path: str) -> BaseModel:
    """Read the config and the tokenizer, without opening weights.

    Raises:
        RecipeError: the model cannot be loaded, or its tokenizer is another model's.
        ResourceError: it is on the Hub, which is unreachable or needs a login.
    """
    path = result_of_run(path) or path
    section = Model(path=path)
    config = load_config(section)
    tokenizer = load_tokenizer(Tokenizer(), section)
    needed_rows = rows_needed(tokenizer)
    embedding_rows = vocabulary_size(config)
    if needed_rows > embedding_rows:
        raise RecipeError(
            f"{path}: its tokenizer has ids up to {needed_rows - 1:,}, but its embedding {embedding_rows:,} rows. Use"
            " the base's tokenizer files; to add tokens: cpt tokenizer extend."
        )
    model = build_on_meta(config)
    return BaseModel(
        path=path,
        model=model,
        tokenizer=tokenizer,
        parameters=count_model_parameters(model).total,
        longest_row=longest_row(config),
        packs_documents=isolates_documents(config),
        known=own_run(path) or known_base(path),
    )


def own_run(path: str) -> KnownBase | None:
    """Training details of an exported model, if this folder is the export of a cpt run."""
    export = Path(path).expanduser()
    run = export.parent
    metrics = run / "metrics.jsonl"
    recipe_file = run / RECIPE
    if not is_local(path) or export.name != EXPORT:
        return None
    if not metrics.is_file() or not recipe_file.is_file():
        return None
    rates = [row["learning_rate"] for row in read_objects(metrics) if "learning_rate" in row]
    recipe = load_recipe(recipe_file)
    return KnownBase(
        name=path,
        source=f"its run, {run}",
        peak_learning_rate=recipe.optimizer.learning_rate,
        final_learning_rate=float(rates[-1]) if rates else None,
        batch_tokens=recipe.budget.global_batch_tokens,
        sequence_length=recipe.data.sequence_length,
    )


def choose(
    statistics: DocumentStatistics,
    base: BaseModel,
    target: Target,
    *,
    with_replay: bool = True,
    tokens: int | None = None,
    full: bool | None = None,
    shift: Shift | None = None,
) -> RecipeChoices:
    """Choose all settings, except `tokens`, `full` training (or adapters) and `shift` if the user set them.

    Raises:
        ResourceError: nothing fits the machine.
        DataError: too little text for even a few steps.
    """
    length = row_length(base, target)
    if shift is None:
        is_strong, shift_reason = measured_shift(statistics)
    else:
        is_strong = shift == "strong"
        shift_reason = "as requested"

    replay = 0.0
    if with_replay:
        replay = STRONG_REPLAY if is_strong else WEAK_REPLAY

    held_out = max(LEAST_HELD_OUT, HELD_OUT_DOCUMENTS / statistics.documents)
    held_out = math.ceil(min(MOST_HELD_OUT, held_out) * 1000) / 1000
    domain_tokens = max(1.0, statistics.tokens * (1 - held_out))
    if tokens is None:
        epochs: float = next(times for least, times in EPOCHS if domain_tokens >= least)
        tokens = max(1, round_down(epochs * domain_tokens / (1 - replay)))
    else:
        epochs = tokens * (1 - replay) / domain_tokens

    batch_tokens = tokens_of_batch(base, target, length, tokens)
    if tokens < FEWEST_STEPS * batch_tokens:
        raise DataError(
            f"{statistics.source.path}: its {statistics.tokens:,} tokens make {tokens // batch_tokens} steps of"
            f" {batch_tokens:,} tokens, too few to learn from. Add documents, or set --tokens to repeat them."
        )

    method = first_method_that_fits(base, target, length, tokens, batch_tokens, full)
    is_full = method.name == "full"
    rate, rate_reason = learning_rate(base, is_full=is_full, is_strong_shift=is_strong)

    # a token of evaluation costs a third of training; evaluation should take a tenth of the time
    held_out_tokens = max(1.0, held_out * statistics.tokens)
    evaluations = int(3 * EVALUATION_SHARE * tokens / held_out_tokens)
    return RecipeChoices(
        way=method,
        sequence_length=length,
        shift_reason=shift_reason,
        replay=replay,
        epochs=epochs,
        tokens=tokens,
        batch_tokens=batch_tokens,
        learning_rate=rate,
        rate_reason=rate_reason,
        warmup_tokens=max(batch_tokens, round_down(0.01 * tokens)),
        held_out_share=held_out,
        evaluations=min(MOST_EVALUATIONS, max(1, evaluations)),
    )


def row_length(base: BaseModel, target: Target) -> int:
    length = LONGEST_ROW_ON_CPU if target.on_cpu else LONGEST_ROW
    if base.known is not None and base.known.sequence_length:
        length = min(length, base.known.sequence_length)
    return min(length, base.longest_row or length)


def tokens_of_batch(base: BaseModel, target: Target, length: int, tokens: int) -> int:
    """Tokens of a step: rows for all GPUs, times a power of two."""
    # give a GPU enough tokens at once to be busy, in fewer steps
    busy_tokens = min(BUSY_TOKENS * target.gpus, tokens / FEWEST_STEPS_ON_GPU)
    limit = min(LARGEST_BATCH, max(tokens / WANTED_STEPS, busy_tokens))
    if base.known is not None and base.known.batch_tokens:
        limit = min(limit, base.known.batch_tokens)
    row_tokens = length * max(1, target.gpus)
    doublings = math.floor(math.log2(max(1.0, limit / row_tokens)))
    return row_tokens * 2**doublings


def measured_shift(statistics: DocumentStatistics) -> tuple[bool, str]:
    """Estimate how far the documents are from the base's training data, by its tokenizer's fit."""
    percent = 100 * statistics.compared_with_english
    fit = f"{statistics.bytes_per_token:.2f} bytes per token, {percent:.0f} % of plain English"
    language = "en"
    if statistics.languages:
        language, _ = statistics.languages.most_common(1)[0]
    if language != "en" and statistics.compared_with_english < 1:
        return True, f"most documents look like `{language}`; {fit}"
    return statistics.compared_with_english < SHIFT_BELOW, fit


def training_methods(
    base: BaseModel, target: Target
) -> Iterator[tuple[str, str | None, dict[str, Any] | None]]:
    """Yield name, DeepSpeed profile and adapters: full training before adapters, on the GPU before offloading."""
    if target.gpus < 2:
        yield "full", None, None
    if not target.on_cpu:
        shipped = dict(shipped_profiles())
        for profile in PROFILES:
            path = f"deepspeed_configs/{profile}"
            zero = shipped[path]
            is_small = zero.stage != 2 or base.parameters <= MOST_FOR_ZERO2
            if is_small and (target.gpus > 1 or zero.offload_optimizer):
                yield "full", path, None
    if next(adaptable(base.model), None) is None:
        return
    for name, options in (("lora", {"preset": "cpt"}), ("adapters", ADAPTERS_ONLY)):
        try:
            count_lora_parameters(base.model, options)
        except RecipeError:  # a tied head that peft does not support
            continue
        yield name, None, options


def first_method_that_fits(
    base: BaseModel, target: Target, length: int, tokens: int, batch: int, full: bool | None
) -> TrainingMethod:
    refused: list[str] = []
    gpus = max(1, target.gpus)
    for name, profile, lora in training_methods(base, target):
        if full is not None and full != (name == "full"):
            continue
        recipe = draft_recipe(base, target, length, tokens, batch, profile=profile, lora=lora)
        engine = str(REPOSITORY / profile) if profile else None
        setup, (sizes, activations) = choose_batch(recipe, engine, base.model.config, target, gpus)
        plan = plan_memory(sizes, setup, activations)

        has_host = not setup.updates_on_host or fits_host(plan, target)
        fits_gpu = fits(plan, target)
        if fits_gpu and has_host:
            mfus = (assumed_mfu(setup), *reversed(MFU_RANGE))
            expected, shortest, longest = (
                planned_speed(sizes, setup, target, mfu).hours(tokens) for mfu in mfus
            )
            return TrainingMethod(
                name=name,
                profile=profile,
                micro_batch=setup.micro_batch,
                checkpointing=setup.checkpointing,
                memory_gib=plan.peak.size / GIB,
                trained=sizes.trained,
                hours=(expected, shortest, longest),
                refused=refused,
            )

        method = METHODS[name]
        if profile is not None:
            method += f" with {profile}"
        needs = f"{plan.host.size / GIB:.0f} GiB of host memory of {target.host_memory_gib:.0f}"
        needs += f" ({target.host_source})"
        if has_host and not fits_gpu:
            needs = f"{plan.peak.size / GIB:.1f} GiB of {target.memory_gib:.0f} on the GPU"
        refused.append(f"{method} needs {needs}")

    if not refused:
        raise ResourceError(f"{base.path} lacks linear layers for adapters. Remove --lora.")
    raise ResourceError(
        f"{base.path} does not fit {gpus} x {target.name}: {'; '.join(refused)} (estimates). Use a smaller model,"
        " more GPUs (--gpus) or larger ones, or set the host's memory (--host-memory GIB)."
    )


def fits_host(plan: MemoryPlan, target: Target) -> bool:
    # of an unknown host, only count memory that stays in use
    usable = USABLE_OF_HOST if target.host_is_known else 1.0
    return plan.host.size / GIB <= usable * target.host_memory_gib


def draft_recipe(
    base: BaseModel,
    target: Target,
    length: int,
    tokens: int,
    batch: int,
    *,
    profile: str | None,
    lora: dict[str, Any] | None,
) -> Recipe:
    training: dict[str, Any] = {
        "bf16": not target.on_cpu,
        CHECKPOINTING[0]: False if target.on_cpu else AUTO,
        MICRO_BATCH: AUTO if base.packs_documents else 1,  # otherwise a row is a whole batch
    }
    if profile is not None:
        training["deepspeed"] = profile
    sections = {
        "name": "draft",
        "model": {"path": base.path, "lora": lora},
        "data": {
            "sequence_length": length,
            "sources": [{"path": "documents"}],
            "packing": "best_fit" if base.packs_documents else "token_budget",
        },
        "budget": {"tokens": tokens, "global_batch_tokens": batch},
        "training": training,
    }
    return Recipe.model_validate(sections)


def learning_rate(base: BaseModel, *, is_full: bool, is_strong_shift: bool) -> tuple[float, str]:
    """Choose the last rate of the base's schedule, higher for text far from its data; ten times that for adapters."""
    rate, reason = rate_of_full_training(base, is_strong_shift=is_strong_shift)
    if is_full:
        return rate, reason
    reason = f"adapters need about ten times the rate of full training (arXiv 2405.09673); that is {rate:g}, {reason}"
    return min(rate * LORA_FACTOR, LARGEST_LORA_RATE), reason


def rate_of_full_training(base: BaseModel, *, is_strong_shift: bool) -> tuple[float, str]:
    known_base = base.known
    if known_base is not None and known_base.peak_learning_rate and is_strong_shift:
        peak = known_base.peak_learning_rate
        reason = f"{REWARMED_TO:g} of the base's peak, {peak:g} ({known_base.source})"
        return peak * REWARMED_TO, f"{reason}: the text is far from the base's data"
    if (
        known_base is not None
        and known_base.final_learning_rate
        and known_base.final_learning_rate >= LEAST_RATE
    ):
        reason = f"the final learning rate of the base's training ({known_base.source})"
        return known_base.final_learning_rate, reason
    if known_base is not None and known_base.peak_learning_rate:
        peak = known_base.peak_learning_rate
        return peak / 10, f"a tenth of the base's peak, {peak:g} ({known_base.source})"
    rate = next(rate for size, rate in RATES_BY_SIZE if base.parameters < size)
    share = "a tenth"
    if is_strong_shift:
        rate *= 10 * REWARMED_TO
        share = f"{REWARMED_TO:g}"
    return rate, f"about {share} of the peaks published for this size; the base's is unknown"


def round_down(number: float) -> int:
    """Round down to two significant digits: 1,234,567 becomes 1,200,000."""
    step = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.floor(number / step) * step
