import torch
from torch import nn

from cpt.evaluation.mode import evaluation_mode


def test_each_module_gets_its_own_mode_back_even_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model.train()
    model[1].eval()  # a frozen part
    before = [module.training for module in model.modules()]
    try:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise KeyError
    except KeyError:
        pass
    assert [module.training for module in model.modules()] == before == [True, True, False, False]
    assert torch.is_grad_enabled()
