"""The parity sweep: every decorated experts class, one process against every layout of 2 and 4 gloo ranks.

    python -m tests.distributed.sweep                    all of them, and writes docs/parity.md
    python -m tests.distributed.sweep gpt_oss mixtral    these alone, printed

For each kind of `tests.tiny` a random checkpoint is loaded in one process by plain transformers (float32, its eager
experts) and gives the reference: the loss of four rows, every parameter's gradient, and greedy tokens. Then it is
loaded sharded, and must give the same. A layout that does not hold gets the error as its reason; a rank that hangs or
dies costs its case, not the sweep.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from tests import tiny
from tests.distributed.world import RankError, World

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "parity.md"

# ||g - g_ref|| / ||g_ref|| of one parameter.
GRADIENT_TOLERANCE = 1e-5
# The reduction order over rows differs: about ten roundings of float32.
LOSS_TOLERANCE = 1e-6
# A gradient that is zero but for rounding (of the queries where there is one key, say) has no direction to compare:
# below this share of the whole model's gradient norm it need only be as small in both.
GRADIENT_FLOOR = 1e-6
TIMEOUT = 120.0


@dataclass(frozen=True)
class Layout:
    """How many ranks, and how they are cut: `fsdp` x `tp` of them, the experts over `ep`."""

    ranks: int
    ep: int
    tp: int = 1

    @property
    def fsdp(self) -> int:
        return self.ranks // self.tp


LAYOUTS = {
    "EP 2": Layout(2, ep=2),
    "EP 2 x efsdp 2": Layout(4, ep=2),
    "EP 4": Layout(4, ep=4),
    "tp 2 x EP 2": Layout(2, ep=2, tp=2),
}


@dataclass(frozen=True)
class Outcome:
    """One kind on one layout: the worst relative gradient error and its parameter, or why it does not hold."""

    error: float = float("nan")
    parameter: str = ""
    reason: str = ""

    @property
    def holds(self) -> bool:
        return not self.reason


def quiet() -> None:
    """Hundreds of loads: their progress bars and advice would bury the sweep's own lines."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def reference(name: str, folder: Path, inputs: dict[str, torch.Tensor] | None = None, **overrides: Any) -> None:
    """Write a tiny checkpoint into `folder`, and beside it what one process of transformers makes of `inputs`."""
    tiny.save(name, folder, **overrides)
    inputs = tiny.batch(name) if inputs is None else inputs
    # In evaluation mode, as it is loaded: some routers draw noise in training.
    model = tiny.model_class(name).from_pretrained(folder, experts_implementation="eager", dtype=torch.float32)
    loss = tiny.loss(model, inputs)
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters()}
    made = {"inputs": inputs, "loss": loss.detach(), "gradients": gradients, "tokens": tiny.tokens(model, inputs)}
    torch.save(made, folder / "reference.pt")


def load(name: str, folder: Path, layout: Layout) -> transformers.PreTrainedModel:
    """The sharded model of a checkpoint; run by every rank."""
    from automodel_moe import MoEAutoModel

    options: dict[str, Any] = {"dtype": torch.float32}
    if layout.tp > 1:
        shape = DistributedConfig(tp_size=layout.tp, fsdp_size=layout.fsdp, ep_size=layout.ep)
        options["distributed_config"] = shape
    model_class = tiny.model_class(name)
    if model_class.config_class not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        # A multimodal class, say: known to other auto classes than AutoModelForCausalLM, until it is registered.
        transformers.AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)
    if model_class.config_class.model_type not in transformers.CONFIG_MAPPING:
        options["config"] = model_class.config_class.from_pretrained(folder)
    return MoEAutoModel.from_pretrained(folder, moe_config={"ep_size": layout.ep}, **options)


def worst_gradient(model: transformers.PreTrainedModel, expected: dict[str, torch.Tensor | None]) -> tuple[float, str]:
    """The largest ||g - g_ref|| / ||g_ref|| of a sharded model's parameters, and whose it is; a collective."""
    lost = expected.keys() - {key for key, _ in model.named_parameters()}
    if lost:
        raise AssertionError(f"the sharded model lacks the parameters {sorted(lost)}")
    floor = GRADIENT_FLOOR * torch.stack([g.norm() for g in expected.values() if g is not None]).norm()
    worst, parameter = 0.0, ""
    for key, p in model.named_parameters():
        ours = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        # A parameter that the loss does not reach may have a gradient of zeros: FSDP2 reduces in lockstep.
        ours, theirs = (torch.zeros(p.shape) if g is None else g for g in (ours, expected[key]))
        both_zero = max(ours.norm(), theirs.norm()) < floor
        error = 0.0 if both_zero else ((ours - theirs).norm() / theirs.norm()).item()
        if not error <= worst:
            worst, parameter = error, key
    return worst, parameter


