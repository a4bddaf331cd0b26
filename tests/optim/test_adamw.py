import pytest
import torch

from cpt.errors import RecipeError
from cpt.optim.adamw import adamw
from cpt.optim.build import build_optimizer, check_optimizer
from cpt.optim.groups import IS_EMBEDDING
from cpt.optim.one_kernel_adamw import OneKernelAdamW
from cpt.recipe.schema import Optimizer


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.linear = torch.nn.Linear(4, 3)


def of(dtype, **options):
    return adamw([{"params": [torch.nn.Parameter(torch.zeros(2, dtype=dtype))]}], 1e-3, **options)


def test_the_type_of_the_weights_decides():
    assert type(of(torch.float32)) is torch.optim.AdamW and of(torch.float32).defaults["fused"]
    for dtype, options in ((torch.bfloat16, {}), (torch.float16, {}), (torch.bfloat16, {"rounding": "kahan"})):
        built = of(dtype, **options)
        assert type(built) is OneKernelAdamW and (built.eight_bit, built.paged, built.rounding) == (
            False,
            False,
            options.get("rounding"),
        )


@pytest.mark.parametrize(("name", "paged"), [("adamw_8bit", False), ("paged_adamw_8bit", True)])
def test_8_bit_is_built_by_name_with_embeddings_apart(name, paged):
    model = Tiny().bfloat16()
    optimizer = build_optimizer(Optimizer(name=name, learning_rate=1e-3, betas=[0.8, 0.9], weight_decay=0.2), model)
    assert (optimizer.eight_bit, optimizer.paged, optimizer.rounding) == (True, paged, "stochastic")
    assert optimizer.defaults == {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2}
    apart = {
        id(parameter): group.get(IS_EMBEDDING, False)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert apart == {id(parameter): parameter is model.embedding.weight for parameter in model.parameters()}


def test_a_rounding_that_there_is_not_is_refused():
    with pytest.raises(RecipeError, match="`optimizer.rounding`: expected .*kahan.*got 'up'"):
        check_optimizer(Optimizer(name="adamw_8bit", rounding="up"))
