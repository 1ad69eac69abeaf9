"""Shared fixtures: worlds of gloo ranks, and the rule that no test reaches the Hub."""

import os

# Before transformers is imported anywhere: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.distributed.world import World


@pytest.fixture(scope="session")
def worlds():
    """`worlds(n)` gives a `World` of n gloo ranks; every test of the session shares it."""
    started: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in started:
            started[size] = World(size)
        return started[size]

    yield get
    for world in started.values():
        world.close()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
