"""DeepEP: what is asked of the package, when it is chosen, and what is said where it can't serve. The contract is in
test_contract.py."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from automodel_moe import MoEAutoModel, dispatch
from automodel_moe.dispatch import deepep
from automodel_moe.trip import Trip
from tests import tiny
from tests.dispatch import fake_deep_ep
from tests.dispatch.test_contract import E_LOCAL, _tokens, make

HERE = __name__


@pytest.fixture
def offers(monkeypatch):
    """`offers(Buffer, ElasticBuffer)` installs a package with these; until it is called there is none."""

    def offer(*buffers):
        monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep.module(*buffers))

    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    return offer


@pytest.fixture
def group(monkeypatch):
    """`group(size, hosts)`: a process group of that many ranks, as far as choosing looks at it."""

    def make_group(size, hosts=1, devices=None, trouble=None):
        monkeypatch.setattr(dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(dist, "get_rank", lambda group: 0)
        devices = devices or range(size)
        members = [
            deepep._Member(f"host{rank * hosts // size}", device, trouble if rank == size - 1 else None)
            for rank, device in enumerate(devices)
        ]
        monkeypatch.setattr(deepep, "_members", lambda group: members)
        return object()

    return make_group


# --- the package -----------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_what_brings_it(offers):
    with pytest.raises(
        ImportError, match=r"needs deep_ep, not installed here: run pip install 'automodel-moe\[deepep\]'"
    ):
        dispatch.check_installed("deepep")
    dispatch.check_installed("auto")
    dispatch.check_installed("all_to_all")
    with pytest.raises(ValueError, match="dispatcher='pigeon' is none of 'auto', 'deepep', 'all_to_all'"):
        dispatch.check_installed("pigeon")


def test_it_is_missed_before_a_weight_is_read(offers, tmp_path):
    # A folder without weights: whatever is raised comes before they are looked for.
    tiny.config("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="needs deep_ep"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"dispatcher": "deepep"})


@pytest.mark.parametrize(
    "running, built_for, remedy",
    [
        ("2.13.0+cu130", "2.13.0", None),
        ("2.14.1+cu130", "2.13.0", 'sgl-deep-ep==0.1.2.post1, or pip install "torch==2.13.0"'),
        ("2.13.0+cu130", "2.14.1", 'sgl-deep-ep==0.1.2, or pip install "torch==2.14.1"'),
        ("2.11.0+cu130", "2.13.0", 'run pip install "torch==2.13.0"'),
    ],
)
def test_a_package_built_for_another_torch_is_refused(offers, monkeypatch, running, built_for, remedy):
    offers(fake_deep_ep.Buffer)
    monkeypatch.setattr(torch, "__version__", running)
    states = SimpleNamespace(
        packages_distributions=lambda: {"deep_ep": ["sgl-deep-ep"]},
        requires=lambda name: ["nvidia-ml-py", f"torch=={built_for}"],
        version=lambda name: "0.1.2",
    )
    monkeypatch.setattr(deepep, "metadata", states)
    deepep._built_for_another_torch.cache_clear()
    try:
        if remedy is None:
            dispatch.check_installed("deepep")
        else:
            with pytest.raises(ImportError) as error:
                dispatch.check_installed("deepep")
            assert f"sgl-deep-ep 0.1.2 is built for torch=={built_for}" in str(error.value)
            assert remedy in str(error.value)
    finally:
        deepep._built_for_another_torch.cache_clear()


# --- the choice ------------------------------------------------------------------------------------------------------

BOTH = (fake_deep_ep.Buffer, fake_deep_ep.ElasticBuffer)


@pytest.mark.parametrize(
    "buffers, size, hosts, chosen",
    [
        (BOTH, 2, 1, "DeepEPBuffer"),
        (BOTH, 4, 1, "DeepEPBuffer"),
        (BOTH, 8, 1, "DeepEPBuffer"),
        (BOTH, 8, 2, "DeepEPElastic"),
        (BOTH, 6, 1, "DeepEPElastic"),
        (BOTH, 1, 1, "DeepEPElastic"),
        (BOTH[1:], 4, 1, "DeepEPElastic"),
        (BOTH[:1], 4, 1, "DeepEPBuffer"),
    ],
)
def test_the_buffer_is_the_one_that_serves_the_group(offers, group, buffers, size, hosts, chosen):
    offers(*buffers)
    transport = dispatch.choose("deepep", group(size, hosts), E_LOCAL, max_tokens=77)
    assert type(transport).__name__ == chosen
    assert (transport.size, transport.num_experts, transport.max_tokens) == (size, size * E_LOCAL, 77)


@pytest.mark.parametrize("size, hosts, where", [(6, 1, "6 of one node"), (8, 2, "8 of several nodes")])
def test_a_group_that_no_buffer_serves(offers, group, size, hosts, where):
    offers(fake_deep_ep.Buffer)
    with pytest.raises(ValueError, match=f'2, 4 or 8 ranks of one node, not {where}.*dispatcher="all_to_all"'):
        dispatch.choose("deepep", group(size, hosts), E_LOCAL)


def _payload(hidden=256, dtype=torch.bfloat16, kind="cuda"):
    return SimpleNamespace(device=SimpleNamespace(type=kind), dtype=dtype, size=(4, hidden).__getitem__)


@pytest.mark.parametrize(
    "chosen, says, members, payload",
    [
        ("deepep", "every GPU of the group reaches the others'", {}, {}),
        ("all_to_all", "the tokens are on cpu", {}, {"kind": "cpu"}),
        ("all_to_all", "the tokens are torch.float32", {}, {"dtype": torch.float32}),
        ("all_to_all", "not installed on the last rank", {"trouble": "not installed on the last rank"}, {}),
        ("all_to_all", "spread over several nodes", {"hosts": 2}, {}),
        ("all_to_all", "share a GPU or don't see", {"devices": (0, 0, 1, 2)}, {}),
        ("all_to_all", "GPU 0 has no peer access to GPU 5", {"devices": (0, 1, 2, 5)}, {}),
        ("all_to_all", "not hidden size 100", {}, {"hidden": 100}),
        ("all_to_all", "does not carry dispatch_dtype='fp8'", {}, {"as": "fp8"}),
    ],
)
def test_auto_takes_deepep_where_it_fits_and_says_why(offers, group, monkeypatch, chosen, says, members, payload):
    offers(*BOTH)
    said = []
    dtype = payload.pop("as", "auto")
    monkeypatch.setattr(dispatch, "say_once", said.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 5 not in (a, b))
    assert dispatch._auto(group(4, **members), _payload(**payload), dtype) == chosen
    assert len(said) == 1 and said[0].startswith(f"dispatcher='auto': {chosen} (") and says in said[0]


# --- its calls -------------------------------------------------------------------------------------------------------


def step(name: str) -> list[tuple[str, dict]]:
    """Two layers forward, both backward, as the driver runs them: one rank without a gradient of its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = make(name)
    tokens = _tokens(rank, 6, 2, world * E_LOCAL, 256, torch.bfloat16, False)
    transport.plan(tokens[1], tokens[0], False)  # opens the buffer and warms it up
    fake_deep_ep.calls.clear()
    outputs, leaves = [], []
    for _ in range(2):
        x_TH, idx_TK, weights_TK = (t.clone() for t in tokens)
        leaves += [x_TH.requires_grad_(rank == 0), weights_TK.requires_grad_(rank == 0)]
        trip = Trip(transport, transport.plan(idx_TK, x_TH, rank == 0))
        rows = trip.dispatch_finish(trip.dispatch_start(x_TH, weights_TK))
        assert trip.plan.differentiable
        y_RH = rows.x_RH * rows.weights_RK.sum(1, keepdim=True).bfloat16()
        outputs.append(trip.combine_finish(trip.combine_start(y_RH)))
    sum(output.float().sum() for output in outputs).backward()
    assert all((leaf.grad is not None) == (rank == 0) for leaf in leaves)
    return [
        (call, {k: (id(v) if k in ("buffer", "handle", "made") and v is not None else v) for k, v in facts.items()})
        for call, facts in (
            (c, f | ({"event": f["event"].waits} if "event" in f else {})) for c, f in fake_deep_ep.calls
        )
    ]


