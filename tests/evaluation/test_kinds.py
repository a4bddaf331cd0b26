"""Which sets are the domain, and how several of them count."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from cpt.evaluation.gain import Gain
from cpt.evaluation.kinds import domain_weights, general_sets, is_written_by_model, written_by_model
from cpt.evaluation.paired import DocumentLosses, bits_per_byte_difference
from cpt.evaluation.sets import data_of_texts, open_evaluation_sets
from cpt.evaluation.verdict import SetVerdict, Verdict
from cpt.recipe.schema import DocumentSource, Recipe

OWN = {"text": "of its own", "number": 3, "model": "base", "model_sha256": "ab", "run_seed": 1}
REWRITTEN = {"text": "of a document", "model": "base", "model_sha256": "ab", "style": "easy"}


def recipe_of(sources, **evaluation):
    return Recipe.model_validate(
        {
            "name": "x",
            "stage": "cpt",
            "model": {"path": "base"},
            "data": {"sequence_length": 64, "sources": sources},
            "budget": {"tokens": 6400, "global_batch_tokens": 64},
            "evaluation": evaluation,
        }
    )


def test_what_is_kept_is_never_the_domain():
    recipe = {
        "data": {
            "sources": [
                {"path": "papers/*.jsonl"},
                {"path": "replay", "replay_kl": 10.0},
                {"path": "x/y.jsonl", "name": "near", "replay_kl": 1},
                {"path": "plain", "replay_kl": None},
            ]
        },
        "evaluation": {"retain": {"web": None, "code": 0.02}},
    }
    inputs = {"data": {"written_by_model": ["own"]}}
    assert general_sets(recipe, inputs) == {"replay", "near", "web", "code", "own"}
    assert general_sets({}, {}) == set(), "a record of another version has no such keys"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".json"])
@pytest.mark.parametrize(
    ("row", "expected"), [(OWN, True), (REWRITTEN, False), ({"text": "a"}, False)]
)
def test_texts_that_a_model_wrote_on_its_own_are_known_by_their_rows(
    tmp_path, suffix, row, expected
):
    path = tmp_path / f"a{suffix}"
    line = json.dumps(row).encode()
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif suffix == ".json":
        path.write_bytes(b"[" + line + b"]")
    else:
        path.write_bytes(gzip.compress(line) if suffix.endswith(".gz") else line)
    assert is_written_by_model(DocumentSource(path=str(path))) is expected
    assert is_written_by_model(DocumentSource(path=str(tmp_path))) is expected


def test_other_sources_were_not_written_by_a_model(tmp_path):
    (tmp_path / "a.txt").write_text("model_sha256")
    (tmp_path / "empty.jsonl").write_text("")
    for path in (tmp_path / "a.txt", tmp_path / "empty.jsonl", tmp_path / "nowhere"):
        assert not is_written_by_model(DocumentSource(path=str(path)))
    sources = [{"path": "HuggingFaceFW/fineweb"}, {"path": "s3://bucket/a.jsonl"}]
    assert written_by_model(recipe_of(sources)) == []


def test_domain_sets_have_the_weights_of_their_sources():
    sources = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]
    recipe = recipe_of(sources, held_out_share=0.1)
    assert domain_weights(recipe, ["b", "a"]) == [1, 3]
    assert domain_weights(recipe, ["a", "exam"]) == [1, 1], "a file of its own has no weight"


def losses(sizes):
    hashes, sizes = np.arange(len(sizes), dtype=np.uint64), np.array(sizes)
    return DocumentLosses(hashes, sizes, 1.0 * sizes, sizes // 4, sizes // 10)


def changed(count, size, change, seed=0, noise=0.005):
    before = losses([size] * count)
    factors = 1 + change + np.random.default_rng(seed).normal(0, noise, count)
    return before, replace(before, nats=before.nats * factors)


def verdict_on(domain, general=(), weights=None):
    """A verdict of these sets: name -> losses before and after."""

    def together(sets):
        sides = list(zip(*sets, strict=True))
        return bits_per_byte_difference(*sides, weights) if sets else None

    sets = [
        SetVerdict(name, name in dict(general), 1, 1, 9, bits_per_byte_difference([one], [other]))
        for name, (one, other) in {**dict(domain), **dict(general)}.items()
    ]
    found = {
        "domain": together(list(dict(domain).values())),
        "general": together(list(dict(general).values())) if general else None,
    }
    facts = {"run": "r", "model": "m", "base": "b", "tokens": 1, "sources": []}
    return Verdict(**facts, sets=sets, **found)


def test_pages_never_outvote_answers():
    """38 long pages became worse and 64 short answers became better: each set gets its own sentence."""
    found = verdict_on({"pages": changed(38, 20_000, 0.05), "answers": changed(64, 300, -0.2)})
    assert found.worked is None
    text = found.headline()
    assert "It did harm: `pages` became 4." in text and "It worked: `answers` became 20." in text
    assert "text like that of the sets that became worse" in found.next_step()
    assert not found.is_usable


@pytest.mark.parametrize(("change", "rate"), [(-0.0003, "ten times higher"), (-0.004, "double")])
def test_a_model_that_hardly_changed_needs_a_much_higher_rate(change, rate):
    found = verdict_on({"pages": changed(40, 1000, change, noise=1e-4)})
    assert found.worked is False and rate in found.next_step()


@pytest.mark.parametrize(("phrases", "doubts"), [(0.9, 1), (0.3, 0)])
def test_a_gain_that_is_mostly_copied_is_doubted_in_the_headline(phrases, doubts):
    found = verdict_on({"pages": changed(40, 1000, -0.2)})
    found = replace(found, gain=[Gain("pages", lines=0.0, phrases=phrases, line="")])
    assert found.headline().count("But most of the gain on `pages`") == doubts


def test_sets_that_agree_get_one_sentence():
    found = verdict_on({"pages": changed(38, 20_000, -0.05), "answers": changed(64, 300, -0.2)})
    assert found.worked is True and found.headline().count("It worked") == 1
    assert "domain text became 12." in found.headline(), "with equal weights"


def test_forgetting_of_one_general_set_is_not_hidden_by_another():
    general = {"prose": changed(40, 1000, 0.06), "code": changed(40, 1000, -0.06, seed=1)}
    found = verdict_on({"domain": changed(40, 1000, -0.1)}, general)
    assert "It forgot: `prose` became" in found.headline()
    assert "Next: replay more general text" in found.next_step()


def test_reported_cases_get_the_right_sentence():
    """43 of 43 documents were worse beside one with 30 % of the bytes; 12 of 12 were worse by 8 %."""
    sizes = [1000] * 42 + [18_000]
    before = losses(sizes)
    factors = np.append(1.034 + np.random.default_rng(0).normal(0, 0.014, 42), 1.001)
    after = replace(before, nats=before.nats * factors)
    found = verdict_on({"domain": changed(40, 1000, -0.1)}, {"general": (before, after)})
    assert "It forgot: general text became 3." in found.headline()
    assert "43 of 43 documents became worse" in found.headline()
    few = verdict_on({"domain": changed(40, 1000, -0.1)}, {"general": changed(12, 1000, 0.08)})
    assert "12 of 12 documents became worse" in few.headline()
    assert few.sets[1].outcome == "worse"


def test_a_run_without_change_says_what_is_excluded():
    found = verdict_on({"domain": changed(40, 1000, 0.0)}, {"general": changed(40, 1000, 0.0)})
    assert found.worked is False
    assert "a gain of more than 0." in found.headline()
    assert "forgetting of more than 0." in found.headline()


def test_a_very_long_document_of_a_file_is_left_out_and_that_is_said(
    tokenizer_folder, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    texts = [f"{number} short text" for number in range(30)] + ["a long text " * 100]
    path = tmp_path / "general.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    held = data_of_texts([f"general={path}"])
    sets = open_evaluation_sets(held, AutoTokenizer.from_pretrained(tokenizer_folder))
    rows = sets["general"].rows
    assert rows.num_documents == 30
    assert "1 of 31 documents not evaluated, longer than 4 average ones (76 % of" in rows.left_out
    assert rows.left_out in caplog.text
    assert [one.text for one in sets["general"].texts()] == texts[:30]
