"""Activations found by what they compute."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.beam.modeling_beam import BeamExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

from automodel_moe.experts.gates import GLU, RELU2, SILU, Gate, apply, known_gate
from tests.experts.test_torch import REAL


def experts(gate=None, act_fn=None, interleaved=False):
    """A module with `gate(g, u)`, or without a gate and with `act_fn`."""

    class Experts(nn.Module):
        has_gate, is_concatenated = gate is not None, not interleaved

        def _apply_gate(self, h):
            return gate(*((h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, dim=-1)))

    module = Experts()
    module.act_fn = act_fn
    return module


def clamped(alpha, beta, limit):
    def gate(g, u):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + beta)

    return gate


silu = nn.functional.silu


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (experts(lambda g, u: silu(g) * u), Gate(GLU)),
        (experts(lambda g, u: silu(g) * u, interleaved=True), Gate(GLU, interleaved=True)),
        (experts(lambda g, u: (silu(g.float()) * u.float()).to(g.dtype)), Gate(GLU)),
        (experts(clamped(1.702, 1.0, 7.0), interleaved=True), Gate(GLU, 1.702, 1.0, 7.0, True)),
        (experts(clamped(1.702, 1.0, math.inf)), Gate(GLU, 1.702, 1.0)),
        (experts(clamped(1.0, 0.0, 10.0)), Gate(GLU, limit=10.0)),
        (experts(act_fn=lambda h: torch.relu(h) ** 2), Gate(RELU2)),
        (experts(act_fn=nn.SiLU()), Gate(SILU)),
        (experts(lambda g, u: silu(g).clamp(max=7.0) * u.clamp(-7, 7)), None),
        (experts(lambda g, u: nn.functional.gelu(g) * u), None),
        (experts(lambda g, u: torch.sigmoid(g) * (u + 1)), None),
        (experts(lambda g, u: torch.relu(g) * u), None),
        (experts(lambda g, u: silu(g) * u * g.sum()), None),
        (experts(lambda g, u: silu(g) * torch.ones(7).double() * u), None),
        (experts(act_fn=nn.GELU()), None),
        (experts(act_fn=nn.ReLU()), None),
    ],
)
def test_what_is_found(module, found):
    assert known_gate(module) == found


@pytest.mark.parametrize("gate", [Gate(GLU, 1.702, 1.0, 2.0, True), Gate(GLU), Gate(SILU), Gate(RELU2)])
def test_apply_is_what_a_gate_stands_for(gate):
    module = experts(lambda g, u: clamped(gate.alpha, gate.beta, gate.limit)(g, u), interleaved=gate.interleaved)
    h = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 3
    want = module._apply_gate(h) if gate.has_gate else silu(h) if gate.kind == SILU else torch.relu(h) ** 2
    torch.testing.assert_close(apply(gate, h), want)


def test_classes_of_transformers():
    beam = SimpleNamespace(num_experts=2, hidden_size=8, moe_intermediate_size=8, hidden_act="silu")
    assert known_gate(BeamExperts(beam)) == Gate(GLU)
    config = REAL["gpt_oss"][1] | {"moe_intermediate_size": 16, "swiglu_limit": 7.0, "num_local_experts": 2}
    assert known_gate(MiniMaxM3VLExperts(SimpleNamespace(**config))) == Gate(GLU, 1.702, 1.0, 7.0)