@pytest.mark.parametrize("name", ["deepep_buffer", "deepep_elastic"])
def test_backward_mirrors_each_transfer_along_its_handle(worlds, name):
    for calls in worlds(2).run(f"{HERE}:step", timeout=120, name=name):
        transfers = [(call, facts) for call, facts in calls if call != "layout"]
        assert len(calls) - len(transfers) == (2 if name == "deepep_buffer" else 0), "a layout a forward, none else"
        kinds = [call for call, _ in transfers]
        assert kinds == ["dispatch", "combine"] * 2 + ["dispatch", "combine"] * 2
        first, second = transfers[0][1]["made"], transfers[2][1]["made"]
        assert first != second
        handles = [facts["handle"] for _, facts in transfers]
        # Forward makes two handles; backward runs the second layer's and then the first's.
        assert handles == [None, first, None, second, second, second, first, first]
        carried = [facts["weights"] for call, facts in transfers if call == "combine"]
        assert carried == [False, False, True, True], "a dispatch's backward brings the weights' gradient"
        assert [facts["event"] for _, facts in transfers] == [1] * 8, "each event is waited for, once"
        assert len({facts["buffer"] for _, facts in transfers}) == 1


def buffers_of_two_models() -> list[tuple[str, dict]]:
    """Layers of one model share a buffer; a wider model on the same ranks gets a larger one for both."""
    made = []
    for hidden in (2064, 2064, 4096, 2064):
        fake_deep_ep.calls.clear()
        transport = make("deepep_buffer")
        x_TH, idx_TK, _ = _tokens(dist.get_rank(), 3, 2, 4, hidden, torch.bfloat16, False)
        transport.plan(idx_TK, x_TH, False)
        made.append([(c, f.get("num_nvl_bytes")) for c, f in fake_deep_ep.calls if c in ("Buffer", "destroy")])
        warmed = sum(call in ("dispatch", "combine") for call, _ in fake_deep_ep.calls)
        made[-1].append(("transfers to warm up", warmed))
    return made


