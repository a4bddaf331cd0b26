"""`cpt tokenizer extend`, `report` and `train`."""

import json

import pytest
import torch
from tiny_extended import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@pytest.fixture
def text(corpus):
    return f"code={corpus / 'domain.jsonl'}"


@pytest.fixture
def model(tokenizer_folder, tmp_path):
    return write_model(tmp_path / "model", tokenizer_folder, tied=False)


@pytest.fixture
def extend(cpt, text, tmp_path):
    """`extend(model)`: the exit code and what was printed; the result is in `tmp_path / "extended"`."""

    def run(model, *options, add=4, output="extended"):
        words = ("--text", text, "--add", add, "--output", tmp_path / output)
        return cpt("tokenizer", "extend", model, *words, *options)

    return run


def test_an_extended_model_has_new_rows_and_a_record_of_them(extend, model, tmp_path):
    code, said = extend(model, add=12)
    assert code == 0 and "328 -> 384 rows" in said
    folder = tmp_path / "extended"
    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert (
        loaded.config.vocab_size,
        len(tokenizer),
        len(loaded.get_output_embeddings().weight),
    ) == (384, 332, 384)
    record = json.loads((folder / "extension.json").read_text())
    assert [token["id"] for token in record["tokens"]] == [*range(320, 332)]
    assert all("".join(token["pieces"]) == token["token"] for token in record["tokens"])
    assert record["bytes_per_token"]["after"] > record["bytes_per_token"]["before"]
    first = record["tokens"][0]
    assert torch.allclose(
        loaded.lm_head.weight[320], loaded.lm_head.weight[first["piece_ids"]].mean(0), atol=1e-6
    )


def test_old_text_in_old_tokens_keeps_its_logits_and_the_model_its_settings(
    extend, model, tmp_path
):
    GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=2).save_pretrained(model)
    assert extend(model)[0] == 0
    folders = (model, tmp_path / "extended")
    ids = torch.arange(3, 40)[None]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits[..., :320] for folder in folders
    )
    assert torch.allclose(before, after, atol=1e-6)
    assert GenerationConfig.from_pretrained(tmp_path / "extended").temperature == 0.5
    templates = {AutoTokenizer.from_pretrained(folder).chat_template for folder in folders}
    assert len(templates) == 1


@pytest.mark.parametrize("add", [0, 5000])
def test_no_tokens_and_too_many_are_refused_and_leave_nothing(extend, model, tmp_path, add):
    assert extend(model, add=add)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_is_not_the_models_is_refused(extend, tokenizer_folder, tmp_path):
    code, said = extend(write_model(tmp_path / "small", tokenizer_folder, tied=True, rows=300))
    assert code == 2 and "300 rows" in said


@pytest.mark.heavy
def test_input_rows_can_be_taught_by_token_distillation(extend, model, tmp_path):
    assert extend(model, "--rows", "token_distillation", add=12)[0] == 0
    record = json.loads((tmp_path / "extended" / "extension.json").read_text())["distilled"]
    assert record["after"] < record["before"]


def test_a_report_compares_two_tokenizers(cpt, tokenizer_folder, text, tmp_path):
    assert (
        cpt(
            "tokenizer",
            "train",
            "--text",
            text,
            "--vocabulary",
            300,
            "--output",
            tmp_path / "small",
        )[0]
        == 0
    )
    words = (
        "tokenizer",
        "report",
        tokenizer_folder,
        "--text",
        text,
        "--against",
        tmp_path / "small",
    )
    found = json.loads(cpt(*words, "--json")[1])
    first, second = (one["texts"][0]["tokens"] for one in found)
    said, vocabulary = cpt(*words)[1], found[1]["vocabulary"]
    assert first < second and f"{100 * (second / first - 1):+.1f} %" in said
    assert (
        f"never seen in these texts: {len(vocabulary['never_seen'])} of {vocabulary['regular']} "
        in said
    )
