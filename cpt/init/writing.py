"""The recipe as text: each choice with its reason and its source in a comment above it."""

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from cpt.init.base_model import BaseModel
from cpt.init.choices import Choices, size_in_words
from cpt.init.documents import DocumentFacts, TokenEstimate
from cpt.init.memory import ADAPTERS_ONLY
from cpt.init.sentences import told_cost, told_documents, told_model, told_tokens, what_would_change
from cpt.planner.target import Target
from cpt.runs.folder import EXPORT
from cpt.shipped import training_program

WIDTH = 118
PUBLIC_GENERAL = "HuggingFaceFW/fineweb-edu"
WORDS_OF_YAML = {"null", "true", "false", "yes", "no", "on", "off"}
FIRST_WORDS = re.compile(r"(\S+\s+){7}\S+")  # with the lines and the indentation that code has
TOKENS_OF_A_PAGE = 800  # of fineweb-edu: about 1,000; fewer, so that there are enough


def recipe_text(
    facts: DocumentFacts,
    estimate: TokenEstimate,
    base: BaseModel,
    target: Target,
    choices: Choices,
    *,
    output: Path,
    general: str | None,
    price_per_gpu_hour: float | None,
) -> str:
    """The whole file.

    Args:
        general: what is replayed: a local path, a dataset on the Hub, or None for the public set that we name.
    """
    parts = [
        header(facts, estimate, base, target, choices, output, price_per_gpu_hour),
        model_section(base, choices),
        data_section(facts, base, choices, general),
        budget_section(choices),
        optimizer_section(choices),
        saving_and_judging(facts, choices),
        training_section(base, target, choices),
    ]
    return "\n\n".join(parts) + "\n"


def header(
    facts: DocumentFacts,
    estimate: TokenEstimate,
    base: BaseModel,
    target: Target,
    choices: Choices,
    output: Path,
    price: float | None,
) -> str:
    """What was found, what it costs, how to start it."""
    where = (
        f"{target.gpus} x {target.name}, {target.memory_gib:g} GiB each"
        if target.gpus
        else f"the CPU, {target.memory_gib:.0f} GiB"
    )
    start = (
        f"cpt train {output}"
        if target.gpus < 2
        else f"accelerate launch --num_processes {target.gpus} {training_program()} {output}"
    )
    model = (
        Path(base.path).parent if Path(base.path).name == EXPORT else Path(base.path)
    )  # a run's is called after the run
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{model.name}-{Path(facts.source.path).stem}").strip("-._") or "cpt"
    lines = [
        comment(
            f"Continued pre-training of {base.path} on {facts.source.path}, put together by `cpt init`. Change what"
            " you know better."
        ),
        "#",
        f"#   cpt check {output}    finds every mistake before GPU time is spent",
        f"#   {start}    runs it",
        "#",
        comment(f"Documents: {told_documents(facts)}"),
        comment(f"Tokens: {told_tokens(estimate)}"),
        comment(f"Base: {told_model(base)}"),
        comment(f"Machine: {where}, {target.peak_flops / 1e12:.3g} TFLOP/s ({target.peak_source})."),
        comment(f"Cost: {told_cost(choices.cost, target, price)}"),
        comment(f"What would change it: {what_would_change(choices)}"),
        f"name: {name}",
        "stage: cpt",
        "seed: 42",
    ]
    return "\n".join(lines)


def model_section(base: BaseModel, choices: Choices) -> str:
    """Full or adapters."""
    method = choices.fit.method
    learn = (
        f"{size_in_words(method.trained)} learn, {100 * method.trained / base.parameters:.1f} % of the model's number"
    )
    if method.name == "full":
        lines = [
            comment(
                "All parameters: they fit, and learn more than adapters do, which forget less (arXiv 2405.09673).", 2
            ),
            "  lora: null",
        ]
    else:
        why = (
            f"Adapters, since by estimate {choices.nearest_refused}."
            if choices.nearest_refused
            else "Adapters, as asked."
        )
        lines = [
            comment(
                f"{why} They learn less and forget less (arXiv 2405.09673), so the rank is high and they are on all"
                " layers.",
                2,
            )
        ]
    if method.name == "lora":
        lines += [
            comment(f"`cpt`: rank 128, rank-stabilised, embeddings and head trained whole; {learn}.", 2),
            "  lora: cpt",
        ]
    elif method.name == "adapters":
        text = f"Without embeddings and head, for which there is no room or no way in this model; {learn}."
        lines += [comment(text, 2), f"  lora: {in_braces(ADAPTERS_ONLY)}"]
    return "\n".join(["model:", f"  path: {plain(base.path)}", *lines])


