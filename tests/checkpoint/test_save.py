"""`save_pretrained` writes the checkpoint's own layout from any sharding: keys, dtypes and bytes."""

import copy
import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import DistributedConfig
from transformers.core_model_loading import SplitModulelist
from transformers.distributed.utils import gather_full_state_dict

from automodel_moe.checkpoint import save, shares
from automodel_moe.checkpoint.save import prepare_save
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write

TIED = ["lfm2_moe", "cohere2_moe", "ernie4_5_moe", "zaya"]
LAYOUT = {"fsdp_size": 2, "ep_size": 2}
HERE = "tests.checkpoint.test_save:"


def loaded(kind, folder, **layout):
    kwargs = {"distributed_config": DistributedConfig(**layout)} if layout else {}
    model = ranks.load(model_class(kind), folder, **kwargs)
    prepare_save(model)
    return model


def save_as(kind, folder, out, state_dict="own", layout=LAYOUT, **kwargs):
    """Save with the model's own state dict, or one that the caller passes: DTensors, or whole on rank 0 alone."""
    model = loaded(kind, folder, **layout)
    if state_dict == "dtensors":
        kwargs["state_dict"] = model.state_dict()
    elif state_dict == "whole":
        kwargs["state_dict"] = gather_full_state_dict(model)
    elif state_dict == "doubled":
        kwargs["state_dict"] = {key: 2 * value for key, value in gather_full_state_dict(model).items()}
    model.save_pretrained(out, **kwargs)


@pytest.mark.parametrize("kind", TIED)
def test_tied_weights_are_written_once(kind, worlds, tmp_path):
    write(kind, tmp_path / "source")
    worlds(2).run(
        HERE + "save_as", kind=kind, folder=tmp_path / "source", out=tmp_path / "out", layout={"fsdp_size": 2}
    )
    assert ranks.unequal(ranks.saved(tmp_path / "source"), ranks.saved(tmp_path / "out")) == []


