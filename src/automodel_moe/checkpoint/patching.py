"""Thin wrappers around functions of transformers: there while someone is loading through us, gone afterwards."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_lock = threading.Lock()
_installed: dict[tuple[int, str], list[Any]] = {}  # (owner, name) -> [users, what its namespace held, if anything]
_here: ContextVar[frozenset] = ContextVar("patched", default=frozenset())
_ABSENT = object()


@contextmanager
def patched(owner: Any, name: str, wrapper: Callable) -> Iterator[None]:
    """
    In this context (this thread, this task), wrap `owner.name` as `wrapper(original, *args, **kwargs)`.

    The wrapper is installed once, however many threads are inside; callers elsewhere reach the original, and the last
    one to leave puts back what was there.

    Args:
        owner: A module or a class. Class methods and static methods keep their kind.
        name (`str`): An attribute of the owner, its own or an inherited one.
        wrapper (`Callable`): Takes the original first; for a class method it is bound to the class already.
    """
    key = (id(owner), name)
    with _lock:
        if key in _installed:
            _installed[key][0] += 1
        else:
            _installed[key] = [1, vars(owner).get(name, _ABSENT)]
            setattr(owner, name, _wrap(key, _find(owner, name), wrapper))
    token = _here.set(_here.get() | {key})
    try:
        yield
    finally:
        _here.reset(token)
        with _lock:
            _installed[key][0] -= 1
            if _installed[key][0] == 0:
                _, own = _installed.pop(key)
                if own is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)


def _find(owner: Any, name: str) -> Any:
    """The attribute as it is stored, descriptor and all."""
    if not isinstance(owner, type):
        return vars(owner)[name]
    return next(vars(base)[name] for base in owner.__mro__ if name in vars(base))


def _wrap(key: tuple[int, str], stored: Any, wrapper: Callable) -> Any:
    if isinstance(stored, classmethod):

        @functools.wraps(stored.__func__)
        def bound(cls, *args, **kwargs):
            original = functools.partial(stored.__func__, cls)
            return wrapper(original, *args, **kwargs) if key in _here.get() else original(*args, **kwargs)

        return classmethod(bound)

    function = stored.__func__ if isinstance(stored, staticmethod) else stored

    @functools.wraps(function)
    def plain(*args, **kwargs):
        return wrapper(function, *args, **kwargs) if key in _here.get() else function(*args, **kwargs)

    return staticmethod(plain) if isinstance(stored, staticmethod) else plain
