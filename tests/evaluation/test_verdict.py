"""The verdict of a finished run. Its sentences and its page are in approved_verdict.txt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from approved import check_approved
from full_disk import disk_of_its_own, fill
from tiny import write_recipe

from cpt.data.rows.contamination import Contamination, Hit
from cpt.evaluation.paired import (
    Difference,
    DocumentLosses,
    LongDocuments,
    RelativeChange,
    Transitions,
    bits_per_byte_difference,
    save_losses,
)
from cpt.evaluation.reports import EvaluationReport, ScoreReport
from cpt.evaluation.scoring import Point
from cpt.evaluation.sentences import disagreement, general_sentence
from cpt.evaluation.verdict import (
    NotRun,
    read_example_sets,
    sample,
    spread_evenly,
    verdict_of_run,
    verdict_page,
    write_verdict,
)
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.runs.events import read_events

APPROVED = Path(__file__).with_name("approved_verdict.txt")


def losses(bits_per_byte, count, seed, spread):
    sizes = np.full(count, 1000)
    noise = np.random.default_rng(seed).normal(0, spread, count)
    nats = bits_per_byte * (1 + noise) * 1000 * np.log(2)
    return DocumentLosses(np.arange(count, dtype=np.uint64), sizes, nats, sizes // 4, sizes // 10)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pairs(accuracy, *, chosen=0.0, count=40, name="rewards/accuracies"):
    """Figures of one evaluation of held-out pairs. The log-probability is -200: a reward of 0 is the reference's."""
    figures = {
        "examples": count,
        "loss": 0.7,
        name: accuracy,
        "rewards/chosen": chosen,
        "logps/chosen": -200.0,
    }
    return {f"eval_pairs_{key}": value for key, value in figures.items()}


DOMAIN, GENERAL = (2.0, 1.6), (1.5, 1.53)  # bits per byte before and after


def write_evaluations(folder, texts, examples, *, documents=40, kept=True, noisy=(), quiet=()):
    """The figures before the first step and after it, of as many evaluations as `examples` has."""

    def spread_of(name):
        if name in noisy:
            return 0.2
        return 1e-4 if name in quiet else 0.02

    lines, last = [], len(examples) - 1
    for number, figures in enumerate(examples):
        now = {of_set: ends[min(number, 1)] for of_set, ends in texts.items()}
        bits = {f"eval_{of_set}_bits_per_byte": value for of_set, value in now.items()}
        lines.append({"step": 50 * number, "tokens": 5000 * number, **bits, **figures})
        if kept and number in (0, last):
            found = {
                of_set: losses(value, documents, number, spread_of(of_set))
                for of_set, value in now.items()
            }
            save_losses(folder / "held_out" / f"step-{50 * number}.npz", found)
    write_lines(folder / "metrics.jsonl", lines)


@pytest.fixture
def run(tiny_recipe, corpus, tmp_path):
    """Write a finished run's folder, as far as the verdict reads it."""

    def write(
        name="run",
        *,
        examples=({}, {}),
        retain=True,
        skipped=0,
        domain=DOMAIN,
        general=GENERAL,
        **how,
    ):
        sets = [
            {"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")
        ]
        evaluation = {"perplexity": sets, "retain": {"general": None} if retain else {}}
        sections = {
            **tiny_recipe,
            "stage": "cpt",
            "model": {"path": "my/base"},
            "evaluation": evaluation,
        }
        recipe = load_recipe(write_recipe(sections, tmp_path / "r.yaml"))
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        texts = {
            name: ends for name, ends in {"domain": domain, "general": general}.items() if ends
        }
        write_evaluations(folder, texts, examples, **how)
        write_lines(folder / "status.json", [{"state": "finished", "step": 50}])
        write_lines(
            folder / "events.jsonl",
            [{"kind": "spike_skipped", "step": step} for step in range(skipped)],
        )
        return folder

    return write


