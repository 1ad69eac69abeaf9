"""`MoEAutoModel` over gloo ranks: what comes up by itself, and the habits of scripts that a sharded model meets."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig
from transformers.distributed import DistributedConfig

from automodel_moe import MoEAutoModel
from automodel_moe.block import experts_modules
from automodel_moe.dispatch.all_to_all import AllToAll
from automodel_moe.trainer import loops
from tests import tiny

HERE = __name__


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


def own_rows(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in inputs.items()}


def full_grads(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def assert_same_grads(got, want, tolerance=1e-5):
    # float32, summed over ranks instead of rows.
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= tolerance * grad.norm(), name


def comes_up_by_itself(folder: str) -> dict:
    model = MoEAutoModel.from_pretrained(folder)
    config = model.config.distributed_config
    experts = next(iter(experts_modules(model).values()))
    return {
        "sizes": (config.fsdp_size, config.ep_size, config.ep_implementation),
        "local": tuple(experts.gate_up_proj.to_local().shape),
        "class": [cls.__name__ for cls in type(model).__mro__],
    }


def test_sharding_comes_up_by_itself(worlds, checkpoint):
    for result in worlds(2).run(f"{HERE}:comes_up_by_itself", folder=checkpoint):
        assert result["sizes"] == (2, 2, "automodel")
        assert result["local"][0] == 4, "8 experts over 2 ranks"
        assert "Qwen3MoeForCausalLM" in result["class"] and "PreTrainedModel" in result["class"]


def padded_step(folder: str, side: str, recompute: bool) -> float:
    """Two different masks in flight: both forwards run before either backward."""
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2}).train()
    reference = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    if recompute:
        model.activation_checkpointing_enable()
    batches = [tiny.batch("qwen3_moe", rows=4, seed=seed) for seed in (1, 2)]
    for inputs, lengths in zip(batches, ([12, 3, 7, 1], [2, 12, 1, 5]), strict=True):
        place = torch.arange(12)
        for row, length in enumerate(lengths):
            kept = place < length if side == "right" else place >= 12 - length
            inputs["attention_mask"][row] = kept.long()
        inputs["labels"].masked_fill_(inputs["attention_mask"] == 0, -100)
    # Sums over tokens, so that ranks with few labels weigh as the reference weighs them.
    sizes = [(inputs["labels"][:, 1:] != -100).sum() for inputs in batches]
    losses = [model(**own_rows(b), num_items_in_batch=n).loss for b, n in zip(batches, sizes, strict=True)]
    for loss in losses:
        (2 * loss).backward()  # FSDP2 takes the mean over the 2 ranks
    for inputs, size in zip(batches, sizes, strict=True):
        reference(**inputs, num_items_in_batch=size).loss.backward()
    assert_same_grads(full_grads(model), {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_gradient(worlds, checkpoint, side, recompute):
    worlds(2).run(f"{HERE}:padded_step", folder=checkpoint, side=side, recompute=recompute)


def routed_pairs(folder: str) -> list[int]:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    seen = []
    plan = AllToAll.plan

    def counted(transport, idx_TK, x_TH, differentiable):
        seen.append(int((idx_TK >= 0).sum()))
        return plan(transport, idx_TK, x_TH, differentiable)

    inputs = own_rows(tiny.batch("qwen3_moe", rows=2))
    inputs["attention_mask"][:, 5:] = 0
    inputs.pop("labels")
    AllToAll.plan = counted
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        AllToAll.plan = plan
    return seen


def test_padded_tokens_are_not_sent(worlds, checkpoint):
    for seen in worlds(2).run(f"{HERE}:routed_pairs", folder=checkpoint):
        assert seen == [5 * 2, 5 * 2], "5 of 12 positions are tokens, top-2, in each of 2 layers"


def random_weights() -> list[str]:
    torch.manual_seed(dist.get_rank())  # ranks that disagree must still make one model
    model = MoEAutoModel.from_config(tiny.config("qwen3_moe"), moe_config={"ep_size": 2})
    std = model.config.initializer_range
    for name, parameter in model.named_parameters():
        whole = parameter.detach().full_tensor()
        if "proj" in name and whole.numel() > 1000:
            assert whole.std().item() == pytest.approx(std, rel=0.1), name
        if "experts" in name:
            assert not torch.equal(whole[:4], whole[4:]), "each rank's experts are drawn anew"
    assert model.training
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    return [torch.get_rng_state().sum().item()]


def test_from_config_makes_one_model_over_all_ranks(worlds):
    worlds(2).run(f"{HERE}:random_weights")


def refuses(folder: str) -> None:
    model = MoEAutoModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="without the DDP wrap"):
        torch.nn.parallel.DistributedDataParallel(model)
    assert model.to("cpu") is model
    with pytest.raises(ValueError, match="stays on cpu"):
        model.to("meta")
    with pytest.raises(ValueError, match="keeps the dtype it was loaded in"):
        model.to(torch.bfloat16)
    assert MoEAutoModel.from_pretrained(folder, device_map={"": "cpu"}).device.type == "cpu"


def test_what_a_sharded_model_refuses_and_accepts(worlds, checkpoint):
    worlds(2).run(f"{HERE}:refuses", folder=checkpoint)


def ranks_disagree(folder: str) -> str:
    with pytest.raises(ValueError) as error:
        MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2 - dist.get_rank()})
    return str(error.value)


def test_ranks_with_different_settings_are_refused_on_all(worlds, checkpoint):
    for message in worlds(2).run(f"{HERE}:ranks_disagree", folder=checkpoint):
        assert message.startswith("The ranks disagree about moe_config and distributed_config: rank 0 has")
        assert "'ep_size': 2" in message and "'ep_size': 1" in message


def norms_of_little(norm_type: float) -> None:
    """Gradients on two meshes, one so small that a rank holds nothing of it."""
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    wholes = [torch.tensor([3.0]), torch.tensor([-4.0, 0.0])]
    tensors = [distribute_tensor(w, mesh[d], [Shard(0)]) for w, d in zip(wholes, ("a", "b"), strict=True)]
    loops.install()
    got = torch.nn.utils.clip_grad._get_total_norm(tensors, norm_type)
    want = torch.linalg.vector_norm(torch.cat(wholes), norm_type)
    assert torch.equal(got, want), (got, want)  # 3, 4, 5: exact


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_rank_that_holds_nothing_of_a_gradient(worlds, norm_type):
    worlds(2).run(f"{HERE}:norms_of_little", timeout=30, norm_type=norm_type)


def users_context_fn(folder: str) -> None:
    """Selective checkpointing of the user's own beside ours."""
    entered = []

    @contextmanager
    def note(where):
        entered.append(where)
        yield

    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2}).train()
    model.activation_checkpointing_enable({"context_fn": lambda: (note("forward"), note("recompute"))})
    model(**own_rows(tiny.batch("qwen3_moe"))).loss.backward()
    assert entered.count("forward") == entered.count("recompute") == 2, "once a layer"


