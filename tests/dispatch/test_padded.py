"""All-to-alls of a stated size: what happens to a batch that they can't carry, and a model's numbers."""

import pytest
import torch
import torch.distributed as dist

from automodel_moe import MoEAutoModel
from automodel_moe.config import MoEConfig
from automodel_moe.dispatch import choose
from tests import tiny
from tests.dispatch.test_contract import E_LOCAL, _layer


def overflow() -> list[str]:
    """Rank 0 has 5 rows for rank 1, where 4 may travel; nobody else has too many."""
    rank = dist.get_rank()
    x_TH = torch.ones(5, 3)
    idx_TK = torch.full((5, 1), E_LOCAL if rank == 0 else 0)
    if rank:
        x_TH, idx_TK = x_TH[:2], idx_TK[:2]
    weights_TK = torch.ones(idx_TK.shape)
    transport = choose("auto", dist.group.WORLD, E_LOCAL, x_TH=x_TH, row_capacity=4)
    fits = _layer(transport, x_TH[:4], idx_TK[:4], weights_TK[:4])
    assert torch.equal(fits, x_TH[:4] * (idx_TK[:4] + 1))
    too_many = _layer(transport, x_TH, idx_TK, weights_TK)
    # The fifth token found no place and has a sum of nothing; all others tell, also where all rows fit.
    assert too_many[:4].isnan().all()
    with pytest.raises(RuntimeError) as error:
        _layer(transport, x_TH[:1], idx_TK[:1], weights_TK[:1])
    return str(error.value)


def test_a_batch_that_does_not_fit_is_found_on_every_rank(worlds):
    for message in worlds(4).run(f"{__name__}:overflow", timeout=150):
        assert "row_capacity=4, but in the forward before this one a rank had 5 rows for another" in message
        assert "row_capacity of at least 5" in message


def model_step(folder: str, capacity: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2, "row_capacity": capacity}).train()
    inputs = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in tiny.batch("qwen3_moe").items()}
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_model_gets_the_same_numbers(worlds, tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    run = worlds(2).run
    (want, wanted), (got, grads) = (
        run(f"{__name__}:model_step", timeout=120, folder=str(tmp_path), capacity=capacity)[0]
        for capacity in (None, 24)
    )
    # The same rows in the same order for each expert: a few roundings where a GEMM's tail differs.
    assert got == pytest.approx(want, rel=1e-6)
    for name, grad in wanted.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_it_is_refused_where_it_cannot_be_had():
    with pytest.raises(ValueError, match="row_capacity=8 can't be had with dispatcher='deepep'"):
        MoEConfig(dispatcher="deepep", row_capacity=8)
    for value in (0, 1.5, True, "auto"):
        with pytest.raises(ValueError, match=r"row_capacity=.* must be None or an integer of at least 1"):
            MoEConfig(row_capacity=value)
