"""DeepEP (`deep_ep`, from the package `sgl-deep-ep`): what is installed, which of its two buffers serves a group, and
what the two adapters share. The calls themselves are in `deepep_buffer.py` (V1) and `deepep_elastic.py` (V2).

Both of its buffers take bfloat16 rows, float32 weights and expert ids with -1 for "nowhere", send a token once to each
rank, and sum what comes back in float32, unweighted. A dispatch leaves a handle; the mirrored transfers of backward go
along it.
"""

from __future__ import annotations

import socket
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch.distributed import ProcessGroup

from .. import where
from .contract import OUT_OF_STEP, Plan, Transport

PACKAGE = "deep_ep"
INSTALL = "pip install 'automodel-moe[deepep]'"
ELSEWHERE = 'use dispatcher="all_to_all"'

# torch release -> the release of sgl-deep-ep that is built for it.
RELEASES = {"2.13.0": "0.1.2", "2.14.1": "0.1.2.post1"}


# --- the package -----------------------------------------------------------------------------------------------------


def load() -> Any:
    """
    The package.

    Raises:
        `ImportError`: if it is missing, or states that it was built for another torch: such a one may well import, and
            then reads tensors wrongly.
    """
    if find_spec(PACKAGE) is None:
        raise ImportError(f"dispatcher='deepep' needs {PACKAGE}, not installed here: run {INSTALL}")
    if reason := _built_for_another_torch():
        raise ImportError(f"dispatcher='deepep': {reason}")
    return import_module(PACKAGE)


@cache
def _built_for_another_torch() -> str | None:
    """What the installed distribution states about its torch, against the torch that runs. A build of one's own states
    nothing, and was made against the torch at hand."""
    running = torch.__version__.split("+")[0]
    for distribution in metadata.packages_distributions().get(PACKAGE, ()):
        for line in metadata.requires(distribution) or ():
            requirement = Requirement(line)
            if requirement.name != "torch" or requirement.specifier.contains(running, prereleases=True):
                continue
            remedy = f'pip install "torch{requirement.specifier}"'
            if running in RELEASES:
                remedy = f"pip install sgl-deep-ep=={RELEASES[running]}, or {remedy}"
            return (
                f"{distribution} {metadata.version(distribution)} is built for torch{requirement.specifier} and can't "
                f"read the tensors of torch {running}: run {remedy}"
            )
    return None


# --- the choice ------------------------------------------------------------------------------------------------------


def transport(
    group: ProcessGroup,
    num_local_experts: int,
    max_tokens: int | None = None,
    payload: torch.dtype | None = None,
) -> DeepEP:
    """
    The adapter of the buffer that serves `group`: the one place that tells DeepEP's versions apart, by their offer.

    V1's `Buffer` is taken where it can be: its size does not depend on the batch and its rows arrive in a fixed order.

    Raises:
        `ImportError`: see [`load`].
        `ValueError`: if the installed version has no buffer for this group.
    """
    offers = vars(load())
    size = dist.get_world_size(group)
    one_node = len({member.host for member in _members(group)}) == 1
    if "Buffer" in offers and size in (2, 4, 8) and one_node:
        from .deepep_buffer import DeepEPBuffer

        return DeepEPBuffer(group, num_local_experts, max_tokens, payload)
    if "ElasticBuffer" in offers:
        from .deepep_elastic import DeepEPElastic

        return DeepEPElastic(group, num_local_experts, max_tokens, payload)
    where = "one node" if one_node else "several nodes"
    raise ValueError(
        f"dispatcher='deepep': the installed {PACKAGE} has no ElasticBuffer, and its Buffer takes 2, 4 or 8 ranks of "
        f"one node, not {size} of {where}: change ep_size, upgrade with {INSTALL}, or {ELSEWHERE}."
    )


