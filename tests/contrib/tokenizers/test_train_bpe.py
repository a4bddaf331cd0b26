import pytest
from tokenizers import pre_tokenizers

from cpt.contrib.tokenizers.train_bpe import BYTES, SPECIAL_TOKENS, train_bpe, untrained_tokenizer
from cpt.errors import DataError, RecipeError

TEXT = [
    f"def {word}_{other}(first, second):\n    return first + {word} * {other}\n"
    for word in ["one", "two", "three", "four"]
    for other in ["nine", "eight", "seven", "six", "five"]
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_bpe(TEXT, 300, tmp_path_factory.mktemp("tokenizer") / "new" / "folder")


def test_the_vocabulary_has_the_asked_size_with_the_special_tokens_first(trained):
    assert len(trained) == 300
    assert trained.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert (trained.pad_token_id, trained.bos_token_id, trained.eos_token_id) == (0, 1, 2)
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(trained.get_vocab())


def test_digits_are_alone_and_words_take_the_space_before_them():
    pieces = untrained_tokenizer().pre_tokenizer.pre_tokenize_str("born in 2024")
    assert [piece for piece, _ in pieces] == ["born", "Ġin", "Ġ", "2", "0", "2", "4"]


def test_the_chat_template_frames_each_turn_and_marks_the_assistants(trained):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    text = trained.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    encoded = trained.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        token
        for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mask
    ]
    assert trained.decode(marked) == "Yes?<|im_end|>"


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="259"):
        train_bpe(TEXT, BYTES + 2, tmp_path)


@pytest.mark.parametrize(
    ("documents", "said"), [([], "text"), (["", "  \n"], "text"), (["a few words"], r"2\d\d")]
)
def test_too_little_text_is_refused_with_the_size_it_reached(tmp_path, documents, said):
    with pytest.raises(DataError, match=said):
        train_bpe(documents, 4000, tmp_path)
    assert not list(tmp_path.iterdir())
