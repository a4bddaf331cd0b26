"""Which attention a model runs with, and the documents' bounds that `varlen` gets."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny import SHAPE
from tiny_models import tiny_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from cpt.errors import RecipeError, ResourceError
from cpt.models.attention import (
    BOUNDS,
    LONGEST,
    add_document_bounds,
    choose_attention,
    document_bounds,
    hand_over_documents,
    leave_out_cudnn,
    package_kernel,
    plain_attention,
    same_width,
    try_documents_apart,
    varlen_attention,
    wants_bounds,
    why_not_varlen,
)

LLAMA, OPT, MAMBA = (AutoConfig.for_model(name) for name in ("llama", "opt", "mamba2"))
WINDOW_IN_MASK = AutoConfig.for_model(
    "qwen2_moe", **SHAPE, sliding_window=4, use_sliding_window=True
)
FLASH_2, FLASH_3 = "is_flash_attn_2_available", "is_flash_attn_3_available"


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a GPU of this compute capability, with these packages."""

    def pretend(capability, *packages):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
        for name in (FLASH_2, FLASH_3):
            monkeypatch.setattr(f"cpt.models.attention.{name}", lambda name=name: name in packages)

    return pretend


def chosen(wanted="auto", *, config=LLAMA, **options):
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return choose_attention(wanted, model_class, config=config, **{"packed": True, **options})


@pytest.mark.parametrize(
    ("capability", "packages", "options", "expected"),
    [
        (None, (), {}, "sdpa"),
        ((8, 9), (), {}, "varlen"),
        ((9, 0), (FLASH_2,), {}, "varlen"),  # torch's own are the same kernels
        ((9, 0), (FLASH_3,), {}, "varlen_fa3"),
        ((8, 0), (FLASH_3,), {}, "varlen"),  # for Hopper alone
        ((7, 5), (), {}, "sdpa"),
        ((8, 9), (), {"half_precision": False}, "sdpa"),
        ((8, 9), (FLASH_2,), {"packed": False}, "sdpa"),
        ((8, 9), (), {"config": OPT}, "sdpa"),
        ((8, 9), (), {"config": AutoConfig.for_model("llama", attention_dropout=0.1)}, "sdpa"),
        ((8, 9), (), {"config": MAMBA}, "eager"),
    ],
)
def test_auto_takes_the_fastest_that_is_right(on_gpu, capability, packages, options, expected):
    if capability is not None:
        on_gpu(capability, *packages)
    assert chosen(**options) == expected


def test_flash_attn_keeps_the_documents_of_several_rows_apart_by_their_bounds(on_gpu):
    on_gpu((8, 9), FLASH_2)
    assert chosen("flash_attention_2") == "varlen_fa2"
    assert chosen("flash_attention_2", packed=False) == "flash_attention_2"
    with pytest.raises(RecipeError, match="flash_attention_4"):
        chosen("flash_attention_4")


@pytest.mark.parametrize(
    ("capability", "wanted", "options", "error"),
    [
        ((7, 5), "varlen", {}, ResourceError),
        ((8, 9), "varlen", {"half_precision": False}, RecipeError),
        ((8, 9), "varlen", {"config": OPT}, RecipeError),
        ((8, 9), "varlen", {"config": WINDOW_IN_MASK}, RecipeError),
        ((8, 9), "flash_attention_2", {}, ResourceError),
        ((9, 0), "flash_attention_3", {}, ResourceError),
        ((8, 9), "spda", {}, RecipeError),
        ((8, 9), "sdpa", {"config": MAMBA}, RecipeError),
    ],
)
def test_an_attention_that_cannot_run_is_refused(on_gpu, capability, wanted, options, error):
    on_gpu(capability)
    with pytest.raises(error, match=r"model\.attention"):
        chosen(wanted, **options)


