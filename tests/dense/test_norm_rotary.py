"""Which modules are taken for RMSNorms and rotations of halves, and that what replaces them computes the same."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextInputScaledRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from automodel_moe import MoEAutoModel, dense
from automodel_moe.dense import norm, rotary
from automodel_moe.kernels import rotary_triton
from tests import tiny


class OfHeads(nn.RMSNorm):
    """A norm for one width alone."""

    def forward(self, x):
        return super().forward(x.unflatten(-1, (4, 128)))


@pytest.mark.parametrize(
    ("norm_class", "offset"),
    [
        (Qwen3MoeRMSNorm, 0.0),
        (NemotronHRMSNorm, 0.0),
        (Qwen3NextRMSNorm, 1.0),  # scales by 1 + weight
        (MuseSparkTextInputScaledRMSNorm, None),  # scales what goes in
        (MambaRMSNormGated, None),
        (nn.RMSNorm, None),
        (OfHeads, None),
    ],
)
def test_forms_of_norms(norm_class, offset):
    assert norm._form(norm_class, 1e-6) == (None if offset is None else (1e-6, offset))


def plain_norm(x, weight_D, eps, offset):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight_D.float())).to(x.dtype)


def plain_rotation(q, k, cos, sin, half):
    tables = [torch.cat([t, t], dim=-1) if half else t for t in (cos, sin)]
    return rotary.reference(q, *tables), rotary.reference(k, *tables)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss", "glm4_moe", "deepseek_v3", "nemotron_h"])
def test_models_compute_the_same(name, tmp_path, monkeypatch):
    """With plain torch in the backends' places, on the CPU: what is replaced is replaced right."""
    tiny.save(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").train()
    used = set()

    def choose(operation, *question):
        used.add(operation)
        return {"norm": plain_norm, "rotary": plain_rotation}.get(operation)

    monkeypatch.setattr(norm, "choose", choose)
    monkeypatch.setattr(rotary, "choose", choose)
    rotary._with_rotation.cache_clear()
    ours = MoEAutoModel.from_pretrained(tmp_path, moe_config={"loss": "model"}).train()
    inputs = tiny.batch(name)
    # A copy must use its own weights.
    for model in (ours, copy.deepcopy(ours)):
        outputs = [tiny.loss(side, inputs) for side in (model, theirs)]
        for loss in outputs:
            loss.backward()
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        for key, p in theirs.named_parameters():
            if p.grad is not None:
                # float32, other roundings.
                assert (model.get_parameter(key).grad - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-7, key
        theirs.zero_grad()
    assert used == ({"norm"} if name in ("deepseek_v3", "nemotron_h") else {"norm", "rotary"})


@pytest.mark.parametrize(
    ("attention", "half"),
    [(Qwen3MoeAttention, False), (Glm4MoeAttention, False), (GptOssAttention, True), (DeepseekV3Attention, False)],
)
def test_forms_of_rotations(attention, half):
    assert rotary._half_tables(attention) is half
    assert rotary._half_tables(Qwen3MoeRMSNorm) is None


def test_transformers_own_function_stays(tmp_path):
    before = modeling_qwen3_moe.apply_rotary_pos_emb
    tiny.save("qwen3_moe", tmp_path)
    MoEAutoModel.from_pretrained(tmp_path)(**tiny.batch("qwen3_moe"))
    assert modeling_qwen3_moe.apply_rotary_pos_emb is before
    assert "forward" not in vars(modeling_qwen3_moe.Qwen3MoeAttention(tiny.config("qwen3_moe"), 0))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("width", [16, 6])
def test_rotation_kernel(half, width):
    """Interpreted on the CPU, in float32 against float64; backward is the transposed map."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, n, 16, dtype=torch.float64).transpose(1, 2).requires_grad_() for n in (5, 1))
    cos, sin = (torch.randn(1 if half else 2, 3, width // (1 + half), dtype=torch.float64) for _ in range(2))
    want = plain_rotation(q, k, cos, sin, half)
    dy = [torch.randn_like(t) for t in want]
    want_grads = torch.autograd.grad(want, (q, k), dy)
    tables = cos.float(), sin.float()
    got = rotary_triton.rotate(q.detach().float(), k.detach().float(), *tables, shared_table=half)
    got_grads = rotary_triton.rotate(*(t.float() for t in dy), *tables, shared_table=half, backward=True)
    assert got[0].stride() == q.stride()
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("operation", dense.OPERATIONS)
def test_a_named_backend_that_is_not_installed_is_refused(operation, tmp_path, monkeypatch):
    tiny.save("qwen3_moe", tmp_path)
    named = next(name for name, backend in dense.OPERATIONS[operation].items() if backend.packages)
    monkeypatch.setattr(dense, "missing", lambda packages: packages)
    with pytest.raises(ImportError, match=rf"{operation}='{named}' needs .* run pip install"):
        MoEAutoModel.from_pretrained(tmp_path, moe_config={operation: named})
