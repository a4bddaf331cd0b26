"""What is measured when a run has ended: the domain test, of the exported model and of its base; losses were kept on the way."""

from pathlib import Path

from cpt.errors import DataError
from cpt.evaluation.domain_test import domain_test
from cpt.evaluation.evaluate import Asked, measure, model_at
from cpt.evaluation.findings import Findings, findings
from cpt.evaluation.judged_sets import judges_of_recipe, open_judged_sets
from cpt.evaluation.verdict import NotRun
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer


def evaluate_after_training(folder: Path, recipe: Recipe, *, batch_size: int = 8) -> tuple[Findings | None, list[NotRun]]:
    """The domain test of each domain set against the base, and why one was not made; for `write_verdict`.

    Args:
        folder: of a run whose model is exported.
        batch_size: rows in one forward pass.

    Raises:
        CptError: the model, the base or the held-out documents cannot be read any more.
    """
    if recipe.model.from_scratch:
        return None, [NotRun("domain test", "there is no base to compare with: the run began with new weights")]
    if recipe.evaluation.held_out_share is None and not recipe.evaluation.perplexity:
        return None, []
    judges = judges_of_recipe(recipe)
    sets = open_judged_sets(judges, load_tokenizer(recipe.tokenizer, recipe.model))
    usable, not_run = [], []
    for name, judged in sets.items():
        if name in recipe.evaluation.retain:
            continue
        try:
            domain_test(judged.texts())
            usable.append(name)
        except DataError as problem:
            not_run.append(NotRun(f"domain test of {name}", str(problem).rstrip(".")))
    if not usable:
        return None, not_run
    asked = Asked(judges, held_out_text=False, domain_test=usable, batch_size=batch_size)
    # Each with the tokenizer that lies beside it: the run's may have new words that the base does not know.
    trained, base = (model_at(path, recipe.model) for path in (str(folder), str(recipe.model.path)))
    return findings(measure(trained, asked), measure(base, asked)), not_run