def data_section(facts: DocumentFacts, base: BaseModel, choices: Choices, general: str | None) -> str:
    """Rows, documents, replay."""
    trained = base.known.sequence_length if base.known else None
    limit = f"the config allows {base.longest_row:,}" if base.longest_row else "the config names no limit"
    why = "as in the base's own training" if trained == choices.sequence_length else limit
    source = facts.source
    lines = [
        "data:",
        comment(
            f"Tokens in a row: {why}; longer rows cost more for each token. Whole documents share a row and do not see"
            " each other.",
            2,
        ),
        f"  sequence_length: {choices.sequence_length}",
    ]
    if not base.packs_documents:
        lines += [
            comment("This architecture carries state along the row, so a row is a batch of padded documents.", 2),
            "  packing: token_budget",
        ]
    if facts.repeats:
        share = f"{100 * facts.repeats / facts.documents_read:.1f} %"
        lines += [
            comment(f"{share} of the documents repeat another; also: near (pip install 'cpt[dedup]').", 2),
            "  deduplicate: exact",
        ]
    if facts.bad_rows:
        allowed = max(0.001, round(1.5 * facts.bad_share, 4))
        lines += [comment("`cpt data check` lists them all.", 2), "  on_bad_row: skip", f"  max_bad_share: {allowed}"]
    lines += ["  sources:", "    - name: domain", f"      path: {plain(source.path)}"]
    if source.text_column != "text":
        lines.append(f"      text_column: {plain(source.text_column)}")
    if facts.licence:
        lines.append(f"      licence: {plain(facts.licence)}")
    lines.append(f"      weight: {1 - choices.replay:g}")
    return "\n".join([*lines, *replay_source(choices, general)])


def replay_source(choices: Choices, general: str | None) -> list[str]:
    """Against forgetting."""
    if not choices.replay:
        return [comment("Nothing is replayed, as asked: expect the model to forget. See recipes/presets/replay/.", 4)]
    kind = (
        "a strong shift, for which 25 % kept" if choices.is_strong_shift else "a weak shift, for which 1 to 5 % kept"
    )
    reason = f"Replay against forgetting. Taken for {kind} what was known (arXiv 2403.08763): {choices.shift_reason}."
    lines = [comment(reason, 4), "    - name: general-replay"]
    if general is None:
        pages = round(1.2 * choices.replay * choices.tokens / TOKENS_OF_A_PAGE) + 1000
        best = "Best is the kind of text that the base read; web pages stand for it. Another: --general FOLDER."
        lines += [
            comment(best, 6),
            f"      path: {PUBLIC_GENERAL}",
            "      subset: sample-10BT",
            f"      max_documents: {pages:_}",
        ]
        lines.append("      licence: ODC-By-1.0")
    else:
        lines.append(f"      path: {plain(general)}")
    return [*lines, f"      weight: {choices.replay:g}"]


def budget_section(choices: Choices) -> str:
    """How long, in which steps."""
    times = f"{choices.epochs:.2g} time{'s' if choices.epochs != 1 else ''} through the documents"
    why = f"{times}, with the replay; up to 4 times is nearly as good as new text (arXiv 2305.16264)."
    batch = (
        f"Tokens in a step, whatever the number of GPUs: {choices.steps:,} steps. Larger steps are fewer and learn"
        " less."
    )
    return "\n".join(
        [
            "budget:",
            comment(why, 2),
            f"  tokens: {choices.tokens:_}",
            comment(batch, 2),
            f"  global_batch_tokens: {choices.batch_tokens:_}",
        ]
    )


