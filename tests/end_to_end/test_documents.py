"""Documents that are not text are converted, and a recipe trains on what comes out."""

import pytest
import torch
from launching import launch
from tiny import write_recipe
from tiny_documents import PAGE, SENTENCE, chapter, write_docx, write_epub, write_pdf
from transformers import AutoTokenizer

from cpt.cli import main
from cpt.data.build import build_data
from cpt.recipe.load import load_mixture


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """The folder that `cpt data ingest` filled."""
    monkeypatch.setenv("CPT_WORKERS", "1")
    library = tmp_path / "library"
    library.mkdir()
    write_pdf(library / "a.pdf", [[f"{SENTENCE} {page} {line}." for line in range(20)] for page in range(4)])
    write_docx(library / "b.docx")
    write_epub(library / "c.epub", {"1.xhtml": chapter(f"<h1>One</h1><p>{SENTENCE}</p>")})
    (library / "d.html").write_text(PAGE)
    (library / "e.epub").write_text("not a book")
    with pytest.raises(SystemExit) as ended:
        main(["data", "ingest", str(library), "--output", str(tmp_path / "converted"), "--on-bad", "skip"])
    assert ended.value.code == 0
    return tmp_path / "converted"


def test_a_mixture_holds_what_was_converted(converted, tokenizer_folder, tmp_path):
    mixture = write_recipe({"sequence_length": 64, "sources": [{"path": str(converted)}]}, tmp_path / "mixture.yaml")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prepared = build_data(*load_mixture(mixture)[:1], tokenizer, seed=1, cache_dir=tmp_path / "cache")
    assert prepared.sources[0].documents == 4
    rows = range(prepared.num_tokens // 64 + 2)
    text = tokenizer.decode(torch.cat([prepared.rows[number]["input_ids"] for number in rows]))
    assert "# Catalysts" in text and "| Nickel | Margarine |" in text and "# One" in text and SENTENCE in text


@pytest.mark.slow
def test_a_run_trains_on_what_was_converted(converted, tiny_recipe, tmp_path):
    tiny_recipe["data"]["sources"] = [{"path": str(converted)}]
    done = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/tiny/final/model.safetensors").is_file()
