"""Which backend runs, why, and what is said when it can't."""

import logging

import pytest
import torch

from automodel_moe import config
from automodel_moe.experts import BACKENDS, Backend, choose, compute_dtype
from automodel_moe.experts import torch as torch_backend
from automodel_moe.say import say_once
from tests.experts.test_torch import PLAIN, toy

CPU = torch.device("cpu")


def test_config_offers_what_the_chooser_has():
    assert set(config.EXPERTS) == {"auto", *BACKENDS}


def test_torch_is_had_everywhere():
    assert choose("torch", toy(PLAIN), CPU) is torch_backend.forward


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"experts='tensor' is none of 'auto', .*'torch'"):
        choose("tensor", toy(PLAIN), CPU)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    absent = Backend("torch", packages=("no_such_package",), install="pip install 'automodel-moe[cuda]'")
    monkeypatch.setitem(BACKENDS, "absent", absent)
    with pytest.raises(
        ImportError, match=r"experts='absent' needs no_such_package.*pip install 'automodel-moe\[cuda\]'"
    ):
        choose("absent", toy(PLAIN), CPU)


def test_auto_on_a_cpu_is_torch():
    assert choose("auto", toy(PLAIN), CPU) is torch_backend.forward


def test_what_a_backend_cannot_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"experts='torch' can't run ToyExperts on cpu in torch.float8_e4m3fn: .*"):
        choose("torch", toy(PLAIN), CPU, torch.float8_e4m3fn)


def test_auto_says_once_what_it_took_and_what_it_passed_over(monkeypatch, caplog):
    absent = Backend("torch", packages=("no_such_package",), install="pip install x")
    monkeypatch.setattr("automodel_moe.experts.BACKENDS", {"absent": absent, **BACKENDS})
    say_once.cache_clear()
    logger = logging.getLogger("automodel_moe.say")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger.name):
        functions = {choose("auto", toy(PLAIN), CPU) for _ in range(3)}
    assert functions == {torch_backend.forward}
    assert len(caplog.messages) == 1
    assert "experts='auto': torch for ToyExperts on cpu in torch.float32" in caplog.messages[0]
    assert "absent: needs no_such_package, run pip install x" in caplog.messages[0]


def test_compute_dtype_is_autocasts_inside_autocast_and_the_weights_outside():
    experts = toy(PLAIN)
    assert compute_dtype(experts, CPU) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(experts, CPU) == torch.bfloat16
