"""Evaluate models on held-out sets, domain tests and tasks, and complete the verdict of a finished run."""

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from cpt.data.readers.columns import ONE_A_ROW, form_of_stage, sections_of
from cpt.data.readers.decontamination import EvaluationDocument, Hashes
from cpt.data.readers.sources import files_of
from cpt.data.rows.contamination import TrainingSearch, search_training
from cpt.data.rows.open_sources import unchecked_sources
from cpt.data.store.tokenization import DocumentEncoder
from cpt.distributed import is_main_process, main_process_decides, world_size
from cpt.errors import CheckpointError, CptError, DataError, RecipeError
from cpt.evaluation.domain_test import CHOICES, KINDS, Question, answer_questions, domain_test
from cpt.evaluation.gain import Gain, MarkedSet, Nats, gain_of, mark_set, nats_of_parts
from cpt.evaluation.kinds import general_sets
from cpt.evaluation.paired import (
    FEW,
    FEWEST,
    DocumentLosses,
    accuracy_difference,
    accuracy_interval,
    bits_per_byte_difference,
    transitions,
)
from cpt.evaluation.reports import EvaluationReport, ScoreReport, SetReport
from cpt.evaluation.scoring import course_of, document_losses, read_evaluations
from cpt.evaluation.sets import (
    DEFAULT_LENGTH,
    EvaluationData,
    EvaluationSet,
    data_of_recipe,
    data_of_texts,
    open_evaluation_sets,
)
from cpt.evaluation.tasks import (
    TaskChoice,
    TaskScore,
    domain_questions,
    run_tasks,
    task_difference,
    task_texts,
    task_transitions,
    tasks_of_recipe,
)
from cpt.evaluation.verdict import NotRun, Verdict, compare_sets, verdict_of_run, write_verdict
from cpt.formatting import format_bytes
from cpt.models.adapters import load_adapter, merge_lora
from cpt.models.build import build_model
from cpt.models.config import load_config, value_of
from cpt.models.inventory import isolates_documents
from cpt.recipe.load import saved_recipe
from cpt.recipe.schema import Model, Recipe, Tokenizer
from cpt.runs.folder import EXPORT, INPUTS, METRICS, RECIPE, TASK, VERDICT, read_object
from cpt.runs.record import Run
from cpt.tokenizer.load import load_tokenizer

log = logging.getLogger("cpt")
UNLIMITED = 1 << 30  # tokens
MOST_BYTES_SEARCHED = 500 * 2**20  # limit for sources; one core searches 15 to 35 MB/s


@dataclass(frozen=True)
class EvaluationRequest:
    held_out: EvaluationData | None = None
    """Sets to measure losses on; None for tasks and questions only."""
    domain_test: Sequence[str] = ()
    """Held-out sets to make questions from."""
    questions: Mapping[str, list[Question]] = field(default_factory=dict)
    """Existing questions, by set."""
    tasks: Sequence[TaskChoice] = ()
    batch_size: int = 8
    gain: Sequence[MarkedSet] = ()
    """Sets to measure part by part."""
    is_compared: bool = False
    """Whether the model is compared with another one, which needs two documents per set."""


