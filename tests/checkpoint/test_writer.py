"""The parallel writer: files of one process, byte for byte, in little memory, from any layout of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from automodel_moe import MoEAutoModel, iter_hf_weights
from automodel_moe.checkpoint import save, writer
from tests import tiny
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write
from tests.checkpoint.test_save import loaded, raised_by

HERE = "tests.checkpoint.test_writer:"
EP2 = {"fsdp_size": 2, "ep_size": 2}
MB = 10**6


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def save_kinds(kinds, root, layout, max_shard_size) -> None:
    for kind in kinds:
        model = loaded(kind, f"{root}/{kind}/source", **layout)
        model.save_pretrained(f"{root}/{kind}/out", max_shard_size=max_shard_size)


# Experts one by one, fused and transposed experts, and conversions that mix ranks: joined q, k, v; permuted rows; a
# padded vocabulary; experts of two modalities; tied weights.
KINDS = ["qwen3_moe", "gpt_oss", "kimi_linear", "bailing_hybrid", "inkling", "ernie4_5_vl_moe", "lfm2_moe", "step3p7"]


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (EP2, KINDS),
        ({"fsdp_size": 4, "ep_size": 2}, ["qwen3_moe", "gpt_oss"]),
        ({"fsdp_size": 4, "ep_size": 4}, ["qwen3_moe", "gpt_oss"]),
        ({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, ["qwen3_moe"]),
        ({"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}, ["qwen3_moe"]),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_files_are_those_of_one_process(layout, kinds, worlds, tmp_path):
    """Config, index, split and every weight file, against transformers' own save in one process."""
    for kind in kinds:
        write(kind, tmp_path / kind / "source")
        reference = model_class(kind).from_pretrained(tmp_path / kind / "source")
        reference.save_pretrained(tmp_path / kind / "one", max_shard_size="60KB")
    n_ranks = layout["fsdp_size"] * layout.get("tp_size", 1) * layout.get("dp_replicate_size", 1)
    worlds(n_ranks).run(HERE + "save_kinds", kinds=kinds, root=tmp_path, layout=layout, max_shard_size="60KB")
    for kind in kinds:
        assert len(list((tmp_path / kind / "out").glob("*.safetensors"))) > 1
        assert differing(files(tmp_path / kind / "one"), files(tmp_path / kind / "out")) == [], kind


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_dtypes_are_those_of_one_process(kind, worlds, tmp_path):
    """In bfloat16, of which the model keeps some tensors in float32."""
    source = tmp_path / kind / "source"
    write(kind, source, torch.bfloat16)
    loaded(kind, source).save_pretrained(tmp_path / kind / "one")
    worlds(2).run(HERE + "save_kinds", kinds=[kind], root=tmp_path, layout=EP2, max_shard_size="50GB")
    assert differing(files(tmp_path / kind / "one"), files(tmp_path / kind / "out")) == []


