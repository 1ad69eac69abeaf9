"""The plain-torch experts against a float64 computation written out token by token, and transformers' own forward."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import grouped_mm
from torch.utils.checkpoint import checkpoint
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from automodel_moe.experts import torch as backend
from automodel_moe.kernels.pairs import sort_pairs
from tests.experts.reference import LAYOUTS, assert_near, batch, dense, filled, run, toy

# Relative norm of the error. float32: rounding of sums of 32 products. The others: operands, activations and results
# rounded to 8 and 11 bits (eps 2^-8, 2^-11) about six times on the way to a gradient.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
GPT_OSS_LIKE = dict(
    has_gate=True, has_bias=True, is_transposed=True, is_concatenated=False, has_post_expert_norm=False
)
PLAIN = dict(has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True, has_post_expert_norm=False)
EVERYTHING = dict(has_gate=True, has_bias=True, is_transposed=False, is_concatenated=True, has_post_expert_norm=True)


def name_of(layout):
    return "-".join(name for name, flag in layout.items() if flag) or "none"


@pytest.fixture(params=["loop", "grouped_mm", "grouped_mm, count unknown"])
def path(request, monkeypatch):
    """How the GEMMs run; grouped_mm has a CPU kernel, which leaves the tail unwritten as the GPU's does."""
    if request.param == "loop":
        return backend.forward
    monkeypatch.setattr(backend, "_fits_grouped_mm", lambda weight: True)
    if request.param == "grouped_mm, count unknown":
        return backend.forward

    def counted(experts, x_RH, idx_RK, weights_RK):
        return backend.forward(experts, x_RH, idx_RK, weights_RK, n_pairs=int((idx_RK >= 0).sum()))

    return counted


def reference(experts, x_RH, idx_RK, weights_RK):
    return run(dense, copy.deepcopy(experts).double(), x_RH.double(), idx_RK, weights_RK.double())