WITH_REFERENCE = [pairs(0.0), pairs(0.9)]
NO_TEXTS = {"domain": None, "general": None}
RUNS = {  # what happened -> the run, and whether it worked
    "the domain was learned at a price": ({}, True),
    "the domain became worse": ({"domain": (2.0, 2.2)}, False),
    "the domain became much worse": ({"domain": (2.0, 2.6)}, False),
    "no change": ({"domain": (2.0, 2.001)}, False),
    "no change is visible": ({"domain": (2.0, 2.001), "noisy": ["domain"]}, None),
    "both became slightly worse": (
        {"domain": (2.0, 2.01), "general": (1.5, 1.51), "quiet": ["domain", "general"]},
        False,
    ),
    "both became slightly better": (
        {"domain": (2.0, 1.99), "general": (1.5, 1.49), "quiet": ["domain", "general"]},
        False,
    ),
    "losses are no numbers": ({"domain": (2.0, np.nan), "general": (1.5, np.nan)}, False),
    "one document of each": ({"documents": 1}, None),
    "general text was kept": ({"general": (1.5, 1.5005)}, True),
    "general text may be worse": ({"general": (1.5, 1.5005), "noisy": ["general"]}, True),
    "general text became better": ({"general": (1.5, 1.2)}, True),
    "the losses of documents were not kept": ({"kept": False}, None),
    "no general text was followed": ({"retain": False, "general": None}, True),
    "nothing was held out": (NO_TEXTS, None),
    "3 documents all became better": (
        {"domain": (2.0, 1.0), "general": (1.5, 1.0), "documents": 3},
        None,
    ),
    "6 documents all became better": (
        {"domain": (2.0, 1.0), "general": (1.5, 1.0), "documents": 6},
        None,
    ),
    "pairs were learned and text lost": ({"domain": (1.6, 1.7), "examples": WITH_REFERENCE}, True),
    "pairs were unlearned, without texts": (
        {**NO_TEXTS, "examples": [pairs(0.0), pairs(0.2)]},
        False,
    ),
    "pairs are at chance": ({**NO_TEXTS, "examples": [pairs(0.0), pairs(0.55)]}, None),
    "pairs were not learned": ({**NO_TEXTS, "examples": [pairs(0.0), pairs(0.35)]}, False),
    "5 pairs": ({**NO_TEXTS, "examples": [pairs(0.0, count=5), pairs(1.0, count=5)]}, None),
    "pairs without a reference": (
        {**NO_TEXTS, "examples": [pairs(0.25, chosen=-9.0), pairs(0.5, chosen=-8.0)]},
        None,
    ),
    "a reward model": (
        {"examples": [pairs(0.8, name="accuracy"), pairs(0.9, name="accuracy")]},
        True,
    ),
    "pairs that new weights order": (
        {"examples": [pairs(1.0, name="accuracy"), pairs(1.0, name="accuracy")]},
        None,
    ),
    "prompts": (
        {
            **NO_TEXTS,
            "examples": [{"eval_p_examples": 8, "eval_p_reward": value} for value in (0.2, 0.7)],
        },
        None,
    ),
    "prompts are answered worse": (
        {
            **NO_TEXTS,
            "examples": [{"eval_p_examples": 8, "eval_p_reward": value} for value in (0.7, 0.2)],
        },
        None,
    ),
    "a tenth of the steps was skipped": ({"skipped": 5}, True),
}


def measured_afterwards():
    against = Difference(0.34, 0.4, 0.06, 0.02, 0.1, 181)
    changes = Transitions(
        9, 20, (0.03, 0.0, 0.11), (0.1, 0.02, 0.18), 0.25, ["a.jsonl:3: the melting point of tin"]
    )
    score = ScoreReport(
        "domain cloze", "accuracy", 0.4, (0.3, 0.5), 181, against=against, transitions=changes
    )
    hit = Hit("code", "a.jsonl:17", "domain", "h.jsonl:3", "x y", 0.6)
    contamination = Contamination({"code": 1631}, {"code": {"domain": 1}}, [hit], 3, 181, 2)
    return {
        "evaluation": EvaluationReport("m", "b", [], [score], []),
        "contamination": contamination,
    }


def reported_case():
    """20 documents, one of which holds 44 % of the bytes; the other 19 got worse, and the interval is very wide."""
    sizes = np.full(20, 1000)
    sizes[0] = 15_000
    draw = np.random.default_rng(3)
    changes = np.where(np.arange(20) == 0, -0.01, 0.12 + draw.normal(0, 0.03, 20))
    before = DocumentLosses(
        np.arange(20, dtype=np.uint64), sizes, 1.0 * sizes, sizes // 4, sizes // 10
    )
    return bits_per_byte_difference([before], [replace(before, nats=(1 + changes) * sizes)])


