import pytest
import transformers
from packaging.version import parse
from tiny_gguf import read_back, tiny_model, written
from tiny_tokenizers import KINDS, SPECIAL, byte_level
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cpt.errors import CheckpointError
from cpt.exporting.gguf_proof import LlamaCpp, refuse_other_tokens
from cpt.exporting.gguf_tokenizer import CONTROL, UNUSED, USER_DEFINED, vocabulary_of

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama3(**model):
    tokenizer = byte_level(**model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIAL[1], eos_token=SPECIAL[0])


MADE = {
    "gpt-2": KINDS["gpt2"],
    "qwen2": KINDS["qwen2"],
    "llama-bpe": lambda: llama3(ignore_merges=True),
    "dbrx": llama3,
    "default": KINDS["llama2"],
    "older default": KINDS["old_llama2"],
}


@pytest.mark.parametrize("kind", MADE)
def test_the_file_reads_text_as_the_tokenizer_does(kind, tmp_path):
    if kind == "qwen2" and parse(transformers.__version__) < parse("5.18"):
        pytest.skip("transformers 5.17 reads no Llama whose tokenizer has no begin token")
    tokenizer = MADE[kind]()
    model = tiny_model("llama", tokenizer)
    text = written(model, tokenizer, tmp_path / "model.gguf")
    assert vocabulary_of(tokenizer, len(tokenizer)).pre == kind.rpartition(" ")[2]
    assert len(text.ids) > 50 and read_back(tmp_path / "model.gguf", text).shape[0] == len(
        text.ids
    )  # refuses other tokens


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", MADE)
def test_llama_cpp_reads_text_and_added_tokens_as_the_tokenizer_does(kind, tmp_path):
    tokenizer = MADE[kind]()
    text = written(tiny_model("llama", tokenizer), tokenizer, tmp_path / "model.gguf")
    reader = LlamaCpp(tmp_path / "model.gguf", len(text.ids))
    assert ("it puts a space" in refuse_other_tokens(reader, tokenizer, text)) == (kind == "default")
    reader.close()


def test_added_tokens_and_padding_are_marked_as_what_they_are(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_tokens(["kinase"])
    vocabulary = vocabulary_of(tokenizer, len(tokenizer) + 2)
    kinds = dict(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    assert (kinds[tokenizer.bos_token], kinds["kinase"], kinds[f"[PAD{len(tokenizer)}]"]) == (
        CONTROL,
        USER_DEFINED,
        UNUSED,
    )


def test_special_tokens_and_chat_template_are_written(tokenizer_folder, tmp_path):
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    written(tiny_model("llama", tokenizer), tokenizer, tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    found = {
        key: reader.get_field(f"tokenizer.{key}").contents()
        for key in ("ggml.bos_token_id", "ggml.eos_token_id", "chat_template")
    }
    assert list(found.values()) == [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    assert reader.get_field("tokenizer.ggml.add_bos_token").contents() is True


def test_text_that_llama_cpp_would_split_otherwise_is_refused():
    with pytest.raises(CheckpointError, match="no name for the way in which this tokenizer splits"):
        vocabulary_of(KINDS["llama3"](), 400)  # without the rule for 's and 't


def test_a_vocabulary_that_is_no_bpe_is_refused():
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(CheckpointError, match="this one is WordLevel"):
        vocabulary_of(words, 1)
