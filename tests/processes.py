"""Run a script in processes of its own, under a time limit, and leave none of them behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAIL = 6000


def run(command: Sequence[str | os.PathLike], timeout: float, env: dict[str, str] | None = None) -> str:
    """
    Run `command` from the repository's root and return what it printed (stdout and stderr together).

    Args:
        command (sequence of `str` or path): Program and arguments.
        timeout (`float`): Seconds.
        env (`dict`, *optional*): Variables on top of this process's own.

    Raises:
        `AssertionError`: on a non-zero exit code or a time-out, with the end of what was printed.
    """
    command = [os.fspath(part) for part in command]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # torchrun's workers lead sessions of their own: only its own SIGTERM handler reaches them.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)}: no end within {timeout} s\n{output[-TAIL:]}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # helpers that outlived their parent
    assert process.returncode == 0, f"{' '.join(command)}: exit code {process.returncode}\n{output[-TAIL:]}"
    return output


def torchrun(script: str | os.PathLike, *args, ranks: int, timeout: float, env: dict[str, str] | None = None) -> str:
    """`run` for `script` on `ranks` processes of this interpreter."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return run([*launch, script, *map(str, args)], timeout, env)
