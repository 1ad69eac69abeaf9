"""The experts on a GPU: every backend against a float64 computation, in poisoned memory."""

import copy
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from automodel_moe.experts import choose
from tests.experts.reference import LAYOUTS, assert_near, batch, by_expert, filled, run, toy
from tests.experts.test_quack import taken
from tests.experts.test_torch import REAL, name_of

pytest.importorskip("triton", reason="the kernels are Triton's")
from triton.runtime.jit import JITFunction

from automodel_moe.kernels import activation_triton, gather_sum_triton, grouped_gemm_triton, pairs_triton

pytestmark = pytest.mark.gpu
TRITON = (activation_triton, gather_sum_triton, grouped_gemm_triton, pairs_triton)
CUDA = torch.device("cuda")
# Operands, activations and results rounded to 8 and 11 bits on the way; float32 sums in another order.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
NEEDS_QUACK = pytest.mark.skipif(find_spec("quack") is None, reason="quack-kernels is not installed")


NAMES = ["torch", "triton", pytest.param("quack", marks=NEEDS_QUACK)]


@pytest.fixture(params=[*NAMES, "torch, counted", "triton, counted"])
def forward(request):
    name, _, counted = request.param.partition(", ")

    def function(experts, x_RH, idx_RK, weights_RK):
        n_pairs = int((idx_RK >= 0).sum()) if counted else None
        return choose(name, experts, CUDA)(experts, x_RH, idx_RK, weights_RK, n_pairs=n_pairs)

    return function


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every uninitialised float is NaN, every uninitialised integer the largest."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def swiglu(E=8, H=256, I=128, dtype=torch.bfloat16):  # noqa: E741
    config = SimpleNamespace(num_experts=E, hidden_size=H, moe_intermediate_size=I, hidden_act="silu")
    return filled(Qwen3MoeExperts(config), dtype).to(CUDA)


def inputs(*args, **kwargs):
    return tuple(tensor.to(CUDA) for tensor in batch(*args, **kwargs))


def reference(experts, x_RH, idx_RK, weights_RK):
    want = run(by_expert, copy.deepcopy(experts).double(), x_RH.double(), idx_RK, weights_RK.double())
    return {name: value.cpu() for name, value in want.items()}


def check(function, experts, arguments):
    got = run(function, experts, *arguments)
    assert_near(got, reference(experts, *arguments), TOLERANCE[experts.down_proj.dtype])
    return got


@pytest.mark.parametrize("dead", [0.0, 0.3])
def test_swiglu_experts(forward, dead):
    check(forward, swiglu(), inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=dead))


@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("sizes", [(1, 256, 128), (5, 200, 72)], ids=["one expert", "no multiple of a tile"])
def test_odd_sizes(forward, rows, sizes):
    E, H, I = sizes  # noqa: E741
    check(forward, swiglu(E, H, I), inputs(rows, 1, E, H=H, dtype=torch.bfloat16))


def test_the_shape_of_qwen3_30b_a3b(forward):
    check(forward, swiglu(E=128, H=2048, I=768), inputs(4096, 8, 128, H=2048, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(n for n, on in layout.items() if on) or "none")
def test_every_layout_in_plain_torch(layout, dtype):
    experts = toy(layout, dtype=dtype).to(CUDA)
    check(choose("torch", experts, CUDA), experts, inputs(200, 2, 4, dtype=dtype, dead=0.3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(n for n, on in layout.items() if on) or "none")
def test_every_layout_in_triton(layout, dtype):
    experts = toy(layout, dtype=dtype).to(CUDA)
    check(choose("triton", experts, CUDA), experts, inputs(200, 2, 4, dtype=dtype, dead=0.3))


WIDER = dict(E=8, H=256, I=128, dtype=torch.bfloat16)
QUACKS = {name_of(layout): partial(toy, layout, **WIDER) for layout in LAYOUTS if taken(layout)} | {
    "nemotron_h": lambda: filled(
        NemotronHExperts(
            SimpleNamespace(
                n_routed_experts=8,
                hidden_size=256,
                moe_intermediate_size=128,
                moe_latent_size=None,
                mlp_hidden_act="relu2",
            )
        ),
        torch.bfloat16,
    ),
}


@NEEDS_QUACK
@pytest.mark.parametrize("name", QUACKS)
def test_every_layout_that_quack_takes(name):
    experts = QUACKS[name]().to(CUDA)
    check(choose("quack", experts, CUDA), experts, inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=0.3))


@pytest.mark.parametrize("name", NAMES)
def test_computing_h_again_gives_the_same_bits(name):
    experts, arguments = swiglu(), inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=0.2)
    function = choose(name, experts, CUDA)
    plain, again = (run(partial(function, keeps_h=keeps_h), experts, *arguments) for keeps_h in (True, False))
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("name", REAL)
def test_real_classes_in_triton(name):
    experts_class, config = REAL[name]
    experts = filled(experts_class(SimpleNamespace(**config)), torch.bfloat16).to(CUDA)
    arguments = inputs(2000, 2, 4, dtype=torch.bfloat16)
    # A bias of these toys has 128 numbers: the norm of so few errors varies by some 10 %.
    compare(choose("triton", experts, CUDA), choose("torch", experts, CUDA), experts, arguments, slack=1.25)