def test_one_buffer_for_all_layers_of_a_group(worlds):
    for made in worlds(2).run(f"{HERE}:buffers_of_two_models", timeout=120):
        # What the package's larger hint says, 1000 times a row's bytes times ranks; 2 dispatches and 2 combines.
        assert made[0][-2:] == [("Buffer", 1000 * 2 * 2064 * 2), ("transfers to warm up", 4)]
        assert made[1] == [("transfers to warm up", 0)]
        assert made[2] == [("destroy", None), ("Buffer", 1000 * 2 * 4096 * 2), ("transfers to warm up", 4)]
        assert made[3] == [("transfers to warm up", 4)], "the wider buffer serves, its kernels are new"


def outgrown() -> list[str]:
    from automodel_moe.dispatch.deepep_elastic import DeepEPElastic

    fake_deep_ep.install()
    group = dist.new_group(list(range(dist.get_world_size())))
    messages = []
    for max_tokens, n_first, n_second in ((None, 5, 9), (12, 5, 13)):
        deepep.DeepEP._SHARED.clear()
        transport = DeepEPElastic(group, E_LOCAL, max_tokens)
        for n_tokens, fits in ((n_first, True), (n_second, False)):
            n_own = n_tokens if dist.get_rank() else 2
            x_TH, idx_TK, weights_TK = _tokens(0, n_own, 2, 4, 256, torch.bfloat16, False)
            plan = transport.plan(idx_TK, x_TH, True)
            if fits:
                transport.dispatch_finish(transport.dispatch_start(plan, x_TH, weights_TK))
                continue
            with pytest.raises(ValueError) as error:
                transport.dispatch_start(plan, x_TH, weights_TK)
            messages.append(str(error.value))
    deepep.DeepEP._SHARED.clear()
    return messages


def test_a_batch_that_outgrows_the_buffer_is_told_on_every_rank(worlds):
    for by_first, stated in worlds(2).run(f"{HERE}:outgrown", timeout=120):
        assert "brings 9 tokens" in by_first and "made for the first batch, holds 5 of each rank" in by_first
        assert "brings 13 tokens" in stated and "made for max_tokens=12, holds 12 of each rank" in stated
        assert "moe_config={'max_tokens': ...}" in stated and 'dispatcher="all_to_all"' in stated


def other_dtypes() -> list[str]:
    messages = []
    for name in ("deepep_buffer", "deepep_elastic"):
        transport = make(name)
        for dtype in (torch.float32, torch.float16):
            x_TH, idx_TK, _ = _tokens(0, 3, 2, 4, 256, dtype, False)
            with pytest.raises(ValueError) as error:
                transport.plan(idx_TK, x_TH, True)
            messages.append((str(dtype), str(error.value)))
    return messages


def test_rows_of_another_dtype_are_refused(worlds):
    for messages in worlds(2).run(f"{HERE}:other_dtypes", timeout=60):
        for dtype, message in messages:
            assert f"these are {dtype}" in message and 'dispatcher="all_to_all"' in message


def model_step(folder: str, dispatcher: str, recompute: str) -> dict[str, torch.Tensor]:
    fake_deep_ep.install()
    moe_config = {"ep_size": 2, "dispatcher": dispatcher, "recompute": recompute}
    model = MoEAutoModel.from_pretrained(folder, moe_config=moe_config).train()
    inputs = tiny.batch("qwen3_moe", rows=2)
    inputs = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in inputs.items()}
    model(**inputs).loss.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_a_model_gets_all_to_alls_gradients(worlds, tmp_path):
    tiny.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    run = worlds(2).run
    want, *others = (
        run(f"{HERE}:model_step", timeout=200, folder=str(tmp_path), dispatcher=name, recompute=recompute)[0]
        for name, recompute in (("all_to_all", "none"), ("deepep", "none"), ("deepep", "experts"), ("deepep", "layer"))
    )
    # The fake carries the same rows in the same order and sums them alike: not a bit may differ.
    for got in others:
        assert want.keys() == got.keys() and all(torch.equal(got[name], grad) for name, grad in want.items())