@dataclass(frozen=True)
class EvaluationResult:
    model: str
    losses: dict[str, DocumentLosses] = field(default_factory=dict)
    answers: dict[tuple[str, str], NDArray[np.bool_]] = field(default_factory=dict)
    """(held-out set, cloze or continuation) -> whether each question of the domain test was answered correctly."""
    tasks: list[TaskScore] = field(default_factory=list)
    questions: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Those of `answers`, each with its file, line and right answer, and shortened."""
    parts: list[Nats] = field(default_factory=list)
    """The loss of each part of the sets of `gain`."""


def measure(
    model: Model, request: EvaluationRequest, *, adapter: Path | None = None, seed: int = 42
) -> EvaluationResult:
    """Load a model from `model_at`, measure it, and free its memory; several processes split the work. An adapter is
    merged into the model first: its folder has the tokenizer, and the seed is that of the base's rows for new tokens.
    """
    tokenizer_path = None if adapter is None else str(adapter)
    tokenizer = load_tokenizer(Tokenizer(path=tokenizer_path), model)
    sets: dict[str, EvaluationSet] = {}
    if request.held_out is not None:
        sets = open_evaluation_sets(fit_packing(request.held_out, model), tokenizer)
    rows = {name: of_set.rows for name, of_set in select_text_sets(sets, request).items()}
    questions = {**make_questions(sets, request.domain_test), **request.questions}
    loaded = load_for_evaluation(model, tokenizer, adapter, seed)
    tasks: list[TaskScore] = []
    for choice in request.tasks:  # first, to fail early on a wrong name
        tasks += run_tasks(loaded, tokenizer, choice, batch_size=request.batch_size)
    if rows:
        num_rows = sum(len(of_set.rows) for of_set in rows.values())
        log.info(f"{model.path}: {num_rows:,} rows of held-out text")
    losses = document_losses(loaded, rows, batch_size=request.batch_size)
    answers = {}
    texts = {}
    for name, of_set in questions.items():
        is_right = answer_questions(
            loaded,
            tokenizer,
            of_set,
            batch_size=4 * request.batch_size,
            longest=known_positions(model),
        )
        for kind in KINDS:
            answers[name, kind] = is_right[[question.kind == kind for question in of_set]]
            texts[name, kind] = [str(question) for question in of_set if question.kind == kind]
    parts = [nats_of_parts(loaded, marked, request.batch_size) for marked in request.gain]
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return EvaluationResult(
        model=str(model.path),
        losses=losses,
        answers=answers,
        tasks=tasks,
        questions=texts,
        parts=parts,
    )


def make_questions(
    sets: Mapping[str, EvaluationSet], names: Sequence[str]
) -> dict[str, list[Question]]:
    """The domain tests of the sets with these names. Raises DataError for an unknown one."""
    for name in names:
        if name not in sets:
            known_names = ", ".join(sets) or "none"
            raise DataError(f"--domain-test {name}: unknown held-out set. Known: {known_names}.")
    return {name: domain_test(sets[name].texts()) for name in names}


def load_for_evaluation(
    model: Model, tokenizer: PreTrainedTokenizerBase, adapter: Path | None, seed: int
) -> PreTrainedModel:
    """The model, with a merged adapter, on the device that evaluates it."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    loaded = build_model(model, tokenizer, seed=seed, dtype=dtype)
    assert isinstance(loaded, PreTrainedModel), "no adapter was requested"
    if adapter is not None:
        loaded = merge_lora(load_adapter(loaded, adapter))
    loaded.config.use_cache = True  # generation is slow without it
    loaded.eval().to("cuda" if on_gpu else "cpu")  # type: ignore[arg-type]
    return loaded


def select_text_sets(
    sets: dict[str, EvaluationSet], request: EvaluationRequest
) -> dict[str, EvaluationSet]:
    """The sets of texts and conversations; pairs and prompts need the run's trainer. Raises DataError if nothing
    remains to be measured, or if a set is too small to compare models."""
    text_sets = {name: of_set for name, of_set in sets.items() if of_set.rows.form not in ONE_A_ROW}
    skipped_names = ", ".join(name for name in sets if name not in text_sets)
    if skipped_names:
        reason = (
            f"held-out pairs and prompts ({skipped_names}) are evaluated by the run: see verdict.md and"
            " metrics.jsonl"
        )
        if not (text_sets or request.tasks or request.questions):
            raise DataError(f"{reason}. Name texts to evaluate here: --text domain=held_out.jsonl")
        log.info(f"Not evaluated here: {reason}.")
    if request.is_compared:
        for name, of_set in text_sets.items():
            if of_set.rows.num_documents < FEWEST:
                raise DataError(
                    f"the held-out set `{name}` has one document, but comparing two models needs at least"
                    f" {FEWEST}, and {FEW} for a useful interval. Hold out more documents."
                )
    return text_sets


def model_at(path: str, of_recipe: Model | None = None) -> Model:
    """The model in a folder or on the Hub, or the one that a run exported, with the attention and imports of a recipe;
    for its base, also with the recipe's pins. Raises CheckpointError if there is no model to evaluate."""
    folder = Path(path).expanduser()
    is_finished_run = (folder / EXPORT / "config.json").exists()
    if is_finished_run:
        model = Model(path=str(folder / EXPORT))
    else:
        refuse_no_model(path, folder)
        model = Model(path=path)
    if of_recipe is None:
        return model
    keys = ["import_", "attention"]
    if path == of_recipe.path:
        keys += ["revision", "trust_remote_code", "config"]
    return model.model_copy(update={key: vars(of_recipe)[key] for key in keys})


def refuse_no_model(path: str, folder: Path) -> None:
    """Raise CheckpointError if this is neither a folder with a model nor the id of a model on the Hub."""
    if (folder / RECIPE).exists():
        raise CheckpointError(
            f"the run {path} is not finished: {folder / EXPORT} is missing. Continue it: cpt train {folder / RECIPE}"
        )
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise CheckpointError(
            f"{path} is an adapter without its base. Evaluate the merged model, or merge it: cpt merge"
        )
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if not folder.exists() and not is_hub_id:
        raise CheckpointError(
            f"no model `{path}` found (in {Path.cwd()}). Give a folder with config.json, a run, or a Hub id."
        )


