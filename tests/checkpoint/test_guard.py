"""Sharded loads are bit-equal to one process, for the models whose conversions don't survive slicing above all."""

import logging
import threading
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import DistributedConfig, PreTrainedModel
from transformers import core_model_loading as core
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.integrations.mxfp4 import Mxfp4Deserialize

from automodel_moe.checkpoint import guard
from automodel_moe.checkpoint.guard import Split, commutes
from automodel_moe.checkpoint.headers import CheckpointError, Entry
from automodel_moe.checkpoint.load import loading
from automodel_moe.checkpoint.patching import patched
from automodel_moe.checkpoint.plan import Group
from automodel_moe.checkpoint.save import prepare_save
from tests.checkpoint import ranks
from tests.checkpoint.kinds import model_class, write

# transformers alone gets each of these wrong, or not at all, when sharded.
UNSLICEABLE = ["kimi_linear", "bailing_hybrid", "minimax_m3_vl", "step3p7", "qwen3_vl_moe", "lara_mini", "glm5_next"]
UNSLICEABLE += ["ernie4_5_vl_moe", "olmo_hybrid", "sarvam_moe"]
# A sample of those it gets right: one tensor an expert, fused, fused and transposed with biases.
SLICEABLE = ["qwen3_moe", "qwen3_5_moe", "gpt_oss"]


def load_and_save(kind, folder, out=None, guarded=True, **distributed):
    """On each rank: what differs from one process's load, and on rank 0 what the saved folder has otherwise."""
    cls = model_class(kind)
    reference = {key: value.clone() for key, value in cls.from_pretrained(folder).state_dict().items()}
    model = ranks.load(cls, folder, guarded, distributed_config=DistributedConfig(**distributed))
    wrong = ranks.differences(model, reference)
    if out is None:
        return wrong
    prepare_save(model)
    model.save_pretrained(out)
    return wrong, ranks.unequal(ranks.saved(folder), ranks.saved(out))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def source(kind: str):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write(kind, made[kind])
        return made[kind]

    return source


RUN = "tests.checkpoint.test_guard:load_and_save"


@pytest.mark.parametrize("kind", UNSLICEABLE + SLICEABLE)
@pytest.mark.parametrize("size", [2, 4])
def test_fsdp(kind, size, sources, worlds, tmp_path):
    for result in worlds(size).run(RUN, kind=kind, folder=sources(kind), out=tmp_path, fsdp_size=size):
        assert result == ([], [])


@pytest.mark.parametrize("kind", [kind for kind in UNSLICEABLE if kind not in ("olmo_hybrid", "step3p7")] + SLICEABLE)
def test_ep(kind, sources, worlds, tmp_path):
    for result in worlds(2).run(RUN, kind=kind, folder=sources(kind), out=tmp_path, fsdp_size=2, ep_size=2):
        assert result == ([], [])


@pytest.mark.parametrize("kind", ["kimi_linear", "minimax_m3_vl", "qwen3_moe"])
def test_tp_and_ep(kind, sources, worlds, tmp_path):
    layout = {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}
    for result in worlds(4).run(RUN, kind=kind, folder=sources(kind), out=tmp_path, **layout):
        assert result == ([], [])


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("num_local_experts", [2, 6])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_uneven_and_empty_ranks(kind, num_local_experts, ep_size, worlds, tmp_path):
    """2 experts on 4 ranks leave two ranks with none; 6 leave them with 2, 2, 1, 1 or 2, 2, 2, 0."""
    write(kind, tmp_path / "source", num_local_experts=num_local_experts)
    layout = {"fsdp_size": 4, "ep_size": ep_size}
    for result in worlds(4).run(RUN, kind=kind, folder=tmp_path / "source", out=tmp_path / "out", **layout):
        assert result == ([], [])