WIDE_LATENT = {"qk_nope_head_dim": 248, "qk_rope_head_dim": 8, "q_lora_rank": 8}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"head_dim": 256}, None),
        ("llama", {"head_dim": 258}, "heads of 258 are wider than 256"),
        ("gpt2", {"n_embd": 1024, "n_head": 4, "attn_pdrop": 0.0}, None),
        ("gpt2", {"n_embd": 1028, "n_head": 4, "attn_pdrop": 0.0}, "heads of 257"),
        ("gpt2", {"n_embd": 8, "n_head": 4, "attn_pdrop": 0.25}, "attn_pdrop: 0.0"),
        ("deepseek_v3", WIDE_LATENT, None),
        ("deepseek_v3", {**WIDE_LATENT, "qk_nope_head_dim": 249}, "heads of 257"),
        ("gemma2", {}, "gemma2 is not tested with it"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4}, "its sliding window"),
        ("qwen2_moe", {"use_sliding_window": False}, None),
        ("opt", {}, "opt is not tested with it"),
    ],
)
def test_why_a_model_cannot_use_kernels_with_bounds(family, changes, reason):
    config = AutoConfig.for_model(family, **changes)
    answer = why_not_varlen(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert (answer is None) if reason is None else reason in answer


calls: list[int] = []


@pytest.mark.parametrize(
    ("capability", "has_masks", "is_left_out"),
    [((9, 0), True, True), ((9, 0), False, False), ((8, 9), True, False), ((10, 0), True, False)],
)
def test_cudnn_is_left_out_where_its_gradients_with_masks_are_nan(
    on_gpu, capability, has_masks, is_left_out
):
    on_gpu(capability)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    leave_out_cudnn(has_masks=has_masks)
    is_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert is_enabled is not is_left_out


def counting_attention(module, query, key, value, attention_mask, **kwargs):
    calls.append(module.layer_idx)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def test_the_users_function_runs_in_every_layer_with_equal_logits_of_packed_rows(
    monkeypatch, tmp_path
):
    (tmp_path / "my_attention.py").write_text(
        f"import sys\nsliding = sys.modules[{__name__!r}].counting_attention\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    ids, positions = torch.arange(3, 15)[None], torch.cat([torch.arange(5), torch.arange(7)])[None]
    calls.clear()
    theirs, ours = (
        tiny_model("llama", attention=name).eval()(input_ids=ids, position_ids=positions).logits
        for name in ("sdpa", "my_attention:sliding")
    )
    assert torch.equal(ours, theirs)
    assert calls == [0, 1]


# --- where documents begin and end -----------------------------------------------------------------------------------


def positions_of(*rows):
    return torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    )


@pytest.mark.parametrize("number", [2, 63, 64])
def test_bounds_are_what_transformers_takes_from_the_positions_of_a_row(number):
    positions = positions_of(
        torch.randint(1, 9, (number,), generator=torch.Generator().manual_seed(number)).tolist()
    )
    (theirs, _), _ = prepare_fa_kwargs_from_position_ids(positions)
    bounds = document_bounds(positions)
    assert (
        torch.equal(bounds[: len(theirs)], theirs)
        and (bounds[len(theirs) :] == positions.numel()).all()
    )
    assert len(bounds).bit_count() == 1, "few different shapes"


def test_a_row_that_begins_inside_a_document_ends_the_one_of_the_row_before():
    assert document_bounds(torch.tensor([[0, 1, 2], [3, 4, 0]]))[:4].tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize(
    ("rows", "longest"),
    [
        ([[128, 72], [200]], 256),
        ([[128, 128], [128, 128]], 128),
        ([[129, 71], [7, 193]], 256),
        ([[300], [300]], 512),
        ([[1, 2], [3]], 128),
    ],
)
def test_a_batch_has_the_longest_documents_power_of_two_of_at_least_128(rows, longest):
    positions = positions_of(*rows)
    batch = {"input_ids": positions, "position_ids": positions}
    with_bounds = add_document_bounds(batch)
    assert with_bounds[LONGEST] == longest
    assert torch.equal(with_bounds[BOUNDS], document_bounds(positions))
    assert with_bounds[BOUNDS].dtype == torch.int32
    assert add_document_bounds({**batch, "attention_mask": positions}).keys() == {
        *batch,
        "attention_mask",
    }
    assert add_document_bounds({"position_ids": positions[0]}).keys() == {"position_ids"}
    assert add_document_bounds({}) == {}


def test_bounds_are_repeated_up_to_32_or_a_power_of_two_above_their_number():
    for number, size in ((2, 32), (31, 32), (32, 64), (63, 64), (64, 128)):
        bounds = document_bounds(positions_of([3] * number))
        assert bounds.tolist() == [3 * min(index, number) for index in range(size)]


def test_heads_are_padded_with_zeros_to_one_width_that_8_divides():
    shapes = ((5, 3, 9), (5, 2, 7), (5, 2, 16))
    padded = same_width(*(torch.ones(shape) for shape in shapes))
    assert [tensor.shape[-1] for tensor in padded] == [16, 16, 16]
    assert [int(tensor.sum()) for tensor in padded] == [5 * 3 * 9, 5 * 2 * 7, 5 * 2 * 16]
    assert padded[0][..., :9].all()
    assert [tensor.shape[-1] for tensor in same_width(torch.ones(2, 2, 9))] == [16]


@pytest.mark.parametrize(
    ("options", "scale", "window"),
    [
        ({}, 12**-0.5, None),
        ({"scaling": 0.3, "sliding_window": 9}, 0.3, 9),
        ({"sliding_window": 10}, 12**-0.5, None),  # as long as the row
    ],
)
@pytest.mark.parametrize("rows", [[[4, 6], [3, 7], [10]], [[10], [10], [10]]])
def test_a_kernel_gets_the_tokens_of_all_rows_and_the_numbers_of_the_batch(
    monkeypatch, rows, options, scale, window
):
    monkeypatch.setattr("cpt.models.attention.has_kernel", lambda query, dtype: True)
    given = []

    def kernel(query, key, value, *others):
        given.append((query.shape, key.shape, query.dtype, *others))
        return value.repeat(1, 2, 2)  # wider than it was

    query = torch.randn(3, 4, 10, 12)
    key = torch.randn(3, 2, 10, 12, dtype=torch.bfloat16)
    bounds = document_bounds(positions_of(*rows))
    value = torch.randn(3, 2, 10, 5).bfloat16()
    mask = bounds.expand(1, 1, 128, -1)
    output, weights = varlen_attention(kernel, None, query, key, value, mask, **options)
    expected = value.transpose(1, 2).repeat(1, 1, 2, 1)
    assert weights is None and torch.equal(output, expected)
    ((query_shape, key_shape, dtype, starts, longest, *numbers),) = given
    assert (query_shape, key_shape, dtype) == ((30, 4, 12), (30, 2, 12), torch.bfloat16)
    if len(rows[0]) == 1:
        assert (starts.tolist(), longest) == ([0, 10, 20, 30], 10)
    else:
        assert (starts.tolist(), longest) == (bounds.tolist(), 128)
    assert numbers == [pytest.approx(scale), window]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_batches_bring_bounds_only_where_the_model_hands_them_on(lora):
    assert wants_bounds(tiny_model("llama", attention="varlen", lora=lora))
    assert not wants_bounds(tiny_model("llama", attention="sdpa", lora=lora))


class WithoutKeywords(LlamaForCausalLM):
    def forward(self, input_ids, position_ids=None):
        return super().forward(input_ids, position_ids=position_ids)


def test_a_model_that_takes_no_further_arguments_gets_no_bounds():
    model = WithoutKeywords(AutoConfig.for_model("llama", **SHAPE, attn_implementation="sdpa"))
    model.model.hands_over_documents = True
    assert not wants_bounds(model)
    assert not wants_bounds(torch.nn.Linear(3, 3)) and not wants_bounds(None)


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager", "broken"])
@pytest.mark.parametrize("fails", [True, False])
def test_plain_attention_has_masks_and_then_all_is_as_before(monkeypatch, attention, fails):
    monkeypatch.setitem(AttentionInterface._global_mapping, "broken", pytest.fail)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "broken", sdpa_mask)
    name = "sdpa" if attention == "broken" else attention
    model = tiny_model("llama", attention=name).eval()
    model.set_attn_implementation(attention)
    ids = torch.arange(3, 15)[None]
    positions = positions_of([5, 7])
    expected = tiny_model("llama", attention="eager").eval()(ids, position_ids=positions).logits
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), plain_attention(model):
        assert model.config._attn_implementation == name
        logits = model(ids, position_ids=positions).logits
        torch.testing.assert_close(logits, expected)
        assert not torch.backends.cuda.flash_sdp_enabled()
        _ = 1 / (not fails)
    assert model.config._attn_implementation == attention
    assert vars(model.model).get("hands_over_documents") == (attention == "varlen" or None)