def fit_packing(held: EvaluationData, model: Model) -> EvaluationData:
    """Pad rows if the model cannot separate packed documents; raises RecipeError if they are too long for it."""
    longest = known_positions(model)
    if held.data.sequence_length > longest:
        raise RecipeError(
            f"rows of {held.data.sequence_length:,} tokens exceed the {longest:,} positions of {model.path}."
            f" Evaluate both models with --sequence-length {longest}."
        )
    if held.data.packing in ("none", "token_budget") or isolates_documents(load_config(model)):
        return held
    return replace(held, data=held.data.model_copy(update={"packing": "token_budget"}))


def held_out_sets(
    recipe: Recipe | None,
    texts: list[str],
    sequence_length: int | None,
    models: list[Model],
    run: Path | None,
) -> EvaluationData | None:
    """The held-out sets of the command line, or else of the recipe, which may be that of a run."""
    if texts:
        if not sequence_length:
            default = recipe.data.sequence_length if recipe is not None else DEFAULT_LENGTH
            sequence_length = min(default, *map(known_positions, models))
        return data_of_texts(texts, sequence_length)
    if recipe is None:
        return None
    return data_of_recipe(recipe, run)


def known_positions(model: Model) -> int:
    """The maximum text length of a model in tokens; `UNLIMITED` if its config sets no limit."""
    config = load_config(model)
    for key in ("max_position_embeddings", "n_positions"):
        positions = value_of(config, key)
        if positions:
            return int(positions)
    return UNLIMITED


def build_report(
    measured: EvaluationResult, base: EvaluationResult | None = None
) -> EvaluationReport:
    """The results, and their differences from the base, which was measured on the same items. Raises DataError if a
    set has too few documents to compare."""
    base_scores = {}
    if base is not None:
        base_scores = {(score.report.name, score.report.metric): score for score in base.tasks}
    tasks = []
    for score in measured.tasks:
        base_score = base_scores.get((score.report.name, score.report.metric))
        tasks.append(report_of_task(score, base_score))
    return EvaluationReport(
        model=measured.model,
        base=None if base is None else base.model,
        sets=[report_of_set(name, measured, base) for name in measured.losses],
        domain_test=[report_of_questions(*key, measured, base) for key in measured.answers],
        tasks=tasks,
    )


def report_of_set(
    name: str, measured: EvaluationResult, base: EvaluationResult | None
) -> SetReport:
    losses = measured.losses[name]
    against = None
    if base is not None:
        try:
            against = bits_per_byte_difference([base.losses[name]], [losses])
        except DataError as problem:
            raise DataError(f"the held-out set `{name}`: {problem}") from problem
    return SetReport(
        name=name,
        documents=len(losses.hashes),
        num_bytes=int(losses.num_bytes.sum()),
        against=against,
        **losses.metrics(),
    )


def report_of_questions(
    name: str, kind: str, measured: EvaluationResult, base: EvaluationResult | None
) -> ScoreReport:
    is_right = measured.answers[name, kind]
    report = ScoreReport(
        name=f"{name} {kind}",
        metric="accuracy",
        value=float(is_right.mean()),
        interval=accuracy_interval(is_right),
        questions=len(is_right),
    )
    if base is None:
        return report
    was_right = base.answers[name, kind]
    chance = np.full(len(is_right), 1 / CHOICES)
    texts = measured.questions.get((name, kind), ())
    return replace(
        report,
        against=accuracy_difference(was_right, is_right),
        transitions=transitions(was_right, is_right, chance, texts),
    )


def report_of_task(score: TaskScore, base: TaskScore | None) -> ScoreReport:
    if base is None:
        return score.report
    return replace(
        score.report,
        against=task_difference(base, score),
        before=base.report.value,
        transitions=task_transitions(base, score),
    )


def needs_verdict(run: Run) -> bool:
    """Whether the verdict of a finished run only has the losses measured during the run."""
    page = run.folder / VERDICT
    return run.is_finished and page.is_file() and not read_object(page).get("is_complete", True)


