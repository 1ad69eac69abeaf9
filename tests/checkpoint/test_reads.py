"""Each rank reads its own share of the experts' bytes from disk, and no more."""

import pytest
from safetensors.torch import load_file, save_file
from transformers import DistributedConfig, modeling_utils

from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write


class CountingFile:
    """A safetensors file that counts the bytes of what is sliced out of it, by key."""

    def __init__(self, file, read: dict[str, int]):
        self.file, self.read = file, read

    def keys(self):
        return self.file.keys()

    def get_slice(self, key):
        return CountingSlice(self.file.get_slice(key), key, self.read)

    def __exit__(self, *args):
        self.file.__exit__(*args)


class CountingSlice:
    def __init__(self, source, key, read):
        self.source, self.key, self.read = source, key, read

    def get_shape(self):
        return self.source.get_shape()

    def get_dtype(self):
        return self.source.get_dtype()

    def __getitem__(self, index):
        tensor = self.source[index]
        self.read[self.key] = self.read.get(self.key, 0) + tensor.numel() * tensor.itemsize
        return tensor


def expert_bytes(kind, folder, **layout):
    """Bytes of expert tensors that this rank read, and that it holds."""
    read: dict[str, int] = {}
    safe_open = modeling_utils.safe_open
    modeling_utils.safe_open = lambda *args, **kwargs: CountingFile(safe_open(*args, **kwargs), read)
    try:
        model = ranks.load(model_class(kind), folder, distributed_config=DistributedConfig(**layout))
    finally:
        modeling_utils.safe_open = safe_open
    params = [param.to_local() for name, param in model.named_parameters() if ".experts." in name]
    held = sum(param.numel() * param.itemsize for param in params)
    return sum(size for key, size in read.items() if ".experts." in key), held


RUN = "tests.checkpoint.test_reads:expert_bytes"
LAYOUTS = [(2, {"fsdp_size": 2, "ep_size": 2}), (4, {"fsdp_size": 4, "ep_size": 2}), (4, {"fsdp_size": 4})]


# One tensor an expert; fused; fused and checked for its layout; beside a convolution that is read whole.
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_vl_moe", "kimi_linear"])
@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_own_share_only(kind, size, layout, worlds, tmp_path):
    write(kind, tmp_path)
    total = sum(
        t.numel() * t.itemsize for key, t in load_file(tmp_path / "model.safetensors").items() if ".experts." in key
    )
    results = worlds(size).run(RUN, kind=kind, folder=tmp_path, **layout)
    assert total > 0 and results == [(total // size, total // size)] * size


def test_transposed_experts(worlds, tmp_path):
    write("qwen3_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {key: t.transpose(1, 2).contiguous() if ".experts." in key else t for key, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    total = sum(t.numel() * t.itemsize for key, t in tensors.items() if ".experts." in key)
    assert worlds(2).run(RUN, kind="qwen3_vl_moe", folder=tmp_path, fsdp_size=2) == [(total // 2, total // 2)] * 2


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_rank_without_experts_reads_none(kind, worlds, tmp_path):
    write(kind, tmp_path, num_local_experts=2)
    results = worlds(4).run(RUN, kind=kind, folder=tmp_path, fsdp_size=4, ep_size=2)
    assert [read for read, _ in results] == [held for _, held in results]
    assert [held == 0 for _, held in results].count(True) == 2