def optimizer_section(choices: Choices) -> str:
    """Learning rate and schedule."""
    rate = choices.rate
    lines = [
        "optimizer:",
        "  name: adamw",
        comment(f"{rate.reason[0].upper()}{rate.reason[1:]}. Higher learns more and forgets more.", 2),
        f"  learning_rate: {number(rate.value)}",
    ]
    if choices.embedding_rate is not None:
        lines += [comment("Embeddings and head move ten times less: each row is for one token.", 2)]
        lines += [f"  embedding_learning_rate: {number(choices.embedding_rate)}"]
    lines += [
        "  betas: [0.9, 0.95]",
        "  weight_decay: 0.1",
        "",
        comment(
            "The base's schedule had ended: warm up again, then fall to a tenth (arXiv 2403.08763; the length of it"
            " matters little)."
        ),
        f"schedule: {{name: rewarm_cosine, warmup_tokens: {choices.warmup_tokens:_}, floor: 0.1}}",
    ]
    return "\n".join(lines)


def saving_and_judging(facts: DocumentFacts, choices: Choices) -> str:
    """Checkpoints and evaluation."""
    fifth, often = (max(choices.batch_tokens, choices.tokens // times) for times in (5, choices.evaluations))
    held_out = round(choices.held_out_share * facts.documents)
    what = "of domain and general text" if choices.replay else "of the domain"
    when = "before, during and after" if choices.evaluations > 1 else "before and after"
    why = (
        f"About {held_out:,} of your documents, chosen by hash, are kept from training: bits per byte {what}, {when}."
    )
    return "\n".join(
        [
            f"checkpoints: {{every_tokens: {fifth:_}, keep: 2}}",
            "",
            "evaluation:",
            comment(why, 2),
            f"  held_out_share: {choices.held_out_share:g}",
            *(
                [
                    comment(
                        "Tells loss from gain in the verdict; a number, say 0.02, stops the run at 2 % more bits per"
                        " byte.",
                        2,
                    )
                ]
                + ["  retain: {general-replay: null}"]
                if choices.replay
                else []
            ),
            *([f"  every_tokens: {often:_}"] if choices.evaluations > 1 else []),
            comment("What the model writes from here on, before and after.", 2),
            "  prompts:",
            *(f"    - {json.dumps(prompt, ensure_ascii=False)}" for prompt in prompts_of(facts)),
        ]
    )


def prompts_of(facts: DocumentFacts) -> list[str]:
    """The first words of two documents."""
    texts = sorted((text.strip() for text in facts.sample if len(text.split()) > 20), key=len)
    beginnings = [FIRST_WORDS.match(text) for text in texts[len(texts) // 2 :][:2]]
    return [found[0] for found in beginnings if found is not None] or ["The"]


def training_section(base: BaseModel, target: Target, choices: Choices) -> str:
    """What goes to Hugging Face."""
    chosen = choices.fit
    place = "host" if target.on_cpu else "GPU"
    lines = [
        "training:                            # Hugging Face's own keys",
        comment(
            f"About {chosen.memory_gib:.1f} of {target.memory_gib:.3g} GiB on the {place} (planned; `cpt plan` shows"
            " its parts).",
            2,
        ),
        f"  per_device_train_batch_size: {chosen.micro_batch}",
        f"  gradient_checkpointing: {'true' if chosen.checkpointing else 'false'}",
    ]
    if not target.on_cpu:
        lines.append("  bf16: true")
    if chosen.method.profile:
        host = (
            f"; {chosen.method.host_gib:.0f} GiB of host memory, of {target.host_memory_gib:.0f}"
            f" ({target.host_source})"
        )
        is_on_host = chosen.setup.zero is not None and chosen.setup.zero.offload_optimizer
        text = f"Why this profile: deepspeed_configs/README.md{host if is_on_host else ''}."
        lines += [comment(text, 2), f"  deepspeed: deepspeed_configs/{chosen.method.profile}"]
    return "\n".join([*lines, "  max_grad_norm: 1.0", "  logging_steps: 10"])


def comment(text: str, indent: int = 0) -> str:
    """Wrapped lines that begin with a hash."""
    lead = " " * indent + "# "
    return textwrap.fill(
        text, WIDTH, initial_indent=lead, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
    )


def plain(text: str) -> str:
    """A YAML value that is this text: bare where nothing in it means something else."""
    is_simple = re.fullmatch(r"(\.{0,2}/|~/)?[A-Za-z_][A-Za-z0-9_./-]*", text) and text.lower() not in WORDS_OF_YAML
    return text if is_simple else json.dumps(text, ensure_ascii=False)


def in_braces(options: Mapping[str, object]) -> str:
    """`{r: 64, use_rslora: true}`."""
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in options.items()) + "}"


def number(value: float) -> str:
    """`1e-5`, as people write it."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
