"""What was found and what it costs, in sentences: for the head of the recipe and for the terminal."""

from cpt.init.base_model import BaseModel
from cpt.init.choices import Choices, Cost, size_in_words
from cpt.init.documents import DocumentFacts, TokenEstimate
from cpt.planner.speed import MFU_RANGE
from cpt.planner.target import Target


def told_documents(facts: DocumentFacts) -> str:
    """Number, formats, languages, bad rows, repeats, licence."""
    formats = ", ".join(f"{count:,} {name}" for name, count in facts.formats.most_common())
    about = "" if facts.is_whole else "about "
    told = [
        f"{about}{facts.documents:,} in {formats} file{'s' if facts.num_files > 1 else ''},"
        f" {facts.text_bytes / 1e6:,.3g} MB of text"
    ]
    if facts.languages is None:
        told.append("languages not looked at (pip install 'cpt[language]')")
    else:
        of = facts.languages.total()
        common = [f"{code} {100 * count / of:.0f} %" for code, count in facts.languages.most_common(3)]
        told.append(f"languages by py3langid, which means nothing for code: {', '.join(common)}")
    told.append(f"{facts.bad_rows:,} bad rows" + (f" (the first: {facts.first_bad})" if facts.bad_rows else ""))
    told.append(
        f"{100 * facts.repeats / facts.documents_read:.1f} % repeat another word for word; nearly equal ones were not"
        " looked for"
    )
    if facts.licence_files:
        files = ", ".join(
            f"{name} ({licence or 'not recognised'})" for name, licence in list(facts.licence_files.items())[:5]
        )
        told.append(f"licence files: {files}")
    else:
        told.append("no licence file: make sure that you may train on them")
    return "; ".join(told) + "."


def told_tokens(estimate: TokenEstimate) -> str:
    """The count or the estimate."""
    if estimate.low == estimate.high:
        return f"{estimate.tokens:,}, counted with the base's tokenizer."
    interval = f"{estimate.low:,} to {estimate.high:,} with 95 % confidence"
    return f"about {estimate.tokens:,} under the base's tokenizer ({interval}, from {estimate.tokenised:,} documents)."


def told_model(base: BaseModel) -> str:
    """Size, vocabulary, licence, what was published."""
    licence = (
        f"licence {base.licence} ({base.licence_source})"
        if base.licence
        else "licence not found: read its card before you publish"
    )
    known = base.known
    figures = {"peak learning rate": known.peak_learning_rate, "batch in tokens": known.batch_tokens} if known else {}
    stated = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:g}"
        for name, value in figures.items()
        if value
    ]
    kind = base.model.config.model_type
    told = f"{size_in_words(base.parameters)} ({kind}), {base.vocabulary:,} tokens in its vocabulary, {licence}"
    return f"{told}; trained with {', '.join(stated)} ({known.source})." if stated and known else f"{told}."


def told_cost(cost: Cost, target: Target, price: float | None) -> str:
    """Hours and money, with what they rest on."""
    low, high = in_time(cost.low), in_time(cost.high)
    span = f"about {in_time(cost.hours)}" + (f", {low} to {high}" if low != high else "")
    basis = f"at {cost.mfu:.0%} of the peak, {MFU_RANGE[1]:.0%} to {MFU_RANGE[0]:.0%} (assumed, not measured)"
    gpus = max(1, target.gpus)
    money = (
        f"; {cost.hours * gpus * price:,.2f} at {price:g} an hour for each GPU"
        if price is not None and target.gpus
        else ""
    )
    rest = ". Evaluation and saving come on top; the first minutes of the run tell how long it takes"
    return f"{span} {basis}{money}{rest}.".replace("%", " %")


def in_time(hours: float) -> str:
    """`3.2 h`, `12 min`, `40 s`."""
    return (
        f"{hours:.1f} h"
        if hours >= 1
        else f"{hours * 60:.0f} min"
        if hours >= 1 / 60
        else f"{max(1, hours * 3600):.0f} s"
    )


def what_would_change(choices: Choices) -> str:
    """The nearest other choices."""
    told = [f"half of `budget.tokens` is half of the time ({choices.epochs / 2:.2g} times through the documents)"]
    if choices.fit.method.name != "full":
        why_not = choices.nearest_refused
        told.append(
            f"all parameters learn more, but {why_not}"
            if why_not
            else "`--full` trains all parameters, which learn and forget more"
        )
    else:
        if choices.refused:
            told.append(f"a larger GPU, or more of them, makes the steps faster ({choices.refused[0]})")
        told.append("`--lora` learns less and forgets less, with a fraction of the memory (arXiv 2405.09673)")
    told.append("general loss that rises too far asks for more replay or a smaller learning rate")
    return "; ".join(told) + "."
