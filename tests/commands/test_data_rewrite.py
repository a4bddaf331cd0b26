import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture
def model_folder(tmp_path):
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, eos_token_id=256, initializer_range=0.3, **shape)).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


def test_texts_are_made_from_a_source(cpt_data, model_folder, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"body": f"Document {n}."}) + "\n" for n in range(5)))
    words = [
        "rewrite",
        tmp_path / "corpus.jsonl",
        "--text-column",
        "body",
        "--max-documents",
        3,
        "--model",
        model_folder,
        "--output",
        tmp_path / "out",
    ]
    options = [
        "--max-new-tokens",
        12,
        "--cut-off",
        "keep",
        "--min-characters",
        1,
        "--prompt",
        "question_answers",
        "--batch-size",
        2,
    ]
    code, said = cpt_data(*words, *options)
    assert code == 0 and "3 documents, 3 texts asked about; 0 group(s) were there before" in said and "kept" in said
    rows = [json.loads(line) for line in (tmp_path / "out/rewritten-00000.jsonl").read_text().splitlines()]
    assert rows and all(
        row["prompt"] == "question_answers" and row["sampling"]["max_new_tokens"] == 12 for row in rows
    )
    assert "1 group(s) were there before" in cpt_data(*words, *options)[1]
    code, said = cpt_data(*words, *options, "--seed", 7)
    assert code == 2 and "run_seed" in said