def compare(name: str, folder: str, layout: Layout) -> dict[str, Any]:
    """Run by every rank: its rows of the reference's batch through the sharded model, and how far that is off.

    Returns:
        `loss` and its reference, the `worst` relative gradient error and its `parameter`, and the greedy `tokens`
        of this rank's rows beside those `expected`.
    """
    quiet()
    made = torch.load(Path(folder) / "reference.pt")
    model = load(name, Path(folder), layout)
    if model.config.distributed_config.ep_implementation != "automodel":
        raise AssertionError("transformers' own expert parallelism ran")
    # The ranks of one tensor parallel group, which are neighbours, take the same rows.
    part = torch.distributed.get_rank() // layout.tp
    rows = len(made["inputs"]["labels"]) // layout.fsdp
    mine = slice(part * rows, (part + 1) * rows)
    inputs = {key: value[mine] for key, value in made["inputs"].items()}

    loss = tiny.loss(model, inputs)
    loss.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    mean /= layout.ranks

    worst, parameter = worst_gradient(model, made["gradients"])
    return {
        "loss": mean.item(),
        "expected_loss": made["loss"].item(),
        "worst": worst,
        "parameter": parameter,
        "tokens": tiny.tokens(model, inputs).tolist(),
        "expected": made["tokens"][mine].tolist(),
    }


def attempt(**case: Any) -> dict[str, Any] | str:
    """`compare`, or the traceback when it fails on every rank alike: then no rank is left waiting for another, and
    the world can be kept. Starting one anew takes longer than running a case."""
    try:
        return compare(**case)
    except Exception:
        torch.distributed.monitored_barrier(timeout=timedelta(seconds=10))
        return traceback.format_exc()


def judge(results: list[dict[str, Any]]) -> Outcome:
    """What the ranks' figures of one case amount to."""
    worst = max(results, key=lambda r: r["worst"])
    outcome = {"error": worst["worst"], "parameter": worst["parameter"]}
    for rank, r in enumerate(results):
        off = abs(r["loss"] - r["expected_loss"]) / abs(r["expected_loss"])
        if not off <= LOSS_TOLERANCE:
            return Outcome(**outcome, reason=f"loss {r['loss']:.7f}, expected {r['expected_loss']:.7f}")
        if not r["worst"] <= GRADIENT_TOLERANCE:
            return Outcome(**outcome, reason=f"gradient of {r['parameter']} off by {r['worst']:.1e}")
        if r["tokens"] != r["expected"]:
            return Outcome(**outcome, reason=f"rank {rank} wrote {r['tokens'][0]}, expected {r['expected'][0]}")
    return Outcome(**outcome)


