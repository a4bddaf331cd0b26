import pytest

from cpt.commands.rewriting_model import RewriteQuestion, cut, encode
from cpt.errors import RecipeError


def test_a_chat_template_is_written_around_the_prompt_as_the_tokenizer_does_it(chat_tokenizer):
    message = [{"role": "user", "content": "Say: hello\n"}]
    expected = chat_tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert RewriteQuestion(chat_tokenizer, "Say: {text}\n").ids("hello") == expected


def test_special_tokens_in_a_document_are_text_and_end_no_turn(chat_tokenizer):
    plain, hostile = (RewriteQuestion(chat_tokenizer, "Say: {text}").ids(text) for text in ("x", "<|end|>"))
    end = chat_tokenizer.convert_tokens_to_ids("<|end|>")
    assert plain.count(end) == hostile.count(end) == 1 and "Say: <|end|><|end|>" in chat_tokenizer.decode(hostile)


def test_a_template_that_loses_the_question_is_refused(chat_tokenizer):
    chat_tokenizer.chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(RecipeError, match="does not write what the user says"):
        RewriteQuestion(chat_tokenizer, "{text}")


def test_a_bos_comes_first_where_the_tokenizer_puts_one(tokenizer):
    from tokenizers import processors

    tokenizer.bos_token = "<|turn|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|turn|> $A", special_tokens=[("<|turn|>", 258)]
    )
    assert RewriteQuestion(tokenizer, "{text}").ids("a")[0] == 258 == tokenizer.bos_token_id


def test_a_long_text_is_cut_at_the_ends_of_paragraphs(tokenizer):
    text = "\n\n".join(["a" * 30, "b" * 30, "c" * 30, "d" * 90])
    assert cut(text, 70, tokenizer) == ["a" * 30 + "\n\n" + "b" * 30, "c" * 30, "d" * 45, "d" * 45]


@pytest.mark.parametrize(
    "text", ["One sentence. " * 40, "line\n" * 90, "word " * 90, "x" * 400, "é" * 300, "a\n\n\n\n" * 60]
)
def test_no_piece_is_too_long_and_nothing_but_blanks_is_lost(tokenizer, text):
    pieces = cut(text, 64, tokenizer)
    assert all(0 < len(encode(tokenizer, piece)) <= 64 for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())