def test_context_fn_of_the_user_is_kept(worlds, checkpoint):
    worlds(2).run(f"{HERE}:users_context_fn", folder=checkpoint)


def clipped(folder: str, norm_type: float, foreach: bool | None) -> None:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    reference = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    inputs = tiny.batch("qwen3_moe")
    model(**own_rows(inputs)).loss.backward()
    reference(**inputs).loss.backward()
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
        for m in (model, reference)
    ]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)  # float32 sums in another order
    assert_same_grads(full_grads(model), {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize(("size", "norm_type", "foreach"), [(2, 2.0, None), (2, float("inf"), False), (4, 2.0, True)])
def test_torch_clip_grad_norm_takes_mixed_meshes(worlds, checkpoint, size, norm_type, foreach):
    worlds(size).run(f"{HERE}:clipped", folder=checkpoint, norm_type=norm_type, foreach=foreach)


def same_data_for_all(folder: str) -> str:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    try:
        for cpu in (True, False):
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(cpu=cpu)
            if accelerator.num_processes == 2:
                assert accelerator.prepare(model) is model
                continue
            with pytest.raises(RuntimeError) as error:
                accelerator.prepare(model)
            return str(error.value)
        return ""
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def test_accelerate_that_takes_each_rank_for_the_only_one(worlds, checkpoint):
    for message in worlds(2).run(f"{HERE}:same_data_for_all", folder=checkpoint):
        assert "accelerate sees 1 process, and the model is sharded over 2" in message
        assert "use_cpu=True" in message


def still_broken_upstream(folder: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    inputs = own_rows(tiny.batch("qwen3_moe"))
    model(**inputs).loss.backward()
    with pytest.raises((RuntimeError, ValueError)):
        torch.nn.utils.clip_grad._get_total_norm.__wrapped__([p.grad for p in model.parameters()])
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.raises(ValueError, match=r"DTensor|without the DDP wrap"):
            Accelerator.prepare_model.__wrapped__(Accelerator(cpu=True), model)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()


def test_the_patches_of_loops_are_still_needed(worlds, checkpoint):
    """Fails when torch or accelerate has mended its side: then the patch goes."""
    worlds(2).run(f"{HERE}:still_broken_upstream", folder=checkpoint)


def mixed_precision(folder: str, bf16_argument: bool) -> None:
    from contextlib import nullcontext

    model = MoEAutoModel.from_pretrained(folder, moe_config={"precision": "mixed", "ep_size": 2})
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    seen = []
    experts = next(iter(experts_modules(model).values()))
    experts.act_fn.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16) if bf16_argument else nullcontext():
        model(**own_rows(tiny.batch("qwen3_moe"))).loss.backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("bf16_argument", [False, True])
def test_mixed_precision_keeps_fp32_masters(worlds, checkpoint, bf16_argument):
    worlds(2).run(f"{HERE}:mixed_precision", folder=checkpoint, bf16_argument=bf16_argument)


def adapter_step(folder: str) -> None:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2})
    assert model.config.distributed_config.ep_size == 2
    reference = Llama4ForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, 64, (4, 10), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    model(**own_rows(inputs)).loss.backward()
    reference(**inputs).loss.backward()
    assert_same_grads(full_grads(model), {name: p.grad for name, p in reference.named_parameters()})
    a, b = (m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, reference))
    assert torch.equal(a, b)


