import json

from transformers import AutoTokenizer

from benchmarks.vocabulary.lengths import bytes_per_token, measure_lengths
from cpt.demo.corpus import Corpus


def write(folder, texts):
    files = {}
    for (kind, part), lines in texts.items():
        files[kind, part] = folder / f"{kind}-{part}.jsonl"
        files[kind, part].write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return Corpus(files, {}, {})


def test_more_tokens_hold_more_bytes_of_what_they_were_learned_for(tokenizer_folder, tmp_path):
    code = ["def colour_of(self): return self.colour\n" * 3, "class Colour: pass\n"]
    texts = {("domain", "train"): code, ("domain", "held_out"): code[:1], ("general", "held_out"): ["the model reads"]}
    rows = measure_lengths(write(tmp_path, texts), {"tiny": tokenizer_folder}, sizes=(4, 12))
    assert [row["added"] for row in rows] == [0, 4, 12]
    assert rows[0]["domain"] < rows[1]["domain"] < rows[2]["domain"]


def test_a_documents_end_tokens_do_not_count(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert bytes_per_token(tokenizer, ["the model"]) == 9 / len(
        tokenizer("the model", add_special_tokens=False)["input_ids"]
    )