def complete_verdict(run: Run, *, batch_size: int = 8) -> Verdict:
    """Measure what is missing in the verdict of a finished run, and rewrite it; each process loads the model and then
    the base. A measurement that fails is listed in the verdict with the command to repeat it; with several processes
    the error is raised, because the others wait."""
    recipe = saved_recipe(run.folder)
    search = None
    not_searched: list[NotRun] = []
    try:
        search = main_process_decides(partial(search_after_training, recipe))
    except CptError as problem:
        again = f"cpt contamination {run.folder / RECIPE}"
        not_searched.append(NotRun("contamination", f"{one_line(problem)}. Again: {again}"))
    report = None
    gain: list[Gain] = []
    not_run: list[NotRun] = []
    try:
        report, gain, not_run = evaluate_after_training(
            run.folder, recipe, copied=search.copied if search else None, batch_size=batch_size
        )
    except (CptError, torch.OutOfMemoryError) as problem:
        if world_size() > 1:
            raise
        again = f"cpt verdict {run.folder}"
        not_run = [NotRun("domain test and benchmarks", f"{one_line(problem)}. Again: {again}")]
    verdict = verdict_of_run(
        run.folder,
        evaluation=report,
        contamination=search.contamination if search else None,
        serve=f"cpt serve {run.export_folder}",
        not_run=[*not_run, *not_searched],
        is_complete=True,
        gain=gain,
    )
    verdict = with_places(verdict, run.folder, recipe)
    if is_main_process():
        write_verdict(run.folder, verdict)
    return verdict


def with_places(verdict: Verdict, folder: Path, recipe: Recipe) -> Verdict:
    """Add the files and lines of the worst documents, which are read again."""
    locations: dict[str, str] = {}
    try:
        if any(of_set.worst for of_set in verdict.sets):
            tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
            sets = open_evaluation_sets(data_of_recipe(recipe, folder), tokenizer)
            for held_out in sets.values():
                if held_out.rows.form not in ONE_A_ROW:
                    locations |= locations_by_hash(held_out)
    except CptError as problem:
        if world_size() > 1:
            raise
        log.warning(
            f"{folder}: the places of the worst documents are unknown: {one_line(problem)}."
        )
    located_sets = []
    for of_set in verdict.sets:
        worst = [replace(document, where=locations.get(document.hash)) for document in of_set.worst]
        located_sets.append(replace(of_set, worst=worst))
    return replace(verdict, sets=located_sets)


def locations_by_hash(held_out: EvaluationSet) -> dict[str, str]:
    locations = {}
    for text, where in held_out.texts():
        locations[f"{xxh3_64_intdigest(text.encode()):016x}"] = where
    return locations


def one_line(problem: BaseException) -> str:
    """The first line of an error, to embed in a sentence."""
    return str(problem).partition("\n")[0].rstrip(".")


def evaluate_after_training(
    folder: Path, recipe: Recipe, *, copied: Hashes | None = None, batch_size: int = 8
) -> tuple[EvaluationReport | None, list[Gain], list[NotRun]]:
    """Domain test and tasks of a finished run's model and its base, what the gain is made of, and the reasons for
    missing domain tests. `copied`: runs of words that training documents share with held-out ones, sorted."""
    tasks = tasks_of_recipe(recipe.evaluation.tasks)
    sets, not_run = sets_after_training(folder, recipe)
    general = general_sets(
        recipe.model_dump(mode="json", by_alias=True), read_object(folder / INPUTS)
    )
    questions = {}
    for name, held_out in sets.items():
        if name in general or held_out.rows.form in ONE_A_ROW:  # questions need domain texts
            continue
        try:
            max_questions = domain_questions(recipe.evaluation.tasks)
            questions[name] = domain_test(held_out.texts(), max_questions=max_questions)
        except DataError as problem:
            not_run.append(NotRun(f"domain test of {name}", one_line(problem)))
    if copied is None:
        copied = np.empty(0, np.uint64)
    marked = marked_sets(folder, recipe, general, sets, copied)
    if not questions and not tasks and not marked:
        return None, [], not_run
    request = EvaluationRequest(
        questions=questions, tasks=tasks, batch_size=batch_size, gain=marked
    )
    # Each with the tokenizer in its folder: that of the run may have new tokens, unknown to the base.
    paths = [str(folder)]
    if not recipe.model.from_scratch:
        paths.append(str(recipe.model.path))
    log.info(f"Measuring {' and '.join(paths)}: {', '.join(measurements(request))}")
    measured = [measure(model_at(path, recipe.model), request) for path in paths]
    report = build_report(*measured) if questions or tasks else None
    return report, gains_of(marked, measured), not_run


