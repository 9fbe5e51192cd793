"""Peak memory of computations on torch's meta device: shapes and dtypes are followed, nothing is computed or stored.

A tensor's storage counts from the operator that makes it until Python releases it, as with a real allocator, so that
what autograd keeps for the backward pass is counted as well.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that are made inside the block.

    Args:
        known: tensors that exist already and do not count, e.g. parameters.

    Attributes:
        now: bytes that are alive.
        peak: the largest value of `now` so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count its results."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.known and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@contextmanager
def live_memory(known: Iterable[Tensor]) -> Iterator[LiveMemory]:
    """Count what is allocated on the meta device inside the block.

    Args:
        known: tensors that do not count: parameters, buffers and inputs.
    """
    was_on = gc.isenabled()
    gc.disable()  # a collection would run at any time; results must not depend on it
    try:
        with _fused_attention(), torch.device("meta"), LiveMemory(known) as live:
            yield live
    finally:
        gc.collect()
        if was_on:
            gc.enable()


def _fused_attention() -> Any:
    """Attention without the matrix of all pairs: on the meta device torch would choose the kernel that stores it."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        return result

    return mock.patch.object(nn.functional, "scaled_dot_product_attention", attention)
