"""A GPU part as the modelled clock knows it: constants with units and sources, from a YAML file.

Nothing here is measured by this project; see a part file's sources. ``with_values`` makes a part
with other constants, for calibration and for what-if questions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

DEVICES = Path(__file__).resolve().parent / "devices"


@dataclass(frozen=True)
class DeviceModel:
    """The constants of ``devices/<name>.yaml``; units are in the names (ns, clk, gbs: GB/s)."""

    name: str
    clock_ghz: float
    cus: float
    simds: float
    warm_bytes: float
    issue_valu_clk: float
    issue_salu_clk: float
    issue_trans_clk: float
    issue_cross_clk: float
    issue_memory_clk: float
    branch_clk: float
    barrier_clk: float
    mfma_macs_per_clk: float
    mfma_scaled_macs_per_clk: float
    mfma_fp4_macs_per_clk: float
    instructions_per_op: float
    lds_latency_clk: float
    hbm_gbs: float
    cu_bytes_per_clk: float
    cu_hbm_gbs: float
    scalar_ns: float
    warm_ns: float
    hbm_ns: float
    device_ns: float
    visible_ns: float
    link_ns: float
    link_gbs: float
    poll_service_ns: float
    channels: float
    launch_ns: float

    def with_values(self, **values: float) -> DeviceModel:
        """A part with other constants. Raises ValueError for a name it does not have."""
        for name in values:
            if name not in CONSTANTS:
                raise ValueError(f"a part has no constant {name}; it has {', '.join(CONSTANTS)}")
        return replace(self, **dict[str, Any](values))


CONSTANTS = tuple(f.name for f in fields(DeviceModel) if f.name != "name")


def read_device_model(name: str = "mi355x") -> dict[str, Any]:
    """A part file as written: name, and constants with value, unit and source."""
    path = DEVICES / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in DEVICES.glob("*.yaml")))
        raise ValueError(f"no part is named {name!r}; there are: {known}")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def load_device_model(name: str = "mi355x") -> DeviceModel:
    """The part ``name``. Raises ValueError where the file lacks a constant or its source."""
    data = read_device_model(name)
    constants = data["constants"]
    for constant in CONSTANTS:
        entry = constants.get(constant)
        if not entry or "source" not in entry or "unit" not in entry:
            raise ValueError(f"{name}.yaml must give {constant} a value, a unit and a source")
        if not float(entry["value"]) > 0:
            raise ValueError(f"{name}.yaml: {constant} must be positive, got {entry['value']}")
    return DeviceModel(data["name"], **{c: float(constants[c]["value"]) for c in CONSTANTS})
