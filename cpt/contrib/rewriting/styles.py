"""Which prompts rewrite a document: those of published families, in our words, or one from a file.

Each prompt ends with the beginning of the answer, so that base models without a chat format continue it.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from cpt.errors import RecipeError
from cpt.plugins import did_you_mean

TEXT = "{text}"  # in a prompt: the document
WRAP_TOKENS = 300  # arxiv.org/abs/2401.16380, section 3.1: models omit parts of longer texts
FOCUS = "{focus}"  # in the prompt of further calls: what this one is about
BULLET = re.compile(r"^\s*(?:[-*•–]|\(?\d+[.):])\s+")
MOST_ITEMS = 32
ITEM_CHARACTERS = 200


@dataclass(frozen=True)
class Style:
    """A prompt; or two, if the answer of the first call is a list, a line an item, and further calls write the texts,
    each about one combination of `sizes` items."""

    name: str
    prompt: str  # contains `{text}`, the place of the text
    then: str = ""  # of the further calls; contains `{focus}`, too
    sizes: tuple[int, ...] = (1,)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(
            "\0".join((self.prompt, self.then, str(self.sizes))).encode()
        ).hexdigest()

    def foci(self, listed: str, max_foci: int, seed: int) -> list[str]:
        """Return the topic of each further call: all combinations of items, or a sample of `max_foci`."""
        lines = (BULLET.sub("", line).strip(" \t*") for line in listed.splitlines())
        # A line with a colon at its end introduces the list.
        items = []
        for line in lines:
            if line and not line.endswith(":"):
                items.append(line[:ITEM_CHARACTERS])
        items = list(dict.fromkeys(items))
        list_items: list[tuple[str, ...]] = []
        for size in self.sizes:
            list_items += combinations(items[:MOST_ITEMS], size)
        drawn = (
            list_items
            if len(list_items) <= max_foci
            else random.Random(seed).sample(list_items, max_foci)
        )
        return ["; ".join(combination) for combination in drawn]


def fill(prompt: str, text: str, focus: str = "") -> str:
    """Insert the text, and what the call is about; `{text}` inside of either stays as it is."""
    values = {TEXT: text, FOCUS: focus} if focus else {TEXT: text}
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], prompt)


ONE_CALL = {  # name -> instruction, beginning of the answer
    # Four styles as in WRAP (arxiv.org/abs/2401.16380): web text mixed with such rewritten text was learned faster.
    "clear_prose": (
        "Rewrite the text below in clear, well organised prose, as a good encyclopedia would put it. Keep every fact,"
        " number, name and formula. Add nothing that is not there. Leave out navigation, advertisements and"
        " repetitions.",
        "The text in clear prose:",
    ),
    "easy": (
        "Rewrite the text below so that a child of ten understands it: short sentences, everyday words, hard ones"
        " explained. Keep what it says, add nothing that is not there.",
        "The text in easy words:",
    ),
    "scholarly": (
        "Rewrite the text below as a scholar writes for others of the field: terse, exact, with the proper technical"
        " terms. Keep every fact and number. Add nothing that is not there.",
        "The text in scholarly prose:",
    ),
    "question_answers": (
        "Turn the text below into questions and answers. Ask about everything of importance in it, one thing at a"
        " time, and answer each question in whole sentences from the text alone. Write `Question:` and `Answer:`"
        " before them.",
        "Questions and answers:",
    ),
    # The seven kinds of SPA (arxiv.org/abs/2603.22213): two to learn concepts, two to think critically, three to
    # create something from the text.
    "spa_key_concepts": (
        "List the key concepts of the text below. Define each one, say what the text states about it, and how it"
        " depends on the others.",
        "Key concepts:",
    ),
    "spa_mind_map": (
        "Write a mind map of the text below: its subject, the main branches, and below each branch the facts,"
        " names and numbers that belong to it, as an indented list.",
        "Mind map:",
    ),
    "spa_implications": (
        "Say what follows from the text below: consequences, causes, assumptions and limits that it implies but does"
        " not spell out. Begin each from the fact in the text that it rests on.",
        "What follows from the text:",
    ),
    "spa_critical_questions": (
        "Write questions about the text below that need thought: why, how, what if,"
        " compared with what. Answer each one step by step from the text. Write `Question:` and `Answer:` before"
        " them.",
        "Questions and reasoned answers:",
    ),
    "spa_case_studies": (
        "Write case studies in which the knowledge of the text below is put to use: a concrete situation, the"
        " problem, and how facts from the text solve or explain it. Name those facts.",
        "Case studies:",
    ),
    "spa_discussion": (
        "Write a discussion of the text below among a few people who know its subject well. They explain its points"
        " to each other, ask, doubt, and settle their questions with facts from the text.",
        "The discussion:",
    ),
    "spa_teacher": (
        "Explain the text below as a patient teacher does in class: what it is about and why that matters, then one"
        " point after the other with examples, then a short recapitulation. Keep to the facts of the text.",
        "The lesson:",
    ),
}
TWO_CALLS = {  # name -> both for the first call, both for further calls, items in a combination
    # Active Reading (arxiv.org/abs/2508.09494): the model itself proposes how to study the document.
    "active_reading": (
        "A student wants to remember everything in the text below and to be able to use it. Propose study strategies"
        " that suit this very text, each one different. Write each in one line as an instruction to the student, and"
        " nothing else.",
        "Study strategies:",
        "Apply the study strategy below to the text below and write down the whole result, so that a reader who has"
        f" only the result learns what the text says. Keep to the facts of the text.\n\nStudy strategy: {FOCUS}",
        "The result:",
        (1,),
    ),
    # EntiGraph (arxiv.org/abs/2409.07431): entities first, then texts about the relations of two or three of them.
    "entigraph": (
        "List the entities that the text below is about: people, places, organisations, things, events and concepts."
        " Write each in one line by its full name, and nothing else.",
        "Entities:",
        "Explain what the text below says about each of the entities below, and how they are related to each other in"
        " it. Mention what the text is about, so that a reader who does not have it can follow. Keep to the facts of"
        f" the text.\n\nEntities: {FOCUS}",
        "How they are related:",
        (2, 3),
    ),
}
FAMILIES = {
    "wrap": list(ONE_CALL)[:4],
    "spa": [name for name in ONE_CALL if name.startswith("spa_")],
}
NAMES = [*ONE_CALL, *TWO_CALLS, *FAMILIES]


def prompt_of(order: str, start: str) -> str:
    return f"{order}\n\nText:\n{TEXT}\n\n{start}\n"


def find_styles(names: str) -> list[Style]:
    """Return styles by their names, separated by commas: a style, a family of styles, or a file that contains
    `{text}`; RecipeError if one is not found."""
    requested = [name.strip() for name in names.split(",")]
    styles: dict[Style, None] = {}
    for name in requested:
        styles |= dict.fromkeys(map(find_style, FAMILIES.get(name, [name])))
    return list(styles)


def find_style(name: str) -> Style:
    if name in ONE_CALL:
        return Style(name, prompt_of(*ONE_CALL[name]))
    if name in TWO_CALLS:
        order, start, further_order, further_start, sizes = TWO_CALLS[name]
        return Style(name, prompt_of(order, start), prompt_of(further_order, further_start), sizes)
    path = Path(name).expanduser()
    if not path.is_file():
        hint = f"{did_you_mean(name, NAMES)} Styles: {', '.join(NAMES)}; or a file that contains {TEXT}."
        raise RecipeError(f"--styles {name}: no such style or file.{hint}")
    try:
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        reason = f"the file is not UTF-8 (byte {problem.start:,}). Save it as UTF-8."
        raise RecipeError(f"--styles {name}: {reason}") from problem
    if TEXT not in template:
        raise RecipeError(
            f"--styles {name}: {TEXT} is missing. Insert it at the place of the text."
        )
    return Style(path.name, template)
