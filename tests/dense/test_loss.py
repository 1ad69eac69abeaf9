"""The loss from hidden states against transformers': values, gradients, and logits whenever somebody reads them."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from automodel_moe import MoEAutoModel
from automodel_moe.dense import loss_chunked
from automodel_moe.dense.loss import Logits
from automodel_moe.dense.loss_quack import _chunk_rows
from automodel_moe.kernels import cross_entropy
from tests import tiny

HERE = __name__
# float32: the same sums in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


@pytest.fixture
def pair(checkpoint):
    ours = MoEAutoModel.from_pretrained(checkpoint, moe_config={"loss": "chunked"}).train()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager").train()
    return ours, theirs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss_chunked, "CHUNK_BYTES", 128 * tiny.VOCAB * 4)  # 128 rows of float32


def batch(rows=12, length=23):
    inputs = tiny.batch("qwen3_moe", rows=rows, length=length)
    inputs["labels"][:, :5] = -100
    return inputs


def grads(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same(ours, theirs, inputs, **more):
    got, want = ours(**inputs, **more), theirs(**inputs, **more)
    torch.testing.assert_close(got.loss, want.loss, **CLOSE)
    got.loss.backward()
    want.loss.backward()
    got_grads, want_grads = grads(ours), grads(theirs)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-8, name
    return got, want


@pytest.mark.parametrize("extra", ["nothing", "int items", "tensor items", "shifted labels", "router loss"])
def test_loss_and_gradients(pair, extra):
    inputs = batch()
    more = {
        "nothing": {},
        "int items": {"num_items_in_batch": 77},
        "tensor items": {"num_items_in_batch": torch.tensor(77)},
        "shifted labels": {"shift_labels": inputs["labels"].roll(-1, 1)},
        "router loss": {"output_router_logits": True},
    }[extra]
    got, _ = assert_same(*pair, inputs, **more)
    assert isinstance(got.logits, Logits) and got.logits.computed is None


def test_logits_when_read(pair):
    ours, theirs = pair
    inputs = batch()
    got, want = ours(**inputs).logits, theirs(**inputs).logits
    assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
    assert got.computed is None
    for use in (
        lambda t: t[..., :-1, :],
        lambda t: t * 2,
        lambda t: 1 - t,
        lambda t: -t,
        lambda t: t.softmax(-1),
        lambda t: torch.softmax(t, -1),
        lambda t: torch.cat([t, t]),
        lambda t: torch.nn.functional.cross_entropy(t.view(-1, t.size(-1)), inputs["labels"].view(-1)),
        lambda t: t.argmax(-1),
        lambda t: t.float(),
        lambda t: next(iter(t)),
    ):
        result = use(got)
        result = result.true() if isinstance(result, Logits) else result
        torch.testing.assert_close(result, use(want), **CLOSE)


def test_a_loss_of_ones_own_from_the_logits(pair):
    ours, theirs = pair
    inputs = batch()
    for model in pair:
        outputs = model(**inputs)
        with torch.no_grad():
            outputs.logits.mean()  # a metric before the loss
        outputs.logits.logsumexp(-1).mean().backward()
    want = grads(theirs)
    for name, grad in grads(ours).items():
        assert (grad - want[name]).norm() <= 1e-5 * want[name].norm() + 1e-8, name


def test_logits_of_changed_weights_are_refused(pair):
    ours, _ = pair
    outputs = ours(**batch())
    outputs.loss.backward()
    torch.optim.SGD(ours.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"before optimizer.step"):
        outputs.logits.sum()


def test_without_labels_or_gradients_logits_are_tensors(pair):
    ours, _ = pair
    inputs = batch()
    with torch.no_grad():
        assert type(ours(**inputs).logits) is torch.Tensor
    inputs.pop("labels")
    assert type(ours(**inputs).logits) is torch.Tensor
    ours.eval()
    assert ours.generate(inputs["input_ids"][:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_a_head_that_is_frozen_and_one_that_has_a_bias(pair):
    ours, _ = pair
    for model in pair:
        model.lm_head.weight.requires_grad_(False)
        model.requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    for model in pair:
        model(**batch()).loss.backward()
    torch.testing.assert_close(*(m.model.layers[0].self_attn.q_proj.weight.grad for m in pair), **CLOSE)
    assert ours.lm_head.weight.grad is None
    ours.lm_head.bias = torch.nn.Parameter(torch.ones(tiny.VOCAB))
    assert type(ours(**batch()).logits) is torch.Tensor


def test_a_model_that_changes_its_logits_gets_transformers_loss(pair):
    ours, theirs = pair

    def capped(head, args, output):
        return torch.tanh(output / 2) * 2

    for model in pair:
        model.lm_head.register_forward_hook(capped)
    inputs = batch()
    assert_same(ours, theirs, inputs)
    assert_same(ours, theirs, inputs)  # the second time nothing is computed in vain
    assert type(ours(**inputs).logits) is torch.Tensor


def test_accelerates_cast_to_float32_computes_no_logits(pair):
    from accelerate.utils import convert_to_fp32

    ours, _ = pair
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ours(**batch())
    assert outputs.logits.dtype == torch.bfloat16
    outputs = convert_to_fp32(outputs)
    assert outputs.logits.computed is None and outputs.logits.dtype == torch.float32
    assert outputs.logits.mean().dtype == torch.float32


def test_autocast(pair):
    ours, _ = pair
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (model(**inputs).loss for model in pair)
    # The same bfloat16 logits; the experts run in bfloat16 here and in float32 in transformers.
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
    got.backward()
    assert ours.lm_head.weight.grad.dtype == torch.float32


def test_a_copy_is_its_own(pair):
    ours, _ = pair
    other = copy.deepcopy(ours)
    other(**batch()).loss.backward()
    assert other.lm_head.weight.grad is not None and ours.lm_head.weight.grad is None


def test_compiled(pair):
    ours, theirs = pair
    ours.compile(backend="eager")
    got, _ = assert_same(ours, theirs, batch())
    assert isinstance(got.logits, Logits)


def test_trainer_with_and_without_label_smoothing(pair, tmp_path):
    from transformers import Trainer, TrainingArguments

    inputs = batch()
    rows = [{name: tensor[i] for name, tensor in inputs.items()} for i in range(12)]
    for smoothing in (0.0, 0.1):
        losses = []
        for model in pair:
            arguments = TrainingArguments(
                tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=1, learning_rate=0.0,
                label_smoothing_factor=smoothing, report_to=[], use_cpu=True, save_strategy="no",
            )  # fmt: skip
            losses.append(Trainer(model, arguments, train_dataset=rows).train().training_loss)
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def step_under_ep(folder: str) -> float:
    ours = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": 2, "loss": "chunked"}).train()
    theirs = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    inputs = batch(rows=4)
    own = {name: tensor.chunk(2)[dist.get_rank()] for name, tensor in inputs.items()}
    items = (inputs["labels"][:, 1:] != -100).sum()
    outputs = ours(**own, num_items_in_batch=items)
    assert isinstance(outputs.logits, Logits)
    want = theirs(**inputs, num_items_in_batch=items)
    # Read between forward and backward, where the head's sharded weight is whole.
    torch.testing.assert_close(outputs.logits[:, -1], want.logits.chunk(2)[dist.get_rank()][:, -1], **CLOSE)
    (2 * outputs.loss).backward()  # FSDP2 takes the mean over the 2 ranks
    want.loss.backward()
    for name, p in ours.named_parameters():
        grad = theirs.get_parameter(name).grad
        assert (p.grad.full_tensor() - grad).norm() <= 1e-5 * grad.norm() + 1e-8, name
    # A loss of one's own, from the logits.
    ours.zero_grad()
    theirs.zero_grad()
    (2 * ours(**own).logits.logsumexp(-1).sum()).backward()
    theirs(**inputs).logits.logsumexp(-1).sum().backward()
    for name, p in ours.named_parameters():
        grad = theirs.get_parameter(name).grad
        assert (p.grad.full_tensor() - grad).norm() <= 1e-5 * grad.norm() + 1e-8, name
    total = outputs.loss.detach().clone()
    dist.all_reduce(total)
    assert abs(total - want.loss) < 1e-5
    return float(total)


def test_expert_parallel(worlds, checkpoint):
    one, two = worlds(2).run(f"{HERE}:step_under_ep", folder=checkpoint)
    assert one == two


def test_kernel_against_autograd():
    """The kernel where Triton can run it (interpreted on the CPU), and its reference, in float32."""
    torch.manual_seed(0)
    logits_TV, target_T = torch.randn(9, 300), torch.randint(300, (9,))
    target_T[4] = -100
    leaf = logits_TV.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf, target_T, reduction="none")
    (losses.sum() * 0.25).backward()
    scale = torch.tensor(0.25)
    from automodel_moe.kernels import cross_entropy_triton

    for function in (cross_entropy.reference, cross_entropy_triton.cross_entropy_):
        gradient_TV = logits_TV.clone()
        loss_T = function(gradient_TV, target_T, scale, -100)
        torch.testing.assert_close(loss_T, losses.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient_TV, leaf.grad, rtol=1e-5, atol=1e-7)
        assert not gradient_TV[4].any()


def test_quacks_chunks_never_have_as_many_rows_as_columns():
    for columns in (256, 1024, 2048, 4096, 4224):
        for rows in (1, 128, 1000, 2048, 2049, 4096, 4097, 8192 + 1024, 16384, 16384 + 2048):
            chunk = _chunk_rows(rows, columns)
            assert chunk % 128 == 0
            assert all(-(-min(chunk, rows - start) // 128) * 128 != columns for start in range(0, rows, chunk))
