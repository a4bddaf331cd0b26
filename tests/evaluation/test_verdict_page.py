import json
import shutil
from dataclasses import replace

import pytest
from full_disk import disk_of_its_own, fill
from tiny import write_recipe

from cpt.data.rows.contamination import Contamination, Hit
from cpt.evaluation.paired import Difference, ScoreReport
from cpt.evaluation.scoring import Point
from cpt.evaluation.verdict import (
    ExampleSet,
    NotRun,
    SetVerdict,
    SourceFacts,
    Verdict,
    verdict_of_run,
    verdict_page,
    write_verdict,
)

BETTER, COST = Difference(2.0, 1.6, -0.4, -0.42, -0.38, 181, num_worse=18), Difference(1.5, 1.53, 0.03, 0.02, 0.04, 12)
VERDICT = Verdict(
    run="demo",
    model="runs/demo/final",
    base="my/base",
    tokens=220_160,
    sets=[SetVerdict("general", True, 1.5, 1.53, 12, COST), SetVerdict("code", False, 2.0, 1.6, 181, BETTER)],
    domain=BETTER,
    general=COST,
    sources=[SourceFacts("code", 1631, 0.7, "PSF-2.0", 4), SourceFacts("prose", 1136, 0.3, None)],
    domain_test=[
        ScoreReport(
            "code cloze", "accuracy", 0.4, (0.3, 0.5), 181, against=Difference(0.34, 0.4, 0.06, 0.02, 0.1, 181)
        )
    ],
    contamination=Contamination(
        {"code": 1631}, {"code": {"code": 1}}, [Hit("code", "a.jsonl:17", "code", "h.jsonl:3", "x y", 0.6)], 3, 181, 2
    ),
    retention=[Point(step, step * 1000, {"code": 2.0, "general": 1.5}) for step in range(30)],
    samples=[{"prompt": "def f", "before": " is a|b", "after": "(x):\n    return x"}],
    not_run=[NotRun("benchmarks", "not asked for")],
    serve="cpt serve runs/demo",
)


def test_the_page_has_everything_on_it():
    page = verdict_page(VERDICT)
    assert page.startswith(
        "# Verdict on demo\n\n**It worked: on held-out domain text the model needs 20.0 % (95 % interval 19.0 to"
        " 21.0 %)"
    )
    assert "| code | domain | 181 | 2.0000 | 1.6000 | -20.0 % | -21.0 to -19.0 % | 10 % | better |" in page
    assert "| general | general | 12 | 1.5000 | 1.5300 | +2.0 % | +1.3 to +2.7 % |  | worse (few) |" in page
    assert page.index("| code | domain") < page.index("| general | general")
    assert "| code cloze | accuracy | 181 | 0.340 | 0.400 | +0.020 to +0.100 | better |" in page
    assert "| code | 1,631 | 70.0 % | PSF-2.0 |" in page and "| prose | 1,136 | 30.0 % | not given |" in page
    assert (
        "- `a.jsonl:17` (code): 60% of code, `h.jsonl:3`" in page
        and "2 of fewer than 8 words were not searched for" in page
    )
    assert "4 training documents were left out for it." in page
    assert "- benchmarks: not asked for." in page and "```\ncpt serve runs/demo\n```" in page
    assert "| 29,000 | 2.0000 | 1.5000 |" in page
    assert "| `def f` | ` is a\\|b` | `(x): ↵     return x` |" in page


def test_the_table_and_the_sentence_agree_where_only_a_gain_of_general_text_is_excluded():
    open_loss = Difference(1.5, 1.51, 0.01, -0.01, 0.09, 40, negligible=0.03, num_worse=20)
    verdict = replace(VERDICT, sets=[replace(VERDICT.sets[0], difference=open_loss)], general=open_loss)
    assert (
        open_loss.outcome() == "not better"
        and "| 50 % | unknown |" in verdict_page(verdict)
        and "is unknown" in verdict.headline()
    )


def test_one_document_with_much_of_the_bytes_is_warned_of():
    domain = replace(BETTER, largest_share=0.44)
    page = verdict_page(replace(VERDICT, sets=[replace(VERDICT.sets[1], difference=domain)]))
    assert "44 % of the bytes" in page and "44 %" not in verdict_page(VERDICT)


@pytest.fixture
def run(tiny_recipe, corpus, tmp_path):
    """A run's folder with a recipe and two evaluations."""
    sets = [{"path": str(corpus / "held_out.jsonl"), "name": name} for name in ("domain", "general")]
    tiny_recipe["evaluation"] = {"perplexity": sets, "retain": {"general": None}}
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    figures = [
        {"step": step, "tokens": step, "eval_domain_bits_per_byte": 2 - step / 99, "eval_general_bits_per_byte": 1}
        for step in (0, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
    return tmp_path


def test_on_a_full_disk_the_run_goes_on_without_a_page(run, caplog):
    with disk_of_its_own(run / "disk", "256k") as disk:
        for name in ("recipe.yaml", "metrics.jsonl"):
            shutil.copy(run / name, disk / name)
        fill(disk)
        write_verdict(disk, verdict_of_run(disk))
        assert "The verdict is not written: No space left on device. Again: cpt verdict" in caplog.text
        assert not (disk / "verdict.json").exists()


def test_page_and_json_are_written_into_the_runs_folder(run, tmp_path):
    write_verdict(run, verdict_of_run(run, serve="cpt serve x"))
    assert "| 9 | 1.9091 | 1.0000 |" not in (tmp_path / "verdict.md").read_text(), "two evaluations are in the table"
    assert json.loads((tmp_path / "verdict.json").read_text())["sets"][0]["name"] == "domain"


def test_pairs_have_a_table_of_their_own():
    pairs = ExampleSet("pairs", 40, (0.6931, 0.4), (0.0, 0.9), (0.0, 0.5), has_reference=True)
    page = verdict_page(replace(VERDICT, examples=[pairs]))
    assert "| pairs: loss | 40 | 0.6931 | 0.4000 | none |" in page
    assert "| pairs: accuracy | 40 | none | 0.9000 | 0.769 to 0.960 |" in page, (
        "against itself the model before has none"
    )
    assert "| pairs: margin | 40 | 0.0000 | 0.5000 | none |" in page and page.index("pairs: loss") < page.index(
        "| code | domain"
    )
