"""`save_pretrained` writes the checkpoint's own layout from any sharding: keys, dtypes and bytes."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import DistributedConfig
from transformers.distributed.utils import gather_full_state_dict

from automodel_moe.checkpoint import save
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


def save_in_pieces(folder, out):
    """Gather everything in pieces of 1 KB."""
    save._PIECE_BYTES, before = 1024, save._PIECE_BYTES
    try:
        save_as("qwen3_moe", folder, out)
    finally:
        save._PIECE_BYTES = before


def test_large_tensors_are_gathered_in_pieces(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    worlds(2).run(HERE + "save_in_pieces", folder=source, out=out)
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def failing_save(folder, out, fails) -> str:
    """Save where rank 0's second file can't be written, or is cut short; returns what this rank raised."""
    from transformers import modeling_utils

    model = loaded("qwen3_moe", folder, **LAYOUT)
    write_file, calls = modeling_utils.safe_save_file, []

    def broken(tensors, path, metadata=None):
        calls.append(path)
        if fails and len(calls) == 2:
            raise OSError(28, "No space left on device")
        write_file(tensors, path, metadata=metadata)
        if not fails and len(calls) == 2:
            with open(path, "r+b") as file:
                file.truncate(200)

    modeling_utils.safe_save_file = broken
    try:
        model.save_pretrained(out, max_shard_size="40KB")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        modeling_utils.safe_save_file = write_file
    return "nothing"


@pytest.mark.parametrize(("fails", "message"), [(True, "No space left on device"), (False, "is truncated")])
def test_a_failed_write_raises_everywhere_and_leaves_what_was_there(fails, message, worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    shutil.copytree(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    first, second = worlds(2).run(HERE + "failing_save", timeout=60, folder=source, out=out, fails=fails)
    assert message in first
    assert second.startswith("RuntimeError: save_pretrained failed on rank 0") and message in second
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def failing_conversion(folder, out) -> str:
    """Rank 0 can't convert the first group of several: the other ranks must not wait for its gathers for ever."""
    from transformers.core_model_loading import SplitModulelist

    model = loaded("qwen3_moe", folder, **LAYOUT)
    convert, calls = SplitModulelist.convert, []

    def broken(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room to convert")
        return convert(self, *args, **kwargs)

    SplitModulelist.convert = broken
    try:
        model.save_pretrained(out)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        SplitModulelist.convert = convert
    return "nothing"


def test_a_failed_conversion_raises_everywhere(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    first, second = worlds(2).run(HERE + "failing_conversion", timeout=60, folder=source, out=out)
    assert first == "MemoryError: no room to convert"
    assert second == "RuntimeError: save_pretrained failed on rank 0: MemoryError: no room to convert"
    assert not list(out.glob("model*"))


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
