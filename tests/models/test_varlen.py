"""Packed documents give what each gives alone, in all models that are said to be proven: by masks, by documents'
bounds, and by torch's kernel as it is called."""

import pytest
import torch
from tiny import SHAPE, TINY, tiny_config
from tiny_models import assert_same_gradients, gradients, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cpt.errors import RecipeError
from cpt.models import attention
from cpt.models.attention import (
    BOUNDS,
    PROVEN,
    VARLEN,
    WINDOW_IN_MASK_ONLY,
    attend_each,
    document_bounds,
    keep_documents_apart,
    register_varlen,
    torch_kernel,
)
from cpt.models.families import register_families
from cpt.models.inventory import isolates_documents

LENGTHS = ((9, 4, 1, 10), (16, 8))  # of the documents in two rows
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
IDS = torch.randint(3, 96, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
LABELS = torch.where(POSITIONS == 0, -100, IDS)
BATCH = {"input_ids": IDS, "position_ids": POSITIONS, "labels": LABELS}
WHOLE = {**BATCH, "position_ids": torch.arange(24).repeat(2, 1)}  # each row is one document

# --- logits of every proven model ------------------------------------------------------------------------------------

WITHOUT_GROUPS = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
    "longcat_flash",
    "axk1",
)
SMALL = {
    96: ("vocab_size",),
    32: ("hidden_size", "n_embd", "d_model", "embedding_size"),
    48: ("intermediate_size", "ffn_dim", "ffn_hidden_size"),
    2: (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "num_key_value_heads",
        "num_experts_per_tok",
    ),
    4: (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
    ),
    8: ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"),
    1: ("n_group", "topk_group", "first_k_dense_replace", "max_window_layers", "bos_token_id"),
    128: ("max_position_embeddings", "n_positions", "n_ctx"),
    0.0: (
        "attention_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "dropout",
        "hidden_dropout",
    ),
}
SIZES = {name: size for size, names in SMALL.items() for name in names}
SIZES |= {"activation_dropout": 0.0, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 5}
SIZES |= {"use_sliding_window": True, "multi_query": False}


def tiny_of(model_type):
    """Its config with every size that it knows made small, and a window where it can have one."""
    register_families()
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    known = AutoConfig.for_model(model_type)
    small = {
        name: value
        for name, value in SIZES.items()
        if name in vars(known) or name in known.attribute_map
    }
    if model_type in WITHOUT_GROUPS:
        small.pop("num_key_value_heads", None)
    if model_type in WINDOW_IN_MASK_ONLY:
        small |= {"sliding_window": None, "use_sliding_window": False}
    if model_type in TINY:
        small |= TINY[model_type]
    return AutoConfig.for_model(model_type, **small, use_cache=False)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in TINY else pytest.mark.slow) for name in PROVEN.split()],
)
def test_a_proven_model_reads_packed_documents_as_each_alone(model_type):
    torch.manual_seed(1)
    config = tiny_of(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().float()
    with torch.no_grad():
        alone = [
            torch.cat([model(input_ids=piece[None]).logits[0] for piece in row.split(lengths)])
            for row, lengths in zip(IDS, LENGTHS, strict=True)
        ]
        leaking = model(input_ids=IDS).logits
        masked = model(input_ids=IDS, position_ids=POSITIONS).logits
        register_varlen()
        model.set_attn_implementation(VARLEN)
        keep_documents_apart(model)
        packed = model(input_ids=IDS, position_ids=POSITIONS).logits
    error = max((found - torch.stack(alone)).abs().max() for found in (masked, packed))
    assert error < 1e-5 and (leaking - packed).abs().max() > 30 * error, (
        "and it would have been seen"
    )
    assert isolates_documents(config)


# --- loss and gradients ----------------------------------------------------------------------------------------------

MISTRAL = {"model_type": "mistral", **SHAPE, "intermediate_size": 48, "sliding_window": 4}
MODELS = {
    **{name: tiny_config(name) for name in ("llama", "gpt2", "nemotron", "deepseek_v3")},
    "minimind2_moe": tiny_config(
        "minimind2_moe", router_aux_loss_coef=0.0
    ),  # of a batch, not of a document
    "mistral, window 4": MISTRAL,
}


def built(config, attention):
    return tiny_model(config, attention=attention).train()


def alone(model):
    """The loss of all documents, each of which is a row by itself, and its gradients."""
    losses = []
    for row, lengths in enumerate(LENGTHS):
        begin = 0
        for length in lengths:
            piece = {
                name: values[row : row + 1, begin : begin + length]
                for name, values in BATCH.items()
            }
            begin += length
            if length > 1:
                losses.append((length - 1) * model(**piece).loss)
    loss = sum(losses) / (LABELS != -100).sum()
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.fixture
def calls(monkeypatch):
    """How often documents were attended to one by one, and how many masks were made."""
    counted = {"varlen": 0, "masks": 0}

    def attending(*arguments):
        counted["varlen"] += 1
        return attend_each(*arguments)

    def making(*arguments, **options):
        counted["masks"] += 1
        return sdpa_mask(*arguments, **options)

    register_varlen()
    monkeypatch.setattr(attention, "attend_each", attending)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, VARLEN, making)
    monkeypatch.setattr(attention, "register_varlen", lambda: None)
    return counted