def whole_page(run):
    """Of a run of which everything was measured."""
    folder = run(examples=[pairs(0.0), *[pairs(0.9)] * 29], noisy=["general"], skipped=1)
    dropped = {"contaminated: domain": 2, "contaminated: quiz": 1, "length": 9}
    sources = {
        name: {"documents": 1100, "share": share, "licence": licence, "dropped": dropped}
        for name, share, licence in (("code", 0.7, "MIT"), ("prose", 0.3, None))
    }
    (folder / "inputs.json").write_text(json.dumps({"data": {"sources": sources}}))
    texts = {0: " is a|b", 1450: "(x):\n    return x"}
    samples = [
        {"step": step, "prompt": "def f", "continuation": text} for step, text in texts.items()
    ]
    write_lines(folder / "samples.jsonl", samples)
    write_lines(
        folder / "status.json", [{"state": "finished", "step": 50, "stopped": "stopped at step 50"}]
    )
    not_run = [NotRun("serving", "no GPU")]
    verdict = verdict_of_run(folder, **measured_afterwards(), not_run=not_run, serve="cpt serve x")
    return verdict_page(verdict)


def test_a_run_worked_only_where_its_figures_show_it_and_says_it_in_the_approved_words(
    run, tmp_path
):
    parts = []
    for name, (changes, worked) in RUNS.items():
        verdict = verdict_of_run(run(name, **changes), serve="cpt serve x")
        assert verdict.worked is worked, name
        missing = ", ".join(one.what for one in verdict.not_run)
        parts.append(
            f"{name}:\n{verdict.headline()}\n{verdict.next_step()}\nNot run: {missing}. Serve: {verdict.serve}.\n"
        )
    parts += [f"one large document:\n{general_sentence(reported_case())}\n", whole_page(run)]
    found = "\n".join(parts).replace(str(tmp_path), "RUNS")
    check_approved(found, APPROVED)


def test_documents_that_agree_outvote_a_long_one_and_the_sentence_says_which(run):
    found = reported_case()
    assert found.outcome() == "worse" and found.low < 0 < found.high
    assert found.num_worse == 19 and found.largest_share == pytest.approx(0.44, abs=0.01)
    assert "19 of 20 documents became worse" in general_sentence(found)
    assert "one document, with 44 % of the bytes, became 1.0 % better" in disagreement(found)
    verdict = verdict_of_run(run())
    dominated = replace(verdict, sets=[replace(one, difference=found) for one in verdict.sets])
    assert "one document has 44 % of the bytes" in verdict_page(dominated)
    assert "of the bytes" not in verdict_page(verdict)


def compared(typical, of_all, long_change=0.0, **more):
    """40 documents of 2 bits per byte; the relative change of one document, of all bytes, and of the longest."""
    change, low, high = of_all
    return Difference(
        before=2.0,
        after=2 + 2 * change,
        difference=2 * change,
        low=2 * low,
        high=2 * high,
        items=40,
        negligible=0.04,
        typical=None if typical is None else RelativeChange(*typical),
        long_documents=LongDocuments(documents=3, share=0.5, change=long_change),
        **more,
    )


WORSE, BETTER, OPEN = (0.05, 0.04, 0.06), (-0.05, -0.06, -0.04), (0.01, -0.03, 0.05)


@pytest.mark.parametrize(
    ("typical", "of_all", "long_change", "disagrees"),
    [
        (WORSE, WORSE, -0.1, False),
        (WORSE, BETTER, 0.1, True),
        (BETTER, WORSE, -0.1, True),
        (WORSE, OPEN, 0.1, False),
        (WORSE, OPEN, -0.1, True),
        (BETTER, (-0.01, -0.05, 0.03), 0.1, True),
        (BETTER, (-0.01, -0.05, 0.03), -0.1, False),
        (OPEN, OPEN, -0.1, False),
        (OPEN, BETTER, 0.1, True),
        (None, BETTER, 0.1, False),
    ],
)
def test_all_bytes_are_explained_where_they_or_the_long_documents_contradict_the_documents(
    typical, of_all, long_change, disagrees
):
    text = disagreement(compared(typical, of_all, long_change))
    assert bool(text) is disagrees
    if disagrees:
        ends = f"{100 * of_all[1]:+.1f} to {100 * of_all[2]:+.1f} %"
        more = "more" if of_all[0] > 0 else "fewer"
        worse = "worse" if long_change > 0 else "better"
        assert text == (
            f"All documents together need {100 * abs(of_all[0]):.1f} % {more} bits ({ends}):"
            f" the 3 longest documents, with 50 % of the bytes, became 10.0 % {worse}."
        )