@pytest.mark.parametrize("state_dict", ["dtensors", "whole"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "lfm2_moe"])
def test_state_dict_of_the_caller(state_dict, kind, worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write(kind, source)
    layout = {"fsdp_size": 2}
    worlds(2).run(HERE + "save_as", kind=kind, folder=source, out=out, state_dict=state_dict, layout=layout)
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def test_state_dict_of_the_caller_is_what_is_written(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    worlds(2).run(HERE + "save_as", kind="qwen3_moe", folder=source, out=out, state_dict="doubled")
    doubled = {key: 2 * value for key, value in ranks.saved(source).items()}
    assert ranks.unequal(doubled, ranks.saved(out)) == []


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_bfloat16_bytes_are_the_sources(kind, worlds, tmp_path):
    """transformers keeps some tensors in float32; untrained, they go back in the dtype they came in."""
    source, out = tmp_path / "source", tmp_path / "out"
    write(kind, source, torch.bfloat16)
    worlds(2).run(HERE + "save_as", kind=kind, folder=source, out=out)
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def test_split_into_files_with_an_index(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    worlds(2).run(HERE + "save_as", kind="qwen3_moe", folder=source, out=out, max_shard_size="40KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    assert {key: name for name in files for key in load_file(out / name)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in ranks.saved(source).values())
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []
    # Then saved whole over it: nothing of the earlier save may be left to be loaded.
    worlds(2).run(HERE + "save_as", kind="qwen3_moe", folder=source, out=out)
    assert sorted(path.name for path in out.glob("model*")) == ["model.safetensors"]


def test_config_and_reload_in_plain_transformers(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    worlds(2).run(HERE + "save_as", kind="qwen3_moe", folder=source, out=out)
    assert json.loads((source / "config.json").read_text()) == json.loads((out / "config.json").read_text())
    model, info = model_class("qwen3_moe").from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert ranks.differences(model, model_class("qwen3_moe").from_pretrained(source).state_dict()) == []


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe", "lfm2_moe"])
def test_one_process(kind, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write(kind, source)
    loaded(kind, source).save_pretrained(out)
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def test_a_deep_copy_saves_itself(tmp_path):
    write("qwen3_moe", tmp_path / "source")
    model = loaded("qwen3_moe", tmp_path / "source")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.fill_(3)
    twin.save_pretrained(tmp_path / "out")
    assert ranks.saved(tmp_path / "out")["model.norm.weight"].unique().tolist() == [3]


def save_in_pieces(kind, folder, out):
    """Convert, gather and write everything in pieces of 1 KB."""
    shares.PIECE_BYTES, before = 1024, shares.PIECE_BYTES
    try:
        save_as(kind, folder, out)
    finally:
        shares.PIECE_BYTES = before


@pytest.mark.parametrize("kind", ["qwen3_moe", "kimi_linear", "gpt_oss"])
def test_large_tensors_are_written_in_pieces(kind, worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write(kind, source)
    worlds(2).run(HERE + "save_in_pieces", kind=kind, folder=source, out=out)
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def raised_by(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_write(folder, out, fails_on) -> str:
    """Save where one rank can't write in the middle; returns what this rank raised."""
    model = loaded("kimi_linear", folder, **LAYOUT)
    pwrite, calls = os.pwrite, []

    def broken(fd, data, offset):
        calls.append(offset)
        if len(calls) == 5 and dist.get_rank() == fails_on:
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, offset)

    os.pwrite = broken
    try:
        return raised_by(lambda: model.save_pretrained(out, max_shard_size="40KB"))
    finally:
        os.pwrite = pwrite


def cut_short(folder, out, fails_on) -> str:
    """Save where one rank's part gets lost."""
    model = loaded("kimi_linear", folder, **LAYOUT)
    write_own_slices = save.write_own_slices

    def broken(aside, *args, **kwargs):
        write_own_slices(aside, *args, **kwargs)
        if dist.get_rank() == fails_on:
            os.truncate(sorted(aside.glob("*.safetensors"))[-1], 200)

    save.write_own_slices = broken
    try:
        return raised_by(lambda: model.save_pretrained(out, max_shard_size="40KB"))
    finally:
        save.write_own_slices = write_own_slices


@pytest.mark.parametrize(
    ("job", "fails_on", "raises", "message"),
    [
        ("failing_write", 0, 0, "OSError: [Errno 28] No space left on device"),
        ("failing_write", 1, 1, "OSError: [Errno 28] No space left on device"),
        ("cut_short", 1, 0, "is truncated"),
    ],
)
def test_a_failed_write_raises_everywhere_and_leaves_what_was_there(job, fails_on, raises, message, worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("kimi_linear", source)
    shutil.copytree(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    results = worlds(2).run(HERE + job, timeout=60, folder=source, out=out, fails_on=fails_on)
    assert message in results[raises]
    other = results[1 - raises]
    assert other.startswith(f"RuntimeError: `save_pretrained` failed on rank {raises}") and message in other
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def failing_conversion(folder, out, fails_on) -> str:
    """One rank can't convert the first slice of several: the others must not wait for its part of a gather."""
    model = loaded("kimi_linear", folder, **LAYOUT)
    convert = SplitModulelist.convert

    def broken(self, input_dict, *args, **kwargs):
        real = not any(tensor.is_meta for tensors in input_dict.values() for tensor in tensors)
        if real and dist.get_rank() == fails_on:
            raise MemoryError("no room to convert")
        return convert(self, input_dict, *args, **kwargs)

    SplitModulelist.convert = broken
    try:
        return raised_by(lambda: model.save_pretrained(out))
    finally:
        SplitModulelist.convert = convert


@pytest.mark.parametrize("fails_on", [0, 1])
def test_a_failed_conversion_raises_everywhere(fails_on, worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("kimi_linear", source)
    results = worlds(2).run(HERE + "failing_conversion", timeout=60, folder=source, out=out, fails_on=fails_on)
    assert results[fails_on] == "MemoryError: no room to convert"
    assert results[1 - fails_on] == (
        f"RuntimeError: `save_pretrained` failed on rank {fails_on}: MemoryError: no room to convert"
    )
    assert not list(out.iterdir())


def save_into_a_file(folder, out) -> str:
    model = loaded("qwen3_moe", folder, **LAYOUT)
    with pytest.raises(NotADirectoryError) as error:
        model.save_pretrained(out)
    return str(error.value)


def test_a_file_in_the_way(worlds, tmp_path):
    write("qwen3_moe", tmp_path / "source")
    (tmp_path / "out").write_text("in the way")
    results = worlds(2).run(HERE + "save_into_a_file", folder=tmp_path / "source", out=tmp_path / "out")
    assert results == [f"save_directory='{tmp_path / 'out'}' is a file."] * 2
