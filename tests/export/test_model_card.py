import json
import shutil
from pathlib import Path

import pytest
from approved import check_approved
from huggingface_hub import ModelCard
from tiny import write_recipe

from cpt.export.export import base_licence, write_model_card


@pytest.fixture
def run(tiny_recipe, base_folder, tmp_path):
    """The record of a run that continued a base whose card names its licence."""
    folder, base = tmp_path / "runs" / "tiny", shutil.copytree(base_folder, tmp_path / "base")
    folder.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    paths = ("/data/domain.jsonl", "/data/general.jsonl", "HuggingFaceFW/fineweb-edu")
    tiny_recipe["data"]["sources"] = [{"path": path} for path in paths]
    sections = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(base)},
        "tokenizer": {"path": "/tokenizer"},
    }
    write_recipe(sections, folder / "recipe.yaml")
    source = {"documents": 120, "held_out": 0, "tokens": 9747, "share": 0.7, "licence": "CC-BY-4.0"}
    sources = {"domain": source, "general": {**source, "share": 0.3, "licence": None}}
    (folder / "inputs.json").write_text(
        json.dumps({"data": {"fingerprint": "abc", "tokens": 1, "sources": sources}})
    )
    (folder / "environment.json").write_text(
        '{"versions": {"torch": "2.13.0", "trl": null, "peft": "0.18"}, "git": {"commit": "0123abc"}}'
    )
    lines = [
        {
            "step": step,
            "tokens": 64 * step,
            "eval_chem_bits_per_byte": bits,
            "eval_law_bits_per_byte": 2 * bits + 0.0000123,
            "eval_chem_loss": 9,
        }
        for step, bits in ((0, 1.5), (4, 1.25), (8, 1.125))
    ]
    (folder / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, [*lines, {"step": 8, "loss": 2.0}]))
    )
    return folder


def card_of(run, folder, **options):
    folder.mkdir(exist_ok=True)
    write_model_card(folder, run, "chemist", **options)
    return ModelCard.load(folder / "README.md")  # refuses a header that the Hub would not read


VERDICT = "# It worked\n\nNext: export it\n\n## Held-out\n\n- domain: better\n\nNext: kept\n\nend\n"


def test_the_card_of_a_run_is_as_approved(run, tmp_path):
    (run / "verdict.md").write_text(VERDICT)
    card = str(card_of(run, tmp_path / "export")).replace(str(tmp_path), "HOME")
    check_approved(card, Path(__file__).with_name("approved_card.md"))


def test_the_cards_of_a_checkpoints_adapter_and_of_a_foreign_model_are_as_approved(run, tmp_path):
    (run / "verdict.md").write_text(VERDICT)
    cards = [
        card_of(run, tmp_path / "adapter", step=4, adapter=True),
        card_of(run, tmp_path / ".hidden", step=0),
        card_of(None, tmp_path / "final"),
    ]
    text = "\n\n=====\n\n".join(map(str, cards)).replace(str(tmp_path), "HOME")
    check_approved(text, Path(__file__).with_name("approved_other_cards.md"))


def test_a_model_from_scratch_and_a_base_on_the_hub_have_their_own_headers(
    run, tiny_recipe, tmp_path, monkeypatch
):
    tiny_recipe["description"] = "It reads."
    write_recipe(tiny_recipe, run / "recipe.yaml")
    card = card_of(run, tmp_path / "new")
    assert card.data.tags == ["cpt", "pretraining"] and card.data.base_model is None
    assert "A causal language model, trained from new weights by the run `tiny`" in card.text
    assert "(stage `pretrain`). It reads.\n\n## Data" in card.text
    assert "Licence and limits" not in card.text and "Licence of the base" not in card.text
    paths = ("owner/base", "owner/data", "here/local", "owner/again")
    tiny_recipe |= {"stage": "cpt", "model": {"path": paths[0]}}
    tiny_recipe["data"]["sources"] = [{"path": path} for path in paths[1:]]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "local").mkdir(parents=True)
    write_recipe(tiny_recipe, run / "recipe.yaml")
    card = card_of(run, tmp_path / "hub")
    assert (card.data.base_model, card.data.license) == ("owner/base", None)
    assert card.data.datasets == ["owner/again", "owner/data"]
    assert "Licence of the base: not stated here; read its card" in card.text


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        (None, None),
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: [mit, bsd]\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\nlicense: mit\nmodel-index: unfinished\n---\n", "mit"),
        ("# no header", None),
    ],
)
def test_the_licence_of_a_base_is_that_of_its_card(tmp_path, card, licence):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert base_licence(str(tmp_path)) == licence
    assert base_licence(None) is base_licence("owner/name") is None


def test_a_checkpoint_has_the_figures_of_its_own_step_and_no_verdict(run, tmp_path):
    (run / "verdict.md").write_text("# It worked\n")
    text = card_of(run, tmp_path / "export", step=4).text
    assert "| chem | 1.5000 | 1.2500 |" in text and "at step 4" in text and "Verdict" not in text
    assert "Not evaluated at step 6." in card_of(run, tmp_path / "export", step=6).text


def test_a_record_that_a_crash_cut_still_gives_a_card(run, tmp_path):
    for name in ("inputs.json", "metrics.jsonl", "environment.json"):
        (run / name).write_text('{"data": {"finge')
    assert "Not recorded." in card_of(run, tmp_path / "out").text
