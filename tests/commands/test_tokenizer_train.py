from transformers import AutoTokenizer


def test_a_tokenizer_is_trained_on_named_texts(cpt_tokenizer, corpus, tmp_path):
    text = f"general={corpus / 'general.jsonl'}"
    code, said = cpt_tokenizer("train", "--text", text, "--vocabulary", 300, "--output", tmp_path / "new")
    assert code == 0 and "300 tokens, learned from general: 120 documents" in said
    assert len(AutoTokenizer.from_pretrained(tmp_path / "new")) == 300
