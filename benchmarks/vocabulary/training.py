"""Continue the demo's base model on code with its own tokens and with added ones: after equal bytes, and after equal
compute."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from benchmarks.library_corpus import Corpus
from benchmarks.vocabulary.lengths import bytes_per_token, texts_of
from cpt.cli import main as cpt
from cpt.data.readers.standard_library import Kind
from cpt.models.inventory import count_parameters
from cpt.recipe.load import load_recipe
from cpt.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
KINDS: tuple[Kind, Kind] = (
    "domain",
    "general",
)  # in the order of the recipes' sources and held-out sets
OWN = "own tokens"
STEP_TOKENS = 1024
DOMAIN_SHARE = 0.7  # of the tokens; the rest replays prose, as in the demo
UNTIED_TOKENS = 300_000  # of the base model with a head of its own, less than the demo's: it only shows how rows begin
NEW_ROWS_SHARE = 0.1  # of an extended model's budget, in which only its new rows learn


@dataclass(frozen=True)
class Budget:
    """What one arm trains on.

    Attributes:
        bytes: of text, about: the tokens times the mixture's bytes per token.
        flops: six times parameters times tokens (arXiv 2001.08361), as if all of them learned all the time.
    """

    tokens: int
    bytes: float
    flops: float


@dataclass(frozen=True)
class Result:
    """One run: what it was, what it cost, and bits per byte of both held-out sets before and after."""

    arm: str
    seed: int
    budget: Budget
    domain_before: float
    domain_after: float
    general_before: float
    general_after: float


def train_base(corpus: Corpus, tokenizer: Path, folder: Path, *changes: str) -> Path:
    """The demo's base model, with a tokenizer of prose."""
    overrides = [
        *changes,
        f"tokenizer.path={tokenizer}",
        f"data.sources.0.path={corpus.files['general', 'train']}",
    ]
    return train(
        load_recipe(
            RECIPES / "demo" / "pretrain.yaml",
            [f"output_dir={folder}", *overrides, *held_out(corpus)],
        )
    )


def extend_base(corpus: Corpus, base: Path, add: int, output: Path, rows: str = "mean") -> Path:
    """The base model with tokens for code."""
    if not output.exists():
        words = [
            "--text",
            f"code={corpus.files['domain', 'train']}",
            "--add",
            str(add),
            "--rows",
            rows,
        ]
        try:
            cpt(["tokenizer", "extend", str(base), *words, "--output", str(output)])
        except SystemExit as ended:
            if ended.code:
                raise
    return output


def budgets(corpus: Corpus, base: Path, extended: Path, tokens: int) -> dict[str, Budget]:
    """What each arm may spend: the base model `tokens`, the extended one as many bytes, or as many FLOPs."""
    (plain_bytes, plain_flops), (long_bytes, long_flops) = (
        costs(corpus, model) for model in (base, extended)
    )
    spent = {OWN: tokens, "extended, equal bytes": tokens * plain_bytes / long_bytes}
    spent["extended, equal compute"] = tokens * plain_flops / long_flops
    spent["extended, equal bytes, all parameters at once"] = spent["extended, equal bytes"]
    found = {}
    for arm, asked in spent.items():
        steps = round(asked / STEP_TOKENS) * STEP_TOKENS
        per_byte, per_token = (plain_bytes, plain_flops) if arm == OWN else (long_bytes, long_flops)
        found[arm] = Budget(steps, steps * per_byte, steps * per_token)
    return found


def costs(corpus: Corpus, model: Path) -> tuple[float, float]:
    """Bytes and FLOPs of one token of the training mixture."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    domain, general = (
        bytes_per_token(tokenizer, texts_of(corpus, kind, "train")) for kind in KINDS
    )
    return DOMAIN_SHARE * domain + (1 - DOMAIN_SHARE) * general, 6.0 * count_parameters(
        AutoConfig.from_pretrained(model)
    ).total


def run_arm(
    arm: str, seed: int, corpus: Corpus, base: Path, extended: Path, budget: Budget, folder: Path
) -> Result:
    """Train one arm with one seed; the extended model in two phases, unless all of it learns at once."""
    name = f"{arm.replace(', ', '-').replace(' ', '_')}-seed{seed}"
    start = base if arm == OWN else extended
    first = None
    tokens = budget.tokens
    if arm.startswith("extended") and not arm.endswith("at once"):
        short = round(NEW_ROWS_SHARE * tokens / STEP_TOKENS) * STEP_TOKENS
        start = continue_model(
            f"{name}-rows", seed + 100, corpus, start, short, folder, "model.train_only=new_rows"
        )
        first, tokens = start.parent, tokens - short
    last = continue_model(name, seed, corpus, start, tokens, folder).parent
    (domain_before, general_before), _ = read_bits(first or last)
    _, (domain_after, general_after) = read_bits(last)
    return Result(arm, seed, budget, domain_before, domain_after, general_before, general_after)


def continue_model(
    name: str, seed: int, corpus: Corpus, model: Path, tokens: int, folder: Path, *overrides: str
) -> Path:
    """The demo's recipe with another model and budget."""
    paths = [f"data.sources.{i}.path={corpus.files[kind, 'train']}" for i, kind in enumerate(KINDS)]
    values = [
        f"name={name}",
        f"seed={seed}",
        f"output_dir={folder}",
        f"model.path={model}",
        f"budget.tokens={tokens}",
        "evaluation.prompts=[]",
    ]
    warmup = f"schedule.warmup_tokens={max(STEP_TOKENS, tokens // 20)}"
    return train(
        load_recipe(RECIPES / "demo.yaml", [*values, warmup, *paths, *held_out(corpus), *overrides])
    )


def measure_starts(
    corpus: Corpus, tokenizer: Path, add: int, folder: Path
) -> list[dict[str, float | str]]:
    """Bits per byte before any training, by how the new rows were made: of a base model whose head is its own."""
    changes = (
        "name=untied",
        "model.config.tie_word_embeddings=false",
        "model.parameters=null",
        f"budget.tokens={UNTIED_TOKENS}",
    )
    base = train_base(corpus, tokenizer, folder, *changes)
    rows: list[dict[str, float | str]] = []
    for start in (OWN, "mean", "token_distillation"):
        model = (
            base
            if start == OWN
            else extend_base(corpus, base, add, folder / f"untied-{start}", start)
        )
        run = continue_model(
            f"start-{start.replace(' ', '_')}", 1, corpus, model, STEP_TOKENS, folder
        ).parent
        (domain, general), _ = read_bits(run)
        rows.append({"start": start, "domain": domain, "general": general})
    return rows


def held_out(corpus: Corpus) -> list[str]:
    """Overrides for the two sets that both recipes are evaluated on."""
    return [
        f"evaluation.perplexity.{i}.path={corpus.files[kind, 'held_out']}"
        for i, kind in enumerate(KINDS)
    ]


def read_bits(run: Path) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bits per byte of domain and general text, before the first and after the last step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval_domain_bits_per_byte" in line]
    first, last = (
        (line["eval_domain_bits_per_byte"], line["eval_general_bits_per_byte"])
        for line in (found[0], found[-1])
    )
    return first, last
