"""The quack backend without quack: what it refuses, and its graph over plain stand-ins for quack's four GEMMs."""

import copy
import re
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from automodel_moe.experts import quack as backend
from tests.experts.reference import LAYOUTS, assert_near, batch, dense, filled, run, toy
from tests.experts.test_torch import GPT_OSS_LIKE, PLAIN, REAL, name_of


def swiglu(act="silu", E=4, H=32, I=16, kind=Qwen3MoeExperts):  # noqa: E741
    config = SimpleNamespace(num_experts=E, hidden_size=H, moe_intermediate_size=I, hidden_act=act)
    return filled(kind(config))


def taken(layout):
    """SwiGLU, or no gate, and no other flag: a gate that is interleaved is one of the toys' own, too."""
    return layout in (PLAIN, PLAIN | {"has_gate": False})


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_which_layouts_it_takes(layout):
    assert (backend._unsupported_layout(toy(layout)) is None) == taken(layout)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (swiglu(act="gelu"), "its own.* is none of swiglu, silu, relu_sq"),
        (toy(GPT_OSS_LIKE), "no biases"),
        (toy(PLAIN | {"is_transposed": True}), "transposed"),
        (toy(PLAIN | {"has_post_expert_norm": True}), "no norm after the experts"),
        (swiglu(H=36), "hidden size 36 and intermediate size 16 must be multiples of 8"),
        (swiglu(I=12), "hidden size 32 and intermediate size 12 must be multiples of 8"),
    ],
    ids=["gelu", "bias", "transposed", "norm", "hidden size", "intermediate size"],
)
def test_it_says_what_it_cannot_do(experts, reason):
    assert re.search(reason, backend._unsupported_layout(experts))


def test_it_refuses_a_cpu():
    with pytest.raises(
        ValueError, match=r"experts='quack' can't run Qwen3MoeExperts on cpu in torch.float32: it needs a Hopper"
    ):
        backend.forward(swiglu(), *batch(R=8, K=2, E=4))


def split(columns):
    """[gate; up] halves of the last dimension, interleaved."""
    gate, up = columns.chunk(2, dim=-1)
    return torch.stack([gate, up], dim=-1).flatten(-2)


def groups(bounds):
    return enumerate(zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True))


ACTIVATIONS = {
    "swiglu": lambda h: nn.functional.silu(h[:, ::2]) * h[:, 1::2],
    "silu": nn.functional.silu,
    "relu_sq": lambda h: torch.relu(h) ** 2,
}


def product(A, B, bounds, A_idx, concat_layout):
    """Grouped over A's rows; NaN in rows of no group."""
    rows = A if A_idx is None else A[A_idx]
    if "B" in (concat_layout or ()):
        # The dimension that is not contiguous: the output's for W.mT, the contraction's for W itself.
        B = split(B) if B.stride(-1) != 1 else split(B.mT).mT
    result = torch.full((rows.shape[0], B.shape[2]), torch.nan, dtype=A.dtype)
    for expert, (start, end) in groups(bounds):
        result[start:end] = rows[start:end] @ B[expert]
    return result


def gemm(A, B, out, cu_seqlens_m, cu_seqlens_k, A_idx, concat_layout, config):
    """Grouped over A's rows (`cu_seqlens_m`) or over the contraction (`cu_seqlens_k`)."""
    if cu_seqlens_m is not None:
        out.copy_(product(A, B, cu_seqlens_m, A_idx, concat_layout))
        return
    columns = A if A_idx is None else A[:, A_idx]
    for expert, (start, end) in groups(cu_seqlens_k):
        result = columns[:, start:end] @ B[start:end]
        if concat_layout:
            assert concat_layout == ("out",)
            result = torch.cat([result[:, ::2], result[:, 1::2]], dim=-1)
        out[expert] = result


def gemm_act(A, B, activation, cu_seqlens_m, A_idx, store_preact, concat_layout, tuned, config):
    h = product(A, B, cu_seqlens_m, A_idx, concat_layout)
    return h if store_preact else None, ACTIVATIONS[activation](h)


def gemm_dact(A, B, PreAct, activation, colvec_scale, colvec_reduce, cu_seqlens_m, A_idx, **schedule):
    assert colvec_reduce
    da = product(A, B, cu_seqlens_m, A_idx, None)
    with torch.enable_grad():
        h = PreAct.detach().requires_grad_()
        a = ACTIVATIONS[activation](h)
        (dh,) = torch.autograd.grad(a, h, da * colvec_scale[:, None])
    return dh, a.detach() * colvec_scale[:, None], (a.detach() * da).sum(dim=1)


@pytest.fixture
def forward(monkeypatch):
    interface, config, package = (
        ModuleType("quack.gemm_interface"),
        ModuleType("quack.gemm_config"),
        ModuleType("quack"),
    )
    interface.gemm_act, interface.gemm_dact, interface.gemm_tuned = gemm_act, gemm_dact, SimpleNamespace(fn=gemm)
    config.GemmConfig = SimpleNamespace
    for module in (package, interface, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backend, "unsupported", lambda *args: None)
    monkeypatch.setattr(backend, "_built", set())
    return backend.forward