def test_without_documents_to_pair_the_change_is_per_byte():
    text = "General text became 5.0 % better per byte (95 % interval 4.0 to 6.0 %)."
    assert general_sentence(compared(None, BETTER)) == text


def test_documents_that_do_not_agree_decide_nothing_where_one_has_much_of_the_bytes():
    doubt = "Whether it forgot is unknown: one document has 60 % of the bytes, and the others do not agree"
    found = compared(OPEN, OPEN, largest_share=0.6, num_worse=25)
    evidence = "(95 % interval -3.0 to +5.0 % per document; 25 of 40 documents became worse)"
    text = general_sentence(found)
    assert text.startswith(f"{doubt} {evidence}.")
    assert text.endswith(" Hold out about 1,400 documents instead of 40 to decide it.")


def test_losses_that_cannot_be_read_are_reported_and_leave_a_verdict_without_intervals(run):
    folder = run()
    path = folder / "held_out" / "step-50.npz"
    path.write_bytes(path.read_bytes()[:100])
    verdict = verdict_of_run(folder)
    assert [(one.name, one.difference) for one in verdict.sets] == [
        ("domain", None),
        ("general", None),
    ]
    damaged = read_events(folder)[-1]
    assert "The verdict lacks intervals: " in damaged["message"] and str(path) in damaged["message"]


def test_copies_of_held_out_text_that_were_not_dropped_come_before_any_other_step(run):
    folder = run(general=(1.5, 1.5))
    contamination = Contamination({"code": 9}, {"code": {"domain": 2}}, [], 3, 40, 2)
    for dropped, has_copies in ((1, True), (2, False)):
        sources = {"code": facts({"contaminated: domain": dropped})}
        (folder / "inputs.json").write_text(json.dumps({"data": {"sources": sources}}))
        verdict = verdict_of_run(folder, contamination=contamination)
        assert verdict.has_copies is has_copies and verdict.is_usable is not has_copies
        assert ("remove the copies" in verdict.next_step()) is has_copies


def test_general_text_of_which_only_a_gain_is_excluded_names_the_loss_that_is_possible():
    difference = Difference(1.0, 1.01, 0.01, -0.005, 0.05, items=40, negligible=0.02)
    assert difference.outcome() == "no change found"
    assert "a loss of up to 5.0 % is possible" in general_sentence(difference)


def test_the_documents_that_became_worst_come_first_and_better_ones_are_not_listed(run):
    domain, general = verdict_of_run(run(domain=(2.0, 1.0))).sets
    assert (
        domain.worst == []
        and len(general.worst) == 3
        and all(len(one.hash) == 16 for one in general.worst)
    )
    changes = [one.change for one in general.worst]
    assert (
        changes == sorted(changes, reverse=True)
        and min(changes) > 0.03
        and general.worst[0].where is None
    )


@pytest.mark.parametrize(
    ("low", "high", "items", "needed"),
    [(-0.01, 0.05, 8, 37), (-0.005, 0.025, 30, 140), (-0.04, 0.05, 40, 740)],
)
def test_the_advised_number_of_documents_decides_at_the_change_that_was_seen(
    low, high, items, needed
):
    """N = items x (1.43 x half width / distance)^2; the distance is to 0 or to the margin, the larger one."""
    change = (low + high) / 2
    found = Difference(1.0, 1 + change, change, low, high, items=items, negligible=0.02)
    assert f"about {needed} documents instead of {items}" in general_sentence(found)


def test_steps_that_were_trained_again_after_they_were_skipped_do_not_count(run):
    folder = run()
    events = [{"kind": "spike_skipped", "step": step} for step in range(1, 49)]
    back = {"kind": "rolled_back", "step": 48, "to_step": 10}  # steps 11 to 48 are trained again
    write_lines(folder / "events.jsonl", [*events, back, *events[20:]])
    assert verdict_of_run(folder).skipped_steps == (38, 50)


