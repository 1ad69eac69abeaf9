"""SGLang's loader finds every expert weight that was saved here.

SGLang has no CPU build, so its wheel is read, not installed: the mapping functions of its loader, and the calls that
its models make of them, are taken out of the files by their syntax trees and run over the saved keys.
"""

import ast
import zipfile
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from transformers import AutoConfig

from tests.processes import ROOT
from tests.serving import trained

WHEELS = ROOT / ".cache" / "sglang"
LAYER = "sglang/srt/layers/moe/fused_moe_triton/layer.py"
MODEL = "sglang/srt/models/{}.py"
MAPPINGS = {"make_expert_params_mapping", "make_expert_params_mapping_fused"}


@pytest.fixture(scope="module")
def wheel():
    assert (WHEELS / ".stamp").exists(), "SGLang's wheel is missing: run `make serve-venv`, it says why"
    (path,) = WHEELS.glob("sglang-*.whl")
    with zipfile.ZipFile(path) as files:
        yield lambda name: ast.parse(files.read(name))


def loader(wheel):
    """A `FusedMoE` of nothing but SGLang's own mapping functions."""
    (layer,) = [n for n in wheel(LAYER).body if isinstance(n, ast.ClassDef) and n.name == "FusedMoE"]
    layer.body = [n for n in layer.body if isinstance(n, ast.FunctionDef) and n.name in MAPPINGS]
    assert {n.name for n in layer.body} == MAPPINGS
    layer.bases, layer.decorator_list = [], []
    postponed = ast.parse("from __future__ import annotations").body
    names = {}
    exec(compile(ast.Module([*postponed, layer], []), LAYER, "exec"), names)
    return names["FusedMoE"]


def mapping(wheel, kind, config):
    """What SGLang's model of this kind asks its loader for, with the arguments that it gives."""
    file = MODEL.format(kind)
    calls = [
        n
        for n in ast.walk(wheel(file))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in MAPPINGS
    ]
    (call,) = calls
    model = SimpleNamespace(config=config, num_fused_shared_experts=0)
    return eval(compile(ast.Expression(call), file, "eval"), {"FusedMoE": loader(wheel), "self": model})


@pytest.mark.parametrize("kind", trained.CONFIGS)
def test_every_expert_key_is_mapped_once(kind, wheel, trained_checkpoint):
    folder = trained_checkpoint(kind).folder
    config = AutoConfig.from_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as saved:
        shapes = {key: saved.get_slice(key).get_shape() for key in saved.keys() if ".experts." in key}  # noqa: SIM118

    found = {}
    for key in shapes:
        # As its models do: the first entry whose name is part of the key, and that part replaced by the parameter's.
        target, part, *shard = next(entry for entry in mapping(wheel, kind, config) if entry[1] in key)
        loaded = (key.replace(part, target), *shard)
        assert loaded not in found, f"{key} and {found[loaded]} are loaded into the same place"
        found[loaded] = key

    hidden = config.hidden_size
    width = config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
    layers = [layer for layer in range(config.num_hidden_layers) if kind != "glm4_moe" or layer > 0]
    expected = {}
    for layer in layers:
        experts = f"model.layers.{layer}.mlp.experts."
        if kind == "gpt_oss":
            expected[experts + "w13_weight", "w13"] = [trained.EXPERTS, hidden, 2 * width]
            expected[experts + "w13_weight_bias", "w13"] = [trained.EXPERTS, 2 * width]
            expected[experts + "w2_weight", "w2"] = [trained.EXPERTS, width, hidden]
            expected[experts + "w2_weight_bias", "w2"] = [trained.EXPERTS, hidden]
            continue
        for expert in range(trained.EXPERTS):
            expected[experts + "w13_weight", expert, "w1"] = [width, hidden]
            expected[experts + "w13_weight", expert, "w3"] = [width, hidden]
            expected[experts + "w2_weight", expert, "w2"] = [hidden, width]
    assert {loaded: shapes[key] for loaded, key in found.items()} == expected
