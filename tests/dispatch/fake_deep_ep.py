"""A `deep_ep` for CPU ranks: strict about its arguments as the real one is, all_to_all underneath, and a record of its
calls.

Nothing is there before its event is waited for, and an ElasticBuffer's rows come in an order of their own with other
ranks' weights left in, as with the real one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from automodel_moe.dispatch.all_to_all import AllToAll

calls: list[tuple[str, dict]] = []


class Event:
    """Delivers what its transfer brought once it is waited for."""

    def __init__(self, *deliveries):
        self.deliveries, self.waits = deliveries, 0

    def current_stream_wait(self):
        self.waits += 1
        for target, value in self.deliveries:
            target.copy_(value)


def _later(*values):
    """Empty tensors like `values`, and the event that fills them."""
    targets = [None if value is None else torch.full_like(value, -7) for value in values]
    return targets, Event(*[(t, v) for t, v in zip(targets, values, strict=True) if t is not None])


def _check_rows(x, step):
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.size(1) % step == 0


def _check_events(previous_event, is_async, allocate_on_comm_stream):
    assert isinstance(previous_event, Event) and is_async and allocate_on_comm_stream


class _Common:
    def __init__(self, group):
        self.group, self.size = group, dist.get_world_size(group)

    @staticmethod
    def capture():
        return Event()

    def destroy(self):
        calls.append(("destroy", {"buffer": self}))

    def _there(self, x, topk_idx, topk_weights, num_experts):
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.size(1) <= 32
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        transport = AllToAll(self.group, num_experts // self.size)
        plan = transport.plan(topk_idx, x, False)
        x_RH, weights_RK = transport.dispatch_finish(transport.dispatch_start(plan, x, topk_weights))
        return transport, plan, x_RH, weights_RK

    @staticmethod
    def _once_more(handle, x):
        return handle.transport.dispatch_finish(handle.transport.dispatch_start(handle.plan, x))[0]

    @staticmethod
    def _back(handle, y, weights):
        assert weights is None or (weights.dtype == torch.float32 and weights.shape == handle.plan.idx_RK.shape)
        return handle.transport.combine_finish(handle.transport.combine_start(handle.plan, y, weights))


class Buffer(_Common):
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        super().__init__(group)
        self.num_nvl_bytes = num_nvl_bytes
        calls.append(("Buffer", {"num_nvl_bytes": num_nvl_bytes}))

    @staticmethod
    def _config(kind, n_ranks):
        return SimpleNamespace(
            name=f"{kind} config of {n_ranks}",
            get_nvl_buffer_size_hint=lambda row_bytes, n: {"dispatch": 1000, "combine": 900}[kind] * row_bytes * n,
        )

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Buffer._config("dispatch", num_ranks)

    @staticmethod
    def get_combine_config(num_ranks):
        return Buffer._config("combine", num_ranks)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        calls.append(("layout", {}))
        ranks = [(topk_idx // (num_experts // self.size) == rank).any(1) for rank in range(self.size)]
        is_in_rank = torch.stack(ranks, 1)
        to_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)])
        return is_in_rank.sum(0), None, to_expert, is_in_rank, Event()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        _check_rows(x, 16)
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert config.name == f"dispatch config of {self.size}"
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            (x_RH,), event = _later(self._once_more(handle, x))
            calls.append(("dispatch", {"buffer": self, "handle": handle, "event": event}))
            return x_RH, None, None, None, None, event
        assert is_token_in_rank.shape == (x.size(0), self.size)
        assert num_tokens_per_rank.shape == (self.size,)
        transport, plan, x_RH, weights_RK = self._there(x, topk_idx, topk_weights, num_tokens_per_expert.numel())
        handle = SimpleNamespace(transport=transport, plan=plan)
        (x_RH, idx_RK, weights_RK), event = _later(x_RH, plan.idx_RK, weights_RK)
        local = range(transport.num_local_experts)
        counts = [int((plan.idx_RK == expert).sum()) for expert in local]
        calls.append(("dispatch", {"buffer": self, "handle": None, "made": handle, "event": event}))
        return x_RH, idx_RK, weights_RK, counts, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        _check_rows(x, 16)
        _check_events(previous_event, async_finish, allocate_on_comm_stream)
        assert config.name == f"combine config of {self.size}"
        (y_TH, weights_TK), event = _later(*self._back(handle, x, topk_weights))
        calls.append(
            ("combine", {"buffer": self, "handle": handle, "weights": topk_weights is not None, "event": event})
        )
        return y_TH, weights_TK, event


class ElasticBuffer(_Common):
    def __init__(
        self, group, num_max_tokens_per_rank=0, hidden=0, num_topk=0, deterministic=False, explicitly_destroy=False
    ):
        super().__init__(group)
        self.rows = num_max_tokens_per_rank
        calls.append(("ElasticBuffer", {"rows": self.rows, "hidden": hidden, "num_topk": num_topk}))

    def get_theoretical_num_sms(self, num_experts, num_topk):
        assert num_experts % self.size == 0
        return 24

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_sms=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
    ):
        _check_rows(x, 256)
        _check_events(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert x.size(0) <= self.rows and num_sms == 24
        if handle is not None:
            assert topk_idx is None and topk_weights is None and num_experts == handle.num_experts
            (x_RH,), event = _later(self._once_more(handle, x).flip(0))
            calls.append(("dispatch", {"buffer": self, "handle": handle, "event": event}))
            return x_RH, None, None, handle, event
        transport, plan, x_RH, weights_RK = self._there(x, topk_idx, topk_weights, num_experts)
        local = range(transport.num_local_experts)
        handle = SimpleNamespace(
            transport=transport,
            plan=plan,
            num_experts=num_experts,
            num_sms=num_sms,
            num_recv_tokens_per_expert_list=[int((plan.idx_RK == expert).sum()) for expert in local],
        )
        weights_RK = torch.where(plan.idx_RK < 0, 5.0, weights_RK)
        (x_RH, idx_RK, weights_RK), event = _later(x_RH.flip(0), plan.idx_RK.flip(0), weights_RK.flip(0))
        calls.append(("dispatch", {"buffer": self, "handle": None, "made": handle, "event": event}))
        return x_RH, idx_RK, weights_RK, handle, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        _check_rows(x, 256)
        _check_events(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        weights = None if topk_weights is None else topk_weights.flip(0)
        (y_TH, weights_TK), event = _later(*self._back(handle, x.flip(0), weights))
        calls.append(
            ("combine", {"buffer": self, "handle": handle, "weights": topk_weights is not None, "event": event})
        )
        return y_TH, weights_TK, event


def module(*offers: type) -> ModuleType:
    """The package, with these of its two buffers."""
    made = ModuleType("deep_ep")
    made.__spec__ = importlib.machinery.ModuleSpec("deep_ep", loader=None)
    vars(made).update({"topk_idx_t": torch.int64} | {offer.__name__: offer for offer in offers})
    return made


def install() -> None:
    """Have `import deep_ep` of this process find the fake, if no real one is there."""
    if importlib.util.find_spec("deep_ep") is None:
        sys.modules["deep_ep"] = module(Buffer, ElasticBuffer)
