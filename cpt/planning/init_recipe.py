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
from cpt.planning.memory import plan_memory
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
LONGEST_ROW, LONGEST_ROW_ON_CPU = 4096, 512
SHIFT_BELOW = 0.75  # of English's bytes per token
WEAK_REPLAY, STRONG_REPLAY = 0.05, 0.25  # arXiv 2403.08763
EPOCHS = (
    (500_000_000, 1),
    (50_000_000, 2),
    (0, 4),
)  # up to 4 are nearly as good as new text: arXiv 2305.16264
STEPS_WANTED, FEWEST_STEPS_ON_GPU, FEWEST_STEPS = 400, 100, 10
LARGEST_BATCH = 524_288
# Adam's second moment forgets by tokens, not by steps (arXiv 2507.07101): as beta2 0.95 does at LARGEST_BATCH.
HALF_LIFE_TOKENS, SHORTEST_BETA2 = 7_100_000, 0.95
REPEATED_DECAY, MEAN_OF_SCHEDULE = (
    3.0,
    0.55,
)  # 30 times the usual decay: arXiv 2509.14786; of the peak rate
FEW_TOKENS, TOO_FEW_FOR_FACTS = (
    50_000_000,
    10_000_000,
)  # of the documents; our choice, above what was measured
BITS_OF_PARAMETER = 2  # that it can store (arXiv 2404.05405); we assume a bit of news in each token
RATES_BY_SIZE = (
    (200_000_000, 1e-4),
    (1_000_000_000, 5e-5),
    (5_000_000_000, 2e-5),
    (math.inf, 1e-5),
)
REWARMED_TO = 0.3  # of the base's peak, for a strong shift: between the usual end, 0.1, and arXiv 2403.08763's 1
LORA_FACTOR, LARGEST_LORA_RATE, LEAST_RATE = 10, 5e-4, 1e-6
ADAPTERS_ONLY = {"r": 64, "lora_alpha": 16, "use_rslora": True}
# In order of preference; above MOST_FOR_ZERO2 parameters, ZeRO-2 leaves too little of 24 GB.
PROFILES = (
    "ds_config_zero1.json",
    "ds_config_production.json",
    "ds_config_prototype.json",
    "ds_config_8b_24gb.json",
)
MOST_FOR_ZERO2 = 4_000_000_000
HELD_OUT_DOCUMENTS, MOST_HELD_OUT, LEAST_HELD_OUT = 100, 0.2, 0.005
MOST_EVALUATIONS, EVALUATION_SHARE = 5, 0.1


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
    source, encode = find_source(path, text_column), encoder.encode
    files = files_of(source, "DOCUMENTS")
    facts = DocumentStatistics(
        source, Counter(format_of(file.name).removeprefix(".") for file in files)
    )
    draw, seen, done_bytes = random.Random(0), set[int](), 0
    pieces = list(pieces_of(source, "DOCUMENTS", PIECE_BYTES))
    for piece in draw.sample(pieces, len(pieces)):
        if done_bytes >= READ_BYTES:
            facts.is_whole = False
            break
        for item in read_piece(source, piece, "DOCUMENTS"):
            if isinstance(item, BadRow):
                if item.loses_file:
                    raise DataError(complaint(item, "DOCUMENTS"))
                facts.bad_rows += item.num_rows
                facts.first_bad = facts.first_bad or f"{item.where}: {item.detail}"
                continue
            facts.documents_read += 1
            encoded = item.text.encode()
            facts.text_bytes += len(encoded)
            digest = xxh3_64_intdigest(encoded)
            facts.repeats += digest in seen
            seen.add(digest)
            # each document has the same probability to be in the sample
            if len(facts.sample) < TOKENISED:
                facts.sample.append(item.text)
            elif (place := draw.randrange(facts.documents_read)) < TOKENISED:
                facts.sample[place] = item.text
        done_bytes += (piece.stop or Path(piece.path).stat().st_size) - piece.start
    scale = 1.0 if facts.is_whole else sum(file.size for file in files) / done_bytes
    facts.documents, facts.text_bytes = (
        round(facts.documents_read * scale),
        round(facts.text_bytes * scale),
    )
    refuse_unusable(facts)
    if importlib.util.find_spec("py3langid") is not None:
        identifier = language_identifier()
        facts.languages = Counter(
            identifier.classify(text[:2000])[0] for text in facts.sample[:200]
        )
    texts = [text[:LONGEST_TOKENISED] for text in facts.sample]
    facts.bytes_per_token = sum(len(text.encode()) for text in texts) / max(
        1, int(encode(texts)[1].sum())
    )
    facts.tokens = round(facts.text_bytes / facts.bytes_per_token)
    facts.compared_with_english = (
        facts.bytes_per_token * int(encode([ENGLISH])[1].sum()) / len(ENGLISH.encode())
    )
    return facts