def cause(ranks: list[str]) -> str:
    """The one line that tells most: the last of a rank's traceback, of a rank that did not merely lose its peers."""
    ends = []
    for part in ranks:
        if "Traceback" not in part:
            ends.append(part.strip().splitlines()[0])
            continue
        lines = part.strip().splitlines()
        # An exception's message can span lines: it starts at the last line that is not indented and names it.
        start = max((i for i, x in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", x)), default=-1)
        where = [f"{m[1]}:{m[2]}" for m in re.finditer(r'File ".*?([\w.]+)", line (\d+)', part)][-1:]
        ends.append(" ".join(x.strip() for x in lines[start:])[:240] + f" ({', '.join(where)})")
    own = [x for x in ends if "Connection closed" not in x and "no answer" not in x and "died" not in x]
    return (own or ends)[0][:300]


def _attempt(world: World, case: dict[str, Any]) -> list[dict[str, Any] | str]:
    try:
        return world.run("tests.distributed.sweep:attempt", timeout=TIMEOUT, **case)
    except BrokenPipeError:  # a rank died after its last case: not this one's doing
        world.close(kill=True)
        return world.run("tests.distributed.sweep:attempt", timeout=TIMEOUT, **case)


def run(
    name: str, worlds: Callable[[int], World], layouts: dict[str, Layout] = LAYOUTS, verbose: bool = False
) -> dict[str, Outcome]:
    """One kind on every layout."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference(name, Path(folder))
        except Exception as error:
            reason = f"one process of transformers: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
            return dict.fromkeys(layouts, Outcome(reason=reason))
        for title, layout in layouts.items():
            case = {"name": name, "folder": folder, "layout": layout}
            try:
                results = _attempt(worlds(layout.ranks), case)
                failed = [r for r in results if isinstance(r, str)]
            except RankError as error:
                failed = re.split(r"^rank \d+:", str(error), flags=re.MULTILINE)[1:]
            if failed and verbose:
                print(failed[0])
            outcomes[title] = (
                Outcome(reason=cause(failed).replace(folder, "the checkpoint")) if failed else judge(results)
            )
    return outcomes


def code_hash() -> str:
    """Of everything that the table is a statement about: the package's sources and the sweep's own."""
    files = [*(ROOT / "src" / "automodel_moe").rglob("*.py"), ROOT / "tests/tiny.py", *map(Path, (__file__, _WORLD))]
    digest = hashlib.sha256()
    for path in sorted(f.resolve() for f in files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


_WORLD = Path(__file__).with_name("world.py")


def stamp() -> dict[str, str]:
    """What a stored table must agree with to be current."""
    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "code": code_hash()}


def read_table(path: Path = TABLE) -> tuple[dict[str, str], dict[str, bool]]:
    """The stamp of a stored table, and for each experts class whether every layout holds."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"<!-- stamp (\{.*\}) -->", text)
    if found is None:
        raise ValueError(f"{path.name} has no stamp: write it with `python -m tests.distributed.sweep`.")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|", text, flags=re.MULTILINE)
    return json.loads(found[1]), {name: held == "yes" for name, held in rows}


def write_table(table: dict[str, dict[str, Outcome]], seconds: float) -> None:
    now = stamp()
    held = sum(all(o.holds for o in outcomes.values()) for outcomes in table.values())
    lines = [
        "# Parity of every experts class",
        "",
        f"<!-- stamp {json.dumps(now)} -->",
        "",
        f"All {len(table)} experts classes that transformers {now['transformers']} decorates, as tiny random models "
        f"in float32 on the CPU (torch {now['torch']}): **{held} hold** on every layout. Written by `make sweep` "
        f"in {seconds / 60:.0f} minutes; do not edit.",
        "",
        "A layout holds when loss, every parameter's gradient (router included) and greedy tokens equal those of one "
        "process of plain transformers. Its column gives the worst parameter's relative gradient error, "
        f"which may be at most {GRADIENT_TOLERANCE:.0e}; a number in brackets is the reason below the table.",
        "",
        "| experts class | kind | " + " | ".join(LAYOUTS) + " | holds |",
        "|---|---|" + "--:|" * len(LAYOUTS) + "---|",
    ]
    reasons: list[str] = []
    for name, outcomes in table.items():
        cells = []
        for outcome in outcomes.values():
            if outcome.holds:
                cells.append(f"{outcome.error:.1e}")
                continue
            if outcome.reason not in reasons:
                reasons.append(outcome.reason)
            cells.append(f"[{reasons.index(outcome.reason) + 1}]")
        holds = "yes" if all(o.holds for o in outcomes.values()) else "no"
        lines.append(f"| `{tiny.experts_class(name)}` | {name} | " + " | ".join(cells) + f" | {holds} |")
    if reasons:
        lines += ["", "## Reasons", ""]
        lines += [f"{i}. `{reason.replace('`', chr(39))}`" for i, reason in enumerate(reasons, 1)]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="kinds to run; all of them, and the table is written, if none is given"
    )
    parser.add_argument("--verbose", action="store_true", help="print the whole traceback of what fails")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    quiet()
    started: dict[int, World] = {}

    def worlds(size: int) -> World:
        return started.setdefault(size, World(size))

    table, start = {}, time.monotonic()
    for name in arguments.names or tiny.names():
        since = time.monotonic()
        table[name] = run(name, worlds, verbose=arguments.verbose)
        cells = [f"{o.error:.1e}" if o.holds else f"{title}: {o.reason}" for title, o in table[name].items()]
        print(f"{name} ({time.monotonic() - since:.0f} s): " + " | ".join(cells), flush=True)
    for world in started.values():
        world.close()
    if not arguments.names:
        write_table(table, time.monotonic() - start)


if __name__ == "__main__":
    main()