def sets_after_training(
    folder: Path, recipe: Recipe
) -> tuple[dict[str, EvaluationSet], list[NotRun]]:
    """The held-out sets to make questions from, or else the reason for a missing domain test."""
    evaluation = recipe.evaluation
    is_of_texts = form_of_stage(recipe.stage) not in ONE_A_ROW
    if not evaluation.perplexity and (evaluation.held_out_share is None or not is_of_texts):
        return {}, []  # no texts to make questions from
    if not domain_questions(evaluation.tasks):
        reason = "turned off in `evaluation.tasks` (`questions: 0`)"
        return {}, [NotRun("domain test", reason)]
    if recipe.model.from_scratch:
        reason = "the run started from new weights, so there is nothing to compare with"
        return {}, [NotRun("domain test", reason)]
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    return open_evaluation_sets(data_of_recipe(recipe, folder), tokenizer), []


def measurements(request: EvaluationRequest) -> list[str]:
    """The measurements, for the log."""
    names = [f"domain test of {name}" for name in request.questions]
    for choice in request.tasks:
        names += choice.names
    for marked in request.gain:
        names.append(f"what the gain on {marked.held_out.rows.name} is made of")
    return names


def gains_of(marked: Sequence[MarkedSet], measured: Sequence[EvaluationResult]) -> list[Gain]:
    """The parts of the gain on each set; `measured` is the run's model and its base."""
    if not marked:
        return []
    after, before = measured
    gains = map(gain_of, marked, before.parts, after.parts)
    return [gain for gain in gains if gain is not None]


def marked_sets(
    folder: Path,
    recipe: Recipe,
    general: set[str],
    sets: Mapping[str, EvaluationSet],
    copied: Hashes,
) -> list[MarkedSet]:
    """The domain sets that improved and have shared lines or copied phrases. None if the base has another tokenizer:
    the parts would be made of other tokens."""
    course = course_of(read_evaluations(folder / METRICS))
    compared, _, _ = compare_sets(folder, course, recipe, general)
    improved = []
    for of_set in compared:
        if of_set.outcome == "better" and not of_set.is_general and of_set.name in sets:
            improved.append(of_set.name)
    if not improved:
        return []
    encoders = []
    for path in (str(folder), str(recipe.model.path)):
        model = model_at(path, recipe.model)
        encoders.append(DocumentEncoder(load_tokenizer(Tokenizer(), model)))
    encoder, base_encoder = encoders
    if encoder.fingerprint != base_encoder.fingerprint or encoder.slow_tokenizer is not None:
        return []
    documents = []
    for name in improved:
        if sets[name].rows.form == "document":
            documents.append(sets[name])
    marked = [mark_set(held_out, encoder, copied) for held_out in documents]
    return [marked_set for marked_set in marked if marked_set is not None]


def search_after_training(recipe: Recipe) -> TrainingSearch | None:
    """Search the training sources for evaluation documents and questions; None without any of these. Raises DataError
    if the sources are too large or not local files."""
    data, evaluation = sections_of(recipe)
    choices = [choice for choice in tasks_of_recipe(evaluation.tasks) if not choice.is_function]
    if evaluation.held_out_share is None and not evaluation.perplexity and not choices:
        return None
    remote_sources = unchecked_sources(data, evaluation)
    if remote_sources:
        raise DataError(f"not all sources are files on this machine ({remote_sources[0]})")
    num_bytes = 0
    for index, source in enumerate(data.sources):
        num_bytes += sum(file.size for file in files_of(source, f"data.sources[{index}]"))
    if num_bytes > MOST_BYTES_SEARCHED:
        raise DataError(
            f"the sources have {format_bytes(num_bytes)}, too much to search automatically"
        )
    questions = (
        EvaluationDocument(*question)
        for choice in choices
        for question in task_texts(choice.names, choice.folder)
    )
    return search_training(data, evaluation, questions)


def task_metrics(weights: Path) -> dict[str, float]:
    """Evaluate weights in a run's folder, a model or an adapter, on the recipe's tasks: metric of the run -> score."""
    recipe = saved_recipe(weights.parent)
    request = EvaluationRequest(tasks=tasks_of_recipe(recipe.evaluation.tasks))
    if (weights / "adapter_config.json").exists():
        base = recipe.model.model_copy(update={"lora": None, "dtype": "auto"})
        measured = measure(base, request, adapter=weights, seed=recipe.seed)
    else:
        measured = measure(model_at(str(weights), recipe.model), request)
    metrics = {}
    for score in measured.tasks:
        report = score.report
        name = f"{TASK}{report.name}_{report.metric.removesuffix(',none')}"
        # Trackers refuse other characters, as in `exact_match,strict-match` or `my_lab.exam:board`.
        metrics[re.sub(r"[^\w./-]", "_", name)] = report.value
    return metrics


if __name__ == "__main__":  # a run starts this program while it trains
    os.nice(10)
    print(json.dumps(task_metrics(Path(sys.argv[1]))))  # noqa: T201 - for the run, which reads the last line