def check(forward, experts, inputs):
    got = run(forward, experts, *inputs)
    want = run(dense, copy.deepcopy(experts).double(), inputs[0].double(), inputs[1], inputs[2].double())
    assert_near(got, want, 1e-5)  # float32
    return got


EXPERTS = {name_of(layout): partial(toy, layout) for layout in LAYOUTS if taken(layout)} | {
    "nemotron_h": lambda: filled(NemotronHExperts(SimpleNamespace(**REAL["nemotron_h"][1]))),
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("keeps_h", [True, False])
def test_every_layout_it_takes(forward, name, keeps_h):
    check(partial(forward, keeps_h=keeps_h), EXPERTS[name](), batch(R=24, K=2, E=4, dead=0.3))


@pytest.mark.parametrize("dead", [0.0, 0.4])
@pytest.mark.parametrize("counted", [False, True])
def test_its_graph_gives_every_gradient(forward, dead, counted):
    def function(experts, x_RH, idx_RK, weights_RK):
        n_pairs = int((idx_RK >= 0).sum()) if counted else None
        return forward(experts, x_RH, idx_RK, weights_RK, n_pairs=n_pairs)

    check(function, swiglu(), batch(R=24, K=2, E=4, dead=dead))


def test_dead_rows_of_nan_reach_nothing(forward):
    experts, (x_RH, idx_RK, weights_RK) = swiglu(), batch(R=16, K=2, E=4, dead=0.2)
    dead_R = torch.arange(16) % 3 == 0
    idx_RK[dead_R] = -1
    want = run(dense, copy.deepcopy(experts).double(), x_RH.double(), idx_RK, weights_RK.double())
    x_RH[dead_R] = torch.nan
    assert_near(run(forward, experts, x_RH, idx_RK, weights_RK), want, 1e-5)


@pytest.mark.parametrize("rows", [0, 8])
@pytest.mark.parametrize("n_pairs", [0, None])
def test_nothing_to_do_gives_zeros(forward, rows, n_pairs):
    experts = swiglu()
    x_RH, idx_RK, weights_RK = batch(R=rows, K=2, E=4)

    def function(*args):
        return forward(*args, n_pairs=n_pairs)

    got = run(function, experts, x_RH, torch.full_like(idx_RK, -1), weights_RK)
    assert all(value.eq(0).all() for value in got.values())


def test_frozen_experts_cost_no_gemm_of_theirs(forward, monkeypatch):
    def rows_alone(*args, cu_seqlens_m, **kwargs):
        assert cu_seqlens_m is not None
        gemm(*args, cu_seqlens_m=cu_seqlens_m, **kwargs)

    monkeypatch.setattr(sys.modules["quack.gemm_interface"].gemm_tuned, "fn", rows_alone)
    experts, inputs = swiglu().requires_grad_(False), batch(R=24, K=2, E=4)
    assert check(forward, experts, inputs).keys() == {"y", "x", "weights"}


def test_kernels_are_built_before_the_first_step(forward, monkeypatch):
    """The first forward of these sizes runs a backward too, of few rows; the next one runs nothing more."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0].shape[0])
        return gemm_dact(*args, **kwargs)

    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_dact", counted)
    experts, inputs = swiglu(), batch(R=8, K=2, E=4)
    forward(experts, *inputs)
    forward(experts, *inputs)
    assert calls == [256]
    assert all(parameter.grad is None for parameter in experts.parameters())


def test_batches_of_many_sizes_are_few_shapes(forward, monkeypatch):
    shapes = set()

    def act(x_RH, *args, A_idx, **kwargs):
        shapes.add((x_RH.shape[0], A_idx.shape[0]))
        return gemm_act(x_RH, *args, A_idx=A_idx, **kwargs)

    forward(swiglu(), *batch(R=3, K=2, E=4))
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_act", act)
    for rows in (3, 100, 256):
        forward(swiglu(), *batch(R=rows, K=2, E=4), n_pairs=2 * rows)
    assert shapes == {(256, 256), (256, 512)}
    assert [backend._round_up(n) for n in (1, 256, 257, 5000, 16384, 16385)] == [256, 256, 512, 5120, 16384, 17408]


def test_without_gradients_nothing_is_kept(forward, monkeypatch):
    kept = []

    def act(*args, store_preact, **kwargs):
        kept.append(store_preact)
        return gemm_act(*args, store_preact=store_preact, **kwargs)

    forward(swiglu(), *batch(R=3, K=2, E=4))
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm_act", act)
    with torch.no_grad():
        forward(swiglu(), *batch(R=8, K=2, E=4))
    assert kept == [False]