def test_a_kernel_of_flash_attn_gets_padded_heads_of_one_row(monkeypatch):
    given = []

    def kernel(package, query, key, value, *others):
        given.append((package, query.shape, key.shape, value.shape, others))
        return query

    monkeypatch.setattr("cpt.models.attention.flash_attention", kernel)
    query = torch.randn(30, 4, 12)
    key = torch.randn(30, 2, 12)
    value = torch.randn(30, 2, 5)
    output = package_kernel("flash_attention_2", query, key, value, "bounds", 7, 0.3, None)
    assert torch.equal(output[..., :12], query) and output.shape == (30, 4, 16)
    shapes = (1, 30, 4, 16), (1, 30, 2, 16), (1, 30, 2, 16)
    assert given == [("flash_attention_2", *shapes, ("bounds", 7, 0.3, None))]


def test_bounds_of_the_batch_or_of_its_positions_replace_the_mask_of_a_layer():
    model = SimpleNamespace(hands_over_documents=True)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    ids = torch.arange(10).view(2, 5)
    batch = {"position_ids": positions, BOUNDS: document_bounds(positions), LONGEST: 128}
    inputs, kwargs = hand_over_documents(model, (ids,), batch)
    mask = kwargs.pop("attention_mask")
    assert inputs == (ids,) and kwargs.keys() == {"position_ids"}
    assert mask.shape == (1, 1, 128, 32) and torch.equal(mask[0, 0, 7], batch[BOUNDS])
    for given in ({"input_ids": ids}, {"inputs_embeds": torch.zeros(2, 5, 3)}):
        one_row = {**given, "position_ids": positions[:1]}  # of both rows
        _, kwargs = hand_over_documents(model, (), one_row)
        bounds = document_bounds(positions[:1].expand(2, -1))
        assert torch.equal(kwargs["attention_mask"], bounds.expand(1, 1, 5, -1))
    for other in ({"attention_mask": ids}, {"past_key_values": "cache"}, {"cache": "cache"}):
        _, kwargs = hand_over_documents(model, (ids,), {**batch, **other})
        assert kwargs == {"position_ids": positions, **other}
    for unchanged in ({}, {"position_ids": positions[0]}):
        assert hand_over_documents(model, (ids,), unchanged) == ((ids,), unchanged)
    model.hands_over_documents = False
    assert hand_over_documents(model, (ids,), batch)[1].keys() == {"position_ids"}


