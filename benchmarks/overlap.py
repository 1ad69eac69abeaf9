"""What overlap hides: one MoE block's step over gloo ranks, with a transport that takes a stated time a transfer.

    python -m benchmarks.overlap --delay 0.1

The block is a tiny DeepSeek-V3's, its shared experts stretched to take `--branch` seconds forward and as long
backward; each of the four transfers of a step arrives `--delay` seconds after it has set out, whatever it carries.
Printed for each `MoEConfig.overlap`: the step's seconds beside the transfers' and the branch's own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch

from tests import tiny
from tests.distributed.world import World


class Late(torch.autograd.Function):
    """The identity, some seconds later, in backward too."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        time.sleep(ctx.seconds)
        return dx, None


def delayed(transport_class: type, seconds: float) -> None:
    """Have what this transport sends arrive `seconds` after it has set out."""
    for kind in ("dispatch", "combine"):
        start, finish = (getattr(transport_class, f"{kind}_{phase}") for phase in ("start", "finish"))

        def late_start(self, *args, start=start):
            return start(self, *args), time.monotonic() + seconds

        def late_finish(self, pending, finish=finish):
            inner, arrival = pending
            time.sleep(max(0.0, arrival - time.monotonic()))
            return finish(self, inner)

        setattr(transport_class, f"{kind}_start", late_start)
        setattr(transport_class, f"{kind}_finish", late_finish)


def step(folder: str, overlap: str, delay: float, branch: float, repeats: int) -> float:
    """Run by every rank: the median seconds of a block's forward and backward."""
    from automodel_moe import MoEAutoModel
    from automodel_moe.block import experts_modules
    from automodel_moe.dispatch.all_to_all import AllToAll

    moe_config = {"ep_size": torch.distributed.get_world_size(), "overlap": overlap, "dispatcher": "all_to_all"}
    model = MoEAutoModel.from_pretrained(folder, moe_config=moe_config)
    (name,) = experts_modules(model)
    block = model.get_submodule(name.rpartition(".")[0])
    block.shared_experts.register_forward_hook(lambda module, args, output: Late.apply(output, branch))
    delayed(AllToAll, delay)
    times = []
    for _ in range(repeats):
        inputs = tiny.batch("deepseek_v3", rows=2)
        since = time.monotonic()
        model(**inputs).loss.backward()
        times.append(time.monotonic() - since)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.2, help="seconds a transfer")
    parser.add_argument("--branch", type=float, default=0.2, help="seconds of the shared experts, each way")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny.save("deepseek_v3", folder)
        print(f"transfers {4 * arguments.delay:.2f} s, shared experts {2 * arguments.branch:.2f} s; a step takes")
        for overlap in ("none", "auto", "halves"):
            world = World(2)  # a fresh one: the delay stays with its processes
            options = {"delay": arguments.delay, "branch": arguments.branch, "repeats": arguments.repeats}
            seconds = world.run(f"{__spec__.name}:step", folder=folder, overlap=overlap, **options)
            world.close()
            print(f"  {overlap:8s} {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
