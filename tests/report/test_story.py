import json
import re
import time
from dataclasses import replace

import pytest

from cpt.report.record import read_record
from cpt.report.story import report_page
from cpt.runs.plots import plotly_script

SECTIONS = [
    "What was gained, and what it cost",
    "Domain test and benchmarks",
    "Training",
    "Mixture: asked and realised",
    "Speed and hardware",
    "Memory and speed against the plan",
    "Events",
    "What it writes",
    "Training data",
    "Not run",
    "Use it",
    "The record",
]
JSON_FILES = ["environment.json", "inputs.json", "plan.json", "status.json", "verdict.json"]
LINES_FILES = ["metrics.jsonl", "events.jsonl", "samples.jsonl", "starts.jsonl"]


def sections(page):
    return re.findall("<h2>(.*?)</h2>", page)


def test_a_whole_run_has_all_sections_in_their_order(record):
    page = report_page(record)
    assert sections(page) == SECTIONS and '<p class="lead">It worked' in page
    assert page.index("Domain against general text") < page.index("<h2>Training</h2>")


def test_a_run_that_has_only_begun_has_a_page_too(lone_record):
    assert sections(report_page(lone_record)) == ["Missing in this record", "The record"]


@pytest.mark.parametrize("file", ["recipe.yaml", *JSON_FILES, *LINES_FILES])
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[[[", b"3", b'"x"', b'{"data": 3, "sets": {}, "step": "x"}', b"\xff\x00", b"{" * 9999]
)
def test_rubbish_in_any_file_costs_only_what_that_file_holds(run_folder, file, content):
    (run_folder / file).write_bytes(content)
    found = sections(report_page(read_record(run_folder)))
    assert len(found) >= 6 and "The record" in found


def test_names_prompts_and_samples_stay_text(run_folder):
    bad = "</script><script>alert(1)</script>😀"
    for name in JSON_FILES:
        (run_folder / name).write_text((run_folder / name).read_text().replace('"code', f'"{bad}'))
    (run_folder / "events.jsonl").write_text(json.dumps({"kind": bad, "step": 4, "message": bad}))
    (run_folder / "samples.jsonl").write_text(json.dumps({"step": 0, "prompt": bad, "continuation": bad}))
    record = read_record(run_folder)
    page = report_page(replace(record, verdict={**record.verdict, "headline": bad, "samples": []}))
    assert page.count("&lt;script&gt;alert(1)") > 5 and "<script>alert" not in page and "😀" in page


def test_a_run_of_100000_lines_is_below_8_megabytes_and_made_in_seconds(run_folder):
    line = dict.fromkeys(
        ("loss", "loss_smoothed", "grad_norm", "learning_rate", "mfu", "data_wait", "tokens_per_second"), 1.2345678
    )
    line |= {f"loss_source {number}": 2.3456789 for number in range(8)} | {
        f"reward {number}": 1.1 for number in range(15)
    }
    text = json.dumps(line)[1:]
    (run_folder / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "tokens": {n * 4_194_304}, {text}\n' for n in range(100_000))
    )
    began = time.perf_counter()
    size = len(report_page(read_record(run_folder)).encode())
    assert size < 8e6 and size - len(plotly_script()) < 2.5e6
    assert time.perf_counter() - began < 20