def test_the_page_has_the_last_value_that_the_machine_forced_for_a_key(run):
    folder = run()
    events = [
        {"kind": "fallback", "key": "model.fused_loss", "value": False, "reason": reason}
        for reason in ("Triton is missing", "its loss differs by 0.5.")
    ]
    write_lines(folder / "events.jsonl", events)
    verdict = verdict_of_run(folder)
    assert verdict.fallbacks == ["`model.fused_loss` is false, because its loss differs by 0.5."]
    assert f"Fell back: {verdict.fallbacks[0]}" in verdict_page(verdict).splitlines()


@pytest.mark.parametrize(
    ("held", "has_reference", "is_new_head"),
    [
        ([pairs(0.4, chosen=0.004), pairs(0.9, chosen=0.3)], True, False),
        ([pairs(0.4, chosen=-5.0), pairs(0.9, chosen=-4.0)], False, False),
        ([pairs(0.8, chosen=-5.0, name="accuracy"), pairs(0.9, name="accuracy")], False, True),
    ],
)
def test_an_accuracy_is_compared_with_chance_where_the_model_before_could_not_choose(
    tmp_path, held, has_reference, is_new_head
):
    logs = [
        {"step": step, "tokens": step, **figures}
        for step, figures in zip((0, 9), held, strict=True)
    ]
    loss = {"step": 5, "tokens": 5, "loss": 0.5}
    (found,) = read_example_sets(write_lines(tmp_path / "metrics.jsonl", [logs[0], loss, logs[1]]))
    assert (found.has_reference, found.is_new_head) == (has_reference, is_new_head)
    assert found.examples == 40 and found.accuracy[1] == 0.9
    assert found.worked is (True if has_reference or is_new_head else None)
    assert (
        read_example_sets(write_lines(tmp_path / "metrics.jsonl", [loss, logs[1]])) == []
    )  # nothing before it began


def test_a_set_that_was_measured_at_one_end_only_hides_no_other_set(run, tmp_path):
    """Neither of texts nor of examples; the figures are those of the last evaluation."""
    folder = run()
    first, last = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    gone = {"eval_gone_bits_per_byte": 1.0, "eval_old_examples": 5, "eval_old_loss": 1.0}
    new = {"eval_new_bits_per_byte": 1.0, "eval_new_examples": 5, "eval_new_loss": 1.0}
    between = {"step": 20, "tokens": 2000, "eval_domain_bits_per_byte": 9.0, **pairs(0.1)}
    write_lines(
        folder / "metrics.jsonl",
        [{**gone, **first, **pairs(0.0)}, between, {**new, **last, **pairs(0.9, chosen=0.2)}],
    )
    verdict = verdict_of_run(folder)
    assert [(one.name, one.is_general, one.documents) for one in verdict.sets] == [
        ("domain", False, 40),
        ("general", True, 40),
    ]
    assert [one.name for one in verdict.examples] == ["pairs"]
    assert verdict.examples[0].accuracy == (0.0, 0.9) and verdict.examples[0].loss == (0.7, 0.7)
    assert verdict.sets[0].before == pytest.approx(2.0, rel=0.05)
    assert verdict.sets[0].after == pytest.approx(1.6, rel=0.05)
    assert verdict.tokens == 5000 and [one.step for one in verdict.retention] == [0, 20, 50]


def test_domain_sets_that_differ_did_not_work_where_none_of_them_did(run):
    """Whether it is open, where one of them did."""
    verdict = verdict_of_run(run())
    domain = verdict.sets[0]

    def together(*changes):
        found = [
            Difference(2.0, 2.0 + one, one, one - 0.01, one + 0.01, 40, 0.002) for one in changes
        ]
        sets = [
            replace(domain, name=f"set {number}", difference=one)
            for number, one in enumerate(found)
        ]
        mean = sum(changes) / len(changes)
        domains = Difference(2.0, 2.0 + mean, mean, mean - 0.01, mean + 0.01, 80, 0.002)
        return replace(verdict, sets=sets, domain=domains)

    cases = {(-0.5, -0.4): True, (-0.5, 0.4): None, (0.5, 0.4): False}
    assert {changes: together(*changes).worked for changes in cases} == cases
    mixed = together(0.5, 0.0001)
    mixed = replace(
        mixed,
        sets=[
            mixed.sets[0],
            replace(domain, difference=Difference(2.0, 2.0, 0.0, -0.001, 0.001, 40, 0.002)),
        ],
        domain=Difference(2.0, 2.1, 0.1, -0.3, 0.5, 80, 0.002),
    )
    assert mixed.worked is False


