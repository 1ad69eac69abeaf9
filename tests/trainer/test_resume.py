"""Ten steps straight against five, a resume and five: the same numbers, bit for bit where the world is the same."""

import pytest

from tests import tiny
from tests.trainer import runs

RUNS = runs.__name__


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return str(folder)


@pytest.mark.parametrize("ranks, ep_size", [(1, None), (2, 2), (4, 2)])
def test_same_world_goes_on_bit_for_bit(worlds, checkpoint, tmp_path, ranks, ep_size):
    options = {"folder": checkpoint, "ep_size": ep_size, "dropout": 0.1}

    def run(function, output):
        if ranks == 1:
            return [getattr(runs, function)(output=output, **options)]
        return worlds(ranks).run(f"{RUNS}:{function}", timeout=120, output=output, **options)

    whole = run("straight", str(tmp_path / "whole"))
    run("first_half", str(tmp_path / "halves"))
    resumed = run("second_half", str(tmp_path / "halves"))
    for got, want in zip(resumed, whole, strict=True):
        assert want["losses"][-1] != want["losses"][0] and len(want["losses"]) == 10
        runs.assert_equal({key: got[key] for key in want}, want)


# Half the run on one world, the other half on another.
CHANGES = {"2 to 4": ((2, 2), (4, 2)), "4 to 1": ((4, 2), (1, None)), "ep 2 to 4": ((4, 2), (4, 4))}

# float32, and only the order of sums differs between worlds.
LOSS_RTOL = 1e-5


@pytest.mark.parametrize("before, after", CHANGES.values(), ids=CHANGES)
def test_another_world_goes_on(worlds, checkpoint, tmp_path, before, after):
    def run(function, world, output):
        ranks, ep_size = world
        if ranks == 1:
            return [getattr(runs, function)(checkpoint, output, ep_size=ep_size)]
        target = f"{RUNS}:{function}"
        return worlds(ranks).run(target, timeout=120, folder=checkpoint, output=output, ep_size=ep_size)

    whole = run("straight", before, str(tmp_path / "whole"))[0]
    half = run("first_half", before, str(tmp_path / "halves"))[0]
    for resumed in run("second_half", after, str(tmp_path / "halves")):
        want = {key: half[key] for key in ("weights", "moments", "rates", "schedule")} | {"step": 5}
        runs.assert_equal(resumed["loaded"], want)
        assert resumed["losses"][:5] == half["losses"] == whole["losses"][:5]
        assert resumed["losses"][5:] == pytest.approx(whole["losses"][5:], rel=LOSS_RTOL)