def why_not(group: ProcessGroup, x_TH: torch.Tensor) -> str | None:
    """Why `"auto"` should leave DeepEP alone for such tokens; None if it fits. The same answer on every rank."""
    if x_TH.device.type != "cuda":
        return f"deepep needs CUDA, the tokens are on {x_TH.device.type}"
    if x_TH.dtype != torch.bfloat16:
        return f"deepep carries bfloat16, the tokens are {x_TH.dtype}"
    members = _members(group)
    if troubles := [member.trouble for member in members if member.trouble]:
        return troubles[0]
    if len({member.host for member in members}) > 1:
        return "the ranks are spread over several nodes"
    if reason := _no_peer_access([member.device for member in members]):
        return reason
    try:
        transport(group, 1)._check(x_TH, top_k=1)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Member:
    """What the ranks of a group tell each other once."""

    host: str
    device: int
    trouble: str | None  # why this rank can't run DeepEP at all


_MEMBERS: dict[ProcessGroup, list[_Member]] = {}


def _members(group: ProcessGroup) -> list[_Member]:
    if group not in _MEMBERS:
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, _Member(socket.gethostname(), device, _trouble_here()), group=group)
        _MEMBERS[group] = gathered
    return _MEMBERS[group]


def _trouble_here() -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return f"deepep is built for compute capability 9.0 and later, {torch.cuda.get_device_name()} has less"
    try:
        load()
    # Beside ImportError: its own check of the loaded NCCL is an assertion, a library that does not fit an OSError.
    except (ImportError, AssertionError, OSError) as error:
        return str(error)
    return None


def _no_peer_access(devices: list[int]) -> str | None:
    # Every rank asks about all pairs, so all come to the same answer.
    if len(set(devices)) < len(devices) or max(devices) >= torch.cuda.device_count():
        return "the ranks share a GPU or don't see each other's"
    for a in devices:
        for b in devices:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} has no peer access to GPU {b}"
    return None


# --- what both adapters share ----------------------------------------------------------------------------------------


@dataclass
class DeepEPPlan(Plan):
    """See [`~automodel_moe.dispatch.Plan`]."""

    idx_TK: torch.Tensor | None  # let go once the rows are on their way: autograd keeps the plan
    facts: torch.Tensor  # see `DeepEP.plan`; replaced by the group's maximum
    work: dist.Work | None
    layout: Any = None  # what the library wants to know before the first dispatch
    handle: Any = None  # what it wants for every later transfer
    # Known once the first dispatch has started.
    pairs: int = 0
    rows: int = 0  # of the rank that has most
    any_differentiable: bool = False
    local_idx_RK: torch.Tensor | None = None

    @property
    def idx_RK(self) -> torch.Tensor:
        assert self.local_idx_RK is not None, "the first dispatch of this plan has not finished"
        return self.local_idx_RK

    @property
    def n_pairs(self) -> int:
        return self.pairs

    @property
    def differentiable(self) -> bool:
        return self.any_differentiable

    def settle(self) -> None:
        """Read what the ranks told each other.

        Raises:
            `RuntimeError`: if they disagree about the shape of a row; on every rank.
        """
        if self.work is None:
            return
        with where.exchange(self.layer, "sizes"):
            self.work.wait()
            facts = self.facts.tolist()
        self.work = None
        differentiable, self.rows, hidden, minus_hidden, top_k, minus_top_k, *step = facts
        if step[0] != -step[1] or step[2] != -step[3]:
            raise RuntimeError(f"{self.layer}: a rank of the group {OUT_OF_STEP}")
        self.any_differentiable = bool(differentiable)
        if hidden != -minus_hidden or top_k != -minus_top_k:
            raise RuntimeError(
                f"the ranks of one expert-parallel group send rows of hidden size {-minus_hidden} to {hidden} and "
                f"top_k {-minus_top_k} to {top_k}: every rank must run the same model in the same dtype (and "
                "autocast) in the same step."
            )


@dataclass
class _Pending:
    """A transfer in flight. It also keeps alive what the library holds on to until its event is waited for."""

    plan: DeepEPPlan
    rows: torch.Tensor
    idx: torch.Tensor | None
    weights: torch.Tensor | None
    event: Any


