"""Checkpoints that were trained under expert parallelism, one a kind."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serving import trained


@dataclass(frozen=True)
class Trained:
    source: Path
    folder: Path


@pytest.fixture(scope="session")
def trained_checkpoint(worlds, tmp_path_factory):
    """`trained_checkpoint(kind)`: the folders before and after; each kind is trained once."""
    done: dict[str, Trained] = {}

    def get(kind: str) -> Trained:
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            pair = Trained(folder / "source", folder / "trained")
            trained.make(kind, pair.source)
            ranks = worlds(2).run(
                "tests.serving.trained:train", timeout=180, source=str(pair.source), output=str(pair.folder)
            )
            worlds.close()  # an engine wants the cores
            for losses in ranks:
                assert losses[-1] < losses[0]
            done[kind] = pair
        return done[kind]

    return get
