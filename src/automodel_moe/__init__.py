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
    "iter_hf_weights": "checkpoint.stream",
    "load_imbalance": "trainer.expert_load",
    "load_training_state": "trainer.plain",
    "save_training_state": "trainer.plain",
}
__all__ = [
    "MoEAutoModel",
    "MoEConfig",
    "iter_hf_weights",
    "load_imbalance",
    "load_training_state",
    "save_training_state",
]

if TYPE_CHECKING:
    from .auto import MoEAutoModel
    from .checkpoint.stream import iter_hf_weights
    from .config import MoEConfig
    from .trainer.expert_load import load_imbalance
    from .trainer.plain import load_training_state, save_training_state


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
