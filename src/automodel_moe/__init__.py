"""Fine-tune Mixture-of-Experts models with transformers: one import brings expert parallelism and fast experts.

    from automodel_moe import MoEAutoModel as AutoModelForCausalLM

Importing this package imports neither torch nor transformers and changes nothing in them; the names below load on
first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "MoEAutoModel": "auto",
    "MoEConfig": "config",
}
__all__ = ["MoEAutoModel", "MoEConfig"]

if TYPE_CHECKING:
    from .auto import MoEAutoModel
    from .config import MoEConfig


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
