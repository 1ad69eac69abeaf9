"""The boxes of a whole tensor that each rank holds, for every way in which a dimension is cut."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from automodel_moe.trainer.folders import check_shared
from automodel_moe.trainer.state import load_optimizer, pieces, regrouped, save_optimizer

HERE = __name__

# Whole experts over (efsdp, ep), also where they don't divide; interleaved halves of a fused weight; replicas.
CUTS = {
    "rows": (Shard(0), Shard(0)),
    "experts": (_StridedShard(0, split_factor=2), Shard(0)),
    "halves": (Replicate(), _StridedShard(1, split_factor=2)),
    "rows and halves": (Shard(0), _StridedShard(1, split_factor=2)),
    "both dimensions": (Shard(0), Shard(1)),
    "replicas": (Replicate(), Shard(-1)),
}


def whole_tensor(rows: int) -> torch.Tensor:
    return torch.arange(rows * 8 * 2.0).view(rows, 8, 2)


def cut(whole: torch.Tensor, mesh, placements) -> DTensor:
    """`whole` cut by torch itself, one mesh dimension after the other."""
    local = whole
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(local, mesh.shape[dim], with_padding=False, contiguous=True)
            local = parts[mesh.get_coordinate()[dim]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def boxes_cover(rows: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = whole_tensor(rows)
    for name, placements in CUTS.items():
        tensor = cut(whole, mesh, placements)
        count = torch.zeros_like(whole)
        held = 0
        for offsets, view in pieces(tensor):
            box = tuple(slice(start, start + size) for start, size in zip(offsets, view.shape, strict=True))
            assert torch.equal(whole[box], view), name
            assert view.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr(), "a copy"
            count[box] += 1
            held += view.numel()
        assert held == tensor.to_local().numel(), name
        dist.all_reduce(count)
        copies = 2 if any(placement.is_replicate() for placement in placements) else 1
        assert torch.equal(count, torch.full_like(count, copies)), name


@pytest.mark.parametrize("rows", [8, 6, 3])
def test_boxes_are_the_elements_that_a_rank_holds(worlds, rows):
    worlds(4).run(f"{HERE}:boxes_cover", rows=rows)


class Weights(torch.nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        for name, placements in CUTS.items():
            value = whole_tensor(6)
            parameter = value if mesh is None else cut(value, mesh, placements)
            self.register_parameter(name.replace(" ", "_"), torch.nn.Parameter(parameter))


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 3
    optimizer.step()
    return optimizer


def write(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = Weights(mesh)
    save_optimizer(folder, model, stepped(model), seen=1)


def test_any_cut_is_read_on_one_process(worlds, tmp_path):
    worlds(4).run(f"{HERE}:write", folder=str(tmp_path))
    model = Weights()
    want = stepped(model).state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    notes, sources = load_optimizer(tmp_path, model, optimizer)
    got = optimizer.state_dict()
    assert notes == {"seen": 1} and sources == [0]
    assert got["param_groups"] == want["param_groups"]
    for place, entries in want["state"].items():
        assert entries.keys() == got["state"][place].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in entries.items():
            assert torch.equal(got["state"][place][key], value), (place, key)


def test_a_strange_optimizer_is_refused(tmp_path):
    model, other = Weights(), Weights()
    save_optimizer(tmp_path, model, stepped(model))
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        save_optimizer(tmp_path, model, stepped(other))
    with pytest.raises(ValueError, match="was trained, and is not among its parameters now"):
        load_optimizer(tmp_path, model, torch.optim.AdamW(list(model.parameters())[1:]))
    model.register_parameter("new", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match="knows nothing of 1 of the optimizer's parameters, new among them"):
        load_optimizer(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_groups_may_be_merged_where_their_options_agree(tmp_path):
    model = Weights()
    first, second, *rest = model.parameters()
    apart = torch.optim.AdamW([{"params": [first, second], "lr": 0.1}, {"params": rest, "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LambdaLR(apart, lambda step: 1 / (step + 1))
    save_optimizer(tmp_path, model, apart)
    together = torch.optim.AdamW(model.parameters())
    _, sources = load_optimizer(tmp_path, model, together)
    assert sources == [0] and together.param_groups[0]["lr"] == 0.1
    assert regrouped(schedule.state_dict(), sources)["base_lrs"] == [0.1]

    apart.param_groups[1]["lr"] = 0.2
    save_optimizer(tmp_path, model, apart)
    with pytest.raises(ValueError, match="each was saved with options"):
        load_optimizer(tmp_path, model, together)


def check_a_folder_of_its_own(folder: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match="not on a filesystem that all ranks share"):
        check_shared(Path(folder) / str(dist.get_rank()))
    check_shared(Path(folder) / "shared")
    dist.barrier()
    assert list((Path(folder) / "shared").iterdir()) == []


def test_a_folder_that_a_rank_does_not_see_is_refused(worlds, tmp_path):
    worlds(2).run(f"{HERE}:check_a_folder_of_its_own", folder=str(tmp_path))


class Factored(torch.optim.Optimizer):
    """Keeps one number a row, as Adafactor does: of a sharded parameter only this rank's."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = parameter.to_local()[:, 0, 0].clone()


def refuse_factored(folder: str) -> None:
    model = Weights(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    optimizer = Factored(model.parameters())
    optimizer.step()
    with pytest.raises((ValueError, RuntimeError), match=r"Factored keeps Tensor of shape .* as 'row' of"):
        save_optimizer(folder, model, optimizer)


def test_state_that_cannot_be_cut_anew_is_refused(worlds, tmp_path):
    worlds(4).run(f"{HERE}:refuse_factored", folder=str(tmp_path))
