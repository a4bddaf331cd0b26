import json
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY_LLAMA, write_documents
from transformers import AutoTokenizer, LlamaConfig
from xxhash import xxh3_64_intdigest

from cpt.checkpoints.trained import Trained
from cpt.data.readers.forms import sections_of
from cpt.data.readers.sources import open_source
from cpt.errors import DataError
from cpt.evaluation.kept_losses import DocumentLosses, save_losses
from cpt.exporting.judged_text import MOST_TOKENS, judged_text
from cpt.recipe.schema import Recipe

NO_RUN = Trained(Path("model"), "model", None, None)
CONFIG = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "model_type"})


@pytest.fixture
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def trained(recipe, run):
    return Trained(run, "model", run, Recipe.model_validate(recipe))


def keep_hashes(run, texts):
    """As the run's evaluations keep what they know of each held-out document."""
    hashes = np.array([xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)
    ones, nats = np.ones(len(texts), np.int64), np.ones(len(texts))
    save_losses(run / "held_out" / "step-8.npz", {"domain": DocumentLosses(hashes, ones, nats, ones, ones)})


def test_a_run_is_judged_on_the_documents_that_it_held_out_and_no_others(tiny_recipe, tokenizer, tmp_path):
    sources = [source["path"] for source in tiny_recipe["data"]["sources"]]
    texts = [json.loads(line)["text"] for path in sources for line in Path(path).read_text().splitlines()]
    held_out = texts[3:120:10]
    keep_hashes(tmp_path, held_out)
    text = judged_text(
        trained(tiny_recipe | {"evaluation": {"held_out_share": 0.1}}, tmp_path), tokenizer, CONFIG, None
    )
    assert text.where == "documents that the run `tiny` held out"
    read = [tokenizer.decode(window) for window in text.windows]
    assert len(read) >= len(held_out) and all(any(one in document for document in held_out) for one in read)


def test_a_run_on_conversations_is_judged_on_those_that_it_held_out(tiny_recipe, tokenizer, tmp_path):
    chats = [
        [{"role": "user", "content": f"What is number {n}?"}, {"role": "assistant", "content": f"It is {n}."}]
        for n in range(60)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = {"sequence_length": 64, "sources": [{"path": str(path)}]}
    recipe = tiny_recipe | {"stage": "sft", "data": data, "evaluation": {"held_out_share": 0.1}}
    sft = trained(recipe, tmp_path)
    (source,) = sections_of(sft.recipe)[0].sources
    documents = list(open_source(source, "data.sources[0]"))
    keep_hashes(tmp_path, [document.text for document in documents[5:15]])
    text = judged_text(sft, tokenizer, CONFIG, None)
    assert text.where == "documents that the run `tiny` held out" and len(text.windows) == 10
    assert "What is number 5?" in tokenizer.decode(text.windows[0])


def test_held_out_files_of_their_own_are_read_in_turn(tiny_recipe, tokenizer, tmp_path):
    sets, texts = [], []
    for number, name in enumerate(("domain", "general")):
        path = write_documents(tmp_path / f"{name}.jsonl", 5, seed=number)
        sets.append({"path": str(path), "name": name})
        texts.append([json.loads(line)["text"] for line in path.read_text().splitlines()])
    keep_hashes(tmp_path, texts[0] + texts[1])
    text = judged_text(trained(tiny_recipe | {"evaluation": {"perplexity": sets}}, tmp_path), tokenizer, CONFIG, None)
    assert tokenizer.decode(text.windows[0]) in texts[0][0] and len(text.windows) >= 10


def test_without_held_out_documents_it_is_our_passage_and_said_so(tiny_recipe, tokenizer, tmp_path):
    gone = {"evaluation": {"perplexity": [{"path": str(tmp_path / "gone.jsonl"), "name": "gone"}]}}
    for recipe in (tiny_recipe, tiny_recipe | gone):
        assert "our own passage" in judged_text(trained(recipe, tmp_path), tokenizer, CONFIG, None).where
    assert "our own passage" in judged_text(NO_RUN, tokenizer, CONFIG, None).where


def test_the_users_file_comes_before_all(tiny_recipe, tokenizer, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 20)
    text = judged_text(trained(tiny_recipe, tmp_path), tokenizer, CONFIG, file)
    assert text.where == f"the text of {file}" and text.num_bytes == pytest.approx(len(file.read_text()), abs=30)


def test_windows_are_as_long_as_the_model_reads_and_not_endless(tokenizer, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 500)
    text = judged_text(NO_RUN, tokenizer, CONFIG, file)
    assert max(map(len, text.windows)) <= CONFIG.max_position_embeddings and text.num_predicted < MOST_TOKENS


def test_a_file_of_one_token_or_none_is_refused(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    for name, message in (("short.txt", "fewer than two tokens"), ("gone.txt", "cannot be read")):
        with pytest.raises(DataError, match=message):
            judged_text(NO_RUN, tokenizer, CONFIG, tmp_path / name)
