"""Special tokens and chat templates, which are the tokenizer's here."""

from cpt.importing.ledger import EMPTY, Ledger


def write_special_tokens(ledger: Ledger, key: str) -> None:
    """A pad token is not needed; another end of text is set in the tokenizer's folder."""
    given = ledger.section(key)
    ledger.skip_empty([key])
    if not given:
        ledger.enter(key, "carried", EMPTY)
        return
    for name, token in given.items():
        place = f"{key}.{name}"
        if token is None:
            ledger.enter(place, "carried", EMPTY)
        elif name == "pad_token":
            ledger.otherwise(place, "nothing: what is padded is masked, whatever stands there")
        elif name == "additional_special_tokens":
            ledger.drop(
                place, "tokens are added to a tokenizer beforehand: `cpt tokenizer extend`; then `tokenizer.path`"
            )
        else:
            ledger.drop(
                place,
                f"if `{name}` is another there, write it into its tokenizer_config.json, and set `tokenizer.path`",
            )


def write_template(ledger: Ledger, key: str, stage: str, *, own: tuple[str, ...]) -> None:
    """Chats are written by the template of the tokenizer.

    Args:
        own: names that mean it.
    """
    name = ledger.value(key)
    ledger.skip_empty([key])
    if name in own:
        ledger.enter(key, "carried", "the tokenizer's own template")
    elif stage in ("cpt", "pretrain"):
        ledger.otherwise(key, "texts have no chat template; conversations are written by the tokenizer's")
    else:
        told = f"the tokenizer's own template, where {ledger.called} writes `{name}` whatever the tokenizer has"
        ledger.otherwise(key, f"{told}. If it has another or none: save one with it, and set `tokenizer.path`")