def test_transposed_experts_keep_the_hub_layout(sources, worlds, tmp_path):
    """The Hub's qwen3_vl_moe experts are [E, in, out]; transformers takes both, and must not write the other one."""
    source, out = tmp_path / "source", tmp_path / "out"
    write("qwen3_vl_moe", source)
    tensors = load_file(source / "model.safetensors")
    turned = {
        key: value.transpose(1, 2).contiguous() if ".experts." in key else value for key, value in tensors.items()
    }
    save_file(turned, source / "model.safetensors", {"format": "pt"})
    results = worlds(2).run(RUN, kind="qwen3_vl_moe", folder=source, out=out, fsdp_size=2, ep_size=2)
    assert results == [([], [])] * 2


def test_transformers_alone_is_still_wrong(sources, worlds):
    """What the guard mends is still broken: when this fails, it can go."""
    kwargs = {"kind": "kimi_linear", "folder": sources("kimi_linear"), "guarded": False, "fsdp_size": 2}
    assert worlds(2).run(RUN, **kwargs) == [["model.layers.0.self_attn.conv1d.weight"]] * 2


def test_every_operation_is_known_or_read_whole():
    """An operation that a new release brings is read whole until someone has thought about it."""
    used = {
        type(op)
        for transforms in _build_checkpoint_conversion_mapping().values()
        for transform in transforms
        if isinstance(transform, core.WeightConverter)
        for op in transform.operations
    }
    whole = {core.Inkling2LoopDequantizeExperts, core.Inkling2LoopMergeMessageQueries, core.Inkling2UnpadVocab}
    assert used - guard._RULES.keys() == whole
    for op in whole:
        assert commutes([op()], {"x": [(8, 4)]}, [Split((8, 4), {0: 2}, {})]) == (
            f"{op.__name__} is not known to work on slices"
        )


