"""Pack many named tensors into one buffer, as every tensor plane transports them, and unpack it.

Per operation (about 2 ms a put or get) costs far more than per byte, so a snapshot travels as one
1-D uint8 tensor. Entries are in the order of the mapping, each on a 64-byte boundary; offsets
follow from the layout and are never sent.

    pack({"indices": [120, 20] int32, "logprobs": [120, 20] float32})
    -> uint8 [19200], TensorLayout((("indices", (120, 20), "int32"), ("logprobs", ...)))
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import TensorLayout

# A cache line, and a multiple of every dtype's size: each entry can be viewed in place.
ALIGNMENT = 64
STAGED_AHEAD = 1  # copies of a device that are under way while an earlier one is written


def layout_of(tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
    """Return the layout that `pack` gives these tensors. Raises PlaneError for a sparse one."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise PlaneError(
                f"tensor {name!r} must be dense and unquantised to be packed: got layout "
                f"{tensor.layout}, dtype {tensor.dtype}; call .to_dense() or .dequantize() first"
            )
    return TensorLayout(
        tuple(
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        )
    )


def packed_bytes(layout: TensorLayout) -> int:
    """Return the packed buffer's bytes; at least 64, since mmap and RDMA refuse an empty one."""
    ends = [end for _, _, _, _, end in _spans(layout)]
    return max(-(-ends[-1] // ALIGNMENT) * ALIGNMENT if ends else 0, ALIGNMENT)


def pack(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, TensorLayout]:
    """Copy the tensors into one new buffer: uint8 [packed_bytes(layout)] on the CPU.

    The buffer shares no memory with its sources, whatever their device, strides or gradient.
    """
    layout = layout_of(tensors)
    buffer = torch.empty(packed_bytes(layout), dtype=torch.uint8)
    filled = 0
    for name, shape, dtype, start, end in _spans(layout):
        buffer[filled:start].zero_()  # equal tensors give equal buffers, gaps included
        buffer[start:end].view(dtype).view(shape).copy_(tensors[name].detach())
        filled = end
    buffer[filled:].zero_()
    return buffer, layout


def packed_chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of `pack`'s buffer in pieces, without a copy where a source is contiguous.

    For a transport that copies anyway, such as a file. A source must not change until the last
    piece has been consumed.
    """
    filled = 0
    layout = layout_of(tensors)
    copies = staged([tensors[name] for name, *_ in layout.entries])
    for (_, _, _, start, end), copy in zip(_spans(layout), copies, strict=True):
        source = copy.resolve_conj().resolve_neg().contiguous()
        yield memoryview(bytes(start - filled))
        yield source.reshape(-1).view(torch.uint8).numpy().data
        filled = end
    yield memoryview(bytes(packed_bytes(layout) - filled))


def staged(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each tensor in host memory, without gradient. A tensor of a CUDA device is copied into
    page-locked memory, and the next one's copy is under way while a caller uses it."""
    waiting = deque[tuple[torch.Tensor, Callable[[], object]]]()
    for tensor in tensors:
        waiting.append(_begin_copy(tensor.detach()))
        if len(waiting) > STAGED_AHEAD:
            copy, wait = waiting.popleft()
            wait()
            yield copy
    for copy, wait in waiting:
        wait()
        yield copy


def _begin_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """Begin to copy a tensor to the host; return the copy, and what waits for its end."""
    if tensor.device.type != "cuda":
        return tensor.cpu(), lambda: None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return copy, event.synchronize


def unpack(buffer: torch.Tensor, layout: TensorLayout) -> dict[str, torch.Tensor]:
    """Return the named tensors as views into `buffer`, which they keep alive.

    Raises PlaneError for a buffer that `pack` cannot have made with this layout.
    """
    expected = packed_bytes(layout)
    if (
        buffer.dtype != torch.uint8
        or buffer.shape != (expected,)
        or not buffer.is_contiguous()
        or buffer.device.type != "cpu"
    ):
        raise PlaneError(
            f"the layout {[entry[0] for entry in layout.entries]} needs a contiguous uint8 buffer "
            f"of {expected} bytes on the CPU: got {buffer.dtype} {list(buffer.shape)} on "
            f"{buffer.device}; was it packed with another layout?"
        )
    return {
        name: buffer[start:end].view(dtype).view(shape)
        for name, shape, dtype, start, end in _spans(layout)
    }


def _spans(
    layout: TensorLayout,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int, int]]:
    """Yield name, shape, dtype, first byte and byte past the last of each entry."""
    end = 0
    for name, shape, dtype_name in layout.entries:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise PlaneError(
                f"tensor {name!r} has dtype {dtype_name!r}, which this torch does not know"
            )
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        yield name, shape, dtype, start, end


def missing_key(operation: str, *keys: str) -> str:
    """Return what is said of keys that a plane does not have."""
    return f"{operation}: no key {', '.join(map(repr, keys))}; never put, or already deleted"