@dataclass
class Shared:
    """What all layers of one group use together."""

    buffer: Any
    hidden: int
    top_k: int = 0
    rows: int = 0
    shapes: set[tuple[int, int, int]] = field(default_factory=set)  # warmed up: hidden size, top-k, experts a rank


class DeepEP(Transport):
    """The part of the contract that is the same for both buffers. See [`~automodel_moe.dispatch.Transport`].

    Raises:
        `ValueError`: from `plan` and the transfers, for rows that the library can't carry.
    """

    # One a process: the memory that the GPUs write into each other's is a group's, not a layer's.
    _SHARED: ClassVar[dict[tuple[type, ProcessGroup], Shared]] = {}

    def __init__(
        self,
        group: ProcessGroup,
        num_local_experts: int,
        max_tokens: int | None = None,
        payload: torch.dtype | None = None,
    ):
        super().__init__(group, num_local_experts, max_tokens, payload)
        self.library = load()
        self.num_experts = num_local_experts * self.size

    # Each transfer starts after what is on the current stream now, runs on the library's stream, and takes its outputs
    # from that stream's memory, so that it waits for nothing that is put on the current stream later.
    @property
    def _asynchronous(self) -> dict[str, Any]:
        return {"previous_event": self.shared.buffer.capture(), "allocate_on_comm_stream": True}

    @property
    def shared(self) -> Shared:
        return self._SHARED[type(self), self.group]

    @shared.setter
    def shared(self, shared: Shared) -> None:
        self._SHARED[type(self), self.group] = shared

    @property
    def _is_open(self) -> bool:
        return (type(self), self.group) in self._SHARED

    @abstractmethod
    def _check(self, x_TH: torch.Tensor, top_k: int) -> None:
        """Raise a `ValueError` for rows that this buffer can't carry."""

    @abstractmethod
    def _fits(self, hidden: int, top_k: int) -> bool:
        """Whether the group's buffer was made for such rows."""

    @abstractmethod
    def _open(self, hidden: int, top_k: int, rows: int) -> Shared:
        """A buffer for such rows, up to `rows` a rank. Runs on every rank of the group at once."""

    @abstractmethod
    def _layout(self, plan: DeepEPPlan) -> None:
        """Start to compute what the first dispatch needs to know."""

    @abstractmethod
    def _first(self, plan: DeepEPPlan, x_TH: torch.Tensor, weights_TK: torch.Tensor) -> _Pending:
        """The dispatch that makes the handle; returns once the host knows how many rows come."""

    @abstractmethod
    def _again(self, plan: DeepEPPlan, x_TH: torch.Tensor) -> _Pending:
        """A dispatch along the handle."""

    @abstractmethod
    def _back(self, plan: DeepEPPlan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None) -> _Pending:
        """A combine along the handle."""

    def _check_settled(self, plan: DeepEPPlan) -> None:
        """Raise, on every rank, for what only the ranks together know."""

    def plan(self, idx_TK: torch.Tensor, x_TH: torch.Tensor, differentiable: bool) -> DeepEPPlan:
        n_tokens, top_k = idx_TK.shape
        hidden = x_TH.size(1)
        _bfloat16(x_TH)
        self._check(x_TH, top_k)
        # The library tells ranks the counts of rows alone. Whether anyone runs a backward must be known to all, since
        # a collective that one rank skips there is a hang; so it travels beside, reduced to its maximum.
        told = [int(differentiable), n_tokens, hidden, -hidden, top_k, -top_k]
        for place in self._step():
            told += [place, -place]
        # From pageable memory the host would wait for the device.
        facts = torch.tensor(told, pin_memory=x_TH.is_cuda).to(x_TH.device, non_blocking=True)
        layer = where.here().layer
        with where.exchange(layer, "sizes"):
            work = dist.all_reduce(facts, dist.ReduceOp.MAX, group=self.group, async_op=True)
        plan = DeepEPPlan(idx_TK.to(self.library.topk_idx_t).contiguous(), facts, work)
        plan.layer = layer
        shape = (hidden, top_k, self.num_local_experts)
        if not (self._is_open and self._fits(hidden, top_k) and shape in self.shared.shapes):
            plan.settle()
            if not (self._is_open and self._fits(hidden, top_k)):
                self._replace(hidden, top_k, plan.rows)
            self.shared.shapes.add(shape)
            self._warm_up(x_TH, top_k)
        self._layout(plan)
        return plan

    def _replace(self, hidden: int, top_k: int, rows: int) -> None:
        if self._is_open:
            # Another model on the same ranks: one buffer for both, as large as either needs. What is in flight ends
            # first, and handles made before go on to serve.
            old = self.shared
            hidden, top_k, rows = max(hidden, old.hidden), max(top_k, old.top_k), max(rows, old.rows)
            old.buffer.destroy()
        self.shared = self._open(hidden, top_k, rows)

    def _warm_up(self, x_TH: torch.Tensor, top_k: int) -> None:
        """Every kind of transfer once, a row to each rank: kernels are compiled now, on all ranks together, and not in
        the middle of a step, where the other ranks' kernels would wait for it up to their time-out."""
        n_tokens = self.size
        idx_TK = torch.full((n_tokens, top_k), -1, device=x_TH.device)
        idx_TK[:, 0] = torch.arange(n_tokens, device=x_TH.device) * self.num_local_experts
        ones_TH = torch.ones(n_tokens, x_TH.size(1), dtype=x_TH.dtype, device=x_TH.device)
        plan = self.plan(idx_TK, ones_TH, differentiable=False)
        weights_TK = torch.ones(n_tokens, top_k, device=x_TH.device)
        x_RH, weights_RK = self.dispatch_finish(self.dispatch_start(plan, ones_TH, weights_TK))
        self.combine_finish(self.combine_start(plan, x_RH, weights_RK))
        y_TH, _ = self.combine_finish(self.combine_start(plan, x_RH))
        self.dispatch_finish(self.dispatch_start(plan, y_TH))

    def dispatch_start(
        self, plan: Plan, x_TH: torch.Tensor, weights_TK: torch.Tensor | None = None, again: bool = False
    ) -> _Pending:
        assert isinstance(plan, DeepEPPlan)
        x_TH = _bfloat16(x_TH).contiguous()
        if weights_TK is None:
            return self._again(plan, x_TH)
        with where.exchange(plan.layer, "dispatch"):  # waits until every rank has told its sizes
            pending = self._first(plan, x_TH, weights_TK.float().contiguous())
        # The library has just waited for every rank, so the one host read here waits for nothing more.
        plan.settle()
        self._check_settled(plan)
        plan.idx_TK = None
        return pending

    def dispatch_finish(self, pending: _Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
        pending.event.current_stream_wait()
        if pending.weights is None:
            return pending.rows, None
        assert pending.idx is not None
        pending.plan.local_idx_RK = pending.idx.long()
        # V2 sends a token's weights as they are, those of other ranks' experts too.
        return pending.rows, torch.where(pending.idx >= 0, pending.weights, 0.0)

    def combine_start(self, plan: Plan, y_RH: torch.Tensor, weights_RK: torch.Tensor | None = None) -> _Pending:
        assert isinstance(plan, DeepEPPlan)
        weights_RK = None if weights_RK is None else weights_RK.float().contiguous()
        return self._back(plan, _bfloat16(y_RH).contiguous(), weights_RK)

    def combine_finish(self, pending: _Pending) -> tuple[torch.Tensor, torch.Tensor | None]:
        pending.event.current_stream_wait()
        return pending.rows, pending.weights


def _bfloat16(rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.bfloat16:
        raise ValueError(
            f"dispatcher='deepep' carries bfloat16 rows, these are {rows.dtype}: load the model in bfloat16 (or train "
            f"under bfloat16 autocast), or {ELSEWHERE}."
        )
    return rows