def check(experts, inputs, function=backend.forward):
    got = run(function, experts, *inputs)
    assert_near(got, reference(experts, *inputs), TOLERANCE[experts.down_proj.dtype])
    return got


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_layout_and_dtype(layout, dtype):
    check(toy(layout, dtype=dtype), batch(R=24, K=2, E=4, dtype=dtype, dead=0.3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_layout_by_every_path(layout, path):
    check(toy(layout, dtype=torch.bfloat16), batch(R=24, K=2, E=4, dtype=torch.bfloat16, dead=0.3), path)


REAL = {
    "qwen3_moe": (
        Qwen3MoeExperts,
        {"num_experts": 4, "hidden_size": 32, "moe_intermediate_size": 16, "hidden_act": "silu"},
    ),
    "gpt_oss": (
        GptOssExperts,
        {
            "num_local_experts": 4,
            "hidden_size": 32,
            "intermediate_size": 16,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 1.0,
        },
    ),
    "nemotron_h": (
        NemotronHExperts,
        {
            "n_routed_experts": 4,
            "hidden_size": 32,
            "moe_intermediate_size": 16,
            "moe_latent_size": None,
            "mlp_hidden_act": "relu2",
        },
    ),
    "aria": (AriaExperts, {"moe_num_experts": 4, "hidden_size": 32, "intermediate_size": 16}),
    "muse_spark": (
        MuseSparkExperts,
        {
            "num_local_experts": 4,
            "moe_hidden_size": 32,
            "moe_intermediate_size": 16,
            "hidden_act": "silu",
            "post_norm_eps": 1e-6,
        },
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_classes_against_their_own_forward(name):
    experts_class, config = REAL[name]
    experts = filled(experts_class(SimpleNamespace(_experts_implementation="eager", **config)))
    inputs = batch(R=24, K=2, E=4)
    own = run(lambda module, *args: module(*args), experts, *inputs)
    # Both are float32 and sum in another order.
    assert_near(run(backend.forward, experts, *inputs), {key: value.double() for key, value in own.items()}, 2e-6)


@pytest.mark.parametrize("layout", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("top_k", [1, 4], ids=["top-1", "top-E"])
def test_top_k_of_one_and_of_all(layout, top_k, path):
    check(toy(layout, dtype=torch.bfloat16), batch(R=16, K=top_k, E=4, dtype=torch.bfloat16), path)


@pytest.mark.parametrize("layout", [PLAIN, GPT_OSS_LIKE, EVERYTHING], ids=["plain", "gpt_oss", "everything"])
def test_all_rows_to_one_expert_leave_the_others_an_exact_zero(layout, path):
    experts = toy(layout, dtype=torch.bfloat16)
    x_RH, idx_RK, weights_RK = batch(R=16, K=1, E=4, dtype=torch.bfloat16)
    got = check(experts, (x_RH, torch.full_like(idx_RK, 2), weights_RK), path)
    for name in ("gate_up_proj", "down_proj"):
        assert got[name][[0, 1, 3]].eq(0).all()
        assert got[name][2].ne(0).any()


@pytest.mark.parametrize("layout", [PLAIN, GPT_OSS_LIKE, EVERYTHING], ids=["plain", "gpt_oss", "everything"])
@pytest.mark.parametrize("rows", [0, 8], ids=["no row", "no live slot"])
def test_nothing_to_do_gives_every_gradient_as_zeros(layout, rows, path):
    experts = toy(layout, dtype=torch.bfloat16)
    x_RH, idx_RK, weights_RK = batch(R=rows, K=2, E=4, dtype=torch.bfloat16)
    got = run(path, experts, torch.full_like(x_RH, torch.nan), torch.full_like(idx_RK, -1), weights_RK)
    for name, shape in {**{n: p.shape for n, p in experts.named_parameters()}, "x": (rows, 32)}.items():
        assert got[name] is not None and got[name].shape == shape
    assert all(value.eq(0).all() for value in got.values())


@pytest.mark.parametrize("layout", [PLAIN, GPT_OSS_LIKE, EVERYTHING], ids=["plain", "gpt_oss", "everything"])
def test_dead_rows_of_nan_reach_nothing(layout, path):
    experts = toy(layout, dtype=torch.bfloat16)
    x_RH, idx_RK, weights_RK = batch(R=16, K=2, E=4, dtype=torch.bfloat16, dead=0.2)
    dead_R = torch.arange(16) % 3 == 0
    idx_RK[dead_R] = -1
    want = reference(experts, x_RH, idx_RK, weights_RK)
    x_RH[dead_R] = torch.nan
    assert_near(run(path, experts, x_RH, idx_RK, weights_RK), want, TOLERANCE[torch.bfloat16])


def test_weights_of_dead_slots_get_an_exact_zero(path):
    experts = toy(EVERYTHING, dtype=torch.bfloat16)
    x_RH, idx_RK, weights_RK = batch(R=16, K=2, E=4, dtype=torch.bfloat16, dead=0.4)
    got = run(path, experts, x_RH, idx_RK, weights_RK)
    assert got["weights"][idx_RK < 0].eq(0).all()
    assert got["weights"][idx_RK >= 0].ne(0).all()
    assert got["weights"].dtype == torch.float32


def test_two_runs_are_bit_equal(path):
    experts = toy(EVERYTHING, dtype=torch.bfloat16)
    inputs = batch(R=64, K=3, E=4, dtype=torch.bfloat16, dead=0.2)
    first, second = (run(path, experts, *inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_experts_get_no_gradient_and_no_memory(path, monkeypatch):
    experts = toy(EVERYTHING, dtype=torch.bfloat16).requires_grad_(False)
    x_RH, idx_RK, weights_RK = batch(R=24, K=2, E=4, dtype=torch.bfloat16)
    x_RH.requires_grad_()
    weights_RK.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        y_RH = path(experts, x_RH, idx_RK, weights_RK)
    # The gathered rows are only for the up-projection's weight gradient.
    gathered_NH = x_RH[sort_pairs(idx_RK, n_experts=4).row_N]
    assert not any(torch.equal(tensor, gathered_NH) for tensor in saved)
    products = []  # of rows by rows: a weight's or a bias's gradient
    for name in ("_products_loop", "_sums_loop"):
        monkeypatch.setattr(backend, name, lambda *args: products.append(args))
    monkeypatch.setattr(
        backend, "grouped_mm", lambda a, b, offs: products.append(a) if b.ndim == 2 else grouped_mm(a, b, offs=offs)
    )
    y_RH.sum().backward()
    assert not products
    assert all(parameter.grad is None for parameter in experts.parameters())
    assert x_RH.grad.abs().sum() > 0
    assert weights_RK.grad.abs().sum() > 0


def test_weights_train_without_gradients_of_the_rows(path):
    experts = toy(PLAIN, dtype=torch.bfloat16)
    inputs = batch(R=24, K=2, E=4, dtype=torch.bfloat16)
    path(experts, *inputs).sum().backward()
    assert experts.gate_up_proj.grad.ne(0).any()
    assert experts.down_proj.grad.ne(0).any()


@pytest.mark.parametrize("layout", [PLAIN, EVERYTHING], ids=["plain", "everything"])
def test_autocast_computes_in_its_dtype_and_keeps_the_callers(layout, path):
    experts = toy(layout)
    inputs = batch(R=24, K=2, E=4)

    def under_autocast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return path(*args)

    got = run(under_autocast, experts, *inputs)
    assert {value.dtype for value in got.values()} == {torch.float32}
    if not layout["has_post_expert_norm"]:  # A norm's own weight stays in float32 under autocast.
        assert torch.equal(got["y"], run(path, copy.deepcopy(experts).bfloat16(), *inputs)["y"])
    assert_near(got, reference(experts, *inputs), TOLERANCE[torch.bfloat16])


def test_sums_over_slots_and_rows_are_kept_in_float32():
    """512 equal slots of 1 + 2^-7 sum exactly in float32; a bfloat16 sum stops growing near 256."""
    experts = toy(PLAIN, E=1, dtype=torch.bfloat16)
    x_RH, _, _ = batch(R=1, K=1, E=1, dtype=torch.bfloat16)
    one = backend.forward(experts, x_RH, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    many = backend.forward(experts, x_RH.float(), torch.zeros(1, 512, dtype=torch.int64), torch.ones(1, 512))
    assert torch.equal(many, 512 * one.float())


def test_gradcheck_of_the_whole_graph():
    experts = toy(EVERYTHING, E=3, H=6, I=4, dtype=torch.float64)
    x_RH, idx_RK, weights_RK = batch(R=5, K=2, E=3, H=6, dtype=torch.float64, dead=0.3)
    weights_RK = weights_RK.double()
    names, values = zip(*experts.named_parameters(), strict=True)

    def function(x_RH, weights_RK, *parameters):
        for name, value in zip(names, parameters, strict=True):
            owner, _, leaf = name.rpartition(".")
            module = experts.get_submodule(owner)
            module._parameters.pop(leaf, None)
            setattr(module, leaf, value)
        return backend.forward(experts, x_RH, idx_RK, weights_RK)

    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x_RH, weights_RK, *values)]
    torch.autograd.gradcheck(function, leaves)


def test_checkpointing_gives_the_same_bits():
    experts = toy(EVERYTHING)
    inputs = batch(R=24, K=2, E=4, dead=0.2)
    plain = run(backend.forward, experts, *inputs)

    def checkpointed(*args):
        return checkpoint(backend.forward, *args, use_reentrant=False)

    again = run(checkpointed, experts, *inputs)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("layout", [PLAIN, EVERYTHING], ids=name_of)
def test_computing_again_gives_the_same_bits_and_keeps_the_rows_alone(layout, path):
    experts, inputs = toy(layout, dtype=torch.bfloat16), batch(R=24, K=2, E=4, dtype=torch.bfloat16, dead=0.2)
    if path is not backend.forward:
        path = partial(backend.forward, n_pairs=int((inputs[1] >= 0).sum()))
    plain, again = (run(partial(path, keeps_h=keeps_h), experts, *inputs) for keeps_h in (True, False))
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        path(experts, inputs[0].requires_grad_(), *inputs[1:], keeps_h=False)
    assert not any(shape[0] > 24 for shape in kept if len(shape) == 2)
