"""Lion, which torch.optim lacks."""

import torch


class Lion(torch.optim.Optimizer):
    """Lion as in the paper, with the arguments that most packages accept."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **more):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(m.mul(beta1).add(p.grad, alpha=1 - beta1).sign(), alpha=lr)
                m.lerp_(p.grad, 1 - beta2)
