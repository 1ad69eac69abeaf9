"""Attention through the registry, with plain torch in a backend's place: masks, windows, sinks, and fall-backs."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from automodel_moe import MoEAutoModel, dense
from automodel_moe.dense import attention
from tests import tiny


def plain_attention(q, k, v, scale, window, softcap, sinks, bounds):
    B, S, N, _ = q.shape
    k, v = (t.repeat_interleave(N // t.shape[2], dim=2) for t in (k, v))
    place = torch.arange(B * S)
    sequence = place // S if bounds is None else torch.bucketize(place, bounds[1:], right=True)
    scores = torch.einsum("snd,tnd->nst", q.flatten(0, 1), k.flatten(0, 1)) * scale
    seen = (place[:, None] >= place) & (sequence[:, None] == sequence)
    if window is not None:
        seen &= place[:, None] - place < window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, B * S, 1)], dim=-1)
    out = torch.einsum("nst,tnd->snd", scores.softmax(-1)[..., : B * S], v.flatten(0, 1))
    return out.reshape(B, S, N, -1).contiguous()


@pytest.fixture
def calls(monkeypatch):
    """How often the backend ran, once `install` believes that there is one."""
    calls = []

    def run(*arguments):
        calls.append(arguments)
        return plain_attention(*arguments)

    monkeypatch.setattr(attention, "choose", lambda *question: run)
    monkeypatch.setattr(attention, "missing", lambda packages: ())
    return calls


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phimoe"])  # the last never tells its attention the window
@pytest.mark.parametrize("padding", [None, "ones", "left", "right"])
def test_same_as_transformers(name, padding, calls, tmp_path):
    tiny.save(name, tmp_path)
    ours = MoEAutoModel.from_pretrained(tmp_path).train()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").train()
    inputs = tiny.batch(name)
    inputs["attention_mask"][0, {"left": slice(5), "right": slice(8, None)}.get(padding, slice(0))] = 0
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    inputs["labels"][0, :6] = -100  # what the padding before a row's first token predicts
    if padding is None:
        inputs.pop("attention_mask")
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)  # one of them has a router with noise
        losses.append(model(**inputs).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    for key, p in theirs.named_parameters():
        if p.grad is not None:
            assert (ours.get_parameter(key).grad - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, key
    assert len(calls) == ours.config.num_hidden_layers


def test_a_cache_and_other_masks_fall_back(calls, tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    ours = MoEAutoModel.from_pretrained(tmp_path).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    ids = tiny.batch("qwen3_moe")["input_ids"]
    tokens = [model.generate(ids, max_new_tokens=5, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*tokens)
    n_layers = ours.config.num_hidden_layers
    assert len(calls) == n_layers, "the prompt, and no token after it"
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])
    logits = [model(input_ids=ids[:1], position_ids=packed, use_cache=False).logits for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)
    assert len(calls) == n_layers


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_dropout_falls_back_with_the_mask_it_needs(name, calls, tmp_path):
    tiny.save(name, tmp_path)
    ours = MoEAutoModel.from_pretrained(tmp_path, attention_dropout=0.5).train()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager", attention_dropout=0.5
    ).train()
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        losses.append(model(**tiny.batch(name)).loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert not calls


def test_the_callers_own_implementation_is_kept(calls, tmp_path, monkeypatch):
    tiny.save("qwen3_moe", tmp_path)
    model = MoEAutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    monkeypatch.setattr(dense, "missing", lambda packages: ())
    with pytest.raises(ValueError, match=r"attention='flash4' and attn_implementation='eager'"):
        MoEAutoModel.from_pretrained(tmp_path, attn_implementation="eager", moe_config={"attention": "flash4"})


def test_only_causal_masks_are_left_out():
    def chunked(batch, head, q, kv):
        return (kv <= q) & (q // 4 == kv // 4)

    def prefix(batch, head, q, kv):
        return (kv <= q) | (kv < 3)

    assert attention._is_causal(causal_mask_function, None)
    assert attention._is_causal(lambda batch, head, q, kv: kv <= q, None)
    assert attention._is_causal(sliding_window_causal_mask_function(4), 4)
    assert not attention._is_causal(sliding_window_causal_mask_function(4), None)
    assert not attention._is_causal(sliding_window_causal_mask_function(5), 4)
    assert not attention._is_causal(chunked, 4)
    assert not attention._is_causal(prefix, None)


def test_padding_between_tokens_stops_the_device():
    mask = torch.tensor([[True, True, True, True], [False, True, True, False]])
    assert attention._bounds(mask).tolist() == [0, 0, 4, 5, 8]
    with pytest.raises(RuntimeError, match="padding between"):
        attention._bounds(torch.tensor([[True, False, True, True]]))
