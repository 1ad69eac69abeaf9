"""Training runs for the tests: what a script with default arguments does, and what is left of it, gathered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from automodel_moe import MoEAutoModel
from tests import tiny

ROWS, LENGTH, GLOBAL_BATCH = 64, 12, 8


class StopAt(TrainerCallback):
    """Ends training after a step, as a job that runs out of its time does: the schedule is that of all steps."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def dataset(rows: int = ROWS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, tiny.VOCAB, (rows, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(
    folder: str, output: str, ep_size=None, dropout: float = 0.0, callbacks=(), model=None, evaluated=None, **arguments
):
    """A `Trainer` with default arguments but for those that make a short run on CPUs, and `arguments`."""
    if model is None:
        moe_config = {} if ep_size is None else {"ep_size": ep_size}
        model = MoEAutoModel.from_pretrained(folder, moe_config=moe_config, attention_dropout=dropout)
    accumulation = arguments.setdefault("gradient_accumulation_steps", 2)
    defaults = {
        "per_device_train_batch_size": GLOBAL_BATCH // accumulation // world_size(),
        "max_steps": 10,
        "save_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=output, **(defaults | arguments)),
        train_dataset=dataset(),
        eval_dataset=evaluated,
        callbacks=list(callbacks),
    )


def gathered(tensor):
    """The whole of a tensor; anything else as it is."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def weights(model) -> dict[str, torch.Tensor]:
    return {name: gathered(tensor) for name, tensor in model.state_dict().items()}


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        f"{names[id(param)]}/{key}": gathered(value)
        for group in optimizer.param_groups
        for param in group["params"]
        for key, value in optimizer.state[param].items()
    }


def rates(model, optimizer) -> dict[str, dict]:
    """The options of each parameter: worlds differ in how they are grouped."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param)]: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for param in group["params"]
    }


def progress(scheduler) -> dict:
    return {key: value for key, value in scheduler.state_dict().items() if not isinstance(value, list)}


def history(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry and "grad_norm" in entry]


def outcome(trainer) -> dict:
    return {
        "losses": history(trainer, "loss"),
        "norms": history(trainer, "grad_norm"),
        "weights": weights(trainer.model),
        "moments": moments(trainer.model, trainer.optimizer),
        "rates": rates(trainer.model, trainer.optimizer),
        "schedule": progress(trainer.lr_scheduler),
    }


def straight(folder: str, output: str, **options) -> dict:
    """All steps in one go."""
    run = trainer(folder, output, **options)
    run.train()
    return outcome(run)


def first_half(folder: str, output: str, **options) -> dict:
    run = trainer(folder, output, callbacks=[StopAt(5)], **options)
    run.train()
    return outcome(run)


class Look(TrainerCallback):
    """Notes what the first step after resuming starts from."""

    def __init__(self):
        self.seen: dict = {}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        self.seen = {
            "weights": weights(model),
            "moments": moments(model, optimizer),
            "rates": rates(model, optimizer),
            "schedule": progress(lr_scheduler),
            "step": state.global_step,
        }


def second_half(folder: str, output: str, **options) -> dict:
    look = Look()
    run = trainer(folder, output, callbacks=[look], **options)
    run.train(resume_from_checkpoint=True)
    return outcome(run) | {"loaded": look.seen}


def assert_equal(got, want, what: str = "") -> None:
    """Bit for bit, through dicts and lists."""
    if isinstance(want, dict):
        assert got.keys() == want.keys(), what
        for key in want:
            assert_equal(got[key], want[key], f"{what}/{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want), what
    else:
        assert got == want, what
