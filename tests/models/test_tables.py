"""Defaults of our families, what is counted of every family, and options of adapters, as approved."""

from pathlib import Path

import pytest
from approved import check_approved
from tiny import TINY, tiny_config
from tiny_models import make_tokenizer
from transformers import AutoConfig

from cpt.errors import CptError
from cpt.models.adapters import (
    check_lora_options,
    check_mergeable,
    check_quantization,
    count_lora_parameters,
    lora_options,
    quantization_of,
    reader_of_weights,
)
from cpt.models.config import config_from
from cpt.models.families import FAMILIES
from cpt.models.freezing import freeze_base
from cpt.models.inventory import (
    attention_flops,
    attention_heads,
    build_on_meta,
    count_model_parameters,
    flops_per_token,
    isolates_documents,
    longest_row,
    rows_needed,
    runs_along_the_row,
    state_space_flops,
    vocabulary_size,
)

HERE = Path(__file__).parent
OTHERS = {
    "gemma3_text": {"head_dim": 10, "sliding_window": 7, "num_hidden_layers": 7},
    "opt": {"hidden_size": 24, "ffn_dim": 40, "num_attention_heads": 3, "word_embed_proj_dim": 24},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8},
}
LONG = {"num_hidden_layers": 3, "vocab_size": 101}


def configs():
    for name in TINY:
        if name != "nemotron_h":
            yield name, config_from(tiny_config(name) | {"tie_word_embeddings": False})
        yield f"{name}, tied", config_from(tiny_config(name) | {"tie_word_embeddings": True})
    for name, options in OTHERS.items():
        yield name, AutoConfig.for_model(name, **LONG | options)


@pytest.mark.heavy
def test_what_is_counted_of_a_model_is_as_approved():
    lines = []
    for name, family in FAMILIES.items():
        config, ours = family.config(), family.config.__mro__
        keys = {
            key for one in ours if one.__module__.startswith("cpt.") for key in one.__annotations__
        }
        values = {
            key: getattr(config, key) for key in sorted(keys | {"head_dim"}) if hasattr(config, key)
        }
        lines.append(f"{name}: {values}, {config.rope_parameters if 'gpt2' not in name else ''}")
    for name, config in configs():
        model = build_on_meta(config)
        lines += [
            f"== {name}",
            f"{count_model_parameters(model)}, rows {vocabulary_size(config)}, longest {longest_row(config)}",
            f"apart {isolates_documents(config)}, along the row {runs_along_the_row(model)}, heads"
            f" {attention_heads(config)}, state {state_space_flops(model)}",
            f"attention {[attention_flops(config, length) for length in (0, 5, 64)]}",
        ]
        flops = [flops_per_token(model, 37)]
        for lora, parts in (
            ({"r": 2}, None),
            (None, ["1"]),
            (None, ["ln_f" if "gpt2" in name else "*norm*"]),
        ):
            try:
                frozen = build_on_meta(config)
                freeze_base(frozen, lora, parts)
                flops.append(flops_per_token(frozen, 37))
            except CptError as problem:
                flops.append(str(problem).partition(".")[0])
        lines.append(f"operations {flops}")
    check_approved("\n".join(lines) + "\n", HERE / "approved_models.txt")


ADAPTERS = [
    {},
    {"preset": "cpt"},
    {"preset": "cpt", "r": 5, "modules_to_save": ["embed_tokens"]},
    {"r": 3, "target_modules": ["q_proj"]},
    {"r": 3, "use_dora": True},
    {"r": 3, "init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "eva"},
    {"init_lora_weights": "loftq"},
    {"alora_invocation_tokens": [1]},
    {"method": "loha", "r": 3},
    {"method": "ln_tuning"},
    {"method": "ia3"},
    {"quantize": "nf4"},
    {"quantize": "fp4", "double_quantize": False},
    {"quantize": "int8"},
    {"quantize": "int8", "double_quantize": True},
    {"quantize": "nf4", "init_lora_weights": "olora"},
    {"double_quantize": True},
]


def answer(function, *arguments, **options):
    """Its result, or its error."""
    try:
        return function(*arguments, **options)
    except CptError as problem:
        return f"{type(problem).__name__}: {problem}"


@pytest.mark.heavy
def test_options_of_adapters_are_as_approved(monkeypatch):
    monkeypatch.setattr("cpt.models.adapters.find_spec", lambda _: None)
    lines = []
    for options in ADAPTERS:
        quantized = answer(quantization_of, options)
        sizes = getattr(quantized, "bits", None), getattr(quantized, "bytes_per_weight", None)
        lines += [
            f"== {options}",
            f"{quantized} {sizes}, reads {reader_of_weights(options)}",
            *(f"{answer(check_lora_options, options, zero3=zero3)}" for zero3 in (False, True)),
            *(f"{answer(check_quantization, options, zero3=zero3)}" for zero3 in (False, True)),
        ]
    for family in ("llama", "llama, tied", "gpt2", "nemotron_h", "deepseek_v3"):
        name, _, tied = family.partition(", ")
        model = build_on_meta(config_from(tiny_config(name) | {"tie_word_embeddings": bool(tied)}))
        for options in ADAPTERS[:6] + ADAPTERS[9:12]:
            chosen = answer(lora_options, model, options)
            number = None
            if not isinstance(chosen, str) and not (
                name != "llama" and "target_modules" in options
            ):
                number = answer(count_lora_parameters, model, options)
            lines.append(f"{family}: {options} -> {chosen}, {str(number)[:200]}")
    check_approved("\n".join(lines) + "\n", HERE / "approved_adapters.txt")


def test_what_peft_cannot_merge_is_refused():
    for mergeable in ("LORA", "ADALORA", "LOHA"):
        check_mergeable(mergeable)
    with pytest.raises(CptError, match="PROMPT_TUNING cannot be merged"):
        check_mergeable("PROMPT_TUNING")


def test_rows_are_needed_up_to_the_largest_id():
    tokenizer = make_tokenizer(50)
    assert rows_needed(tokenizer) == 50
    tokenizer.get_vocab = lambda: {"a": 0, "b": 77, "c": 3}
    assert rows_needed(tokenizer) == 78
    tokenizer.get_vocab = dict
    assert rows_needed(tokenizer) == 0
