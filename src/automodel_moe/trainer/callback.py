"""What runs beside each step when transformers' `Trainer` trains a model of this library: one list, in one place."""

from __future__ import annotations

from transformers import PreTrainedModel, TrainerCallback

from .expert_load import LoadImbalanceCallback


def callbacks(model: PreTrainedModel) -> list[TrainerCallback]:
    """
    The callbacks that every `Trainer` of `model` gets, before the user's own.

    Args:
        model (`PreTrainedModel`): As `MoEAutoModel` returned it; its `automodel_moe` is the `MoEConfig`. A `Trainer`
            with `model_init` makes it anew for each run: take the model from the event's `model=`.
    """
    return [LoadImbalanceCallback()] if vars(model)["automodel_moe"].load_stats else []
