"""Optimizer and schedule: names and defaults of Hugging Face's Trainer, on which both tools stand, as they are
here."""

from typing import Any

from cpt.importing.dialect import Dialect
from cpt.importing.ledger import Ledger
from cpt.importing.lengths import Lengths, tokens_for

AS_THEY_ARE = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    "muon": "muon",
    "sgd": "sgd",
    "adafactor": "torch.optim:Adafactor",
    "rmsprop": "torch.optim:RMSprop",
    "adagrad": "torch.optim:Adagrad",
}
"""Optimizers that there are here."""
NEAREST = {
    **dict.fromkeys(
        ("adamw_apex_fused", "adamw_anyprecision", "optimi_adamw", "stable_adamw", "adamw_torch_xla"), "adamw"
    ),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), "adamw"),
    **dict.fromkeys(
        ("ao_adamw_8bit", "adamw_torch_8bit", "ao_adamw_4bit", "adamw_torch_4bit", "ao_adamw_fp8"), "adamw_8bit"
    ),
}
"""Other implementations of what there is here."""
TAKES_BETAS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "muon")
BETAS = (0.9, 0.999)
FLOORS = ("min_lr_rate", "min_lr_ratio")
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def write_optimizer(ledger: Ledger, dialect: Dialect) -> None:
    """Name, rate, decay and betas."""
    asked = str(ledger.value(dialect.optimizer, "adamw_torch")).removeprefix("OptimizerNames.").lower()
    name = AS_THEY_ARE.get(asked) or NEAREST.get(asked) or "adamw"
    if ledger.is_on("use_muon"):
        name = "muon"
        ledger.enter("use_muon", "carried", "optimizer.name: muon")
    ledger.put(
        "optimizer.name",
        name,
        "" if asked == name or ledger.value(dialect.optimizer) is None else f"{dialect.optimizer}: {asked}",
    )
    ledger.skip_empty([dialect.optimizer])
    if asked in AS_THEY_ARE:
        ledger.enter(dialect.optimizer, "carried", f"optimizer.name: {name}")
    elif asked in NEAREST:
        ledger.otherwise(
            dialect.optimizer, f"optimizer.name: {name}, which is the same method in another implementation"
        )
    else:
        told = (
            f"there is no {asked} here, and adamw stands in its place. Any optimizer class of a library you have will"
            " do: "
        )
        ledger.drop(dialect.optimizer, told + "`optimizer: {name: package.module:Class}`")
    write_rates(ledger, dialect, name)


def write_rates(ledger: Ledger, dialect: Dialect, name: str) -> None:
    """The numbers beside the optimizer's name."""
    rate = ledger.number("learning_rate")
    if rate is None:
        told = (
            "FILL IN: axolotl has none by default" if dialect.tool == "axolotl" else f"the default of {ledger.called}"
        )
        ledger.put("optimizer.learning_rate", dialect.learning_rate, told)
        ledger.skip_empty(["learning_rate"])
    else:
        ledger.carry("learning_rate", "optimizer.learning_rate", rate)
    decay = ledger.number("weight_decay")
    ledger.put(
        "optimizer.weight_decay",
        decay or 0.0,
        "" if decay is not None else f"the default of {ledger.called}; here it is 0.1",
    )
    ledger.skip_empty(["weight_decay"])
    ledger.enter("weight_decay", "carried", "optimizer.weight_decay")
    given = [ledger.number(key) for key in ("adam_beta1", "adam_beta2")]
    keys = ["adam_beta1", "adam_beta2", "adam_epsilon"]
    ledger.skip_empty(keys)
    if name not in TAKES_BETAS:
        for key in keys:
            ledger.drop(key, f"{name} takes no such option")
        return
    betas = [default if value is None else value for value, default in zip(given, BETAS, strict=True)]
    comment = (
        "adam_beta1, adam_beta2"
        if given != [None, None]
        else f"the default of {ledger.called}; here it is [0.9, 0.95]"
    )
    ledger.put("optimizer.betas", betas, comment)
    ledger.enter("adam_beta1", "carried", "optimizer.betas, the first of two")
    ledger.enter("adam_beta2", "carried", "optimizer.betas, the second of two")
    if (eps := ledger.number("adam_epsilon")) is not None:
        ledger.carry("adam_epsilon", "optimizer.eps", eps)