def test_block_adapter_under_expert_parallelism(worlds, tmp_path):
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    worlds(2).run(f"{HERE}:adapter_step", folder=str(tmp_path))


def lonely_call(folder: str, call: str, out: str) -> str:
    """Rank 0 makes a call that needs all ranks; the others go on without it."""
    model = MoEAutoModel.from_pretrained(folder, moe_config={"call_timeout": 2.0})
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as error:
            if call == "save_pretrained":
                model.save_pretrained(out)
            else:
                model.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=1)
        message = str(error.value)
    dist.barrier()
    return message


@pytest.mark.parametrize("call", ["save_pretrained", "generate"])
def test_a_call_that_only_one_rank_makes_raises_and_names_itself(worlds, checkpoint, tmp_path, call):
    message, other = worlds(2).run(f"{HERE}:lonely_call", folder=checkpoint, call=call, out=str(tmp_path))
    assert f"`model.{call}` works on all 2 ranks" in message
    assert "after 2 s rank(s) [1] have not called it" in message
    assert "Call it on every rank" in message and other == ""
    # That world's ranks have counted different numbers of calls: its next user gets a fresh one.
    worlds(2).close()


def users_own_layout(folder: str) -> None:
    given = DistributedConfig(fsdp_size=2, dp_replicate_size=2, ep_size=2)
    model = MoEAutoModel.from_pretrained(folder, distributed_config=given)
    config = model.config.distributed_config
    assert (config.dp_replicate_size, config.fsdp_size, config.ep_size) == (2, 2, 2)
    assert config.ep_implementation == "automodel" and given.ep_implementation == "auto"
    inputs = tiny.batch("qwen3_moe")
    model(**own_rows(inputs)).loss.backward()
    reference = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    reference(**inputs).loss.backward()
    assert_same_grads(full_grads(model), {name: p.grad for name, p in reference.named_parameters()})


def test_distributed_config_of_the_user_is_respected(worlds, checkpoint):
    worlds(4).run(f"{HERE}:users_own_layout", folder=checkpoint)
