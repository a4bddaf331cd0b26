import json

import pytest
from tiny_extended import extend, write_model

from benchmarks.vocabulary.training import STEP_TOKENS, budgets, read_bits
from cpt.demo.corpus import Corpus


@pytest.fixture
def corpus_of_two(corpus):
    files = {(kind, "train"): corpus / f"{kind}.jsonl" for kind in ("domain", "general")}
    return Corpus(files, {}, {})


def test_the_arms_spend_equal_bytes_or_equal_compute(corpus_of_two, corpus, tokenizer_folder, tmp_path):
    base = write_model(tmp_path / "base", tokenizer_folder, tied=True)
    assert extend(base, corpus / "domain.jsonl", tmp_path / "extended") == 0
    found = budgets(corpus_of_two, base, tmp_path / "extended", 1_000_000)
    own = found["own tokens"]
    assert found["extended, equal bytes"].bytes == pytest.approx(own.bytes, rel=2e-3)
    assert found["extended, equal compute"].flops == pytest.approx(own.flops, rel=2e-3)
    assert found["extended, equal bytes"].tokens < own.tokens
    assert all(budget.tokens % STEP_TOKENS == 0 for budget in found.values())


def test_bits_are_read_before_the_first_and_after_the_last_step(tmp_path):
    lines = [{"eval_domain_bits_per_byte": bits, "eval_general_bits_per_byte": bits + 1} for bits in (3.0, 2.5, 2.0)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [lines[0], {"loss": 1}, *lines[1:]])
    )
    assert read_bits(tmp_path) == ((3.0, 4.0), (2.0, 3.0))
