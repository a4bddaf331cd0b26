import pytest
import torch
from tiny_models import make_tokenizer, tiny_config
from transformers import LlamaForCausalLM, Mamba2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cpt.errors import RecipeError, ResourceError
from cpt.models.attention import choose_attention
from cpt.models.build import build_model
from cpt.recipe.schema import Model

calls: list[int] = []


def counting_attention(module, query, key, value, attention_mask, **kwargs):
    calls.append(module.layer_idx)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def test_auto_takes_the_best_that_is_here():
    assert choose_attention("auto", LlamaForCausalLM) == "sdpa"
    assert choose_attention("auto", Mamba2ForCausalLM) == "eager"


def test_auto_takes_flash_attention_only_for_half_precision(monkeypatch):
    monkeypatch.setattr("cpt.models.attention._missing_for_flash", lambda: None)  # as on a GPU with flash-attn
    assert choose_attention("auto", LlamaForCausalLM, half_precision=True) == "flash_attention_2"
    assert choose_attention("auto", LlamaForCausalLM, half_precision=False) == "sdpa"


def test_an_implementation_that_the_model_cannot_run_is_refused():
    with pytest.raises(RecipeError, match="Mamba2ForCausalLM cannot run with `sdpa`"):
        choose_attention("sdpa", Mamba2ForCausalLM)


def test_a_misspelt_implementation_gets_a_suggestion():
    with pytest.raises(RecipeError, match="Did you mean `sdpa`"):
        choose_attention("spda", LlamaForCausalLM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_flash_attention_without_a_gpu_says_what_is_missing():
    with pytest.raises(ResourceError, match="CUDA GPU"):
        choose_attention("flash_attention_2", LlamaForCausalLM)


def test_the_users_function_runs_in_every_layer_with_equal_logits_of_packed_rows(monkeypatch, tmp_path):
    (tmp_path / "my_attention.py").write_text("from test_attention_calls import counting_attention as sliding\n")
    (tmp_path / "test_attention_calls.py").write_text(f"import sys\ncounting_attention = sys.modules[{__name__!r}].counting_attention\n")
    monkeypatch.syspath_prepend(tmp_path)
    sections = [Model(from_scratch=True, config=tiny_config("llama"), attention=a) for a in ("sdpa", "my_attention:sliding")]
    models = [build_model(section, make_tokenizer(), seed=1).eval() for section in sections]
    ids, positions = torch.arange(3, 15)[None], torch.cat([torch.arange(5), torch.arange(7)])[None]
    calls.clear()
    theirs, ours = (model(input_ids=ids, position_ids=positions).logits for model in models)
    assert torch.equal(ours, theirs)
    assert calls == [0, 1]
