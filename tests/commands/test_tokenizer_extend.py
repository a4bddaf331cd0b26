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


def test_the_folder_is_a_whole_model_with_a_record_of_what_was_added(cpt_tokenizer, model, text, tmp_path):
    output = tmp_path / "extended"
    code, said = cpt_tokenizer("extend", model, "--text", text, "--add", 12, "--output", output)
    assert (
        code == 0
        and "12 tokens added to 320" in said
        and "8 new tokens took spare rows" in said
        and "328 -> 384 rows" in said
    )
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert (loaded.config.vocab_size, len(tokenizer), len(loaded.get_output_embeddings().weight)) == (384, 332, 384)
    record = json.loads((output / "extension.json").read_text())
    assert [token["id"] for token in record["tokens"]] == [*range(320, 332)]
    assert all("".join(token["pieces"]) == token["token"] for token in record["tokens"])
    assert record["bytes_per_token"]["after"] > record["bytes_per_token"]["before"]
    first = record["tokens"][0]
    assert torch.allclose(loaded.lm_head.weight[320], loaded.lm_head.weight[first["piece_ids"]].mean(0), atol=1e-6)


def test_old_text_in_old_tokens_has_the_logits_that_it_had(cpt_tokenizer, model, text, tmp_path):
    assert cpt_tokenizer("extend", model, "--text", text, "--add", 4, "--output", tmp_path / "extended")[0] == 0
    ids = torch.arange(3, 40)[None]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits[..., :320]
        for folder in (model, tmp_path / "extended")
    )
    assert torch.allclose(before, after, atol=1e-6)


def test_generation_settings_and_chat_template_stay(cpt_tokenizer, model, text, tmp_path):
    GenerationConfig(temperature=0.5, do_sample=True, eos_token_id=2).save_pretrained(model)
    assert cpt_tokenizer("extend", model, "--text", text, "--add", 4, "--output", tmp_path / "extended")[0] == 0
    assert GenerationConfig.from_pretrained(tmp_path / "extended").temperature == 0.5
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "extended").chat_template
        == AutoTokenizer.from_pretrained(model).chat_template
    )


@pytest.mark.parametrize(("add", "why"), [(0, "at least 1 is needed"), (5000, "too little for 5,000 new tokens")])
def test_no_tokens_and_too_many_are_refused_and_leave_nothing(cpt_tokenizer, model, text, tmp_path, add, why):
    code, said = cpt_tokenizer("extend", model, "--text", text, "--add", add, "--output", tmp_path / "extended")
    assert code == 2 and why in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_folder_that_is_there_stays_as_it_is(cpt_tokenizer, model, text):
    code, said = cpt_tokenizer("extend", model, "--text", text, "--add", 4, "--output", model)
    assert code == 2 and "exists already" in said


def test_a_tokenizer_that_is_not_the_models_is_refused(cpt_tokenizer, tokenizer_folder, text, tmp_path):
    model = write_model(tmp_path / "small", tokenizer_folder, tied=True, rows=300)
    code, said = cpt_tokenizer("extend", model, "--text", text, "--add", 4, "--output", tmp_path / "extended")
    assert code == 2 and "ids up to 319, its embedding 300 rows" in said


def test_input_rows_can_be_taught_by_token_distillation(cpt_tokenizer, model, text, tmp_path):
    options = ["--text", text, "--add", 12, "--rows", "token_distillation", "--output", tmp_path / "extended"]
    code, said = cpt_tokenizer("extend", model, *options)
    record = json.loads((tmp_path / "extended" / "extension.json").read_text())["distilled"]
    assert code == 0 and "Token distillation, 15 steps" in said
    assert record["after"] < record["before"]
