"""Four ranks train a tiny model, over gloo or NCCL; one of them meets a fault in the middle of the third step.

    python -m tests.distributed.fault_run FOLDER FAULT SECONDS

FOLDER holds the checkpoint and gets `<rank>.err`, what each rank printed; SECONDS is the group's time-out. Prints one
JSON line: each rank's exit code and how many seconds after the fault it ended (None for one that had to be killed).
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from automodel_moe import MoEAutoModel
from automodel_moe.block import experts_modules
from tests import tiny

RANKS, FAULTY, STEP = 4, 2, 2
PATIENCE = 90.0  # of the parent, after the fault


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def stall():
    time.sleep(PATIENCE)


def run_out():
    raise torch.OutOfMemoryError("out of memory, injected")


def stray():
    """No fault of the rank's own: it leaves the step and goes on with the next."""
    raise KeyError("a bad sample, injected")


# fault: what happens, and whether in the second layer's backward or, before its exchange, in its forward
FAULTS = {
    "killed": (kill, False),
    "killed_in_backward": (kill, True),
    "frozen": (freeze, False),
    "frozen_in_backward": (freeze, True),
    "stalled": (stall, False),
    "out_of_memory": (run_out, False),
    "out_of_memory_in_backward": (run_out, True),
    "goes_on_after_an_error": (stray, False),
}


def train(folder: Path, fault: str, seconds: float) -> None:
    model = MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": RANKS, "group_timeout": seconds}).train()
    act, in_backward = FAULTS[fault]
    step = 0

    def strike(*_):
        if step == STEP and int(os.environ["RANK"]) == FAULTY:
            (folder / "struck").touch()
            act()

    second = list(experts_modules(model).values())[1]
    if in_backward:
        second.register_forward_hook(lambda module, args, output: output.register_hook(strike) and None)
    else:
        second.register_forward_pre_hook(strike)
    inputs = {name: tensor.to(model.device) for name, tensor in tiny.batch("qwen3_moe", rows=1).items()}
    for step in range(4):  # noqa: B007 - `strike` reads it
        try:
            model(**inputs).loss.backward()
        except KeyError:
            print("goes on", file=sys.stderr)


def main() -> None:
    folder, fault, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    # Forked here, so that the imports are paid once; a rank then ends like any script.
    children = {}
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            # Ranks may share a GPU, with an NCCL that lets them.
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % (torch.cuda.device_count() or RANKS))}
            os.dup2(os.open(folder / f"{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
            return train(folder, fault, seconds)
        children[child] = rank
    struck, ends = folder / "struck", {}
    started = time.time()
    while (
        set(ends) | {FAULTY} != set(range(RANKS))
        and time.time() - (struck.stat().st_mtime if struck.exists() else started) < PATIENCE
    ):
        time.sleep(0.1)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                after = time.time() - struck.stat().st_mtime if struck.exists() else None
                ends[children.pop(child)] = (os.waitstatus_to_exitcode(status), after)
    for child, rank in children.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ends.setdefault(rank, (None, None))
    print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()
