"""The ROCm device: whether there is one, and what it is.

Launching on it is not built yet: ``launch`` says so. The interpreter runs the same kernels.
"""

from __future__ import annotations

from typing import Any


def available() -> bool:
    """Whether torch is a ROCm build that sees a device."""
    import torch

    return torch.version.hip is not None and torch.cuda.device_count() > 0


def describe() -> str:
    """One line: the ROCm devices and their HIP version, or why there is none."""
    import torch

    if torch.version.hip is None:
        return "no ROCm device: this torch is not a ROCm build"
    count = torch.cuda.device_count()
    if count == 0:
        return f"no ROCm device: torch is built for HIP {torch.version.hip} and sees none"
    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", "unknown architecture")
    return f"{count} x {properties.name} ({arch}), HIP {torch.version.hip}"


def launch(*_arguments: Any, **_options: Any) -> None:
    """Not built yet: raises NotImplementedError, whatever the arguments."""
    raise NotImplementedError(
        "launching on a ROCm device is not built yet; run with the backend 'interpreter'"
    )
