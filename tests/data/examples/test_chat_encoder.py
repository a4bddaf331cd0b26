import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.readers.example import CONTROL, transcript
from cpt.data.store.tokenization import DocumentEncoder
from cpt.recipe.schema import Source

SOURCE = Source(path="chats.jsonl", chat="messages")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] |"
    " trim + '<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
PHI = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|im_end|>' + m.content }}{% endfor %}"
WITH_BLOCKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% endfor %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def bytes_tokenizer(tokenizer, template, *, bos=False, eos="<|endoftext|>", strips=False):
    """The tokenizer of bytes with the marks of chats."""
    made = copy.deepcopy(tokenizer)
    made.add_tokens(
        [AddedToken(mark, special=True, normalized=False, rstrip=strips) for mark in MARKS], special_tokens=True
    )
    made.add_tokens(["<think>"])
    made.add_special_tokens({"bos_token": "<s>"})
    made.eos_token, made.chat_template = eos, template
    if bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made


def like_llama_2(template):
    """Blanks are pieces, one is put in front of a text, and `</s>` is vocabulary."""
    characters = [*"▁abcdefghijklmnopqrstuvwxyz[]/<>I|NST:", "\n"]
    vocabulary = {
        token: number
        for number, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *characters])
    }
    merges = [("▁", "a"), ("▁", "b")]
    vocabulary |= {a + b: len(vocabulary) + number for number, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def tokenizers(tokenizer):
    return {
        "chatml": bytes_tokenizer(tokenizer, CHATML),
        "chatml whose turns end with eos": bytes_tokenizer(tokenizer, CHATML, eos="<|im_end|>"),
        "llama 3": bytes_tokenizer(tokenizer, LLAMA_3, bos=True),
        "llama 3, ended by its turn": bytes_tokenizer(tokenizer, LLAMA_3, bos=True, eos="<|eot_id|>"),
        "a bos that the template forgets": bytes_tokenizer(tokenizer, CHATML, bos=True),
        "a bos that only the template writes": bytes_tokenizer(tokenizer, LLAMA_3),
        "blocks of what is generated": bytes_tokenizer(tokenizer, WITH_BLOCKS),
        "no control tokens": bytes_tokenizer(tokenizer, PLAIN),
        "tokens that swallow blanks": bytes_tokenizer(tokenizer, PHI, strips=True),
        "llama 2": like_llama_2(LLAMA_2),
    }


NAMES = [
    "chatml",
    "chatml whose turns end with eos",
    "llama 3",
    "llama 3, ended by its turn",
    "a bos that the template forgets",
    "a bos that only the template writes",
    "blocks of what is generated",
    "no control tokens",
    "tokens that swallow blanks",
    "llama 2",
]
CONTENT = (
    st.text("ab \n<>|é😀")
    | st.text().filter(lambda text: not set(CONTROL) & set(text))
    | st.sampled_from(["<think>\na</think>", "  ", "\n\na\n"])
)
CHATS = st.lists(st.lists(CONTENT, min_size=1, max_size=4), min_size=1, max_size=4)


def messages(contents):
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


def texts_of(chats):
    return [transcript(messages(contents), "") for contents in chats]


def documents(encoder, texts):
    ids, lengths = encoder.encode(texts)
    assert ids.dtype == encoder.dtype and lengths.sum() == len(ids)
    return [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]


def expected(tokenizer, contents, adds_bos):
    """What transformers gives, with BOS and EOS where they are missing."""
    ids = tokenizer.apply_chat_template(messages(contents), tokenize=True, return_dict=False)
    written = tokenizer.apply_chat_template(messages(contents), tokenize=False)
    before = [tokenizer.bos_token_id] if adds_bos and ids[:1] != [tokenizer.bos_token_id] else []
    return before + ids + ([] if written.rstrip().endswith(tokenizer.eos_token) else [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", NAMES)
@given(chats=CHATS)
def test_the_ids_are_those_of_transformers(tokenizers, name, chats):
    tokenizer = tokenizers[name]
    encoder = ExampleEncoder(DocumentEncoder(tokenizer), SOURCE, "data.sources[0]")
    chats = [
        contents for contents in chats if not any(mark in text for text in contents for mark in encoder.control_tokens)
    ] or [["a"]]
    wanted = [expected(tokenizer, contents, encoder.bos is not None) for contents in chats]
    assert documents(encoder, texts_of(chats)) == wanted


def test_a_template_with_todays_date_writes_the_same_every_day(tokenizer):
    dated = bytes_tokenizer(
        tokenizer, "\n{{ '[' + strftime_now('%d %b %Y') + strftime_now('%Y-%m-%d') + ']' }}{{ messages[0].content }}"
    )
    (ids,) = documents(ExampleEncoder(DocumentEncoder(dated), SOURCE, ""), texts_of([["a"]]))
    assert dated.decode(ids) == "\n[26 Jul 20242024-07-26]a<|endoftext|>"
