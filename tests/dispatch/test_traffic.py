"""Bytes on the wire, counted over gloo ranks, against what the model in docs/dispatch.md says."""

import pytest
import torch

from benchmarks import dispatch_model
from benchmarks.dispatch import Shape, count, remote_rows
from tests.processes import ROOT

TOKENS, HIDDEN, TOP_K = 1000, 32, 8


def counted(n_experts: int, dtype: str) -> dict[str, float]:
    return count(Shape(TOKENS, HIDDEN, n_experts, TOP_K), dtype=dtype)


def test_the_expected_rows():
    # A rank of 8 holds 16 of 128 experts and is missed with C(112, 8) / C(128, 8) = 0.3326.
    assert remote_rows(128, 8, 8) == pytest.approx(4.672, abs=1e-3)
    assert remote_rows(128, 8, 64) == pytest.approx(7.66, abs=1e-2)
    assert remote_rows(128, 8, 128) == pytest.approx(127 * 8 / 128)
    assert remote_rows(128, 8, 1) == 0


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_eight_ranks_send_no_copy_twice(worlds, dtype):
    counts = worlds(8).run(f"{__name__}:counted", timeout=120, n_experts=128, dtype=dtype)[0]
    rows = counts["remote rows"]
    # 8,000 tokens, whose ranks' number has a deviation of about 1: one standard error is 0.25 % of 4.67.
    assert rows == pytest.approx(4.67, rel=0.01)
    row_bytes = HIDDEN * torch.bfloat16.itemsize
    # Sizes, ten numbers at most for each other rank, are all that comes on top: exact counts.
    beside = TOP_K * (4 + 4)  # an int32 id and a float32 weight a slot
    sizes = counts["bytes, dispatch"] - rows * ((HIDDEN + 4 if dtype == "fp8" else row_bytes) + beside)
    assert 0 < sizes <= 7 * 10 * 8 / TOKENS
    assert counts["bytes, combine"] == pytest.approx(rows * row_bytes)
    assert counts["bytes, combine's mirror"] == pytest.approx(rows * row_bytes)
    assert counts["bytes, dispatch's mirror"] == pytest.approx(rows * (row_bytes + TOP_K * 4))


def test_the_model_counts_the_bytes_that_were_counted():
    model = dispatch_model.Model(hidden=HIDDEN, top_k=TOP_K)
    transfers = 4 * HIDDEN * torch.bfloat16.itemsize + TOP_K * (4 + 4) + TOP_K * 4
    assert dispatch_model.row_bytes(model) == transfers


def test_the_document_holds_the_models_tables():
    document = (ROOT / "docs" / "dispatch.md").read_text()
    assert all(table in document for table in dispatch_model.tables().split("\n\n"))
