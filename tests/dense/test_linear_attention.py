"""The mixers of hybrid models on the CPU: our forward, over kernels in plain torch, against transformers' own."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_moe import MoEAutoModel
from automodel_moe.dense import linear_attention, triton_kernels
from tests import tiny
from tests.dense import torch_kernels

KINDS = ("nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5_moe", "qwen4_exp")
LENGTHS = (5, 1, 9)


@pytest.fixture(params=["triton", "model"])
def choice(request, monkeypatch):
    """`MoEConfig.linear_attention`, with the kernels of "triton" replaced by plain torch, which a CPU can run."""
    monkeypatch.setattr(linear_attention, "triton_kernels", torch_kernels)
    return request.param


def plain(name, **overrides):
    config = tiny.config(name, **overrides).get_text_config()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def installed(model, choice):
    model = copy.deepcopy(model)
    linear_attention.install(model, choice)
    return model


def step(model, **inputs):
    logits = model(**inputs, use_cache=False).logits
    loss = logits.square().mean()
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance):
    assert (got[0] - want[0]).norm() <= tolerance * want[0].norm()
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= tolerance * grad.norm() + 1e-9, name


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_numbers_as_transformers(name, padding, choice):
    model = plain(name)
    ids = torch.randint(tiny.VOCAB, (2, 13), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if padding is not None:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, slice(4) if padding == "left" else slice(-4, None)] = 0
    # float32; positions one by one where transformers goes by chunks, and gradients of decays are small differences.
    assert_same(step(installed(model, choice), **inputs), step(model, **inputs), 1e-4)


@pytest.mark.parametrize("told_by", ["position_ids", "seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("name", KINDS)
def test_packed_sequences_equal_separate_ones(name, told_by, choice):
    if name == "qwen4_exp" and told_by != "position_ids":
        pytest.skip("its attention knows these by no other argument")
    # This one's attention takes no notice of where sequences begin.
    mixers_alone = {"layer_types": ["linear_attention"] * 2} if name == "granitemoehybrid" else {}
    model = installed(plain(name, **mixers_alone), choice)
    parts = [torch.randint(tiny.VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    want = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], dim=1)
    packed = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if told_by == "seq_idx":
        packed["seq_idx"] = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None].int()
    elif told_by == "cu_seq_lens_q":
        packed["cu_seq_lens_q"] = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    got = model(input_ids=torch.cat(parts, dim=1), **packed, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # float32, logits near 1


def test_sequences_packed_into_several_rows_stay_apart(choice):
    model = installed(plain("nemotron_h"), choice)
    ids = torch.randint(tiny.VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])
    got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got[:1], model(input_ids=ids[:1], use_cache=False).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1:, 3:], model(input_ids=ids[1:, 3:], use_cache=False).logits, rtol=0, atol=1e-5)


def test_without_us_a_packed_batch_leaks_from_one_sequence_to_the_next():
    """The day this fails, transformers keeps them apart by itself."""
    model = plain("nemotron_h")
    ids = torch.randint(tiny.VOCAB, (1, 8), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    got = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (got[:, 3:] - model(input_ids=ids[:, 3:], use_cache=False).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_generation_continues_from_the_cache_that_we_filled(name, choice):
    model = plain(name)
    ids = torch.randint(tiny.VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    got = installed(model, choice).generate(ids, **options)
    assert torch.equal(got, model.generate(ids, **options))


def test_a_layers_recompute_gets_the_sequences_of_its_forward(choice):
    model = installed(plain("nemotron_h"), choice).train()
    inputs = {
        "input_ids": torch.randint(tiny.VOCAB, (1, 8), generator=torch.Generator().manual_seed(2)),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
    }
    want = step(copy.deepcopy(model), **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(step(model, **inputs), want, 1e-6)


def test_a_copy_has_forwards_of_its_own():
    model = MoEAutoModel.from_config(tiny.config("nemotron_h"))
    copied = copy.deepcopy(model)
    mixer, other = (m.model.layers[0].mixer for m in (model, copied))
    assert mixer.forward.args == (mixer,) and other.forward.args == (other,)


def test_auto_says_that_the_slow_one_runs_and_why(monkeypatch):
    said = []
    monkeypatch.setattr(linear_attention, "say_once", said.append)
    model = MoEAutoModel.from_config(tiny.config("nemotron_h"))
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert set(said) == {
        "linear_attention='auto': NemotronHMamba2Mixer runs in plain torch, several times slower (the kernels need a "
        "CUDA device, and this is cpu)"
    }


def test_an_explicit_choice_that_can_not_be_had_is_refused():
    model = MoEAutoModel.from_config(tiny.config("nemotron_h"), moe_config={"linear_attention": "triton"})
    with pytest.raises(ValueError, match="linear_attention='triton' can't run NemotronHMamba2Mixer on cpu"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64))


def test_what_the_kernels_lack_is_named(monkeypatch):
    assert triton_kernels.unsupported_mamba_scan(128, 64) is None
    assert "here are 256 and 64" in triton_kernels.unsupported_mamba_scan(256, 64)
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None)
    reason = triton_kernels.unsupported_delta_scan(torch.device("cuda"))
    assert reason == "fla-core is not installed, run pip install 'automodel-moe[hybrid]'"


@pytest.mark.parametrize(("triton", "fine"), [("3.3.1", True), ("3.6.0", False), ("3.7.1", True)])
def test_a_triton_that_computes_flas_backward_wrongly_is_refused(monkeypatch, triton, fine):
    monkeypatch.setattr(triton_kernels, "find_spec", lambda name: None if name == "tilelang" else object())
    monkeypatch.setattr(triton_kernels, "version", lambda name: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert (triton_kernels.unsupported_delta_scan(torch.device("cuda")) is None) == fine