def find_source(path: str, text_column: str | None) -> DocumentSource:
    if kind_of(path) != "local":
        raise DataError(f"{path}: DOCUMENTS must be a local file, folder or glob.")
    try:
        files = [file.name for file in files_of(DocumentSource(path=path), "DOCUMENTS")]
    except DataError as problem:
        text = str(problem).split(" Set `DOCUMENTS.path`")[0]
        raise DataError(f"{text} {to_convert(path) or 'Use another DOCUMENTS.'}") from problem
    first = next((name for name in files if format_of(name) not in TEXT_FILES), files[0])
    missing: list[BadRow] = []
    for column in [text_column] if text_column else TEXT_COLUMNS:
        source = DocumentSource(path=path, text_column=column)
        item = next(read_piece(source, Piece(first), "DOCUMENTS"), None)
        if not isinstance(item, BadRow) or item.reason != "missing column":
            return source
        missing.append(item)
    raise DataError(
        f"{missing[0].where}: {missing[0].detail}. Set the column with the text: --text-column NAME."
    )


def to_convert(path: str) -> str:
    """Return the command for a folder with files that only `cpt data ingest` reads."""
    folder = Path(path).expanduser()
    found = sorted({file.suffix for file in folder.rglob("*") if file.suffix.lower() in CONVERTED})
    command = f"cpt data ingest {folder} --output {folder.name}-text"
    return f"Convert its {', '.join(found)} files with: {command}" if found else ""


