"""Training steps of a small model on a GPU: as transformers' own, without waits of the host, compiled, in autocast."""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from automodel_moe import MoEAutoModel
from automodel_moe.dense.loss import Logits

pytestmark = pytest.mark.gpu
CONFIG = Qwen3MoeConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4,
    norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip


def models(dtype=torch.bfloat16, **moe_config):
    """Ours, and transformers' with the same weights."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype, experts_implementation="grouped_mm").train()
        ours = MoEAutoModel.from_config(CONFIG, dtype=dtype, moe_config=moe_config).train()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def batch(rows=2, length=256, seed=0):
    ids = torch.randint(CONFIG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()
    return {"input_ids": ids, "labels": ids}


def gradients(model, inputs, autocast=False):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


def assert_no_worse(ours, theirs, exact):
    """Errors against float32 in the Frobenius norm; a tenth more is let pass: near ties are routed differently."""
    assert abs(ours[0] - exact[0]) <= 1.1 * abs(theirs[0] - exact[0]) + 2e-3
    for name, want in exact[1].items():
        errors = [float((side[1][name] - want).norm() / want.norm()) for side in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1] + 5e-3, (name, errors)


def exact_gradients(model, inputs):
    reference = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32, experts_implementation="eager").cuda()
    reference.load_state_dict(model.state_dict())
    return gradients(reference.train(), inputs)


@pytest.mark.parametrize("padded", ["no mask", "ones", "left", "right"])
def test_gradients(padded):
    ours, theirs = models()
    inputs = batch()
    if padded != "no mask":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        columns = {"ones": slice(0), "left": slice(0, 60), "right": slice(200, None)}[padded]
        inputs["attention_mask"][0, columns] = 0
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        inputs["labels"][0, :61] = -100
    assert_no_worse(gradients(ours, inputs), gradients(theirs, inputs), exact_gradients(theirs, inputs))


def test_autocast_with_float32_parameters():
    ours, theirs = models(torch.float32)
    inputs = batch()
    got, other = (gradients(model, inputs, autocast=True) for model in (ours, theirs))
    assert_no_worse(got, other, exact_gradients(theirs, inputs))


def test_compiled():
    ours, theirs = models()
    inputs = batch()
    got = gradients(ours, inputs)
    ours.compile()
    compiled = gradients(ours, inputs)
    exact = exact_gradients(theirs, inputs)
    assert_no_worse(compiled, gradients(theirs, inputs), exact)
    assert isinstance(ours(**inputs).logits, Logits) and abs(compiled[0] - got[0]) < 2e-3


def test_accumulation_adds_up():
    ours, _ = models()
    whole = gradients(ours, batch(rows=4))
    ours.zero_grad()
    inputs = batch(rows=4)
    for half in range(2):
        part = {name: tensor.chunk(2)[half] for name, tensor in inputs.items()}
        ours(**part, num_items_in_batch=4 * 255).loss.backward()
    for name, p in ours.named_parameters():
        assert (p.grad.float() - whole[1][name]).norm() <= 2e-2 * whole[1][name].norm(), name  # two bfloat16 roundings


@pytest.mark.parametrize("masked", [False, True])
def test_the_host_never_waits(masked, figures):
    """Forward, backward, clipping and fused AdamW. What transformers itself waits for is listed, and nothing else."""
    ours, _ = models()
    optimizer = torch.optim.AdamW(ours.parameters(), fused=True)
    inputs = batch()
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])

    def step():
        ours(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    waits = []

    def noted(message, *args, **kwargs):
        if "synchroniz" in str(message):
            waits.append([f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_stack()[-6:-1]])

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = noted
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    figures[f"host waits, mask {masked}"] = waits
    # Without a mask or a cache transformers looks whether position ids are packed.
    others = [stack for stack in waits if not any(frame.startswith("masking_utils.py") for frame in stack)]
    assert not others
    assert len(waits) == (0 if masked else 1)


def test_lengths_that_change_compile_nothing_new():
    """After a first sight of short and long, no kernel is built or tuned again."""
    ours, _ = models()
    for length in (64, 1000, 129, 512):
        gradients(ours, batch(length=length))
    torch.cuda.synchronize()
    slow = []
    for length in torch.randint(64, 1000, (50,), generator=torch.Generator().manual_seed(1)).tolist():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gradients(ours, batch(length=length))
        end.record()
        end.synchronize()
        slow.append(start.elapsed_time(end))
    # A kernel takes 2 s to build, a step of this model some milliseconds.
    assert max(slow) < 1000, slow