RECOMPUTED = {"gpt2", "deepseek_v3", "minimind2_moe"}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "nemotron"])
def test_packed_documents_give_the_loss_and_gradients_of_each_alone(name, calls):
    model = built(MODELS[name], VARLEN)
    if name in RECOMPUTED:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, of_each = alone(built(MODELS[name], "sdpa"))
    loss = model(**BATCH).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model), of_each)
    assert calls == {
        "varlen": model.config.num_hidden_layers * (2 if name in RECOMPUTED else 1),
        "masks": 0,
    }


def test_bounds_of_the_batch_are_taken_and_bounds_of_another_batch_never(calls):
    model = built(MODELS["nemotron"], VARLEN)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected, of_each = alone(built(MODELS["nemotron"], "sdpa"))
    first = model(**BATCH, **{BOUNDS: document_bounds(POSITIONS)}).loss
    model(input_ids=IDS.flip(1), position_ids=torch.arange(24).expand(2, -1), labels=IDS)
    with pytest.raises(IndexError):  # a forward pass that fails in between
        model(input_ids=IDS + 1000, position_ids=POSITIONS)
    first.backward()  # computes its layers again, after two other batches
    torch.testing.assert_close(first.detach(), expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model), of_each)


def test_rows_with_a_mask_are_attended_to_as_by_sdpa(calls):
    mask = (torch.arange(24) < torch.tensor([[24], [15]])).long()
    theirs, ours = (
        built(MISTRAL, name)(input_ids=IDS, attention_mask=mask).logits for name in ("sdpa", VARLEN)
    )
    assert torch.equal(ours, theirs) and calls["varlen"] == 0 and calls["masks"] > 0


def test_generation_with_a_cache_is_that_of_sdpa(calls):
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    theirs, ours = (
        built(MODELS["llama"], name).eval().generate(IDS[:1, :9], **options)
        for name in ("sdpa", VARLEN)
    )
    assert torch.equal(ours, theirs) and calls["varlen"] == 0


def test_autocast_decides_in_which_precision_attention_computes(monkeypatch):
    seen = []
    monkeypatch.setattr(
        attention, "attend_each", lambda *given: seen.append(given[0].dtype) or attend_each(*given)
    )
    widened, bounds = (
        torch.zeros(1, 4, 24, 8),
        document_bounds(POSITIONS[:1]).view(1, 1, 1, -1),
    )  # by norms in fp32
    with torch.autocast("cpu", torch.bfloat16):
        built(MODELS["llama"], VARLEN)(**BATCH).loss.backward()
        AttentionInterface()[VARLEN](torch.nn.Identity(), widened, widened, widened, bounds)
    built(MODELS["llama"], VARLEN).to(torch.bfloat16)(**BATCH)
    assert seen == [torch.bfloat16] * 5


# --- torch's kernel: the operator as it is called, computed on the CPU by the definition -----------------------------


def by_definition(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal=False,
    scale=None,
    window_size=None,
    *_,
):
    """What the flash kernels compute; no part of it knows of our functions."""
    left, right = window_size
    assert right == 0 and is_causal == (left == -1) and query.shape[-1] % 8 == 0
    key, value = (of.repeat_interleave(query.shape[1] // of.shape[1], 1) for of in (key, value))
    token = torch.arange(len(query))
    document = torch.bucketize(token, cu_seq_q[1:].long(), right=True)
    distance = token[:, None] - token[None]
    seen = (
        (document[:, None] == document[None])
        & (distance >= 0)
        & ((distance <= left) if left >= 0 else True)
    )
    scores = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~seen, -torch.inf)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).contiguous()
    return output, scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)