def brute_force(operations, sources, target_shape, dim, parts, packed=1):
    """Whether converting slices gives the slices of the converted whole, tried on numbers.

    `packed` > 1: each part holds a piece of each of so many blocks of the cut dimension.
    """

    def slices(tensor, dim, packed):
        blocks = tensor.chunk(packed, dim)
        return [torch.cat([block.chunk(parts, dim)[part] for block in blocks], dim) for part in range(parts)]

    def convert(inputs):
        for op in operations:
            inputs = op.convert(dict(inputs), source_patterns=list(sources), target_patterns=["t"], config=None)
        return inputs["t"]

    whole = convert({key: list(tensors) for key, tensors in sources.items()})
    assert whole.shape == target_shape
    for part, expected in enumerate(slices(whole, dim, packed)):
        mine = {}
        for key, tensors in sources.items():
            if tensors[0].ndim == len(target_shape) - 1:  # one expert each
                if dim == 0:
                    mine[key] = list(tensors[part * len(tensors) // parts : (part + 1) * len(tensors) // parts])
                else:
                    mine[key] = [slices(tensor, dim - 1, 1)[part] for tensor in tensors]
            else:
                mine[key] = [slices(tensor, dim, packed)[part] for tensor in tensors]
        try:
            got = convert(mine)
        except (RuntimeError, ValueError):
            return False
        if got.shape != expected.shape or not torch.equal(got, expected):
            return False
    return True


def experts(n, *shape):
    return [torch.randn(*shape) for _ in range(n)]


MERGE, UP = core.MergeModulelist(0), core.Concatenate(1)
CASES = [
    # operations, sources, the parameter's shape, (dimension cut, parts, packed blocks)
    ([MERGE], {"a": experts(4, 6, 8)}, (4, 6, 8), (0, 2, 1)),
    ([MERGE], {"a": experts(4, 6, 8)}, (4, 6, 8), (2, 2, 1)),
    ([MERGE, UP], {"a": experts(4, 6, 8), "b": experts(4, 6, 8)}, (4, 12, 8), (0, 2, 1)),
    ([MERGE, UP], {"a": experts(4, 6, 8), "b": experts(4, 6, 8)}, (4, 12, 8), (1, 2, 1)),
    ([MERGE, UP], {"a": experts(4, 6, 8), "b": experts(4, 6, 8)}, (4, 12, 8), (1, 2, 2)),
    ([core.Concatenate(0)], {"a": [torch.randn(4, 3)], "b": [torch.randn(4, 3)]}, (8, 3), (0, 2, 1)),
    ([core.Concatenate(1)], {"a": [torch.randn(4, 3)], "b": [torch.randn(4, 3)]}, (4, 6), (0, 2, 1)),
    ([core.Transpose(0, 1)], {"a": [torch.randn(4, 6)]}, (6, 4), (0, 2, 1)),
    ([core.Transpose(1, 2)], {"a": [torch.randn(4, 6, 8)]}, (4, 8, 6), (0, 2, 1)),
    ([core.Interleave(0)], {"a": [torch.randn(8, 3)]}, (8, 3), (0, 2, 1)),
    ([core.Interleave(1)], {"a": [torch.randn(4, 6)]}, (4, 6), (0, 2, 1)),
    ([core.Chunk(0)], {"a": [torch.randn(4, 6)]}, (4, 6), (1, 2, 1)),
    ([core.Conv3dToLinear(3, (2, 2, 2))], {"a": [torch.randn(4, 3, 2, 2, 2)]}, (4, 24), (0, 2, 1)),
]


@pytest.mark.parametrize(("operations", "sources_", "shape", "cut"), CASES)
def test_commutes_tells_the_truth(operations, sources_, shape, cut):
    dim, parts, packed = cut
    truth = brute_force(operations, sources_, shape, dim, parts, packed)
    shapes = {key: [tuple(tensor.shape) for tensor in tensors] for key, tensors in sources_.items()}
    said = commutes(operations, shapes, [Split(shape, {dim: parts}, {dim: packed} if packed > 1 else {})])
    assert (said is None) == truth, said


def test_other_contexts_are_left_alone(tmp_path):
    """While this thread loads through us, another reaches transformers' own functions; afterwards nothing is left."""
    before = dict(vars(PreTrainedModel)), core.set_param_for_module
    prepared = []
    write("qwen3_moe", tmp_path)
    with loading(prepared.append):
        thread = threading.Thread(target=lambda: model_class("qwen3_moe").from_pretrained(tmp_path))
        thread.start()
        thread.join()
        assert prepared == []
        model = model_class("qwen3_moe").from_pretrained(tmp_path)
    assert prepared == [model]
    assert (dict(vars(PreTrainedModel)), core.set_param_for_module) == before


class Base:
    @classmethod
    def name(cls):
        return cls.__name__


class Derived(Base):
    pass


def test_wrappers_nest_and_leave_nothing():
    with ExitStack() as outer:
        outer.enter_context(patched(Derived, "name", lambda original: f"outer {original()}"))
        with patched(Derived, "name", lambda original: "a second wrapper is never installed"):
            assert Derived.name() == "outer Derived"
        assert (Derived.name(), Base.name()) == ("outer Derived", "Base")
    assert Derived.name() == "Derived" and "name" not in vars(Derived)


def what_is_refused() -> str:
    param = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    plan = {"w": Group(["w"], [Mxfp4Deserialize(None)], 0, {"w_blocks": ["w_blocks"]})}
    with pytest.raises(CheckpointError) as error:
        guard.inspect(plan, {"w_blocks": Entry((4, 2), None)}, {"w": param})
    return str(error.value)


def test_what_stays_quantized_is_refused_by_name(worlds):
    for message in worlds(2).run("tests.checkpoint.test_guard:what_is_refused"):
        assert message.startswith("w is quantized (Mxfp4Deserialize), and quantized weights can't be sharded: pass a")


def logged(kind, folder) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    guard.logger.addHandler(handler)
    guard.logger.setLevel(logging.INFO)
    try:
        ranks.load(model_class(kind), folder, distributed_config=DistributedConfig(fsdp_size=2))
    finally:
        guard.logger.removeHandler(handler)
        guard.logger.setLevel(logging.NOTSET)
    return lines


def test_one_line_says_what_is_read_whole(sources, worlds):
    run = "tests.checkpoint.test_guard:logged"
    for lines in worlds(2).run(run, kind="kimi_linear", folder=sources("kimi_linear")):
        (line,) = lines
        assert line.startswith("1 sharded tensors (0.0 MiB) are read whole: Concatenate does not work on slices of")
    assert worlds(2).run(run, kind="qwen3_moe", folder=sources("qwen3_moe")) == [[], []]