def test_a_general_set_that_became_worse_decides_the_next_step_wherever_it_is_listed(run):
    verdict = verdict_of_run(run())
    general = verdict.sets[1]
    negligible = Difference(2.0, 2.0002, 0.0002, 0.0001, 0.0003, 40, 0.002)
    worse = Difference(2.0, 2.2, 0.2, 0.19, 0.21, 40, 0.002)
    sets = [replace(general, name="web", difference=negligible)]
    sets.append(replace(general, name="code", difference=worse))
    for ordered in (sets, sets[::-1]):
        listed = replace(verdict, sets=[verdict.sets[0], *ordered], general=negligible)
        assert "replay more general text" in listed.next_step()


def facts(dropped, **more):
    return {"documents": 11, "share": 0.25, "licence": None, "dropped": dropped, **more}


def test_the_verdict_as_json_has_the_facts_of_the_run(run):
    folder = run()
    dropped = {"contaminated: domain": 2, "contaminated: quiz": 3, "length": 9}
    sources = {"code": facts(dropped, account="11 files"), "prose": facts({}, licence="MIT")}
    left_out = {"domain": "One document was not evaluated.", "general": "Two were not."}
    inputs = {"data": {"sources": sources, "left_out": left_out}}
    (folder / "inputs.json").write_text(json.dumps(inputs))
    lines = [
        (0, "a", "old"),
        (0, "b", "gone"),
        (20, "a", "between"),
        (50, "c", "new"),
        (50, "a", "last"),
    ]
    samples = [dict(zip(("step", "prompt", "continuation"), line, strict=True)) for line in lines]
    write_lines(folder / "samples.jsonl", [*samples, {"step": 50, "prompt": "no continuation"}])
    write_verdict(folder, verdict_of_run(folder, is_complete=True, serve="cpt serve x"))
    found = json.loads((folder / "verdict.json").read_text())
    common = {"documents": 11, "share": 0.25}
    assert found["sources"] == [
        {**common, "name": "code", "licence": None, "decontaminated": 5, "account": "11 files"},
        {**common, "name": "prose", "licence": "MIT", "decontaminated": 0, "account": ""},
    ]
    assert found["left_out"] == [*left_out.values()]
    assert found["samples"] == [{"prompt": "a", "before": "old", "after": "last"}]
    values = ("run", "base", "tokens", "stopped", "serve", "is_complete", "worked", "skipped_steps")
    assert [found[name] for name in values] == [
        *("run", "my/base", 5000, None, "cpt serve x", True, True),
        [0, 50],
    ]
    assert (found["learning_rate"], found["are_documents"]) == (3e-3, True)
    assert [one["outcome"] for one in found["sets"]] == ["better", "worse"]
    assert (
        found["headline"]
        and found["next"]
        and "5 training documents" in ((folder / "verdict.md").read_text())
    )
    write_lines(folder / "samples.jsonl", samples[:2])
    assert verdict_of_run(folder).samples == [], "of the beginning alone"


@pytest.mark.parametrize(
    ("count", "steps"), [(2, []), (3, [0, 1, 2]), (20, [0, 3, 6, 10, 13, 16, 19])]
)
def test_a_course_is_shown_by_points_that_are_spread_evenly(count, steps):
    points = [Point(step, step, {}) for step in range(count)]
    assert [point.step for point in spread_evenly(points, 7)] == steps


def test_a_sample_is_the_start_of_its_text_on_one_line():
    assert sample("a `b`\nc") == "`a 'b' ↵ c`" and sample(" \n ") == "(nothing)"
    assert sample("x" * 200) == f"`{'x' * 200}`" and sample("x" * 201) == f"`{'x' * 200}...`"


def test_on_a_full_disk_the_run_continues_without_a_page(run, tmp_path, caplog):
    folder = run()
    with disk_of_its_own(tmp_path / "disk", "256k") as disk:
        for name in ("recipe.yaml", "metrics.jsonl"):
            shutil.copy(folder / name, disk / name)
        fill(disk)
        write_verdict(disk, verdict_of_run(disk))
        assert "cpt verdict" in caplog.text and not (disk / "verdict.json").exists()
