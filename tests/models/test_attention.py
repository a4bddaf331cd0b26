import pytest
import torch
from tiny_models import make_tokenizer, tiny_config
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, LlamaForCausalLM, Mamba2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cpt.errors import RecipeError, ResourceError
from cpt.models.attention import FLASH, choose_attention
from cpt.models.build import build_model
from cpt.recipe.schema import Model

LLAMA = AutoConfig.for_model("llama")
calls: list[int] = []


def counting_attention(module, query, key, value, attention_mask, **kwargs):
    calls.append(module.layer_idx)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def test_auto_takes_the_best_that_is_here():
    assert choose_attention("auto", LlamaForCausalLM) == "sdpa"
    assert choose_attention("auto", Mamba2ForCausalLM) == "eager"


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a GPU of this compute capability, with these packages."""

    def pretend(capability, *packages):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
        monkeypatch.setitem(FLASH, "flash_attention_2", lambda: "flash-attn 2" in packages)

    return pretend


def chosen(wanted="auto", *, config=LLAMA, **options):
    return choose_attention(
        wanted, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config=config, **{"packed": True, **options}
    )


@pytest.mark.parametrize(
    ("capability", "packages", "options", "expected"),
    [
        ((8, 9), (), {}, "varlen"),
        ((9, 0), ("flash-attn 2",), {}, "varlen"),  # torch's own are the same kernels
        ((7, 5), (), {}, "sdpa"),
        ((8, 9), (), {"half_precision": False}, "sdpa"),
        ((8, 9), ("flash-attn 2",), {"packed": False}, "sdpa"),
        ((8, 9), (), {"config": AutoConfig.for_model("opt")}, "sdpa"),
        ((8, 9), (), {"config": AutoConfig.for_model("llama", attention_dropout=0.1)}, "sdpa"),
        ((8, 9), (), {"config": AutoConfig.for_model("mamba2")}, "eager"),
    ],
)
def test_auto_takes_the_fastest_that_is_right(on_gpu, capability, packages, options, expected):
    on_gpu(capability, *packages)
    assert chosen(**options) == expected


def test_flash_attention_of_packed_rows_is_torchs_own(on_gpu):
    on_gpu((8, 9), "flash-attn 2")
    assert chosen("flash_attention_2") == "varlen"
    assert chosen("flash_attention_2", packed=False) == "flash_attention_2"
    with pytest.raises(RecipeError, match="flash_attention_4"):
        chosen("flash_attention_4")


@pytest.mark.parametrize(
    ("capability", "wanted", "options", "error"),
    [
        ((7, 5), "varlen", {}, ResourceError),
        ((8, 9), "varlen", {"half_precision": False}, RecipeError),
        ((8, 9), "varlen", {"config": AutoConfig.for_model("opt")}, RecipeError),
        ((8, 9), "flash_attention_2", {"packed": False}, ResourceError),
        ((8, 9), "spda", {}, RecipeError),
        ((8, 9), "sdpa", {"config": AutoConfig.for_model("mamba2")}, RecipeError),
    ],
)
def test_what_cannot_run_is_refused(on_gpu, capability, wanted, options, error):
    on_gpu(capability)
    with pytest.raises(error, match="model.attention"):
        chosen(wanted, **options)


def test_the_users_function_runs_in_every_layer_with_equal_logits_of_packed_rows(monkeypatch, tmp_path):
    (tmp_path / "my_attention.py").write_text("from test_attention_calls import counting_attention as sliding\n")
    (tmp_path / "test_attention_calls.py").write_text(
        f"import sys\ncounting_attention = sys.modules[{__name__!r}].counting_attention\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sections = [
        Model(from_scratch=True, config=tiny_config("llama"), attention=a) for a in ("sdpa", "my_attention:sliding")
    ]
    models = [build_model(section, make_tokenizer(), seed=1).eval() for section in sections]
    ids, positions = torch.arange(3, 15)[None], torch.cat([torch.arange(5), torch.arange(7)])[None]
    calls.clear()
    theirs, ours = (model(input_ids=ids, position_ids=positions).logits for model in models)
    assert torch.equal(ours, theirs)
    assert calls == [0, 1]
