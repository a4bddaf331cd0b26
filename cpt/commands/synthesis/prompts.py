"""What the model is asked to do with a text: our own prompts by name, or a file of the user's."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpt.errors import RecipeError
from cpt.plugins import did_you_mean

TEXT = "{text}"

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
PROMPTS: Mapping[str, str] = {
    "clear_prose": CLEAR_PROSE,
    "easy": EASY,
    "scholarly": SCHOLARLY,
    "question_answers": QUESTION_ANSWERS,
}


@dataclass(frozen=True)
class Prompt:
    name: str
    template: str
    """`{text}` stands for the text."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.template.encode()).hexdigest()


def find_prompt(name: str) -> Prompt:
    """A prompt by its name, or from a file with `{text}` in it.

    Raises:
        RecipeError: there is no such prompt, or it has no `{text}`.
    """
    if name in PROMPTS:
        return Prompt(name, PROMPTS[name])
    path = Path(name).expanduser()
    if not path.is_file():
        hint = did_you_mean(name, list(PROMPTS))
        raise RecipeError(
            f"--prompt {name}: no such prompt or file.{hint} There is: {', '.join(PROMPTS)}; or a file with {TEXT}"
            " in it."
        )
    try:
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise RecipeError(
            f"--prompt {name}: the file is not UTF-8 (byte {problem.start:,}). Save it as UTF-8."
        ) from problem
    if TEXT not in template:
        raise RecipeError(f"--prompt {name}: {TEXT} is missing. Write it where the text belongs.")
    return Prompt(path.name, template)
