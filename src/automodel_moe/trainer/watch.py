"""Ranks that die or stand still: found within seconds, named on the other ranks, and nobody left waiting for them.

A thread on each rank tells the process group's key-value store every few seconds that the rank lives and where it is,
and looks after the next rank of the ring. What it finds out goes into the store, and every rank's thread ends its
process with the same message, unless the rank's own error comes first: gloo notices a lost peer by itself, NCCL waits
for its time-out and can't say for whom.

    gone        the process is no more and did not leave            found by a rank of the same machine, in seconds
    silent      no word for most of `MoEConfig.group_timeout`       a frozen process, a lost machine
    failed      an error ends the rank's script                     told by the rank itself
    in trouble  its forward raised and its script goes on           ends only the ranks that then wait for it in vain

Set AUTOMODEL_MOE_WATCH=0 to go without, say under a debugger.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from .. import where

logger = logging.get_logger(__name__)

SWITCH = "AUTOMODEL_MOE_WATCH"
_LOST, _TROUBLE = "lost", "trouble"
_LEFT = "left"  # what stands in the store of a rank that has ended as it should

_watch: Watch | None = None


def start(timeout: float) -> None:
    """
    Begin to watch the ranks of the default process group; once for each group. Every rank must call it.

    Args:
        timeout (`float`): Seconds within which a rank that stands still ends the job.
    """
    global _watch
    if os.environ.get(SWITCH, "1") == "0" or dist.get_world_size() == 1:
        return
    if _watch is not None:
        if _watch.group is dist.group.WORLD:
            return
        _watch.leave()
    _watch = Watch(timeout)
    _watch.start()
    where.ask(_watch.who)


def follow(model: nn.Module, experts: dict[str, Any]) -> None:
    """Have the watch know where in `model` this rank is, and when its forward has raised."""
    where.follow(experts)
    if _watch is not None:
        model.register_forward_hook(_tell_trouble, always_call=True)


def _tell_trouble(model: nn.Module, args: tuple, output: Any) -> None:
    error = sys.exc_info()[1]
    if output is None and error is not None and _watch is not None:
        _watch.trouble(error)


class Watch(threading.Thread):
    """See this file's head.

    Args:
        timeout (`float`): See [`start`].
    """

    def __init__(self, timeout: float):
        super().__init__(name="automodel_moe watch", daemon=True)
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # A connection of its own: others' waits hold theirs locked.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stub
        self.store = dist.PrefixStore("automodel_moe/watch", store)
        self.period = min(5.0, timeout / 20)
        # Between a verdict and the end: time for a rank's own error, which comes with a traceback.
        self.grace = min(20.0, timeout / 10)
        self.silence = timeout - self.grace - 2 * self.period
        store.set_timeout(timedelta(seconds=self.grace))
        self._next = (self.rank + 1) % self.world
        self._word, self._heard = "", time.monotonic()
        self._rank_0: dict[str, Any] = {}
        self._last_look = time.monotonic()
        self._beats, self._troubles = 0, 0
        self._failed = self._looked = False
        self._stop_now = threading.Event()
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}
        self._identity["born"] = _birth(os.getpid())
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self.leave)
        self._beat()

    # --- the thread ---

    def run(self) -> None:
        """One look around a period, until the process or the group ends."""
        threading.Thread(target=self._guard, name=f"{self.name}, its guard", daemon=True).start()
        while not self._stop_now.wait(self.period):
            if not dist.is_initialized():
                self._stop_now.set()
                self._say_left()
                return
            try:
                verdict = self._look()
            except dist.DistError as error:
                # Rank 0, which may hold the store, has died, or has ended as it should and before this rank.
                verdict = self._blocked_by(self._without_store(error))
            self._last_look = time.monotonic()
            if verdict:
                self._end(verdict)

    def _guard(self) -> None:
        """The store stands still with the rank that holds it, and so does whoever asks it: no time-out of its own."""
        while not self._stop_now.wait(self.period):
            silent = time.monotonic() - self._last_look
            if silent > self.silence:
                self._end(
                    f"The process group's store, held by the launcher or by rank 0, is silent for {silent:.0f} s."
                )

    def _without_store(self, error: dist.DistError) -> str:
        if self._rank_0 and _is_gone(self._rank_0):
            return f"Rank {_name(0, self._rank_0)}, which held the process group's store, has ended."
        return f"The process group's store can't be reached any more ({error})."

    def _beat(self) -> None:
        place = where.here()
        self._beats += 1
        seconds = round(time.monotonic() - place.since) if place.since else 0
        self.store.set(
            str(self.rank), json.dumps(self._identity | {"beat": self._beats, "where": str(place), "for": seconds})
        )

    def _look(self) -> str | None:
        """Tell, look after the next rank and read what others found out; why the job must end, if it must."""
        self._beat()
        if not self._rank_0 and self.store.check(["0"]):
            word = self.store.get("0").decode()
            self._rank_0 = {} if word == _LEFT else json.loads(word)
        if self.store.check([_LOST]):
            return self.store.get(_LOST).decode()
        if self._next != self.rank and (finding := self._look_after_next()):
            return self._publish(finding)
        if self.store.check([_TROUBLE]):
            trouble = json.loads(self.store.get(_TROUBLE))
            if trouble["count"] > self._troubles:
                return self._blocked_by(trouble["text"])
        place = where.here()
        if place.exchanging and time.monotonic() - place.since > self.silence + self.period and not self._looked:
            self._looked = True  # the collective's own time-out is near, and may end the process without a word
            logger.error(f"Rank {self.rank} waits {place} since {self.silence:.0f} s. {self.who()}")
        return None

    def _look_after_next(self) -> str | None:
        if not self.store.check([str(self._next)]):
            return None  # on its way here
        word = self.store.get(str(self._next)).decode()
        now = time.monotonic()
        if word != self._word:
            self._word, self._heard = word, now
        if word == _LEFT:
            self._next = (self._next + 1) % self.world
            return None
        told = json.loads(word)
        if _is_gone(told):
            return _died(self._next, told)
        if now - self._heard > self.silence:
            return (
                f"Rank {_name(self._next, told)} has given no sign of life for {now - self._heard:.0f} s; it was last "
                f"seen {told['where']}."
            )
        return None

    def _blocked_by(self, reason: str) -> str | None:
        place = where.here()
        waits = place.exchanging and time.monotonic() - place.since > self.grace
        return reason if waits else None

    def _publish(self, text: str) -> str:
        # The first finding is the cause, later ones are what it led to.
        return self.store.compare_set(_LOST, "", text).decode()

    def _end(self, verdict: str) -> None:
        logger.error(f"{verdict} Rank {self.rank} is {where.here()} and ends in {self.grace:.0f} s.")
        if self._stop_now.wait(self.grace):
            return
        logger.error(f"Rank {self.rank} ends {where.here()}.")
        sys.stderr.flush()
        # The main thread waits inside a collective, where no exception reaches it.
        os._exit(1)

    # --- called by the main thread ---

    def who(self) -> str:
        """Which ranks are gone or silent, or else where those are that are elsewhere; for messages."""
        try:
            return self._who()
        except dist.DistError as error:
            return self._without_store(error)

    def _who(self) -> str:
        if self.store.check([_LOST]):
            return self.store.get(_LOST).decode()
        first = self._words()
        if gone := [rank for rank, told in first.items() if _is_gone(told)]:
            return " ".join(_died(rank, first[rank]) for rank in gone)
        time.sleep(1.5 * self.period)
        second = self._words()
        silent = [r for r, told in second.items() if told == first.get(r) and r != self.rank]
        if silent:
            return " ".join(
                f"Rank {_name(r, second[r])} gives no sign of life, last seen {second[r]['where']}." for r in silent
            )
        place = str(where.here())
        elsewhere = [(r, told) for r, told in second.items() if r != self.rank and told["where"] != place]
        listed = "; ".join(f"rank {r} is {told['where']}, for {told['for']} s" for r, told in elsewhere[:8])
        return f"All ranks are alive; {listed or 'all are in the same place'}."

    def _words(self) -> dict[int, dict[str, Any]]:
        keys = [str(rank) for rank in range(self.world) if self.store.check([str(rank)])]
        words = zip(keys, self.store.multi_get(keys), strict=True)
        return {int(rank): json.loads(word) for rank, word in words if word.decode() != _LEFT}

    def trouble(self, error: BaseException) -> None:
        """Tell that a forward of this rank has raised."""
        self._troubles += 1
        text = f"Rank {self.rank} left a forward with {_brief(error)}, {where.here()}."
        with contextlib.suppress(dist.DistError):
            self.store.set(_TROUBLE, json.dumps({"count": self._troubles, "text": text}))

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() == self._identity["pid"] and not issubclass(kind, KeyboardInterrupt) and dist.is_initialized():
            self._failed = True
            with contextlib.suppress(dist.DistError):
                gone = [r for r, told in self._words().items() if _is_gone(told)]
                text = f"Rank {self.rank} failed with {_brief(error)}, {where.here()}."
                cause = self._publish(self._who() if gone else text)
                if cause != text:
                    logger.error(f"Rank {self.rank} fails {where.here()}. {cause}")
        self._previous_hook(kind, error, traceback)

    def leave(self) -> None:
        """Stop; the process ends as it should."""
        if os.getpid() != self._identity["pid"]:
            return  # a fork's exit
        self._stop_now.set()
        # A thread that is inside the store when the interpreter goes down takes the process with it.
        if self.is_alive():
            self.join(2.0)
        if not self._failed:
            self._say_left()

    def _say_left(self) -> None:
        with contextlib.suppress(dist.DistError):
            self.store.set(str(self.rank), _LEFT)


def _name(rank: int, told: dict[str, Any]) -> str:
    return f"{rank} (process {told['pid']} of {told['host']})"


def _died(rank: int, told: dict[str, Any]) -> str:
    return f"Rank {_name(rank, told)} has died; it was last seen {told['where']}."


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _machine() -> str | None:
    """What two processes share that can see each other's process ids; None where that can't be told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _birth(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it is no more. Ids are used again, births are not."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]


def _is_gone(told: dict[str, Any]) -> bool:
    return told["machine"] is not None and told["machine"] == _machine() and _birth(told["pid"]) != told["born"]
