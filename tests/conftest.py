"""Shared fixtures: worlds of gloo ranks, and the rule that no test reaches the Hub."""

import os

# Before transformers is imported anywhere: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported anywhere: the kernels then run on the CPU

from tests.distributed.world import World


class Worlds:
    """`worlds(n)` gives a `World` of n gloo ranks; every test of the session shares it."""

    def __init__(self):
        self._made: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self._made.setdefault(size, World(size))

    def close(self) -> None:
        for world in self._made.values():
            world.close()


@pytest.fixture(scope="session")
def worlds():
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def cores(worlds):
    """For tests that start processes of their own: the ranks of the others, which poll their sockets, are ended."""
    worlds.close()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
