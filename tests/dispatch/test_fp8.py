"""Tokens in eight bits: how far each number may be off, what travels, and what a model's gradients make of it."""

import pytest
import torch
import torch.distributed as dist

from automodel_moe import MoEAutoModel, dispatch
from automodel_moe.config import MoEConfig
from automodel_moe.dispatch import fp8
from tests import tiny
from tests.dispatch.test_contract import E_LOCAL, _tokens


@pytest.mark.parametrize("hidden", [1, 100, 128, 130, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_is_near(hidden, dtype):
    generator = torch.Generator().manual_seed(hidden)
    # Rows and columns of very different sizes, a row of zeros, and no row at all.
    x_RH = torch.randn(50, hidden, generator=generator) * torch.exp(4 * torch.randn(50, 1, generator=generator))
    x_RH[:, ::3] *= 1e-4
    x_RH[7] = 0
    x_RH = x_RH.to(dtype)
    packed = fp8.pack(x_RH)
    assert packed.shape == (50, hidden + 4 * -(-hidden // 128)) and packed.dtype == torch.uint8
    back_RH = fp8.unpack(packed, hidden, dtype)
    assert back_RH.dtype == dtype
    largest_RH = torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in x_RH.float().split(128, 1)], 1)
    # e4m3: three bits after the point, so 2^-4 of a number; below 2^-6 steps of 2^-9, where 448 stands for the
    # largest. The scale's and the result's own roundings come on top: bfloat16's is 2^-9.
    allowed_RH = (
        torch.maximum(x_RH.float().abs() * 2**-4, largest_RH * 2**-10 / 448) * 1.01 + x_RH.float().abs() * 2**-8
    )
    assert ((back_RH.float() - x_RH.float()).abs() <= allowed_RH).all()
    assert fp8.unpack(fp8.pack(x_RH[:0]), hidden, dtype).shape == (0, hidden)


def test_what_is_not_finite_shows():
    x_RH = torch.ones(3, 256)
    x_RH[0, 5], x_RH[1, 5] = float("inf"), float("nan")
    back_RH = fp8.unpack(fp8.pack(x_RH), 256, torch.float32)
    assert back_RH[0, 5].isnan() and back_RH[1, 5].isnan()
    assert torch.equal(back_RH[:, 128:], torch.ones(3, 128)) and torch.equal(back_RH[2], torch.ones(256))


def round_trip() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    sent: list[tuple[torch.dtype, int]] = []
    all_to_all = dist.all_to_all_single

    def counted(output, rows, *args, **kwargs):
        sent.append(tuple(rows.shape))
        return all_to_all(output, rows, *args, **kwargs)

    x_TH, idx_TK, weights_TK = _tokens(rank, (9, 0, 5, 1)[rank], 2, world * E_LOCAL, 256, torch.bfloat16, False)
    transport = dispatch.choose("auto", dist.group.WORLD, E_LOCAL, x_TH=x_TH, dtype="fp8")
    dist.all_to_all_single = counted
    try:
        plan = transport.plan(idx_TK, x_TH, True)
        x_RH, weights_RK = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
        transport.combine_finish(transport.combine_start(plan, x_RH, weights_RK))
        again_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH))
        recomputed_RH, _ = transport.dispatch_finish(transport.dispatch_start(plan, x_TH, again=True))
    finally:
        dist.all_to_all_single = all_to_all
    # Sizes; tokens in eight bits, ids and weights; rows back, their weights' gradients; a gradient out; a recompute.
    assert [columns for _, columns in sent[1:]] == [256 + 8, 4 * 4, 512, 2 * 4, 512, 256 + 8]
    assert x_RH.dtype == again_RH.dtype == torch.bfloat16
    # The mirror of a combine carries gradients, as they are; so these rows are the tokens themselves.
    assert torch.equal(x_RH, fp8.unpack(fp8.pack(again_RH), 256, torch.bfloat16))
    assert torch.equal(x_RH, recomputed_RH)
    assert torch.equal(plan.idx_RK >= 0, weights_RK > 0)


def test_tokens_alone_travel_in_eight_bits(worlds):
    worlds(2).run(f"{__name__}:round_trip", timeout=150)


def disagreeing() -> str:
    x_TH, idx_TK, weights_TK = _tokens(0, 4, 2, dist.get_world_size() * E_LOCAL, 256, torch.bfloat16, False)
    dtype = ("auto", "fp8")[dist.get_rank()]
    transport = dispatch.choose("all_to_all", dist.group.WORLD, E_LOCAL, x_TH=x_TH, dtype=dtype)
    with pytest.raises(RuntimeError) as error:
        transport.dispatch_start(transport.plan(idx_TK, x_TH, True), x_TH, weights_TK)
    return str(error.value)


def test_ranks_that_disagree_about_it_are_told(worlds):
    for message in worlds(2).run(f"{__name__}:disagreeing", timeout=150):
        assert "torch.float8_e4m3fn" in message and "torch.bfloat16" in message


def gradients(folder: str, dtype: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2, "dispatch_dtype": dtype}).train()
    inputs = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in tiny.batch("qwen3_moe").items()}
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_models_gradients_are_near(worlds, tmp_path):
    # One layer: its routing does not depend on rounded rows, so no token changes its expert.
    tiny.save("qwen3_moe", tmp_path, num_hidden_layers=1)
    run = worlds(2).run
    (exact_loss, exact), (loss, rounded) = (
        run(f"{__name__}:gradients", timeout=120, folder=str(tmp_path), dtype=dtype)[0] for dtype in ("auto", "fp8")
    )
    # The experts' share of the hidden state is a few per cent off, as below; the loss is that of near random logits.
    assert loss != exact_loss and loss == pytest.approx(exact_loss, rel=5e-3)
    for name, grad in exact.items():
        distance = (rounded[name] - grad).norm() / grad.norm()
        # A row's numbers are up to 1/16 off, evenly spread: 1/16/sqrt(3) = 3.6 % in the mean square, which the
        # activation's slope can double.
        assert distance < 0.072, (name, distance)


def test_it_is_refused_where_it_cannot_be_had():
    with pytest.raises(ValueError, match="dispatch_dtype='fp8' can't be had with dispatcher='deepep'"):
        MoEConfig(dispatcher="deepep", dispatch_dtype="fp8")
    with pytest.raises(ValueError, match="dispatch_dtype='fp4' is none of 'auto', 'fp8'"):
        MoEConfig(dispatch_dtype="fp4")
