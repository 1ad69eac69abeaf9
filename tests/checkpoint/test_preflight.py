"""A checkpoint that isn't the model's is refused before a weight is read, on every rank, with a name and a remedy."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DistributedConfig

from automodel_moe.checkpoint.headers import CheckpointError, read_header
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write

GATE = "model.layers.1.mlp.experts.{}.gate_proj.weight"


def change(folder, edit) -> None:
    """Apply `edit` to the dict of a checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def lacks_one(tensors):
    del tensors[GATE.format(3)]


def has_one_more(tensors):
    for name in ("gate", "up", "down"):
        key = GATE.format(7).replace("gate", name)
        tensors[key.replace(".7.", ".8.")] = tensors[key].clone()


def lacks_a_layer(tensors):
    for key in [key for key in tensors if "layers.1.mlp.experts" in key and "down" in key]:
        del tensors[key]


def is_narrower(tensors):
    for key in [key for key in tensors if "layers.1.mlp.experts" in key]:
        tensors[key] = tensors[key][:, :16].contiguous()


BAD = {
    lacks_one: r"layers\.1\.mlp\.experts\.gate_up_proj: of the 8 experts .* lacks 3 \(in .*model\.safetensors\)",
    has_one_more: r"of the 8 experts 'mlp\.experts\.\*\.down_proj\.weight' has in excess 8",
    lacks_a_layer: r"layers\.1\.mlp\.experts\.down_proj: no tensor of the checkpoint becomes this parameter",
    is_narrower: r"gate_up_proj: the config asks for \(8, 48, 32\), the checkpoint's .* is \(24, 16\)",
}


@pytest.mark.parametrize("edit", BAD, ids=lambda edit: edit.__name__)
def test_experts_that_do_not_fit(edit, tmp_path):
    write("qwen3_moe", tmp_path)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=BAD[edit]) as error:
        ranks.load(model_class("qwen3_moe"), tmp_path)
    assert "Download or write the checkpoint again" in str(error.value)


def test_fused_experts_of_another_number(tmp_path):
    write("gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: the config asks for \(6, .* is \(8, "):
        ranks.load(model_class("gpt_oss"), tmp_path)


def truncate(folder, n_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])


@pytest.mark.parametrize("n_bytes", [0, 5, 100, -1])
def test_truncated_file(n_bytes, tmp_path):
    write("qwen3_moe", tmp_path)
    truncate(tmp_path, n_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: .* download or copy the file again"):
        read_header(tmp_path / "model.safetensors")


def message(folder) -> str:
    layout = DistributedConfig(fsdp_size=2, ep_size=2)
    with pytest.raises(CheckpointError) as error:
        ranks.load(model_class("qwen3_moe"), folder, distributed_config=layout)
    return str(error.value)


@pytest.mark.parametrize("spoil", [lambda folder: change(folder, lacks_one), lambda folder: truncate(folder, -1)])
def test_every_rank_says_the_same(spoil, worlds, tmp_path):
    write("qwen3_moe", tmp_path)
    spoil(tmp_path)
    first, second = worlds(2).run("tests.checkpoint.test_preflight:message", folder=tmp_path)
    assert first == second and str(tmp_path / "model.safetensors") in first


def message_of_one_bad_copy(folder, copy) -> str:
    return message(copy if torch.distributed.get_rank() == 1 else folder)


def test_a_file_that_is_bad_on_one_rank_only(worlds, tmp_path):
    """As with a local disk a node: the ranks whose copy is whole must not wait for the one that raised."""
    for name in ("whole", "cut"):
        write("qwen3_moe", tmp_path / name)
    truncate(tmp_path / "cut", -1)
    run = "tests.checkpoint.test_preflight:message_of_one_bad_copy"
    first, second = worlds(2).run(run, timeout=60, folder=tmp_path / "whole", copy=tmp_path / "cut")
    assert first == second and "cut/model.safetensors is truncated" in first


def test_what_is_missing_elsewhere_stays_transformers_business(tmp_path):
    write("qwen3_moe", tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    model, info = ranks.load(model_class("qwen3_moe"), tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.norm.weight"}
    assert torch.equal(model.model.norm.weight, torch.ones(32))
