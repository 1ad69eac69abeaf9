"""Ten kinds of the parity sweep, chosen for what differs between experts classes; `make sweep` runs them all."""

import pytest

from tests.distributed import sweep

KINDS = {
    "qwen3_moe": "the plain layout, softmax router",
    "mixtral": "three matrices an expert in the checkpoint",
    "gpt_oss": "transposed, biased, gate and up interleaved, an activation of its own",
    "nemotron_h": "no gate, squared ReLU, beside a Mamba layer",
    "aria": "transposed",
    "muse_spark": "a norm after each expert that all experts share",
    "glm4_moe": "sigmoid router with a score correction, shared experts, a dense layer first",
    "deepseek_v4": "experts by token id in one layer, clamped gates, hyper-connections",
    "gemma4": "a dense branch beside the experts, an EP plan that names dense layers",
    "zaya": "top-k 1",
}

# transformers' own tensor parallelism can't run these; the table has the error.
NO_TENSOR_PARALLELISM = {"muse_spark", "zaya"}


@pytest.mark.parametrize("kind", KINDS)
def test_parity(worlds, kind):
    layouts = {
        title: layout for title, layout in sweep.LAYOUTS.items() if layout.tp == 1 or kind not in NO_TENSOR_PARALLELISM
    }
    outcomes = sweep.run(kind, worlds, layouts)
    assert outcomes.keys() == layouts.keys()
    assert not {title: outcome.reason for title, outcome in outcomes.items() if not outcome.holds}
