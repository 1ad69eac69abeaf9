"""Blocks rewritten to run their shared experts beside the transport: the same to the word and to the number."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest
import torch

from automodel_moe import MoEConfig, overlap
from automodel_moe.block import attach
from tests import tiny


def blocks(model) -> list:
    return [module for module in model.modules() if type(module).__name__ in overlap.SHARED]


def kinds() -> dict[str, str]:
    """The kind of tiny model that has each block of the table."""
    found = {}
    for kind in tiny.names():
        with torch.device("meta"):
            for block in blocks(tiny.model_class(kind)(tiny.config(kind))):
                found[type(block).__name__] = kind
    return found


KINDS = kinds()


def written(block_class: type) -> str:
    """A forward without its docstring and annotations."""
    function = ast.parse(textwrap.dedent(inspect.getsource(block_class.forward))).body[0]
    function.body = [line for line in function.body if not isinstance(getattr(line, "value", None), ast.Constant)]
    function.returns = None
    for argument in function.args.args:
        argument.annotation = None
    return ast.unparse(function)


def test_every_block_of_the_table_exists():
    assert KINDS.keys() == overlap.SHARED.keys()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_rewritten_block_gives_the_same_numbers(name):
    model = tiny.build(KINDS[name])
    attach(model, MoEConfig())
    block = next(block for block in blocks(model) if type(block).__name__ == name)
    first = next(other for other, way in overlap.SHARED.items() if way is overlap.SHARED[name])
    other = next(b for b in blocks(tiny.build(KINDS[first])) if type(b).__name__ == first)
    assert written(type(block)) == written(type(other)), "transformers writes this block in another way now"

    torch.manual_seed(0)
    x = torch.randn(2, 5, block.gate.weight.size(1), requires_grad=True)
    parameters = [x, *(p.requires_grad_() for p in block.parameters() if p.is_floating_point())]
    for p in parameters[1:]:
        torch.nn.init.normal_(p, std=0.2)
    results = []
    for forward in (block.forward, lambda x: overlap.SHARED[name].forward(block, x)):
        y = forward(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), parameters, allow_unused=True)))
    for want, got in zip(*results, strict=True):
        # Exact but for the order of a gradient's summands.
        assert want is got is None or (want - got).norm() <= 1e-6 * want.norm()
    assert torch.equal(results[0][0], results[1][0])


def test_a_block_that_someone_replaced_is_left_alone():
    model = tiny.build("deepseek_v3")
    block = blocks(model)[0]
    block.forward = mine = block.forward
    overlap.install(model)
    assert vars(block)["forward"] is mine


def test_work_beside_runs_once():
    calls = []
    beside = overlap.Beside(lambda x: calls.append(x) or x, torch.ones(1))
    assert beside() is beside() and len(calls) == 1
