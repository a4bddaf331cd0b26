import json
import shutil

import pytest
from huggingface_hub import ModelCard
from tiny import write_recipe

from cpt.export.export import write_model_card


@pytest.fixture
def run(tiny_recipe, base_folder, tmp_path):
    """The record of a run that continued a base whose card names its licence."""
    folder, base = tmp_path / "runs" / "tiny", shutil.copytree(base_folder, tmp_path / "base")
    folder.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    tiny_recipe["data"]["sources"].append({"path": "HuggingFaceFW/fineweb-edu"})
    write_recipe({**tiny_recipe, "stage": "cpt", "model": {"path": str(base)}}, folder / "recipe.yaml")
    source = {"documents": 120, "held_out": 0, "tokens": 9747, "share": 0.7, "licence": "CC-BY-4.0"}
    sources = {"domain": source, "general": {**source, "share": 0.3, "licence": None}}
    (folder / "inputs.json").write_text(json.dumps({"data": {"fingerprint": "abc", "tokens": 1, "sources": sources}}))
    lines = [
        {"step": step, "tokens": 64 * step, "eval_chem_bits_per_byte": bits, "eval_chem_loss": 9}
        for step, bits in ((0, 1.5), (4, 1.25), (8, 1.125))
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"step": 8, "loss": 2.0}])))
    return folder


def card_of(run, folder, **options):
    folder.mkdir(exist_ok=True)
    write_model_card(folder, run, "chemist", **options)
    return ModelCard.load(folder / "README.md")  # refuses a header that the Hub would not read


def test_the_header_is_what_the_hub_reads(run, tmp_path):
    data = card_of(run, tmp_path / "export").data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "transformers", "text-generation")
    assert (
        data.datasets == ["HuggingFaceFW/fineweb-edu"] and data.base_model is None
    )  # a folder here is no id of the Hub
    assert [(one.dataset_name, one.metric_type, one.metric_value) for one in data.eval_results] == [
        ("chem", "bits_per_byte", 1.125)
    ]


def test_the_text_tells_data_with_licences_recipe_figures_limits_and_how_to_serve(run, tmp_path):
    text = card_of(run, tmp_path / "export").text
    assert "| domain | CC-BY-4.0 | 70.0% | 120 | 9,747 |" in text and "| general | not stated |" in text
    assert "| chem | 1.5000 | 1.1250 |" in text and "is not stated of: general" in text
    assert "cpt serve export" in text and "learning_rate: 0.003" in text and "window_bytes" not in text


def test_a_checkpoint_has_the_figures_of_its_own_step(run, tmp_path):
    assert "| chem | 1.5000 | 1.2500 |" in card_of(run, tmp_path / "export", step=4).text
    text = card_of(run, tmp_path / "export", step=6).text
    assert "Not evaluated at step 6." in text and "taken at step 6" in text


def test_the_verdict_of_the_runs_end_is_part_of_its_card_but_not_of_a_checkpoints(run, tmp_path):
    (run / "verdict.md").write_text("# It worked\n\n- domain: better\n")
    text = card_of(run, tmp_path / "export").text
    assert "## Verdict\n\n### It worked" in text and "- domain: better" in text
    assert "Verdict" not in card_of(run, tmp_path / "checkpoint", step=4).text


def test_a_record_that_a_crash_cut_is_no_reason_not_to_write_a_card(run, tmp_path):
    for name in ("inputs.json", "metrics.jsonl", "environment.json"):
        (run / name).write_text('{"data": {"finge')
    assert "Not recorded." in card_of(run, tmp_path / "out").text
