"""Choose the device of a process's model."""

from __future__ import annotations

import torch

from protocols.errors import SpecError

DEVICES = ("cpu", "cuda")


def claim_device(asked: str, rank: int = 0) -> torch.device:
    """Return the device that `asked` names, "cpu" or "cuda", and make it this process's current
    one. A rank that sees several GPUs takes the one of its number, modulo their count. Raises
    SpecError where a GPU is requested and torch sees none."""
    if asked not in DEVICES:
        raise SpecError(f"a device is one of {DEVICES}: got {asked!r}")
    if asked == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if not there:
        raise SpecError(
            f"a GPU is asked for and torch {torch.__version__} sees none: install a torch built "
            "for CUDA, check nvidia-smi and CUDA_VISIBLE_DEVICES, or set the role's gpus to 0"
        )
    device = torch.device("cuda", rank % there)
    torch.cuda.set_device(device)  # the default of FSDP and NCCL
    return device
