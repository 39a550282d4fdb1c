"""A second device on any machine: tensors that say they are "elsewhere" and refuse what CUDA does.

    with elsewhere():
        model.to("elsewhere")(torch.tensor([[1]], device="elsewhere"))

Each holds an ordinary tensor and computes with it, so values, `tolist` and gradients are real and
the same bits as without it; an operation over two devices raises, and so does `numpy`. It is a
Python backend of torch's, registered once a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "elsewhere"
aten = torch.ops.aten
MOVES = {aten.copy_, aten._to_copy}
# Which of their arguments may be on the host: indices, as CUDA has it.
INDICES = {aten.index: 1, aten.index_put: 1, aten.index_put_: 1, aten._index_put_impl_: 1}


class Elsewhere(Tensor):
    """`held` is the ordinary tensor."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes its contents along
        return f"Elsewhere({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Made(TorchDispatchMode):
    """What is made with `device=`, and what is moved, from ordinary tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[None]:
    backend = _register()
    # A backward pass in this thread: torch's own for a device knows nothing of Python.
    with _Made(), torch.autograd.set_multithreading_enabled(False):
        backend.open = True
        # `torch.tensor(..., device=)` makes its tensor on the host, and then asks the mode.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            backend.open = False


class _Backend(_DummyBackendModule):
    """What torch asks about the device; it is there inside of `elsewhere` alone."""

    open = False

    def is_available(self) -> bool:
        return self.open

    def device_count(self) -> int:
        return int(self.open)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def _register() -> _Backend:
    backend = _Backend()
    _setup_privateuseone_for_python_backend(rename=NAME, backend_module=backend)
    return backend


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = any(isinstance(x, Elsewhere) for x in given)
    if here and func.overloadpacket not in MOVES:
        _check(func, args, kwargs)
    plain, named = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    if func.overloadpacket is aten.copy_:
        here = isinstance(args[0], Elsewhere)
    if kwargs.get("device") is not None:
        here = kwargs["device"].type == NAME
        named["device"] = torch.device("cpu")
    out = func(*plain, **named)
    if not here:
        return out
    # What an operation changed in place is the tensor that it was given.
    known = {id(x.held): x for x in given if isinstance(x, Elsewhere)}
    return tree_map(lambda x: known[id(x)] if id(x) in known else _moved(x), out)


def _moved(value: Any) -> Any:
    return Elsewhere(value) if isinstance(value, Tensor) else value


def _check(func: Any, args: Any, kwargs: Any) -> None:
    free = INDICES.get(func.overloadpacket)
    for i, argument in enumerate((*args, *kwargs.values())):
        for x in tree_leaves(argument):
            # A number on the host may join anything.
            if isinstance(x, Tensor) and not isinstance(x, Elsewhere) and x.ndim and i != free:
                raise RuntimeError(f"{func}: tensors on two devices, {x.device} and {NAME}")
