import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tiny import write_recipe

from cpt.evaluation.paired import Difference, DocumentLosses, bits_per_byte_difference, save_losses
from cpt.evaluation.verdict import NotRun, general_sentence, outcome_of_set, verdict_of_run, verdict_page
from cpt.recipe.load import dump_recipe, load_recipe


def losses(bits_per_byte, count=40, seed=0, spread=0.02):
    sizes = np.full(count, 1000)
    noise = np.random.default_rng(seed).normal(0, spread, count)
    nats = (bits_per_byte * (1 + noise)) * 1000 * np.log(2)
    return DocumentLosses(np.arange(count, dtype=np.uint64), sizes, nats, sizes // 4, sizes // 10)


def write_run(folder, recipe, *, domain=(2.0, 1.6), general=(1.5, 1.53), documents=40, kept=True, noisy=()):
    """A finished run's folder, as far as the verdict reads it."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe(recipe)))
    both = [{"domain": domain[end], "general": general[end]} for end in (0, 1)]
    lines = [
        {
            "step": step,
            "tokens": step * 100,
            **{f"eval_{name}_bits_per_byte": value for name, value in both[min(step, 1)].items()},
        }
        for step in (0, 50)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, sets in zip((0, 50), both, strict=True):
        if kept:
            found = {
                name: losses(value, documents, step, 0.2 if name in noisy else 0.02) for name, value in sets.items()
            }
            save_losses(folder / "held_out" / f"step-{step}.npz", found)
    dropped = {"contaminated: domain": 2, "contaminated: quiz": 1, "length": 9}
    sources = {
        name: {"documents": 100, "share": 0.5, "licence": licence, "dropped": dropped}
        for name, licence in (("code", "MIT"), ("prose", None))
    }
    (folder / "inputs.json").write_text(json.dumps({"data": {"sources": sources}}))
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    samples = [
        {"step": step, "prompt": "def f", "continuation": text}
        for step, text in ((0, " is a"), (50, "(x):\n    return x"))
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return folder


@pytest.fixture
def recipe(tiny_recipe, corpus, tmp_path):
    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")]
    tiny_recipe |= {
        "stage": "cpt",
        "model": {"path": "my/base"},
        "evaluation": {"perplexity": sets, "retain": {"general": None}},
    }
    return write_recipe(tiny_recipe, tmp_path / "r.yaml")


def test_a_run_that_learnt_at_a_price_is_told_so(recipe, tmp_path):
    verdict = verdict_of_run(write_run(tmp_path / "run", recipe))
    assert verdict.worked and verdict.headline().startswith("It worked: on held-out domain text the model needs ")
    assert "fewer bits per byte than its base. It cost " in verdict.headline()
    assert [(one.name, one.is_general, one.documents) for one in verdict.sets] == [
        ("domain", False, 40),
        ("general", True, 40),
    ]
    assert verdict.domain.difference == pytest.approx(verdict.sets[0].difference.difference)
    assert (verdict.base, verdict.tokens) == ("my/base", 5000)
    assert [(one.name, one.licence, one.decontaminated) for one in verdict.sources] == [
        ("code", "MIT", 3),
        ("prose", None, 3),
    ]
    assert verdict.samples[0]["before"] == " is a" and verdict.samples[0]["after"].startswith("(x)")


@pytest.mark.parametrize(
    ("figures", "worked", "said"),
    [
        ({"domain": (2.0, 2.2)}, False, "It did harm: on held-out domain text the model needs "),
        ({"domain": (2.0, 2.001)}, False, "It did not work: "),
        ({"domain": (2.0, 2.001), "noisy": ["domain"]}, None, "Whether it worked is unknown: "),
        ({"general": (1.5, 1.5005)}, True, "General text is as good as before: a loss of more than "),
        ({"general": (1.5, 1.5005), "noisy": ["general"]}, True, "Whether general text became worse is unknown: "),
        ({"general": (1.5, 1.2)}, True, "General text became better, by "),
        ({"kept": False}, None, "Whether it worked is not known"),
    ],
)
def test_other_runs_are_told_as_they_are(figures, worked, said, recipe, tmp_path):
    verdict = verdict_of_run(write_run(tmp_path / "run", recipe, **figures))
    assert verdict.worked is worked and said in verdict.headline()


def reported_case():
    """20 documents, one of which holds 44 % of the bytes; the other 19 got worse, and the interval is very wide."""
    sizes = np.full(20, 1000)
    sizes[0] = 15_000
    draw = np.random.default_rng(3)
    changes = np.where(np.arange(20) == 0, -0.01, 0.12 + draw.normal(0, 0.03, 20))
    before = DocumentLosses(np.arange(20, dtype=np.uint64), sizes, 1.0 * sizes, sizes // 4, sizes // 10)
    return bits_per_byte_difference([before], [replace(before, nats=(1 + changes) * sizes)])


def test_a_wide_interval_under_one_large_document_is_unknown_and_not_as_good_as_before():
    found = reported_case()
    assert found.outcome() == "unknown" and found.low < -0.2 * found.before and found.high > 0.4 * found.before
    assert (found.num_worse, found.is_dominated) == (19, True) and found.largest_share == pytest.approx(0.44, abs=0.01)
    sentence = general_sentence(found)
    assert (
        "unknown" in sentence
        and "as good as" not in sentence
        and "19 of them worse" in sentence
        and "44 % of the bytes" in sentence
    )


def outcomes(truth, documents, *, corpora=20, runs=50, seed=0):
    """What is said of general text in simulated runs whose bits per byte truly rise by `truth`.

    Documents have log-normal sizes. Their own changes differ by 5 % of their bits, and most have a smaller one than
    the mean.
    """
    draw, said = np.random.default_rng(seed), Counter()
    for _ in range(corpora):
        count = int(draw.integers(documents[0], documents[1], endpoint=True))
        sizes = np.exp(draw.normal(8, 1, count)).astype(np.int64)
        before = DocumentLosses(
            np.arange(count, dtype=np.uint64), sizes, 0.7 * sizes * draw.normal(1, 0.1, count), sizes // 4, sizes // 10
        )
        for _ in range(runs):
            changes = truth + 0.05 * (draw.exponential(1, count) - 1)
            after = replace(before, nats=before.nats * (1 + changes))
            said[bits_per_byte_difference([before], [after]).outcome()] += 1
    return {outcome: count / (corpora * runs) for outcome, count in said.items()}


AS_GOOD = ("better", "about the same", "not worse")
NO_GAIN = ("worse", "about the same", "not better")


def test_forgetting_of_5_percent_is_hardly_ever_called_as_good_as_before():
    said = outcomes(0.05, (20, 200))
    assert sum(said.get(outcome, 0) for outcome in AS_GOOD) < 0.05
    said = outcomes(0.05, (5, 20), seed=1)
    assert sum(said.get(outcome, 0) for outcome in AS_GOOD) < 0.05, "nor with few documents"


def test_no_change_is_hardly_ever_called_a_success_and_a_gain_of_5_percent_no_failure():
    assert outcomes(0.0, (20, 200)).get("better", 0) < 0.05
    assert outcomes(0.0, (2, 6)).get("better", 0) < 0.05, "nor with very few documents"
    said = outcomes(-0.05, (20, 200))
    assert sum(said.get(outcome, 0) for outcome in NO_GAIN) < 0.05


def test_what_was_not_run_is_told_with_its_command(recipe, tmp_path):
    verdict = verdict_of_run(write_run(tmp_path / "run", recipe), not_run=[NotRun("serving", "no GPU")])
    told = {one.what: one.why for one in verdict.not_run}
    assert list(told) == ["domain test", "benchmarks", "contamination", "serving"]
    assert told["domain test"] == f"not asked for: cpt evaluate {tmp_path / 'run'} --against my/base --domain-test SET"


def test_a_run_without_a_general_set_is_told_which_one_to_take(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("retain:\n    general: null", "retain: {}"))
    verdict = verdict_of_run(write_run(tmp_path / "run", recipe))
    told = {one.what: one.why for one in verdict.not_run}
    assert "HuggingFaceFW/fineweb-edu" in told["forgetting"] and verdict.headline().endswith(
        "no general set was followed."
    )


def add_pairs(run, accuracy, *, name="rewards/accuracies"):
    """Figures of held-out pairs, in the evaluations that a run has."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, value in zip(lines, (0.0, accuracy), strict=True):
        rewards = {f"eval_pairs_{name}": value, "eval_pairs_rewards/chosen": value, "eval_pairs_logps/chosen": -9.0}
        line |= {"eval_pairs_examples": 40, "eval_pairs_loss": 0.7, **rewards}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_run_on_pairs_is_judged_by_them_and_tells_what_text_cost(recipe, tmp_path):
    verdict = verdict_of_run(add_pairs(write_run(tmp_path / "run", recipe, domain=(1.6, 1.7)), 0.9))
    assert verdict.worked and verdict.headline().startswith("It worked: in 90 % of 40 held-out pairs")
    assert (
        "bits per byte on held-out domain text." in verdict.headline()
        and "bits per byte on held-out general text." in verdict.headline()
    )
    assert json.loads(json.dumps(verdict.to_json()))["examples"][0]["accuracy"] == [0.0, 0.9]


def test_a_run_on_pairs_without_texts_is_told_what_it_lacks(recipe, tmp_path):
    run = add_pairs(write_run(tmp_path / "run", recipe, kept=False), 0.2)
    lines = [
        {key: value for key, value in json.loads(line).items() if "bits" not in key}
        for line in (run / "metrics.jsonl").open()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = verdict_of_run(run)
    assert verdict.worked is False and verdict.tokens == 5000
    assert verdict.headline().endswith("What it forgot is not known: no held-out text was followed.")
    assert [one.what for one in verdict.not_run] == ["held-out text", "benchmarks", "contamination"]


def test_of_a_model_that_gives_scores_no_text_is_asked(recipe, tmp_path):
    verdict = verdict_of_run(add_pairs(write_run(tmp_path / "run", recipe), 0.9, name="accuracy"), serve="cpt serve x")
    assert verdict.serve is None
    assert verdict.headline().endswith("half would be chance.")
    assert [one.what for one in verdict.not_run] == ["contamination"]


@pytest.mark.parametrize("documents", [3, 6])
def test_a_few_documents_that_all_became_better_prove_nothing(documents, recipe, tmp_path):
    verdict = verdict_of_run(
        write_run(tmp_path / "run", recipe, domain=(2.0, 1.0), general=(1.5, 1.0), documents=documents)
    )
    assert verdict.worked is None and verdict.domain.high < 0 and not verdict.domain.is_clear
    assert outcome_of_set(verdict.general, is_general=True) == "unknown" and "at least 7" in verdict.headline()


def test_a_few_pairs_prove_nothing(recipe, tmp_path):
    run = add_pairs(write_run(tmp_path / "run", recipe), 1.0)
    (run / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text().replace('"eval_pairs_examples": 40', '"eval_pairs_examples": 5')
    )
    assert verdict_of_run(run).worked is None


def test_a_run_whose_steps_were_nearly_all_skipped_says_so(recipe, tmp_path):
    run = write_run(tmp_path / "run", recipe)
    (run / "status.json").write_text(json.dumps({"state": "finished", "step": 50}))
    events = [{"kind": "spike_skipped", "step": step} for step in range(1, 49)]
    back = {"kind": "rolled_back", "step": 48, "to_step": 10}  # steps 11 to 48 are trained again
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, back, *events[20:]]))
    verdict = verdict_of_run(run)
    assert verdict.skipped_steps == (38, 50) and "38 of 50 steps were skipped" in verdict.headline()
    (run / "events.jsonl").write_text(json.dumps(events[0]) + "\n")
    seldom = verdict_of_run(run)
    assert "skipped" not in seldom.headline() and "1 of 50 steps were skipped" in verdict_page(seldom)


def test_general_text_of_which_only_a_gain_is_excluded_is_unknown():
    difference = Difference(1.0, 1.01, 0.01, -0.005, 0.05, items=40, negligible=0.02)
    assert outcome_of_set(difference, is_general=True) == "unknown"
    assert outcome_of_set(difference, is_general=False) == "not better"