def compare(function, other, experts, arguments, slack=1.05):
    """No gradient is further from float64 than another way's times `slack`. What bfloat16 costs both is the same: a
    number that it rounds across an activation's limit, for one."""
    want = reference(experts, *arguments)
    got, others = run(function, experts, *arguments), run(other, experts, *arguments)
    for name, value in want.items():
        error, allowed = ((side[name].cpu().double() - value).norm() for side in (got, others))
        assert error <= slack * allowed, f"{name}: {error / value.norm()} against {allowed / value.norm()}"


def test_no_less_accurate_than_transformers(forward):
    experts = swiglu(E=32, H=1024, I=512)
    compare(forward, grouped_mm_experts_forward, experts, inputs(2048, 4, 32, H=1024, dtype=torch.bfloat16))


def test_lengths_that_change_compile_nothing_new():
    experts = swiglu()

    def step(rows):
        run(choose("triton", experts, CUDA), experts, *inputs(rows, 3, 8, H=256, dtype=torch.bfloat16))

    def compiled():
        kernels = [kernel for module in TRITON for kernel in vars(module).values() if isinstance(kernel, JITFunction)]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    step(512)
    before = compiled()
    assert before > 0
    for rows in (1, 7, 16, 100, 511, 513, 4096, 5000):
        step(rows)
    assert compiled() == before


def test_experts_without_rows_get_an_exact_zero(forward):
    experts = swiglu()
    x_RH, idx_RK, weights_RK = inputs(300, 1, 8, H=256, dtype=torch.bfloat16)
    got = check(forward, experts, (x_RH, torch.where(idx_RK < 4, 2, 7), weights_RK))
    for name in ("gate_up_proj", "down_proj"):
        assert got[name][[0, 1, 3, 4, 5, 6]].eq(0).all()
        assert got[name][[2, 7]].ne(0).any()


@pytest.mark.parametrize("rows", [0, 200], ids=["no row", "no live slot"])
def test_nothing_to_do_gives_zeros(forward, rows):
    x_RH, idx_RK, weights_RK = inputs(rows, 2, 8, H=256, dtype=torch.bfloat16)
    got = run(forward, swiglu(), torch.full_like(x_RH, torch.nan), torch.full_like(idx_RK, -1), weights_RK)
    assert all(value.eq(0).all() for value in got.values())


def test_dead_rows_of_nan_reach_nothing(forward):
    experts = swiglu()
    x_RH, idx_RK, weights_RK = inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=0.2)
    dead_R = torch.arange(500, device=CUDA) % 3 == 0
    idx_RK[dead_R] = -1
    want = reference(experts, x_RH, idx_RK, weights_RK)
    x_RH[dead_R] = torch.nan
    assert_near(run(forward, experts, x_RH, idx_RK, weights_RK), want, TOLERANCE[torch.bfloat16])


def test_two_runs_are_bit_equal(forward):
    experts, arguments = swiglu(), inputs(2000, 4, 8, H=256, dtype=torch.bfloat16, dead=0.2)
    first, second = (run(forward, experts, *arguments) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_autocast(forward):
    experts, arguments = swiglu(dtype=torch.float32), inputs(500, 3, 8, H=256)

    def under_autocast(*args):
        with torch.autocast("cuda", torch.bfloat16):
            return forward(*args)

    got = run(under_autocast, experts, *arguments)
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_near(got, reference(experts, *arguments), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("name", NAMES)
def test_the_host_never_waits(name):
    experts, arguments = swiglu(), inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=0.2)
    x_RH, idx_RK, weights_RK = arguments
    x_RH.requires_grad_()
    weights_RK.requires_grad_()
    function = choose(name, experts, CUDA)
    dy_RH = torch.ones_like(x_RH)
    for mode in ("default", "error"):  # the first builds the kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            function(experts, x_RH, idx_RK, weights_RK).backward(dy_RH)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_frozen_experts_pass_gradients_on(forward):
    experts = swiglu().requires_grad_(False)
    arguments = inputs(500, 3, 8, H=256, dtype=torch.bfloat16, dead=0.2)
    got = check(forward, experts, arguments)
    assert got.keys() == {"y", "x", "weights"}
    assert all(parameter.grad is None for parameter in experts.parameters())