def peak(call) -> int:
    """Bytes of resident memory that `call` takes at its peak beyond what was there before."""

    def status(field: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def save_large(kind, out, sizes) -> tuple[int, int, int]:
    config = tiny.config(kind, **sizes)
    model = MoEAutoModel.from_config(config, moe_config={"ep_size": 4})
    saved = peak(lambda: model.save_pretrained(out, max_shard_size="50MB"))
    tensors = {}

    def stream():
        tensors["bytes"] = max(tensor.nbytes for _, tensor in iter_hf_weights(model))

    streamed = peak(stream)
    return saved, streamed, tensors["bytes"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_memory_beyond_the_parameters(kind, worlds, tmp_path):
    """325 MB in files of 50 MB: each rank stays under two of them."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 3, "vocab_size": 4096}
    sizes |= {"intermediate_size": 512} if kind == "gpt_oss" else {"moe_intermediate_size": 512}
    sizes |= {"num_local_experts" if kind == "gpt_oss" else "num_experts": 32}
    results = worlds(4).run(HERE + "save_large", timeout=200, kind=kind, out=tmp_path, sizes=sizes)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size > 300 * MB
    for saved, streamed, largest in results:
        assert saved < 2 * 50 * MB, f"{saved / MB:.0f} MB beyond the parameters"
        # Windows of 16 MiB: what was yielded last, the next part of the parameters, a piece being sent, what that is
        # converted to; the largest tensor, and the next one. The allocator keeps some of each. A layer's fused
        # experts, gathered and converted whole, would be 200 MB.
        assert streamed < 6 * 2**24 + 2 * largest + 20 * MB, f"{streamed / MB:.0f} MB beyond the parameters"


def save_unshared(folder, out, kind) -> bool:
    """Rank 1 does not see rank 0's folder."""
    sees, heard = save._sees, []
    save._sees = lambda job: dist.get_rank() == 0
    say, save.say_once = save.say_once, heard.append
    try:
        loaded(kind, folder, **EP2).save_pretrained(
            out if dist.get_rank() == 0 else f"{out}-elsewhere", max_shard_size="60KB"
        )
    finally:
        save._sees, save.say_once = sees, say
    return any("rank(s) [1] do not see rank 0's" in line for line in heard)


@pytest.mark.parametrize("kind", ["qwen3_moe", "kimi_linear", "gpt_oss"])
def test_without_a_shared_file_system(kind, worlds, tmp_path):
    source, one, out = tmp_path / "source", tmp_path / "one", tmp_path / "out"
    write(kind, source)
    model_class(kind).from_pretrained(source).save_pretrained(one, max_shard_size="60KB")
    assert worlds(2).run(HERE + "save_unshared", folder=source, out=out, kind=kind) == [True, True]
    assert differing(files(one), files(out)) == []
    assert not Path(f"{out}-elsewhere").exists()


def trainer_save(folder, out) -> None:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    args = TrainingArguments(out, use_cpu=True, save_strategy="no", report_to="none")
    trainer = Trainer(model, args)
    gathers = []
    full_tensor, fetch = DTensor.full_tensor, writer.fetch
    DTensor.full_tensor = lambda *args, **kwargs: gathers.append("full_tensor")
    writer.fetch = lambda *args, **kwargs: gathers.append("fetch")
    try:
        trainer.save_model(out)
    finally:
        DTensor.full_tensor, writer.fetch = full_tensor, fetch
    assert gathers == []


def test_trainer_saves_through_it_and_gathers_nothing(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_moe", source)
    worlds(2).run(HERE + "trainer_save", folder=str(source), out=str(out))
    assert ranks.unequal(ranks.saved(source), ranks.saved(out)) == []


def pushed(folder, out) -> dict | None:
    """What `save_pretrained(push_to_hub=True)` would upload; nothing leaves the machine."""
    from huggingface_hub import HfApi

    model = loaded("qwen3_moe", folder, **EP2)
    if dist.get_rank() == 0:
        card = type("Card", (), {"save": lambda self, path: Path(path).write_text("card")})()
        save.create_and_tag_model_card = lambda *args, **kwargs: card
        HfApi.create_repo = lambda self, repo_id, **kwargs: type("Url", (), {"repo_id": f"me/{repo_id}"})()
        commits = []
        HfApi.create_commit = lambda self, **kwargs: commits.append(kwargs)
    model.save_pretrained(out, push_to_hub=True, commit_message="trained", max_shard_size="60KB")
    if dist.get_rank() == 0:
        (commit,) = commits
        names = sorted(operation.path_in_repo for operation in commit["operations"])
        return {"repo": commit["repo_id"], "message": commit["commit_message"], "names": names}
    return None


def test_push_to_hub_uploads_what_was_saved(worlds, tmp_path):
    source, out = tmp_path / "source", tmp_path / "mine"
    write("qwen3_moe", source)
    out.mkdir()
    (out / "notes.txt").write_text("not of this save")
    upload, other = worlds(2).run(HERE + "pushed", folder=source, out=out)
    worlds(2).close()  # these ranks' hub is a fake
    assert other is None
    assert upload["repo"] == "me/mine" and upload["message"] == "trained"
    assert upload["names"] == sorted(set(files(out)) - {"notes.txt"})
    assert "model.safetensors.index.json" in upload["names"]


def partly_passed(folder, out) -> str:
    model = loaded("qwen3_moe", folder, **EP2)
    state = model.state_dict()
    if dist.get_rank() == 1:
        state.pop("model.embed_tokens.weight")
    return raised_by(lambda: model.save_pretrained(out, state_dict=state))


def test_a_state_dict_with_parts_missing_on_a_rank(worlds, tmp_path):
    write("qwen3_moe", tmp_path / "source")
    first, second = worlds(2).run(HERE + "partly_passed", folder=tmp_path / "source", out=tmp_path / "out")
    assert "state_dict['model.embed_tokens.weight'] is a DTensor on rank 0 and not on rank 1" in second
    assert first.startswith("RuntimeError: `save_pretrained` failed on rank 1: ValueError")
    assert not list((tmp_path / "out").iterdir())


def drawn(out) -> None:
    model = MoEAutoModel.from_config(tiny.config("qwen3_moe"), moe_config={"ep_size": 2})
    model.save_pretrained(out)


def test_a_model_from_a_config_has_the_hubs_keys(worlds, tmp_path):
    worlds(2).run(HERE + "drawn", out=tmp_path / "out")
    tiny.save("qwen3_moe", tmp_path / "one")
    assert ranks.saved(tmp_path / "out").keys() == ranks.saved(tmp_path / "one").keys()


def facts(name, tensor) -> tuple:
    return name, tensor.dtype, tuple(tensor.shape), tensor.double().sum().item(), tensor.float().std().item()


def streamed(kind, folder, receivers, dtype=None, stop_at=None) -> list:
    """What `iter_hf_weights` yields on this rank."""
    model = loaded(kind, folder, **EP2)
    seen = []
    for name, tensor in iter_hf_weights(model, ranks=receivers, dtype=dtype):
        seen.append(facts(name, tensor))
        if len(seen) == stop_at and dist.get_rank() == 0:
            break
    dist.barrier()
    return seen


def expected(folder, dtype=None) -> list:
    return by_name(facts(name, tensor.to(dtype or tensor.dtype)) for name, tensor in ranks.saved(folder).items())


def by_name(seen) -> list:
    return sorted(seen, key=lambda item: item[0])


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "kimi_linear"])
def test_iter_hf_weights(kind, worlds, tmp_path):
    write(kind, tmp_path)
    want = expected(tmp_path)
    for seen in worlds(2).run(HERE + "streamed", kind=kind, folder=tmp_path, receivers="all"):
        assert by_name(seen) == want
    first, second = worlds(2).run(HERE + "streamed", kind=kind, folder=tmp_path, receivers="first")
    assert by_name(first) == want and second == []


def test_iter_hf_weights_in_another_dtype(worlds, tmp_path):
    write("deepseek_v3", tmp_path)
    bf16 = torch.bfloat16
    first, _ = worlds(2).run(HERE + "streamed", kind="deepseek_v3", folder=tmp_path, receivers="first", dtype=bf16)
    kept = {name for name, dtype, *_ in first if dtype == torch.float32}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"}
    want = [item for item in expected(tmp_path, bf16) if item[0] not in kept]
    assert [item for item in by_name(first) if item[0] not in kept] == want


def test_iter_hf_weights_may_be_left_early(worlds, tmp_path):
    write("qwen3_moe", tmp_path)
    first, second = worlds(2).run(
        HERE + "streamed", timeout=60, kind="qwen3_moe", folder=tmp_path, receivers="all", stop_at=3
    )
    assert len(first) == 3 and by_name(second) == expected(tmp_path)


def test_iter_hf_weights_on_one_process(tmp_path):
    write("qwen3_moe", tmp_path)
    model = loaded("qwen3_moe", tmp_path)
    got = {name: tensor.clone() for name, tensor in iter_hf_weights(model)}
    assert ranks.unequal(ranks.saved(tmp_path), got) == []
    with pytest.raises(ValueError, match="ranks='some' is none of"):
        iter_hf_weights(model, ranks="some")
    with pytest.raises(ValueError, match="no floating-point dtype"):
        iter_hf_weights(model, dtype=torch.int8)
