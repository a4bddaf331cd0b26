import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, tiny
from benchmarks.gpu.systems import CAUSAL, MasterAdamW, register_attention
from cpt.models.config import config_from


@pytest.mark.parametrize("case", ["A", "B", "C"])
def test_compiled_opponents_get_causal_attention_without_a_mask(case):
    register_attention()
    model = AutoModelForCausalLM.from_config(config_from(dict(tiny(CASES[case]).config)), attn_implementation=CAUSAL)
    calls = []

    def backend(graph, _):
        calls.extend(node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return graph.forward

    ids = torch.randint(500, (2, 64))
    loss = torch.compile(model, backend=backend)(input_ids=ids, labels=ids, use_cache=False).loss
    assert len(calls) == 2 and all(
        node.kwargs["is_causal"] and "attn_mask" not in node.kwargs and len(node.args) == 3 for node in calls
    )
    assert all(node.kwargs["enable_gqa"] == (case != "A") for node in calls)
    model.set_attn_implementation("sdpa")
    assert loss.item() == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)


def test_updates_smaller_than_a_bf16_weight_can_hold_add_up():
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([{"params": [weight]}], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight[0].item() == pytest.approx(0.99, abs=4e-3)
