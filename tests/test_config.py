"""`MoEConfig` and the sources that `moe_config=` takes."""

import json
import subprocess
import sys

import pytest

from automodel_moe import MoEConfig


def test_defaults_are_all_auto():
    config = MoEConfig.load(None)
    assert (config.ep_size, config.dispatcher, config.experts, config.precision) == ("auto",) * 4


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", [".yaml", ".json", None])
def test_same_config_from_every_source(tmp_path, suffix, nested):
    fields = {"ep_size": 2, "experts": "torch", "precision": "bf16"}
    source = {"moe_config": fields, "lr": 1} if nested else fields
    if suffix is not None:
        path = tmp_path / f"config{suffix}"
        # JSON is YAML too; the YAML file is written in YAML's own form.
        path.write_text(json.dumps(source) if suffix == ".json" else _as_yaml(source))
        source = path
    assert MoEConfig.load(source) == MoEConfig(ep_size=2, experts="torch", precision="bf16")


def _as_yaml(mapping, indent=""):
    lines = []
    for key, value in mapping.items():
        lines.append(
            f"{indent}{key}:" + (f"\n{_as_yaml(value, indent + '  ')}" if isinstance(value, dict) else f" {value}")
        )
    return "\n".join(lines)


def test_unknown_key_names_the_nearest():
    with pytest.raises(ValueError, match=r"unknown key 'ep_sise'; did you mean 'ep_size'\?"):
        MoEConfig.load({"ep_sise": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep_size": 0}, r"ep_size=0 must be"),
        ({"ep_size": True}, r"ep_size=True must be"),
        ({"ep_size": "two"}, r"ep_size='two' must be"),
        ({"max_tokens": 0}, r'max_tokens=0 must be "auto" or an integer of at least 1'),
        ({"dispatcher": "pigeon"}, r"dispatcher='pigeon' is none of 'auto', 'deepep', 'all_to_all'"),
        ({"experts": "abacus"}, r"experts='abacus' is none of"),
        ({"precision": "int4"}, r"precision='int4' is none of 'auto', 'bf16', 'mixed', 'fp32'"),
        ({"call_timeout": -1}, r"call_timeout=-1 must be a positive number of seconds"),
    ],
)
def test_bad_value_names_field_value_and_choices(fields, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig.load(fields)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml"):
        MoEConfig.load(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ValueError, match="must hold a mapping, got list"):
        MoEConfig.load(tmp_path / "list.yaml")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="no valid JSON"):
        MoEConfig.load(tmp_path / "broken.json")
    with pytest.raises(TypeError, match="got int"):
        MoEConfig.load(3)


def test_importing_the_package_imports_nothing_else():
    code = "import sys, automodel_moe; print([m for m in ('torch', 'transformers', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_importing_everything_changes_nothing_in_transformers():
    code = """
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.distributed.expert_parallel import EPImplementationInterface
from accelerate import Accelerator
import torch.nn.utils.clip_grad as clip
before = {c: dict(vars(c)) for c in (PreTrainedModel, Accelerator, clip)}
from automodel_moe import MoEAutoModel, MoEConfig
assert all(dict(vars(c)) == seen for c, seen in before.items())
assert "automodel" not in ALL_EXPERTS_FUNCTIONS and "automodel" not in EPImplementationInterface()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
