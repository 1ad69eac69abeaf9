"""How the library speaks: what "auto" chose, in one line, once a job."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from transformers.utils import logging

logger = logging.get_logger(__name__)


@cache
def say_once(line: str) -> None:
    """Log `line` once a process and on rank 0 alone, at the level that transformers shows by default."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(line)
