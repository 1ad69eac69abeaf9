"""`MoEAutoModel` in one process: the same model, and every refusal before memory is allocated."""

import copy
import pickle

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

from automodel_moe import MoEAutoModel
from automodel_moe.auto import auto_ep_size
from automodel_moe.block import experts_modules, tied_experts
from tests import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


@pytest.fixture
def four_ranks(monkeypatch):
    """The environment of rank 0 of 4, which is all that the checks before loading look at."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def step(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_one_process_gives_transformers_class_and_its_numbers(checkpoint):
    model = MoEAutoModel.from_pretrained(checkpoint)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")
    assert type(model) is Qwen3MoeForCausalLM
    assert not model.training
    inputs = tiny.batch("qwen3_moe")
    loss, grads = step(model, inputs)
    reference_loss, reference_grads = step(reference, inputs)
    # float32 on both sides, summed in another order.
    torch.testing.assert_close(loss, reference_loss, rtol=1e-6, atol=0)
    for name, grad in reference_grads.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name
    assert torch.equal(tiny.tokens(model, inputs), tiny.tokens(reference, inputs))


def test_loading_info_and_config_overrides_pass_through(checkpoint):
    model, info = MoEAutoModel.from_pretrained(checkpoint, output_loading_info=True, router_aux_loss_coef=0.5)
    assert model.config.router_aux_loss_coef == 0.5
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_adapter_folder_loads_its_base_model_and_the_adapter(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), options)
    adapted.save_pretrained(tmp_path)
    inputs = tiny.batch("qwen3_moe")
    model = MoEAutoModel.from_pretrained(tmp_path)
    # The same weights through other GEMMs: float32 rounding apart.
    torch.testing.assert_close(model(**inputs).loss, adapted.eval()(**inputs).loss, rtol=1e-5, atol=0)
    assert abs(model(**inputs).loss - MoEAutoModel.from_pretrained(checkpoint)(**inputs).loss) > 1e-3


def test_dense_checkpoint_is_what_transformers_returns(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, reference = (cls.from_pretrained(tmp_path) for cls in (MoEAutoModel, AutoModelForCausalLM))
    assert type(model) is LlamaForCausalLM
    assert vars(model).keys() == vars(reference).keys()
    with pytest.raises(ValueError, match=r"ep_size=2, but LlamaForCausalLM has no MoE experts"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"ep_size": 2})
    with pytest.raises(ValueError, match=r"precision='mixed', but LlamaForCausalLM has no MoE experts"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"precision": "mixed"})
    with pytest.raises(ValueError, match=r"attention='flash4', but LlamaForCausalLM has no MoE experts"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"attention": "flash4"})
    harmless = {"ep_size": 1, "precision": "fp32", "loss": "model", "recompute": "none", "call_timeout": 5.0}
    assert type(MoEAutoModel.from_pretrained(tmp_path, moe_config=harmless)) is LlamaForCausalLM


@pytest.mark.parametrize("top_k", [1, 3])
def test_block_outside_the_registries_through_its_adapter(tmp_path, top_k):
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=top_k,
        interleave_moe_layer_step=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    adapted, reference = (cls.from_pretrained(tmp_path) for cls in (MoEAutoModel, Llama4ForCausalLM))
    ids = torch.randint(3, 64, (2, 10))
    loss, grads = step(adapted, {"input_ids": ids, "labels": ids})
    reference_loss, reference_grads = step(reference, {"input_ids": ids, "labels": ids})
    # float32 on both sides; the reference also runs every other expert, on zeros.
    torch.testing.assert_close(loss, reference_loss, rtol=1e-6, atol=0)
    for name, grad in reference_grads.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_from_config_is_transformers_own_in_one_process():
    config = tiny.config("qwen3_moe")
    torch.manual_seed(3)
    model = MoEAutoModel.from_config(config)
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config)
    assert model.training
    for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize(
    ("precision", "weights"), [("bf16", torch.bfloat16), ("mixed", torch.float32), ("fp32", torch.float32)]
)
def test_precision(checkpoint, precision, weights):
    model = MoEAutoModel.from_pretrained(checkpoint, moe_config={"precision": precision})
    assert {p.dtype for p in model.parameters()} == {weights}
    seen = []
    activation = model.model.layers[0].mlp.experts.act_fn
    activation.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(**tiny.batch("qwen3_moe")).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {weights}
    assert seen == [torch.float32 if precision == "fp32" else torch.bfloat16]


def test_a_copy_and_a_pickle_have_hooks_of_their_own(checkpoint):
    model = MoEAutoModel.from_pretrained(checkpoint)
    inputs = tiny.batch("qwen3_moe")
    inputs["attention_mask"][:, 6:] = 0
    want = model(**inputs).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**inputs).loss, want)
        state, twins = (m.model.layers[0].mlp.experts.automodel.routed for m in (model, twin))
        assert state is not twins and twins.routed_BS is not None


def test_a_copy_of_a_mixed_model_runs_itself(checkpoint):
    model = MoEAutoModel.from_pretrained(checkpoint, moe_config={"precision": "mixed"})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    inputs = tiny.batch("qwen3_moe")
    assert not twin(**inputs).logits.any()
    assert model(**inputs).logits.any()


def test_from_config_of_a_quantized_checkpoint():
    config = tiny.config("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4"}
    model = MoEAutoModel.from_config(config)
    assert "quantization_config" not in vars(model.config)
    assert "quantization_config" in vars(config)
    assert all(p.is_floating_point() for p in model.parameters())


def test_precision_and_dtype_that_contradict(checkpoint):
    with pytest.raises(ValueError, match=r"dtype=torch.float16 and moe_config: precision='bf16'"):
        MoEAutoModel.from_pretrained(checkpoint, dtype=torch.float16, moe_config={"precision": "bf16"})


def test_own_experts_implementation_is_kept(checkpoint):
    model = MoEAutoModel.from_pretrained(checkpoint, experts_implementation="grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    assert not model.model.layers[0].mlp.experts._forward_pre_hooks
    with pytest.raises(ValueError, match=r"experts='torch' can't be used with experts_implementation='eager'"):
        MoEAutoModel.from_pretrained(checkpoint, experts_implementation="eager", moe_config={"experts": "torch"})


@pytest.mark.parametrize(
    ("moe_config", "kwargs", "message"),
    [
        ({"ep_size": 3}, {}, r"ep_size=3 does not divide the 4 processes of this job; use one of 1, 2, 4"),
        ({"ep_size": 2}, {"distributed_config": DistributedConfig(fsdp_size=4, ep_size=4)}, r"contradict each other"),
        ({}, {"device_map": "auto"}, r"device_map='auto' can't be combined with 4 processes.*Leave device_map out"),
        ({}, {"device_map": {"": 3, "lm_head": 0}}, r"device_map=.* can't be combined"),
        ({}, {"tp_plan": "auto"}, r"tp_plan='auto' can't be combined.*DistributedConfig\(tp_size"),
    ],
)
def test_refused_before_weights_are_read(checkpoint, four_ranks, moe_config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        MoEAutoModel.from_pretrained(checkpoint, moe_config=moe_config, **kwargs)


def test_ep_size_must_divide_the_experts(tmp_path, four_ranks):
    tiny.save("qwen3_moe", tmp_path, num_experts=6)
    with pytest.raises(ValueError, match=r"ep_size=4 does not divide the 6 experts of .*experts; use one of 1, 2\."):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"ep_size": 4})


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_sharding_by_accelerate_is_refused(checkpoint, monkeypatch, variable):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"{variable} is set: .*torchrun"):
        MoEAutoModel.from_pretrained(checkpoint)


def test_ep_size_in_one_process_names_the_launcher(checkpoint):
    with pytest.raises(ValueError, match=r"ep_size=2 needs at least that many processes.*torchrun --nproc-per-node 2"):
        MoEAutoModel.from_pretrained(checkpoint, moe_config={"ep_size": 2})


def test_expert_parallel_outside_the_registries_is_refused(tmp_path, four_ranks):
    from transformers import DogeConfig, DogeForCausalLM

    config = DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, is_moe=True, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    DogeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"ep_size=2, but the MoE block of 'doge' is outside.*use ep_size=1"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={"ep_size": 2})


def test_experts_under_two_names_are_not_spread_twice():
    modules = {
        name: module
        for kind in ("diffusion_gemma", "qwen3_moe")
        for name, module in experts_modules(tiny.build(kind)).items()
    }
    first, second = tied_experts(modules)
    assert first != second and modules[first].down_proj is modules[second].down_proj
    assert tied_experts(experts_modules(tiny.build("qwen3_moe"))) is None


@pytest.mark.parametrize(
    ("num_experts", "world", "local", "expected"),
    [
        ([128] * 48, 8, 8, 8),
        ([128] * 48, 64, 8, 8),  # inside a node
        ([60], 8, 8, 4),  # whole experts, equally many
        ([128, 6], 8, 8, 2),  # every layer's
        ([128], 6, 6, 2),
        ([7], 8, 8, 1),
    ],
)
def test_auto_ep_size(num_experts, world, local, expected):
    assert auto_ep_size(num_experts, world, local) == expected
