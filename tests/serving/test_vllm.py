"""A real vLLM engine serves what was trained here: greedy tokens equal transformers', in float32."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.processes import ROOT, run
from tests.serving import trained

PYTHON = ROOT / ".venv-serve" / "bin" / "python"
STAMP = ROOT / ".venv-serve" / ".stamp"
NEW_TOKENS = 16
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine in the one process that the test starts, and can end.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
# vLLM and transformers sum in other orders: in float32 their logits differ by some 1e-5. Under a margin much above
# that, equal weights must give equal tokens.
MARGIN = 1e-3


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(trained.VOCAB, (length,), generator=generator).tolist() for length in (5, 12)]


def greedy(folder, prompt):
    """Greedy tokens of plain transformers, and the smallest lead of a chosen token over the next best."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    return result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


@pytest.mark.serving
@pytest.mark.parametrize("kind", trained.CONFIGS)
def test_vllm_gives_the_tokens_of_transformers(kind, trained_checkpoint):
    assert STAMP.exists(), "the serving venv is missing or half built: run `make serve-venv`, it says why"
    checkpoint = trained_checkpoint(kind)

    expected, margins = zip(*(greedy(checkpoint.folder, prompt) for prompt in prompts()), strict=True)
    assert min(margins) > MARGIN, "near ties would make the comparison a matter of luck: change the seed"
    untrained = [greedy(checkpoint.source, prompt)[0] for prompt in prompts()]
    assert untrained != list(expected), "the training must show in the tokens"

    engine = ROOT / "tests" / "serving" / "engine.py"
    printed = run([PYTHON, engine, checkpoint.folder, json.dumps(prompts()), str(NEW_TOKENS)], timeout=400, env=ENGINE)
    served = json.loads(re.search(r"^TOKENS (.*)$", printed, re.MULTILINE).group(1))
    assert served == list(expected)


@pytest.mark.parametrize("kind", trained.CONFIGS)
def test_training_changed_every_expert(kind, trained_checkpoint):
    checkpoint = trained_checkpoint(kind)
    before = load_file(checkpoint.source / "model.safetensors")
    after = load_file(checkpoint.folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype and weight.shape == after[name].shape, name
        if ".experts." in name:
            assert not torch.equal(weight, after[name]), name
