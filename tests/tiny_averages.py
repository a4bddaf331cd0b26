"""An optimizer of a user's that evaluates at the mean of the weights after each step, as schedule-free ones do."""

import torch


class Averaging(torch.optim.SGD):
    """Steps of SGD; `eval` swaps the weights with their mean, and `train` swaps them back."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group |= {"trains": True, "steps": 0}

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            assert group["trains"], "a step from the evaluation point"
            group["steps"] += 1
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.detach(), 1 / group["steps"])

    def eval(self):
        self.swap(trains=False)

    def train(self):
        self.swap(trains=True)

    @torch.no_grad()
    def swap(self, trains):
        for group in self.param_groups:
            if group["trains"] == trains:
                continue
            group["trains"] = trains
            for weight in group["params"] if group["steps"] else ():
                mean = self.state[weight]["mean"]
                trained = weight.clone()
                weight.copy_(mean)
                mean.copy_(trained)
