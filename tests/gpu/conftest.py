"""Each run on a GPU leaves its summary: versions, command, counts and figures."""

import datetime
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
import torch

_figures: dict = {}


@pytest.fixture
def figures() -> dict:
    """Where a test puts the figures that the run's summary should hold."""
    return _figures


def pytest_sessionfinish(session, exitstatus):
    if not torch.cuda.is_available() or not session.testscollected:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of pytest-xdist
        return
    counts = {kind: len(reporter.stats.get(kind, [])) for kind in ("passed", "failed", "skipped", "error")}
    packages = ("torch", "transformers", "accelerate", "triton", "quack-kernels", "nvidia-cutlass-dsl")
    installed = {d.name for d in importlib.metadata.distributions()}
    summary = {
        "date": datetime.date.today().isoformat(),
        "gpu": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "versions": {p: importlib.metadata.version(p) for p in packages if p in installed},
        "command": "pytest " + " ".join(sys.argv[1:]),
        "counts": counts,
        "figures": _figures,
    }
    folder = Path(os.environ.get("AUTOMODEL_MOE_RESULTS", "benchmarks/results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu_tests_{summary['date']}.json").write_text(json.dumps(summary, indent=1) + "\n")