class OneRow(torch.nn.Module):
    """A model whose logits are those of its embeddings, or of their sum along the row."""

    def __init__(self, vocabulary, leaks):
        super().__init__()
        self.embedding, self.leaks = torch.nn.Embedding(vocabulary, 7), leaks
        self.was_training = []

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids):
        self.was_training.append(self.training)
        values = self.embedding(input_ids)
        if self.leaks == "the row":
            values = values.cumsum(1)
        if self.leaks == "nan":
            values = values * float("nan")
        if self.leaks is None:  # each document is summed on its own, as its positions say
            begins = (position_ids == 0).long().cumsum(1)
            same = (begins[:, :, None] == begins[:, None, :]).tril()
            values = same.float() @ values
        return SimpleNamespace(logits=values)


@pytest.mark.parametrize("vocabulary", [5, 50])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("leaks", [None, "the row", "nan"])
def test_a_model_that_says_it_keeps_documents_apart_is_tried(vocabulary, is_training, leaks):
    model = OneRow(vocabulary, leaks).train(is_training)
    if leaks is None:
        try_documents_apart(model)
    else:
        with pytest.raises(RecipeError, match="OneRow sets `keeps_documents_apart`, but"):
            try_documents_apart(model)
    assert model.was_training == [False] * 3 and model.training is is_training