def refuse_unusable(facts: DocumentStatistics) -> None:
    path = facts.source.path
    converted = to_convert(path)
    if facts.bad_share > MOST_BAD:
        rows = facts.bad_rows + facts.documents_read
        raise DataError(
            f"{path}: {facts.bad_rows:,} of {rows:,} rows are not documents; the first: {facts.first_bad}. Fix them,"
            f" or remove these files. {converted}"
        )
    if facts.documents < FEWEST_DOCUMENTS:
        split = (
            "A txt or md file is one document: split long ones. "
            if facts.formats.keys() & {"txt", "md"}
            else ""
        )
        raise DataError(
            f"{path}: {facts.documents:,} document(s), but {FEWEST_DOCUMENTS} are needed, since some are held out for"
            f" the evaluation. {split}{converted or 'Add more.'}"
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
        return round(
            max(
                SHORTEST_BETA2, 0.5 ** (self.batch_tokens / min(HALF_LIFE_TOKENS, self.tokens / 10))
            ),
            4,
        )

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
    config, tokenizer = load_config(section), load_tokenizer(Tokenizer(), section)
    needed, known_tokens = rows_needed(tokenizer), vocabulary_size(config)
    if needed > known_tokens:
        raise RecipeError(
            f"{path}: its tokenizer has ids up to {needed - 1:,}, but its embedding {known_tokens:,} rows. Use"
            " the base's tokenizer files; to add tokens: cpt tokenizer extend."
        )
    model = build_on_meta(config)
    known, packs = own_run(path) or known_base(path), isolates_documents(config)
    return BaseModel(
        path,
        model,
        tokenizer,
        count_model_parameters(model).total,
        longest_row(config),
        packs,
        known,
    )


def own_run(path: str) -> KnownBase | None:
    """Training details of an exported model, if this folder is the export of a cpt run."""
    run = Path(path).expanduser().parent
    metrics, recipe = run / "metrics.jsonl", run / RECIPE
    if (
        not is_local(path)
        or Path(path).name != EXPORT
        or not metrics.is_file()
        or not recipe.is_file()
    ):
        return None
    rates = [row["learning_rate"] for row in read_objects(metrics) if "learning_rate" in row]
    made, last = load_recipe(recipe), float(rates[-1]) if rates else None
    peak, batch = made.optimizer.learning_rate, made.budget.global_batch_tokens
    return KnownBase(path, f"its run, {run}", peak, last, batch, made.data.sequence_length)


def choose(
    facts: DocumentStatistics,
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
    known, gpus = base.known, max(1, target.gpus)
    longest = LONGEST_ROW_ON_CPU if target.on_cpu else LONGEST_ROW
    length = min(longest, (known and known.sequence_length) or longest, base.longest_row or longest)
    is_strong, reason = (
        (shift == "strong", "as requested") if shift is not None else measured_shift(facts)
    )
    replay = (STRONG_REPLAY if is_strong else WEAK_REPLAY) if with_replay else 0.0
    share = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, HELD_OUT_DOCUMENTS / facts.documents))
    held_out = math.ceil(share * 1000) / 1000
    domain_tokens = max(1.0, facts.tokens * (1 - held_out))
    if tokens is None:
        epochs: float = next(times for least, times in EPOCHS if domain_tokens >= least)
        tokens = max(1, round_down(epochs * domain_tokens / (1 - replay)))
    else:
        epochs = tokens * (1 - replay) / domain_tokens
    # give a GPU enough tokens at once to be busy, in fewer steps
    wanted = max(
        tokens / STEPS_WANTED, min(BUSY_TOKENS * target.gpus, tokens / FEWEST_STEPS_ON_GPU)
    )
    most = min(LARGEST_BATCH, (known and known.batch_tokens) or LARGEST_BATCH, wanted)
    batch = length * gpus * 2 ** max(0, math.floor(math.log2(max(1.0, most / (length * gpus)))))
    if tokens < FEWEST_STEPS * batch:
        raise DataError(
            f"{facts.source.path}: its {facts.tokens:,} tokens make {tokens // batch} steps of {batch:,} tokens, too"
            " few to learn from. Add documents, or set --tokens to repeat them."
        )
    way = first_method_that_fits(base, target, length, tokens, batch, full)
    rate, rate_reason = learning_rate(base, is_full=way.name == "full", is_strong_shift=is_strong)
    # a token of evaluation costs a third of training; evaluation should take a tenth of the time
    often = int(3 * EVALUATION_SHARE * tokens / max(1.0, held_out * facts.tokens))
    often, warmup = min(MOST_EVALUATIONS, max(1, often)), max(batch, round_down(0.01 * tokens))
    return RecipeChoices(
        way,
        length,
        reason,
        replay,
        epochs,
        tokens,
        batch,
        rate,
        rate_reason,
        warmup,
        held_out,
        evaluations=often,
    )


def measured_shift(facts: DocumentStatistics) -> tuple[bool, str]:
    """Estimate how far the documents are from the base's training data, by its tokenizer's fit."""
    fit = f"{facts.bytes_per_token:.2f} bytes per token, {100 * facts.compared_with_english:.0f} % of plain English"
    language = facts.languages.most_common(1)[0][0] if facts.languages else "en"
    if language != "en" and facts.compared_with_english < 1:
        return True, f"most documents look like `{language}`; {fit}"
    return facts.compared_with_english < SHIFT_BELOW, fit


