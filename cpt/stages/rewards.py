"""Rewards of a recipe: built-in, custom function, or reward model."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cpt.errors import CptError, DataError, RecipeError, TrainingError
from cpt.hf_internals import without_zero3
from cpt.plugins import check_options, find, with_key
from cpt.recipe.schema import Reward
from cpt.runs.record import Run

# Arguments that TRL passes in addition to the columns of the data:
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
MOST_UNSCORED = 10  # batches in a row without any reward
MOST_LETTERS = 300  # of a prompt or a completion, in a message
Text = str | Sequence[Mapping[str, Any]]  # a prompt or a completion: a text, or messages
NUMBERS = re.compile(
    r"[-+−]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?\s*\\?%?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|quad|,|;|!|:| )|\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}|[$\s]|\^\{?\\circ\}?"
)


class UnscoredBatches:
    """Ends a run in which no reward applies to any completion: it would learn nothing."""

    def __init__(self, rewards: Sequence["NamedReward"]) -> None:
        self.rewards = rewards
        self.has_scored = False  # in this batch
        self.scored = 0  # batches
        self.in_a_row = 0  # batches without a reward

    def note(self, reward: "NamedReward", scores: bool) -> None:
        """Called after each reward of a batch, in order; TrainingError after MOST_UNSCORED batches without any."""
        self.has_scored = scores if reward is self.rewards[0] else self.has_scored or scores
        if reward is not self.rewards[-1]:
            return
        self.scored += self.has_scored
        self.in_a_row = 0 if self.has_scored else self.in_a_row + 1
        if self.in_a_row >= MOST_UNSCORED:
            raise self.error()

    def check_end(self) -> None:
        """TrainingError if no batch of the run was scored."""
        if self.in_a_row and not self.scored:
            raise self.error()

    def error(self) -> TrainingError:
        names = ", ".join(reward.where for reward in self.rewards)
        return TrainingError(
            f"no reward applied to any completion of the last {self.in_a_row} batches, so nothing is learned: {names}"
            " returned None for all. Return a number, or add another reward to `rewards`."
        )


class NamedReward:
    """A reward function of the recipe, called as TRL calls rewards: all arguments by name.

    Keyword-only parameters are options, set in the recipe. All others are columns of the data; `**columns` receives
    all of them.
    """

    def __init__(
        self, name: str, key: str, function: Callable[..., Any], options: Mapping[str, Any]
    ) -> None:
        self.__name__ = name
        self.function = function
        self.options = dict(options)
        self.unscored = UnscoredBatches([self])
        self.where = f"the reward {name} (`{key}`)"
        self.parameters = inspect.signature(function).parameters

    def refuse_missing(self, columns: Sequence[str]) -> None:
        """Raise DataError if the rows lack a parameter's column, or the one in its option `column`."""
        by_position = [p for p in self.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = []
        for p in by_position:
            if p.default is p.empty and p.name not in GIVEN:
                needed.append(p.name)
        default = self.parameters["column"].default if "column" in self.parameters else None
        named = self.options.get("column", default)
        missing = []
        for column in [*needed, named]:
            if isinstance(column, str) and column not in columns:
                missing.append(column)
        if missing:
            there = ", ".join(column for column in columns if column not in GIVEN) or "none"
            raise DataError(
                f"{self.where} reads the column `{missing[0]}`. Columns besides the prompt: {there}."
            )

    def __call__(self, **columns: Any) -> list[float | None]:
        """Return the rewards of completions, a finite number or None each; TrainingError otherwise."""
        self.refuse_missing(list(columns))
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        options = set()
        for name, p in self.parameters.items():
            if p.kind is p.KEYWORD_ONLY:
                options.add(name)
        passed_columns = (
            columns.keys() if takes_all else self.parameters.keys() & columns.keys()
        ) - options
        taken = {name: value for name, value in columns.items() if name in passed_columns}
        try:
            scores = self.function(**taken, **self.options)
        except CptError:
            raise
        except Exception as problem:
            raise TrainingError(
                f"{self.where} failed: {type(problem).__name__}: {problem}."
            ) from problem
        values = scores.tolist() if isinstance(scores, torch.Tensor | np.ndarray) else scores
        count = len(columns["completions"])
        if not isinstance(values, list | tuple) or len(values) != count:
            raise TrainingError(
                f"{self.where} returned {scores!r}: expected a list of {count} numbers."
            )
        for row, value in enumerate(values):
            is_number = isinstance(
                value, bool | int | float | np.number | np.bool_
            ) and math.isfinite(value)
            if value is not None and not is_number:
                prompt = str(columns["prompts"][row])[:MOST_LETTERS]
                said = str(columns["completions"][row])[:MOST_LETTERS]
                raise TrainingError(
                    f"{self.where} returned {value!r}: expected a finite number, or None if it does not apply. The"
                    f" prompt: {prompt!r}; the completion: {said!r}."
                )
        self.unscored.note(self, any(value is not None for value in values))
        return [None if value is None else float(value) for value in values]


def build_rewards(rewards: Sequence[Reward], columns: Sequence[str]) -> list[NamedReward]:
    """Build the recipe's rewards, in order; `columns` are the data's."""
    built = check_columns(rewards, columns)
    unscored = UnscoredBatches(built)
    for reward in built:
        reward.unscored = unscored
        if reward.function is reward_model:
            load_reward_model(
                **{key: value for key, value in reward.options.items() if key != "batch_size"}
            )
    return built


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> list[NamedReward]:
    """Refuse rewards that read missing columns, without loading models."""
    functions = find_rewards(rewards)
    for reward in functions:
        reward.refuse_missing(columns)
    return functions


def find_rewards(rewards: Sequence[Reward]) -> list[NamedReward]:
    """Return the recipe's rewards with unique names for logs and checked options, without loading models."""
    functions = []
    for number, reward in enumerate(rewards):
        key = f"rewards[{number}]"
        function = with_key(f"{key}.name", partial(find, "reward", reward.name, REWARDS))
        check_options(without_columns(function), reward.options, key)
        if reward.name in CHECKS:
            with_key(key, partial(CHECKS[reward.name], **reward.options))
        name = reward.name.rpartition(":")[2]
        same = sum(other.name.rpartition(":")[2] == name for other in rewards[:number])
        functions.append(
            NamedReward(f"{name}_{same + 1}" if same else name, key, function, reward.options)
        )
    return functions


def without_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without `**columns`, so that its options can be checked."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
    bare = functools.update_wrapper(partial(function), function)
    bare.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return bare


def text_of(completion: Text) -> str:
    """Return the text of a prompt or completion; of messages, the last one's."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def exact_match(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    column: str = "answer",
    case_sensitive: bool = False,
    **columns: Sequence[Any],
) -> list[float]:
    """1 if a completion equals the answer, ignoring surrounding space and case; else 0.

    Args:
        column: the column of the data with the answers.
        case_sensitive: compare upper and lower case.
    """

    def plain(text: str) -> str:
        if case_sensitive:
            return text.strip()
        return text.strip().casefold()

    scores = []
    for said, answer in zip(completions, columns[column], strict=True):
        scores.append(float(plain(text_of(said)) == plain(str(answer))))
    return scores


def matches_format(
    prompts: Sequence[Text], completions: Sequence[Text], *, pattern: str
) -> list[float]:
    r"""1 if a regular expression matches the full completion; else 0.

    Args:
        pattern: of Python's `re`; a dot matches line breaks too: `<think>.*</think>\s*\S.*`.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text_of(said)) is not None) for said in completions]


def check_pattern(*, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as problem:
        raise RecipeError(
            f"`pattern`: {pattern!r} is not a regular expression: {problem}."
        ) from problem


def length(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    completion_ids: Sequence[Sequence[int]],
    *,
    at_least: int = 0,
    at_most: int | None = None,
    falloff: int = 0,
    unit: Literal["tokens", "characters"] = "tokens",
) -> list[float]:
    """1 if a completion's length is within bounds, decreasing linearly to 0 outside.

    Args:
        at_least: the shortest length with reward 1.
        at_most: the longest length with reward 1; null: any.
        falloff: distance from the bounds at which the reward is 0.
        unit: unit of the length; the token that ends a completion counts too.
    """
    counted = completion_ids if unit == "tokens" else list(map(text_of, completions))
    lengths = list(map(len, counted))
    outside = [
        max(at_least - size, size - (size if at_most is None else at_most), 0) for size in lengths
    ]
    return [1 - min(1.0, far / falloff) if falloff else float(far == 0) for far in outside]


def check_bounds(
    *, at_least: int = 0, at_most: int | None = None, falloff: int = 0, unit: str = "tokens"
) -> None:
    if falloff < 0 or at_least < 0 or (at_most is not None and at_most < at_least):
        raise RecipeError(
            f"`at_least` {at_least}, `at_most` {at_most}, `falloff` {falloff}: write 0 <= at_least <= at_most, falloff"
            " >= 0."
        )


def maths_answer(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    column: str = "answer",
    tolerance: float = 1e-6,
    **columns: Sequence[Any],
) -> list[float]:
    r"""1 if a completion has the right answer, else 0.

    An answer is the content of the last `\boxed{}`, else the text after the last `####`, else the last number. Numbers
    are equal as numbers: 0.5, 1/2, \frac{1}{2} and 50% are the same, 1,000 and 1000 too.

    Args:
        column: the column of the data with the answers: numbers, or texts that are read in the same way.
        tolerance: allowed error of a number, relative to the right one if that is above 1.
    """
    answers = []
    for answer in columns[column]:  # may be whole solutions
        answers.append(marked(str(answer)) or str(answer).strip())
    pairs = zip(completions, answers, strict=True)
    return [float(is_same(found_in(text_of(said)), answer, tolerance)) for said, answer in pairs]


def found_in(text: str) -> str:
    """Extract the final answer of a completion; empty if it lacks one."""
    numbers = NUMBERS.findall(text)
    return marked(text) or (numbers[-1].strip() if numbers else "")


def marked(text: str) -> str:
    r"""Extract the marked answer of a text, in `\boxed{}` (to the end if unclosed) or after `####`."""
    start = text.rfind("\\boxed{")
    if start < 0:
        if "####" in text:
            return text.rpartition("####")[2].strip().split("\n")[0]
        return ""
    inside = text[start + len("\\boxed{") :]
    depth = 1
    for position, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return inside[:position].strip()
    return inside.strip()


def is_same(said: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are equal, as numbers where they are numbers."""
    number = as_number(said)
    expected = as_number(answer)
    if number is None or expected is None:
        return bool(plain(said)) and plain(said) == plain(answer)
    close = Fraction(tolerance) * max(Fraction(1), abs(expected))
    if abs(number - expected) <= close:
        return True
    # `50%` is 0.5, but an answer to a question about percentages may omit the sign.
    other = number * (100 if "%" in said else Fraction(1, 100))
    return ("%" in said) != ("%" in answer) and abs(other - expected) <= close


def as_number(text: str) -> Fraction | None:
    """A decimal, fraction, mixed number or percentage; None for anything else."""
    bare = plain(text)
    share = Fraction(1, 100) if bare.endswith("%") else Fraction(1)
    bare = bare.removesuffix("%").removesuffix("\\")
    mixed = re.fullmatch(r"([-+]?\d+)\((\d+)/(\d+)\)", bare)
    try:
        if mixed:
            integer = int(mixed[1])
            part = Fraction(int(mixed[2]), int(mixed[3]))
            return share * (integer - part if mixed[1].startswith("-") else integer + part)
        above, _, below = bare.replace("(", "").replace(")", "").partition("/")
        return (
            share
            * Fraction(without_commas(above))
            / Fraction(without_commas(below) if below else 1)
        )
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def without_commas(number: str) -> str:
    """Remove the commas of `1,000,000`, but no others."""
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", number):
        return number.replace(",", "")
    return number


def plain(text: str) -> str:
    r"""Remove spaces, `$` and LaTeX formatting; keep the part after the last `=`; `\frac{a}{b}` becomes `(a/b)`."""
    plain = DECORATION.sub(lambda match: "".join((match[1] or "").split()), text.replace("−", "-"))
    plain = LATEX_FRACTION.sub(
        lambda match: f"({match[1] or match[2]}/{match[3] or match[4]})", plain
    )
    return plain.rpartition("=")[2].rstrip(".").casefold()


def reward_model(
    prompts: Sequence[Text],
    completions: Sequence[Text],
    *,
    path: str,
    revision: str | None = None,
    batch_size: int = 8,
) -> list[float]:
    """Score each completion after its prompt with a reward model.

    Args:
        path: a run's folder, a model's folder, or its Hub id.
        revision: of a model on the Hub.
        batch_size: completions per batch.
    """
    model, tokenizer = load_reward_model(path, revision)
    texts = []  # as the reward model read them in its training
    for prompt, said in zip(prompts, completions, strict=True):
        if isinstance(prompt, str) and isinstance(said, str):
            texts.append(prompt + said)
        else:
            messages: list[Any] = [*prompt, *said]
            texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False)))
    scores: list[float] = []
    for first in range(0, len(texts), batch_size):
        texts_of_batch = texts[first : first + batch_size]
        batch = tokenizer(
            texts_of_batch,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        ids = batch["input_ids"].to(model.device)
        mask = batch["attention_mask"].to(model.device)
        with torch.no_grad():
            scores += model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
    return scores


@cache
def load_reward_model(
    path: str, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model on the run's device, unsharded on each process, and its tokenizer."""
    folder = str(Run(Path(path)).export_folder) if Run(Path(path)).export_folder.is_dir() else path
    revision = revision or "main"
    try:
        with without_zero3():
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, revision=revision, dtype="auto"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision)
    except (OSError, ValueError, KeyError) as problem:
        reason = " ".join(str(problem).split())[:400]
        raise RecipeError(f"the reward model {path} cannot be loaded: {reason}") from problem
    if model.config.num_labels != 1:
        raise RecipeError(
            f"the reward model {path} has {model.config.num_labels} outputs, but rewards need one. Choose another."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The score is that of the last token before the padding.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.to(PartialState().device).eval().requires_grad_(False), tokenizer


REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "maths_answer": maths_answer,
    "format": matches_format,
    "length": length,
    "reward_model": reward_model,
}
CHECKS: dict[str, Callable[..., None]] = {"format": check_pattern, "length": check_bounds}
