"""Weights read back into a model that is there already: in place, in every layout, whole or refused."""

import json

import pytest
import torch
import torch.distributed as dist
from transformers import DistributedConfig

from automodel_moe.checkpoint.headers import CheckpointError
from automodel_moe.checkpoint.load import same_on_every_rank
from automodel_moe.checkpoint.reload import reload_weights
from automodel_moe.checkpoint.save import prepare_save
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write

HERE = __name__

# Experts stacked, transposed, interleaved, with biases, split in two; q, k and v in one weight, which is read whole;
# tied weights; buffers that training changes; float32 beside bfloat16.
KINDS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_linear", "lfm2_moe", "nemotron_h", "ernie4_5_vl_moe", "step3p7"]


def loaded(kind, folder, **layout):
    kwargs = {"distributed_config": DistributedConfig(**layout)} if layout else {}
    model = ranks.load(model_class(kind), folder, **kwargs)
    prepare_save(model)
    return model


@torch.no_grad()
def back_in_place(kind, folder, out, **layout) -> list[str]:
    """What differs after the weights were saved, spoilt and read back."""
    model = loaded(kind, folder, **layout)
    for parameter in model.parameters():
        (parameter.to_local() if layout else parameter).mul_(1.5)
    want = {name: ranks.whole(value).clone() for name, value in model.state_dict().items()}
    conversions, objects = model._weight_conversions, dict(model.named_parameters())
    model.save_pretrained(out)
    for parameter in model.parameters():
        (parameter.to_local() if layout else parameter).fill_(7)
    reload_weights(model, out)
    assert model._weight_conversions is conversions
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())
    return ranks.differences(model, want)


def all_back_in_place(folders, out, **layout) -> dict[str, list[str]]:
    return {kind: back_in_place(kind, folder, f"{out}/{kind}", **layout) for kind, folder in folders.items()}


@pytest.mark.parametrize("layout", [{}, {"fsdp_size": 2}, {"fsdp_size": 4, "ep_size": 2}], ids=str)
def test_every_weight_is_read_back_in_place(layout, worlds, tmp_path):
    folders = {kind: str(tmp_path / kind) for kind in KINDS}
    for kind, folder in folders.items():
        write(kind, folder)
    out = str(tmp_path / "out")
    if layout:
        kinds = {kind: folder for kind, folder in folders.items() if kind != "step3p7" or "ep_size" not in layout}
        results = worlds(layout["fsdp_size"]).run(f"{HERE}:all_back_in_place", folders=kinds, out=out, **layout)
    else:
        results = [all_back_in_place(folders, out)]
    for result in results:
        assert result == {kind: [] for kind in result}


def test_several_files_and_a_dtype_of_its_own(tmp_path):
    write("qwen3_moe", tmp_path / "source", torch.bfloat16)
    model = loaded("qwen3_moe", tmp_path / "source")
    want = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    for parameter in model.parameters():
        parameter.data.zero_()
    reload_weights(model, tmp_path / "out")
    assert model.dtype == torch.bfloat16 and ranks.unequal(model.state_dict(), want) == []

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    (tmp_path / "out" / index["weight_map"]["lm_head.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: it has no model-0000"):
        reload_weights(model, tmp_path / "out")


def refuse(folder, **layout) -> str:
    model = loaded("qwen3_moe", folder, **layout)
    model.save_pretrained(f"{folder}/saved")
    state = model.state_dict()
    state.pop("model.norm.weight")
    model.save_pretrained(f"{folder}/less", state_dict=state)
    with pytest.raises(CheckpointError) as error:
        reload_weights(model, f"{folder}/less")
    return str(error.value)


@pytest.mark.parametrize("layout", [{}, {"fsdp_size": 2, "ep_size": 2}], ids=str)
def test_a_weight_that_is_not_there_is_named(layout, worlds, tmp_path):
    write("qwen3_moe", tmp_path)
    folder = str(tmp_path)
    messages = worlds(2).run(f"{HERE}:refuse", folder=folder, **layout) if layout else [refuse(folder)]
    for message in messages:
        assert message == f"{folder}/less does not fill the model:\n  model.norm.weight is not there"


def unreadable_on_one(rank: int) -> str:
    with pytest.raises((PermissionError, CheckpointError)) as error, same_on_every_rank(sharded=True):
        if dist.get_rank() == rank:
            raise PermissionError("not for you")
    return f"{error.type.__name__}: {error.value}"


def test_a_file_that_one_rank_cannot_read_stops_all(worlds):
    assert worlds(2).run(f"{HERE}:unreadable_on_one", timeout=60, rank=1) == [
        "CheckpointError: PermissionError: not for you",
        "PermissionError: not for you",
    ]
