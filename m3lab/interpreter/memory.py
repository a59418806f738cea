"""Device memory for interpreted kernels: one arena, real 64-bit addresses, guard gaps.

Every byte knows whether something wrote it (``defined``), and every word which CTA wrote it in
which store of which launch (``writer``); the checks read both. Memory that is never touched costs
nothing on a CPU: the arena and its shadows are lazily mapped.
"""

from __future__ import annotations

import bisect
import ctypes
from functools import cache

import numpy as np
import torch

from m3lab.interpreter.errors import OutOfBounds

BASE = 1 << 44  # the arena's first address: far from any small integer a bug may use as a pointer
ALIGN = 4096
GUARD = 4096  # bytes between allocations
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class Allocation:
    """A named piece of device memory of one rank."""

    def __init__(self, memory: Memory, name: str, offset: int, nbytes: int, rank: int) -> None:
        self.memory = memory
        self.name = name
        self.offset = offset
        self.nbytes = nbytes
        self.rank = rank
        self.freed = False
        self.tracked = True  # some byte may be unwritten
        self.written = -1  # number of the last kernel store into it

    @property
    def addr(self) -> int:
        """The address kernels use."""
        return BASE + self.offset

    def write(self, tensor: torch.Tensor, offset: int = 0) -> None:
        """Copy a tensor's bytes to ``offset`` and mark them written.

        Raises ValueError where they do not fit.
        """
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._check(offset, data.numel())
        start = self.offset + offset
        self.memory.data[start : start + data.numel()].copy_(data)
        if self.tracked:
            if offset == 0 and data.numel() == self.nbytes:
                self.tracked = False
            else:
                self.memory.defined[start : start + data.numel()] = 0xFF

    def fill(self, byte: int) -> None:
        """Set every byte and mark all written (``byte`` 0: what a zeroed buffer holds)."""
        self.memory.data[self.offset : self.offset + self.nbytes] = byte
        self.tracked = False

    def poison(self, byte: int = 0xFF) -> None:
        """Set every byte without marking it written: 0xFF is a NaN in every float format."""
        self.memory.data[self.offset : self.offset + self.nbytes] = byte

    def read(
        self, dtype: torch.dtype, shape: tuple[int, ...] | list[int], offset: int = 0
    ) -> torch.Tensor:
        """A copy of ``shape`` elements of ``dtype`` from byte ``offset``, on the host."""
        n = dtype.itemsize
        for d in shape:
            n *= d
        self._check(offset, n)
        start = self.offset + offset
        raw = self.memory.data[start : start + n].clone()
        return raw.view(dtype).reshape(tuple(shape)).cpu()

    def free(self) -> None:
        """Give the address range up; a later access to it is out of bounds. Idempotent."""
        self.freed = True

    def _check(self, offset: int, n: int) -> None:
        if self.freed:
            raise ValueError(f"{self.name} (rank {self.rank}) was freed")
        if offset < 0 or offset + n > self.nbytes:
            raise ValueError(
                f"{self.name} (rank {self.rank}) holds {self.nbytes} bytes; "
                f"bytes {offset}..{offset + n} do not fit"
            )


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep what large tensors free, instead of giving it back to the system.

    A run makes thousands of short-lived tensors of megabytes; mapping fresh pages for each costs a
    fifth of it (benchmarks/interpreter.py: four ranks, whole K4, 6.0 -> 4.8 CPU s). glibc only.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class Memory:
    """The arena all ranks of a run share. ``device``: any torch device."""

    def __init__(
        self,
        device: str | torch.device = "cpu",
        capacity: int | None = None,
        *,
        poison: bool = False,
    ) -> None:
        """``capacity``: bytes to begin with; it grows as needed, but growing copies. The default on
        a CPU is large, since memory that is never touched is never mapped. ``poison``: memory that
        was not asked for as zeros starts as 0xFF bytes (NaNs)."""
        self.device = torch.device(device)
        if self.device.type == "cpu":
            _keep_freed_memory()
        self.poison = poison
        self.stores = 0  # kernel stores executed so far: the checks' clock
        self._used = 0
        self._starts: list[int] = []
        self._allocs: list[Allocation] = []
        if capacity is not None:
            self._make(capacity)
        else:
            self._make_default()

    def _make_default(self) -> None:
        """The largest arena the host grants at once, from 8 GiB down (256 MiB on a device)."""
        capacity = 8 << 30 if self.device.type == "cpu" else 1 << 28
        while True:
            try:
                return self._make(capacity)
            except MemoryError:
                if capacity <= 1 << 28:
                    raise
                capacity //= 2

    def _zeros(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cpu":  # calloc: pages are mapped when touched
            return torch.from_numpy(np.zeros(n, dtype=_NUMPY[dtype]))
        return torch.zeros(n, dtype=dtype, device=self.device)

    def _make(self, capacity: int) -> None:
        try:
            self.data = self._zeros(capacity, torch.uint8)
            self.defined = self._zeros(capacity, torch.uint8)
            self.writer = self._zeros(capacity // 4, torch.int64)
        except (MemoryError, RuntimeError) as exc:
            raise MemoryError(
                f"{capacity * 4} bytes of {self.device} memory for the interpreter's arena "
                "and its shadows could not be had"
            ) from exc
        self.capacity = capacity
        self._view()

    def _view(self) -> None:
        self.views = {
            1: self.data,
            2: self.data.view(torch.int16),
            4: self.data.view(torch.int32),
            8: self.data.view(torch.int64),
            16: self.data.view(torch.int32).view(-1, 4),
        }
        self.defined_views = {
            1: self.defined,
            2: self.defined.view(torch.int16),
            4: self.defined.view(torch.int32),
            8: self.defined.view(torch.int64),
            16: self.defined.view(torch.int32).view(-1, 4),
        }

    def _grow(self, need: int) -> None:
        old = (self.data, self.defined, self.writer, self._used)
        capacity = self.capacity
        while capacity < need:
            capacity *= 2
        self._make(capacity)
        data, defined, writer, used = old
        self.data[:used] = data[:used]
        self.defined[:used] = defined[:used]
        self.writer[: used // 4] = writer[: used // 4]

    def close(self) -> None:
        """Give the arena back now (allocations and memory refer to each other, so it would wait for
        the garbage collector); nothing of it can be used afterwards. Idempotent."""
        for allocation in self._allocs:
            allocation.free()
        self._used, self._starts, self._allocs = 0, [], []
        self._make(ALIGN)

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes`` more at once, so that growing copies nothing."""
        if self._used + nbytes > self.capacity:
            self._grow(self._used + nbytes)

    def alloc(
        self,
        name: str,
        nbytes: int,
        *,
        rank: int = 0,
        zero: bool = False,
        uncached: bool = False,
    ) -> Allocation:
        """``nbytes`` of device memory of ``rank``. Without ``zero`` its bytes count as never
        written. ``uncached`` (fine-grained memory on a GPU) changes nothing here."""
        if nbytes <= 0:
            raise ValueError(f"{name}: an allocation needs at least one byte, got {nbytes}")
        offset = self._used
        end = offset + nbytes + GUARD
        end = (end + ALIGN - 1) // ALIGN * ALIGN
        if end > self.capacity:
            self._grow(end)
        self._used = end
        allocation = Allocation(self, name, offset, nbytes, rank)
        allocation.tracked = not zero  # the arena is zero where nothing was written
        self._starts.append(offset)
        self._allocs.append(allocation)
        if self.poison and not zero:
            allocation.poison()
        return allocation

    def upload(self, name: str, tensor: torch.Tensor, *, rank: int = 0) -> Allocation:
        """An allocation that holds a copy of ``tensor``."""
        allocation = self.alloc(name, tensor.numel() * tensor.element_size(), rank=rank)
        allocation.write(tensor)
        return allocation

    def at(self, offset: int) -> Allocation | None:
        """The live allocation that holds arena byte ``offset``."""
        i = bisect.bisect_right(self._starts, offset) - 1
        if i < 0:
            return None
        allocation = self._allocs[i]
        inside = offset < allocation.offset + allocation.nbytes and not allocation.freed
        return allocation if inside else None

    def describe(self, offset: int) -> str:
        """Where an arena byte lies, in words."""
        allocation = self.at(offset)
        if allocation is not None:
            return f"{allocation.name}+{offset - allocation.offset} (rank {allocation.rank})"
        i = bisect.bisect_right(self._starts, offset) - 1
        if 0 <= offset < self.capacity and i >= 0:
            a = self._allocs[i]
            if a.freed:
                return f"{a.name} (rank {a.rank}), which was freed"
            past = offset - a.offset - a.nbytes
            return f"{past} bytes past the end of {a.name} ({a.nbytes} bytes, rank {a.rank})"
        return f"address {BASE + offset:#x}, outside all memory"

    @property
    def used(self) -> int:
        """Bytes of the arena up to the end of the last allocation."""
        return self._used

    def shadow_words(self) -> torch.Tensor:
        """A fresh int64 zero per word in use, for who keeps something about words (the clock)."""
        return self._zeros(self._used // 4, torch.int64)

    def owners(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First bytes of the allocations, ascending, and the rank of each (1-D int64)."""
        ranks = [a.rank for a in self._allocs]
        return (
            torch.tensor(self._starts, dtype=torch.int64, device=self.device),
            torch.tensor(ranks, dtype=torch.int64, device=self.device),
        )

    def check_span(self, lo: int, hi: int) -> Allocation | None:
        """The one allocation that holds bytes lo..hi, or None."""
        allocation = self.at(lo)
        if allocation is None or hi > allocation.offset + allocation.nbytes:
            return None
        return allocation

    def locate_all(self, lo: torch.Tensor, hi: torch.Tensor) -> list[Allocation]:
        """The allocations of many spans lo..hi (1-D int64); raises OutOfBounds(index) on a miss."""
        found: dict[int, Allocation] = {}
        starts = np.asarray(self._starts, dtype=np.int64)
        ends = np.asarray(
            [0 if a.freed else a.offset + a.nbytes for a in self._allocs], dtype=np.int64
        )
        low, high = lo.cpu().numpy(), hi.cpu().numpy()
        index = np.searchsorted(starts, low, side="right") - 1
        bad = (index < 0) | (high > ends[np.maximum(index, 0)])
        if bad.any():
            raise _Miss(int(np.flatnonzero(bad)[0]))
        for i in np.unique(index):
            found[int(i)] = self._allocs[int(i)]
        return list(found.values())


class _Miss(OutOfBounds):
    def __init__(self, index: int) -> None:
        super().__init__(f"span {index}")
        self.index = index


_NUMPY = {torch.uint8: np.uint8, torch.int64: np.int64}