def training_methods(
    base: BaseModel, target: Target
) -> Iterator[tuple[str, str | None, dict[str, Any] | None]]:
    """Yield name, DeepSpeed profile and adapters: full training before adapters, on the GPU before offloading."""
    if target.gpus < 2:
        yield "full", None, None
    shipped = {path.rpartition("/")[2]: zero for path, zero in shipped_profiles()}
    for profile in PROFILES if not target.on_cpu else ():
        zero = shipped[profile]
        if (target.gpus > 1 or zero.offload_optimizer) and (
            zero.stage != 2 or base.parameters <= MOST_FOR_ZERO2
        ):
            yield "full", f"deepspeed_configs/{profile}", None
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
        training: dict[str, Any] = {
            "bf16": not target.on_cpu,
            CHECKPOINTING[0]: False if target.on_cpu else AUTO,
        }
        training[MICRO_BATCH] = (
            AUTO if base.packs_documents else 1
        )  # otherwise a row is a whole batch
        sections = {
            "name": "draft",
            "model": {"path": base.path, "lora": lora},
            "data": {
                "sequence_length": length,
                "sources": [{"path": "documents"}],
                "packing": "best_fit" if base.packs_documents else "token_budget",
            },
            "budget": {"tokens": tokens, "global_batch_tokens": batch},
            "training": training | ({"deepspeed": profile} if profile else {}),
        }
        recipe, config = Recipe.model_validate(sections), base.model.config
        engine = str(REPOSITORY / profile) if profile else None
        setup, (facts, activations) = choose_batch(recipe, engine, config, target, gpus)
        plan = plan_memory(facts, setup, activations)
        # with an unknown host, only count memory that stays in use
        usable = USABLE_OF_HOST if target.host_is_known else 1.0
        has_host = (
            not setup.updates_on_host or plan.host.size / GIB <= usable * target.host_memory_gib
        )
        if fits(plan, target) and has_host:
            shares = (assumed_mfu(setup), MFU_RANGE[1], MFU_RANGE[0])
            expected, least, most = (
                planned_speed(facts, setup, target, mfu).hours(tokens) for mfu in shares
            )
            memory, hours = plan.peak.size / GIB, (expected, least, most)
            batch_and_memory = (setup.micro_batch, setup.checkpointing, memory)
            return TrainingMethod(name, profile, *batch_and_memory, facts.trained, hours, refused)
        what = {
            "full": "all parameters",
            "lora": "LoRA with embeddings and head",
            "adapters": "LoRA",
        }[name]
        needs = f"{plan.peak.size / GIB:.1f} GiB of {target.memory_gib:.0f} on the GPU"
        if not has_host or fits(plan, target):
            needs = f"{plan.host.size / GIB:.0f} GiB of host memory of {target.host_memory_gib:.0f}"
            needs += f" ({target.host_source})"
        refused.append(f"{what}{f' with {profile}' if profile else ''} needs {needs}")
    if not refused:
        raise ResourceError(f"{base.path} lacks linear layers for adapters. Remove --lora.")
    raise ResourceError(
        f"{base.path} does not fit {gpus} x {target.name}: {'; '.join(refused)} (estimates). Use a smaller model,"
        " more GPUs (--gpus) or larger ones, or set the host's memory (--host-memory GIB)."
    )


def learning_rate(base: BaseModel, *, is_full: bool, is_strong_shift: bool) -> tuple[float, str]:
    """Choose the last rate of the base's schedule, higher for text far from its data; ten times that for adapters."""
    known = base.known
    peak, last = (known.peak_learning_rate, known.final_learning_rate) if known else (None, None)
    whose = f"the base's peak, {peak:g} ({known.source})" if known and peak else ""
    if peak and is_strong_shift:
        value, reason = (
            peak * REWARMED_TO,
            f"{REWARMED_TO:g} of {whose}: the text is far from the base's data",
        )
    elif known and last and last >= LEAST_RATE:
        value, reason = last, f"the final learning rate of the base's training ({known.source})"
    elif peak:
        value, reason = peak / 10, f"a tenth of {whose}"
    else:
        value = next(rate for size, rate in RATES_BY_SIZE if base.parameters < size)
        value *= 10 * REWARMED_TO if is_strong_shift else 1
        part = f"{REWARMED_TO:g}" if is_strong_shift else "a tenth"
        reason = f"about {part} of the peaks published for this size; the base's is unknown"
    if is_full:
        return value, reason
    text = f"adapters need about ten times the rate of full training (arXiv 2405.09673); that is {value:g}, {reason}"
    return min(value * LORA_FACTOR, LARGEST_LORA_RATE), text


def round_down(number: float) -> int:
    """Round down to two significant digits: 1,234,567 becomes 1,200,000."""
    step = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.floor(number / step) * step
