"""What the model is asked to do with a text: our own prompts by name, or a file of the user's."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpt.errors import RecipeError
from cpt.extend import did_you_mean

TEXT = "{text}"
STEP_MARK = "---"

# Four styles as in WRAP (arxiv.org/abs/2401.16380), which found that web text mixed with such rewritten text is
# learned faster. The words are ours. Each ends with where the answer begins, so that base models, which know no chat,
# go on with it.
CLEAR_PROSE = """\
Rewrite the text below in clear, well organised prose, as a good encyclopedia would put it. Keep every fact, number, name and formula. Add \
nothing that is not there. Leave out navigation, advertisements and repetitions.

Text:
{text}

The text in clear prose:
"""  # noqa: E501
EASY = """\
Rewrite the text below so that a child of ten understands it: short sentences, everyday words, hard ones explained. Keep what it says, add \
nothing that is not there.

Text:
{text}

The text in easy words:
"""  # noqa: E501
SCHOLARLY = """\
Rewrite the text below as a scholar writes for others of the field: terse, exact, with the proper technical terms. Keep every fact and \
number. Add nothing that is not there.

Text:
{text}

The text in scholarly prose:
"""  # noqa: E501
QUESTION_ANSWERS = """\
Turn the text below into questions and answers. Ask about everything of importance in it, one thing at a time, and answer each question in \
whole sentences from the text alone. Write `Question:` and `Answer:` before them.

Text:
{text}

Questions and answers:
"""  # noqa: E501
THERE = (
    "Translate the text below from {language} into {pivot}. Give the translation and nothing"
    " else.\n\nText:\n{text}\n\nIn {pivot}:\n"
)
AND_BACK = (
    "Translate the text below from {pivot} into {language}. Give the translation and nothing"
    " else.\n\nText:\n{text}\n\nIn {language}:\n"
)

PROMPTS: Mapping[str, tuple[str, ...]] = {
    "clear_prose": (CLEAR_PROSE,),
    "easy": (EASY,),
    "scholarly": (SCHOLARLY,),
    "question_answers": (QUESTION_ANSWERS,),
    "back_translation": (THERE, AND_BACK),
}


@dataclass(frozen=True)
class Prompt:
    """One question to the model, or several: each is asked about the answer to the one before."""

    name: str
    steps: tuple[str, ...]
    """Templates; `{text}` stands for the text."""

    @property
    def sha256(self) -> str:
        """Of all steps."""
        return hashlib.sha256("\0".join(self.steps).encode()).hexdigest()


def find_prompt(name: str, pivot: str | None = None, language: str | None = None) -> Prompt:
    """A prompt by its name, or from a file: a template with `{text}`, or several with a line `---` between them.

    Args:
        pivot, language: of a back-translation; by default German and English.

    Raises:
        RecipeError: there is no such prompt, it has no `{text}`, or a language was given that it does not ask for.
    """
    steps = PROMPTS[name] if name in PROMPTS else read_prompt(name)
    for option, value in (("pivot", pivot), ("language", language)):
        if value is not None and not any(f"{{{option}}}" in step for step in steps):
            raise RecipeError(f"--{option} has no effect: the prompt `{name}` asks for no translation. Leave it out.")
    filled = (
        step.replace("{pivot}", pivot or "German").replace("{language}", language or "English") for step in steps
    )
    return Prompt(name if name in PROMPTS else Path(name).name, tuple(filled))


def read_prompt(name: str) -> tuple[str, ...]:
    """The steps that stand in a file."""
    path = Path(name).expanduser()
    if not path.is_file():
        hint = did_you_mean(name, list(PROMPTS))
        raise RecipeError(
            f"--prompt {name}: no such prompt or file.{hint} There is: {', '.join(PROMPTS)}; or a file with {TEXT}"
            " in it."
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as problem:
        raise RecipeError(
            f"--prompt {name}: the file is not UTF-8 (byte {problem.start:,}). Save it as UTF-8."
        ) from problem
    steps = [""]
    for line in lines:
        if line.strip() == STEP_MARK:
            steps.append("")
        else:
            steps[-1] += line
    if missing := [number for number, step in enumerate(steps, 1) if TEXT not in step]:
        raise RecipeError(
            f"--prompt {name}: {TEXT} is missing in step {missing[0]} of {len(steps)}. Write it where the text"
            " belongs."
        )
    return tuple(steps)
