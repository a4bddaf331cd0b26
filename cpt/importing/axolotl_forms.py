"""What each `type` of a dataset of axolotl means: the columns of its rows, as `chat` of a source names them."""

import re
from collections.abc import Mapping
from typing import Any

FIELD = re.compile(r"\{(\w+)\}")
TEXT = ("completion", "pretrain")
CHAT = ("chat_template", "sharegpt", "pygmalion", "messages")
SHAREGPT = {"sharegpt": "conversations", "pygmalion": "conversations"}
FRAME_TOLD = "its headings, without axolotl's introduction"


STYLES = {
    "instruct": ("### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:\n"),
    "chat": ("USER: ", "\n", "\nASSISTANT:"),
}
"""What stands before a question, before its input and before the answer, by what follows the colon: `alpaca:chat`."""
OF_A_TEMPLATE = ("chatml", "phi")
"""Styles with a chat model's own tokens, which its template writes."""
QUESTIONS = {
    "alpaca": ("{instruction}", "{input}", "output"),
    "gpteacher": ("{instruction}", "{input}", "response"),
    "jeopardy": ("{question}", "{category}", "what is {answer}"),
    "oasst": ("{INSTRUCTION}", "", "RESPONSE"),
    "summarizetldr": ("{article}", "", "summary"),
}
"""Question, its input, and the column of the answer, of types that take a style."""


def asked(style: str, question: str, extra: str = "") -> str:
    """A question in one of the styles, for models without a chat template."""
    before, between, after = STYLES[style]
    return before + question + (between + extra if extra else "") + after


SYSTEM_PROMPT = "### System:\n{system_prompt}\n"
PAIRS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("alpaca_instruct", "alpaca_instruct.load_no_prompt"),
        (asked("instruct", "{instruction}", "{input}"), "output"),
    ),
    **dict.fromkeys(
        ("alpaca_chat", "alpaca_chat.load_concise", "alpaca_chat.load_no_prompt"),
        (asked("chat", "{instruction}", "{input}"), "output"),
    ),
    "alpaca_chat.load_qa": (asked("chat", "{question}"), "answer"),
    "alpaca_chat.load_camel_ai": (asked("chat", "{message_1}"), "message_2"),
    **dict.fromkeys(
        ("alpaca_w_system", "alpaca_w_system.load_chat"),
        ("SYSTEM: {system}\n" + asked("chat", "{instruction}", "{input}"), "output"),
    ),
    "alpaca_w_system.load_instruct": ("{system}\n\n" + asked("instruct", "{instruction}", "{input}"), "output"),
    "alpaca_w_system.load_open_orca": (SYSTEM_PROMPT + "### Human:\n{question}\n### Assistant:\n", "response"),
    "orcamini": (SYSTEM_PROMPT + "\n### User:\n{question}\n\n### Response:\n", "response"),
    "context_qa": (asked("chat", "{article}\n===\n{question}"), "answer"),
    "context_qa.load_v2": ("Context: {context}\nQuestion: {question}\n", "Answer: {answer}"),
    "creative_acr.load_answer": (asked("chat", "{instruction}"), "revision"),
    "metharme": ("{prompt}", "generation"),
}
"""Prompt, and the column of the answer."""
PREFERENCES: dict[str, dict[str, str]] = {
    "argilla": {
        "user": "instruction",
        "chosen": "chosen_response",
        "rejected": "rejected_response",
        "system": "system",
    },
    "argilla_chat": {"chosen": "chosen", "rejected": "rejected"},
    "icr": {"user": "input", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    "intel": {"user": "question", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    "prompt_pairs": {"user": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    "ultra": {"user": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    "default": {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"},
    "": {"user": "prompt", "chosen": "chosen", "rejected": "rejected", "system": "system"},
}
"""By the part of a type that comes after chatml, llama3 or chat_template."""
JUDGED: dict[str, dict[str, str]] = {
    "argilla": {"user": "instruction", "assistant": "completion", "label": "label", "system": "system"},
    "argilla_chat": {"messages": "completion", "label": "label"},
    "intel": {"user": "question", "assistant": "completion", "label": "label", "system": "system"},
    "prompt_pairs": {"user": "prompt", "assistant": "completion", "label": "label", "system": "system"},
    "ultra": {"user": "prompt", "assistant": "completion", "label": "label", "system": "system"},
    "": {"user": "prompt", "assistant": "completion", "label": "label", "system": "system"},
}


def base_of(kind: str) -> str:
    """A type without the style behind a colon and a plain `.load`."""
    return kind.partition(":")[0].removesuffix(".load")


def chat_of_pairs(kind: str) -> dict[str, str] | None:
    """`chat` for a type of questions and answers; None for another."""
    if kind == "alpaca_w_system.load_open_orca_chatml":
        return {"user": "question", "assistant": "response", "system": "system_prompt"}
    if base_of(kind) in QUESTIONS:
        question, extra, answer = QUESTIONS[base_of(kind)]
        style = kind.partition(":")[2]
        if style in OF_A_TEMPLATE:
            return {"user": f"{question}\n{extra}".rstrip(), "assistant": answer}
        return {"prompt": asked(style if style in STYLES else "instruct", question, extra), "completion": answer}
    found = PAIRS.get(base_of(kind))
    return None if found is None else {"prompt": found[0], "completion": found[1]}


def chat_of_rl(kind: str, stage: str) -> dict[str, str] | None:
    """`chat` for a type of preferences or judgements; None for another."""
    style = (
        kind.partition(".")[2] if "." in kind else "" if kind in ("chatml", "llama3", "chat_template", "") else kind
    )
    if kind.startswith("passthrough"):
        return {side: side for side in ("prompt", "chosen", "rejected")}
    if kind == "bradley_terry.chat_template":
        style = "icr"
    table = JUDGED if stage == "kto" else PREFERENCES
    found = table.get(style)
    if found is not None and style == "argilla" and kind.startswith("chat_template") and stage != "kto":
        return {"chosen": "chosen", "rejected": "rejected", "system": "system"}  # ORPO's, of whole conversations
    return found


def chat_of_own(fields: Mapping[str, Any], stage: str) -> dict[str, str]:
    """`chat` for a type of the user's own: columns by name, put together by formats."""
    column = {name: str(fields.get(f"field_{name}") or name) for name in NAMES_OF_FIELDS}
    sides = {"kto": ("prompt", "completion")}.get(
        stage, ("prompt", "chosen", "rejected") if stage in PREFERRED else ()
    )
    if sides:
        chat = {side: formatted(str(fields.get(f"{side}_format") or f"{{{side}}}"), column) for side in sides}
        return chat | ({"label": column["label"]} if stage == "kto" else {})
    system = str(fields.get("system_format") or "{system}").replace("{system}", str(fields.get("system_prompt") or ""))
    before = "" if not fields.get("system_prompt") else system.replace("{", "{{").replace("}", "}}")
    return {
        "prompt": before + formatted(str(fields.get("format") or "{instruction}\n{input}\n"), column),
        "completion": column["output"],
    }


PREFERRED = ("dpo", "orpo", "cpo", "reward")
NAMES_OF_FIELDS = ("system", "instruction", "input", "output", "prompt", "chosen", "rejected", "completion", "label")


def formatted(text: str, column: Mapping[str, str]) -> str:
    """A format with the columns' names in it; a column alone where it is nothing else."""
    text = FIELD.sub(lambda found: f"{{{column.get(found[1], found[1])}}}", text)
    alone = text.removeprefix("{").removesuffix("}")
    return alone if text == f"{{{alone}}}" and "{" not in alone else text
