"""Hybrid models' mixers at real widths on a GPU: the Triton kernels against transformers' plain torch."""

import copy
import functools

import pytest
import torch
from transformers import GraniteMoeHybridConfig, NemotronHConfig, Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from automodel_moe.dense import linear_attention, triton_kernels
from automodel_moe.dense.sequences import Sequences

pytestmark = pytest.mark.gpu

# The widths of Nemotron 3 Nano, Granite 4 tiny, Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B.
MIXERS = {
    "nemotron_h": lambda: NemotronHMamba2Mixer(
        NemotronHConfig(
            hidden_size=2688,
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            chunk_size=128,
            layers_block_type=["linear_attention"],
        ),
        layer_idx=0,
    ),
    "qwen3_next": lambda: Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"]), layer_idx=0
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeGatedDeltaNet(
        Qwen3_5MoeTextConfig(num_hidden_layers=1, layer_types=["linear_attention"]), layer_idx=0
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridMambaLayer(
        GraniteMoeHybridConfig(
            hidden_size=1536,
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        layer_idx=0,
    ),
}


def mixer(name, dtype):
    if "qwen" in name and (reason := triton_kernels.unsupported_delta_scan(torch.device("cuda"))):
        pytest.skip(reason)
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = MIXERS[name]().to(dtype)
        # Steps of 0.01 to 0.1 as a trained model's: a state that lives for hundreds of positions.
        module.dt_bias.data.uniform_(-4.6, -2.2)
        module.norm.weight.data.normal_(1.0, 0.1)
        if module.conv1d.bias is not None:
            module.conv1d.bias.data.normal_(0.0, 0.1)
    return module


def values(forward, module, x_BSH, dy_BSH, **kwargs):
    """The output and every gradient, in float32."""
    x_BSH = x_BSH.detach().to(module.out_proj.weight.dtype, copy=True).requires_grad_()
    module.zero_grad()
    y_BSH = forward(x_BSH, **kwargs)
    y_BSH.backward(dy_BSH.to(y_BSH.dtype))
    grads = {key: parameter.grad.float() for key, parameter in module.named_parameters()}
    return {"output": y_BSH.detach().float(), "input": x_BSH.grad.float(), **grads}


def errors(got, want):
    return {key: float((got[key] - value).norm() / value.norm()) for key, value in want.items()}


def fast(module):
    return functools.partial(linear_attention._forward, module, choice="triton")


def inputs(module, B=2, S=333):
    x_BSH, dy_BSH = torch.randn(2, B, S, module.hidden_size, device="cuda")
    return x_BSH.bfloat16().float(), dy_BSH.bfloat16().float()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_no_less_accurate_than_transformers_in_bfloat16(name, padded, figures):
    module = mixer(name, torch.bfloat16)
    x_BSH, dy_BSH = inputs(module)
    kwargs = {}
    if padded:
        kwargs["attention_mask"] = torch.ones(x_BSH.shape[:2], device="cuda", dtype=torch.int64)
        kwargs["attention_mask"][0, :70] = 0
    exact = copy.deepcopy(module).float()
    want = values(exact, exact, x_BSH, dy_BSH, **kwargs)
    ours = errors(values(fast(module), module, x_BSH, dy_BSH, **kwargs), want)
    theirs = errors(values(module, module, x_BSH, dy_BSH, **kwargs), want)
    figures[f"hybrid {name} bfloat16{' padded' if padded else ''}: ours, transformers"] = {
        key: (float(f"{ours[key]:.2g}"), float(f"{theirs[key]:.2g}")) for key in want
    }
    # transformers keeps float32 between the projections; the kernels' operands are bfloat16 with float32 sums.
    worse = {key: (ours[key], theirs[key]) for key in want if ours[key] > 2 * theirs[key] + 2e-3}
    assert not worse


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_float32_against_transformers(name, figures):
    module = mixer(name, torch.float32)
    arguments = inputs(module)
    found = errors(values(fast(module), module, *arguments), values(module, module, *arguments))
    figures[f"hybrid {name} float32"] = {key: float(f"{error:.2g}") for key, error in found.items()}
    # fla's float32 products are TF32, ten bits of each factor; ours are float32.
    assert max(found.values()) <= (1e-4 if name == "nemotron_h" else 3e-3), found


@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_equal_separate_ones(name):
    module = mixer(name, torch.bfloat16)
    lengths = (100, 1, 64, 300, 7)
    x_BSH, dy_BSH = inputs(module, B=1, S=sum(lengths))
    seq_BS = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int().to("cuda")
    got = values(fast(module), module, x_BSH, dy_BSH, packed_sequences=Sequences(seq_BS))
    parts = [
        values(fast(module), module, x, dy)
        for x, dy in zip(x_BSH.split(lengths, dim=1), dy_BSH.split(lengths, dim=1), strict=True)
    ]
    want = {
        key: torch.cat([part[key] for part in parts], dim=1)
        if key in ("output", "input")
        else sum(part[key] for part in parts)
        for key in got
    }
    found = errors(got, want)
    # The same products in other chunks; the weights' gradients are rounded to bfloat16 once for each part there.
    assert max(found.pop("output"), found.pop("input")) <= 1e-2
    assert max(found.values()) <= 2e-2, found


def test_a_cache_continues_where_the_kernels_left_off():
    """A prompt by the kernels, then single tokens by transformers' own forward, from the states that were left."""
    from transformers import DynamicCache

    module = mixer("nemotron_h", torch.bfloat16).eval()
    x_BSH, _ = inputs(module, S=70)
    config = NemotronHConfig(layers_block_type=["linear_attention"])
    with torch.no_grad():
        want = fast(module)(x_BSH.bfloat16())
        cache = DynamicCache(config=config)
        pieces = [fast(module)(piece, cache=cache) for piece in x_BSH.bfloat16().split([64, 1, 5], dim=1)]
    got = torch.cat(pieces, dim=1)
    assert (got - want).norm() <= 1e-2 * want.norm()
