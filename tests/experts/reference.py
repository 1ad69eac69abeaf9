"""Toy experts of every layout, and what they must compute, written out token by token in float64."""

from itertools import product
from types import SimpleNamespace

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation


class ToyNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def toy_class(has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm):
    """A class decorated as transformers' models decorate theirs; a module of it takes (E, H, I)."""

    class ToyExperts(nn.Module):
        def __init__(self, config):
            super().__init__()
            E, H, I = config.sizes  # noqa: E741
            up_out = 2 * I if has_gate else I
            up_shape, down_shape = ((H, up_out), (I, H)) if is_transposed else ((up_out, H), (H, I))
            up_name = "gate_up_proj" if has_gate else "up_proj"
            self.register_parameter(up_name, nn.Parameter(torch.empty(E, *up_shape)))
            self.down_proj = nn.Parameter(torch.empty(E, *down_shape))
            if has_bias:
                self.register_parameter(f"{up_name}_bias", nn.Parameter(torch.empty(E, up_out)))
                self.down_proj_bias = nn.Parameter(torch.empty(E, H))
            if has_post_expert_norm:
                self.post_expert_norm = ToyNorm(H)
            self.act_fn = nn.SiLU()

        def forward(self, *args):
            raise AssertionError("The toys have no forward of their own.")

        if not is_concatenated:

            def _apply_gate(self, gate_up):
                gate, up = gate_up[..., ::2], gate_up[..., 1::2]
                return torch.sigmoid(gate) * (up + 1)

    return use_experts_implementation(
        has_gate=has_gate,
        has_bias=has_bias,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        has_post_expert_norm=has_post_expert_norm,
    )(ToyExperts)


LAYOUTS = [
    dict(zip(("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"), flags, strict=True))
    for flags in product((True, False), repeat=5)
    # Without a gate there is nothing to interleave.
    if flags[0] or flags[3]
]


def toy(layout, E=4, H=32, I=16, dtype=torch.float32):  # noqa: E741
    return filled(toy_class(**layout)(SimpleNamespace(sizes=(E, H, I))), dtype)


def filled(module, dtype=torch.float32, seed=0):
    """Random parameters with variance 1 over the fan-in kept, so that no tolerance is met by being small."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 3 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator).mul(scale).to(dtype)
    return module


def batch(R, K, E, H=32, dtype=torch.float32, dead=0.0, seed=1):
    """Rows, distinct expert ids for each, and weights; a share `dead` of the slots is -1."""
    generator = torch.Generator().manual_seed(seed)
    x_RH = torch.randn(R, H, generator=generator).to(dtype)
    idx_RK = torch.rand(R, E, generator=generator).topk(K).indices
    idx_RK = idx_RK.masked_fill(torch.rand(R, K, generator=generator) < dead, -1)
    weights_RK = torch.rand(R, K, generator=generator) + 0.1
    return x_RH, idx_RK, weights_RK


def dense(experts, x_RH, idx_RK, weights_RK):
    """Every (row, slot) on its own, in the dtype of the module: to be called with a float64 copy."""
    rows = []
    for x_H, idx_K, weights_K in zip(x_RH, idx_RK.tolist(), weights_RK, strict=True):
        y_H = torch.zeros_like(x_H)
        for expert, weight in zip(idx_K, weights_K, strict=True):
            if expert >= 0:
                y_H = y_H + weight * one_expert(experts, expert, x_H)
        rows.append(y_H)
    return torch.stack(rows) if rows else x_RH * 0


def one_expert(experts, expert, x_H):
    up, down = (experts.gate_up_proj if experts.has_gate else experts.up_proj)[expert], experts.down_proj[expert]
    if not experts.is_transposed:
        up, down = up.T, down.T
    h = x_H @ up
    if experts.has_bias:
        h = h + (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[expert]
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    y_H = h @ down
    if experts.has_bias:
        y_H = y_H + experts.down_proj_bias[expert]
    return experts.post_expert_norm(y_H) if experts.has_post_expert_norm else y_H


def by_expert(experts, x_RH, idx_RK, weights_RK):
    """The same, expert by expert: for sizes at which `dense` takes too long."""
    y_RH = torch.zeros_like(x_RH)
    for expert in range(experts.down_proj.shape[0]):
        row, k = torch.where(idx_RK == expert)
        y_NH = weights_RK[row, k, None] * one_expert(experts, expert, x_RH[row])
        y_RH = y_RH.index_add(0, row, y_NH)
    return y_RH


def run(function, experts, x_RH, idx_RK, weights_RK, seed=2):
    """Output and every gradient of `function(experts, x, idx, weights)`, by name, under a random loss."""
    x_RH = x_RH.detach().clone().requires_grad_()
    weights_RK = weights_RK.detach().clone().requires_grad_()
    for parameter in experts.parameters():
        parameter.grad = None
    y_RH = function(experts, x_RH, idx_RK, weights_RK)
    dy_RH = torch.randn(y_RH.shape, generator=torch.Generator().manual_seed(seed))
    y_RH.backward(dy_RH.to(y_RH))
    grads = {name: parameter.grad for name, parameter in experts.named_parameters() if parameter.requires_grad}
    return {"y": y_RH.detach(), "x": x_RH.grad, "weights": weights_RK.grad, **grads}


def assert_near(got, want, tolerance):
    """Norm of the difference over norm of the reference, each tensor on its own; exact zeros where it is zero."""
    assert got.keys() == want.keys()
    for name, reference in want.items():
        assert got[name] is not None, f"no gradient for {name}"
        assert got[name].shape == reference.shape
        difference = (got[name].cpu().double() - reference).norm()
        assert difference <= tolerance * reference.norm(), f"{name}: {difference} against {reference.norm()}"