@pytest.fixture
def kernel_on_cpu(monkeypatch):
    varlen._varlen_attn.register_kernel("cpu")(by_definition)
    monkeypatch.setattr(attention, "has_kernel", lambda query, dtype: True)


@pytest.mark.parametrize(
    ("heads", "grouped", "width", "value_width", "window"),
    [(4, 4, 8, 8, 5), (4, 2, 12, 12, None), (4, 1, 16, 8, 5)],
)
def test_kernel_and_reference_agree_on_heads_widths_and_windows(
    heads, grouped, width, value_width, window, kernel_on_cpu
):
    torch.manual_seed(0)
    shapes = ((heads, width), (grouped, width), (grouped, value_width))
    given = [torch.randn(48, number, each) for number, each in shapes]
    bounds = document_bounds(POSITIONS)
    ours = torch_kernel(*given, bounds, 24, 0.3, window)[..., :value_width]
    torch.testing.assert_close(
        ours, attend_each(*given, bounds, 24, 0.3, window), rtol=0, atol=1e-5
    )


@pytest.mark.heavy
def test_a_compiled_layer_is_one_graph_for_all_batches(kernel_on_cpu):
    graphs = []

    def counting(graph, _):
        graphs.append(
            [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        )
        return graph.forward

    config = tiny_config("llama", num_hidden_layers=1)
    model, plain = built(config, VARLEN), built(config, VARLEN)
    torch._dynamo.reset()
    model.model.layers[0].compile(backend=counting, fullgraph=True, dynamic=False)
    for positions in (POSITIONS, torch.arange(24).repeat(2, 1) % 12):
        batch = {**BATCH, "position_ids": positions, BOUNDS: document_bounds(positions)}
        torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    torch._dynamo.reset()
    assert len(graphs) == 1 and any("_varlen_attn" in target for target in graphs[0])


def test_on_a_gpu_nothing_waits_for_the_bounds():
    """Fake tensors of a GPU refuse every value that the host would have to see. From torch 2.15 on, `varlen_attn`
    asks the driver whether cuDNN can be used, unless it is excluded."""
    register_varlen()
    attend = AttentionInterface()[VARLEN]
    with FakeTensorMode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        query, key = (
            torch.empty(2, heads, 24, 8, dtype=torch.bfloat16, device="cuda") for heads in (4, 2)
        )
        for number in (64, 0):
            bounds = torch.empty(1, 1, 1, number, dtype=torch.int32, device="cuda")
            output, _ = attend(
                torch.nn.Identity(), query, key, key, bounds, scaling=0.3, sliding_window=5
            )
            assert output.shape == (2, 24, 4, 8) and output.dtype == torch.bfloat16


# --- rows of one document each ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "key_heads"), [("llama", 2), ("deepseek_v3", 4)])
def test_whole_rows_are_attended_to_at_once_and_without_a_mask(name, key_heads, monkeypatch):
    model, plain = (built(MODELS[name], attention) for attention in (VARLEN, "sdpa"))
    calls, of_torch = [], F.scaled_dot_product_attention

    def attend(query, key, value, *, attn_mask=None, is_causal, **options):
        calls.append((attn_mask is None and is_causal, query.shape[1], key.shape[1]))
        return of_torch(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        loss = model(**WHOLE).loss
    assert calls == [(True, 4, key_heads)] * model.config.num_hidden_layers
    expected = plain(**WHOLE).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_gradients(gradients(model), gradients(plain), atol=1e-6)


def test_a_window_is_kept_in_whole_rows():
    theirs, ours = (built(MISTRAL, name)(**WHOLE).loss for name in ("sdpa", VARLEN))
    torch.testing.assert_close(ours, theirs)
    assert (ours - built(MISTRAL | {"sliding_window": None}, VARLEN)(**WHOLE).loss).abs() > 1e-4


def test_a_soft_cap_on_scores_is_refused():
    register_varlen()
    query, bounds = torch.zeros(1, 4, 24, 8), document_bounds(POSITIONS[:1]).view(1, 1, 1, -1)
    with pytest.raises(RecipeError, match="softcap"):
        AttentionInterface()[VARLEN](torch.nn.Identity(), query, query, query, bounds, softcap=30.0)