def write_schedule(ledger: Ledger, dialect: Dialect, lengths: Lengths) -> None:
    """Name, warm-up and floor, in tokens."""
    options = ledger.section("lr_scheduler_kwargs")
    asked = str(ledger.value(dialect.scheduler, dialect.schedule)).removeprefix("SchedulerType.").lower()
    steps = (
        ledger.as_number("lr_scheduler_kwargs", options.pop("num_decay_steps", None) or 0)
        if asked == "warmup_stable_decay"
        else 0
    )
    decay = tokens_for(steps, lengths) if steps else None
    name = SCHEDULES.get(asked, "cosine")
    if asked not in SCHEDULES or name == "wsd" and not decay:
        name = "cosine"
        ledger.drop(
            dialect.scheduler,
            f"there is no `{asked}` here, and cosine stands in its place; recipes/README.md names those there are",
        )
    ledger.put(
        "schedule.name", name, f"the default of {ledger.called}" if ledger.value(dialect.scheduler) is None else ""
    )
    ledger.skip_empty([dialect.scheduler])
    if name == "wsd":
        ledger.put("schedule.decay_tokens", decay, "num_decay_steps")
        ledger.otherwise(dialect.scheduler, "schedule: wsd, whose decay is 1 - sqrt")
    ledger.enter(dialect.scheduler, "carried", f"schedule.name: {name}")
    floor = floor_of(ledger, options)
    if name != "constant":
        ledger.put(
            "schedule.floor",
            floor or 0.0,
            "" if floor else f"{ledger.called} ends at nothing; here it would be a tenth",
        )
    told = "carried" if not options else "otherwise"
    left = f"; not: {', '.join(map(str, options))}" if options else ""
    ledger.skip_empty(["lr_scheduler_kwargs"])
    ledger.enter(
        "lr_scheduler_kwargs", "carried" if told == "carried" else "otherwise", f"in the options of `schedule`{left}"
    )
    write_warmup(ledger, dialect, lengths, has_warmup=asked != "constant")


def floor_of(ledger: Ledger, options: dict[str, Any]) -> float | None:
    """The last learning rate as a share of the peak."""
    given = {
        key: ledger.as_number("lr_scheduler_kwargs", options.pop(key))
        for key in FLOORS
        if options.get(key) is not None
    }
    found = next(iter(given.values()), None)
    peak = ledger.number("learning_rate")
    if options.get("min_lr") is not None and peak:
        found = ledger.as_number("lr_scheduler_kwargs", options.pop("min_lr")) / peak
    ratio = ledger.number("cosine_min_lr_ratio")
    if ratio is not None:
        ledger.enter("cosine_min_lr_ratio", "carried", "schedule.floor")
    return found if ratio is None else ratio


def write_warmup(ledger: Ledger, dialect: Dialect, lengths: Lengths, *, has_warmup: bool) -> None:
    """`schedule.warmup_tokens` from steps, `schedule.warmup_share` from a share."""
    keys = ("warmup_steps", "warmup_ratio")
    ledger.skip_empty(keys)
    amounts = {key: ledger.number(key) or 0.0 for key in keys}
    counted = [key for key, amount in amounts.items() if amount > 0 and has_warmup][:1]
    for key, amount in amounts.items():
        if key not in counted:
            ledger.enter(key, "carried", "no effect there, beside another" if amount else "no warm-up there")
    if counted:
        write_counted(ledger, counted[0], amounts[counted[0]], lengths)
    elif has_warmup and dialect.warmup_share and all(ledger.value(key) is None for key in keys):
        told = f"the default of {ledger.called}: {dialect.warmup_share:.0%} of the run, at most 100 steps"
        tokens = tokens_for(dialect.warmup_share, lengths)
        if tokens is None:
            ledger.put("schedule.warmup_share", dialect.warmup_share, told)
        else:
            ledger.put("schedule.warmup_tokens", min(tokens, 100 * lengths.step_tokens), told)


def write_counted(ledger: Ledger, key: str, amount: float, lengths: Lengths) -> None:
    """The warm-up that the config asks for: a share of the run, or steps."""
    if amount < 1:
        ledger.carry(key, "schedule.warmup_share", amount)
        return
    tokens = tokens_for(amount, lengths) or 0
    if lengths.run_tokens is not None:
        tokens = min(tokens, lengths.run_tokens)
    ledger.put("schedule.warmup_tokens", tokens, f"{key}: {amount:g}")
    ledger.otherwise(key, f"schedule.warmup_tokens: {tokens:,}")
