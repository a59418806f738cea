"""The device buffers of a step: scratch, peer buffers, step counter, timeline, with host views.

Each owns its memory, knows its regions by name and frees it once. They ask a ``Memory`` for room:
the interpreter's, or a HIP device's. The layout itself is ``memory_layout``'s, re-exported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from m3lab.layout.regions import (
    MAX_LAYER,
    MAX_STEP,
    Region,
    peer_bytes,
    peer_layout,
    scratch_bytes,
    scratch_layout,
    tag,
)
from m3lab.model.shapes import MAX_TOKENS, RankShape

__all__ = [
    "MAX_LAYER",
    "MAX_STEP",
    "Allocation",
    "Memory",
    "PeerBuffers",
    "Region",
    "Scratch",
    "StepCounter",
    "peer_bytes",
    "peer_layout",
    "scratch_bytes",
    "scratch_layout",
    "tag",
]

_VALUE_TYPES = {
    "bf16x2": torch.bfloat16,
    "u8x4": torch.uint8,
    "f32": torch.float32,
    "i32": torch.int32,
}


class Allocation(Protocol):
    """A named piece of one rank's device memory."""

    @property
    def name(self) -> str: ...
    @property
    def addr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def write(self, tensor: Tensor, offset: int = 0) -> None:
        """Copy the tensor's bytes to byte ``offset``."""

    def read(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> Tensor:
        """A host copy of ``shape`` elements from byte ``offset``."""

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""


class Memory(Protocol):
    """A device's allocator. A failed allocation is a MemoryError that says bytes and device."""

    def alloc(
        self, name: str, nbytes: int, *, rank: int = 0, zero: bool = False, uncached: bool = False
    ) -> Allocation:
        """``nbytes`` of ``rank``'s memory; ``uncached``: fine-grained, seen across devices."""

    def upload(self, name: str, tensor: Tensor, *, rank: int = 0) -> Allocation:
        """An allocation that holds a copy of ``tensor``."""


def _unpack(words: Tensor, region: Region) -> Tensor:
    """int32 value words -> the region's typed values; packed types widen the last dim."""
    return words.contiguous().view(_VALUE_TYPES[region.dtype])


def read_region(
    allocation: Allocation,
    region: Region,
    *,
    step: int | None = None,
    layer: int | None = None,
    tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A region's typed values (its shape, packed types widening the last dim) and their mask.

    The mask says where the pair's tag is the one of (``step``, ``layer``); elsewhere the value is
    NaN, or 0 of an integer type. A region of plain words carries no tags: its mask is None, its
    values are what lies there. ``tokens`` keeps the first rows of the step only.
    """
    if region.kind == "words":
        values, mask = (
            _unpack(allocation.read(torch.int32, region.shape, region.offset), region),
            None,
        )
    else:
        if step is None or layer is None:
            raise ValueError(f"region {region.name} is tagged: its view needs a step and a layer")
        pairs = allocation.read(torch.int32, (*region.shape, 2), region.offset)
        values = _unpack(pairs[..., 0], region)
        current = pairs[..., 1] == tag(step, layer)
        mask = current.repeat_interleave(values.shape[-1] // current.shape[-1], dim=-1)
        values = values.masked_fill(~mask, torch.nan if values.is_floating_point() else 0)
    if tokens is None or region.token_axis is None:
        return values, mask
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens must be in 0..{MAX_TOKENS}, got {tokens}")
    values = values.narrow(region.token_axis, 0, tokens)
    return values, None if mask is None else mask.narrow(region.token_axis, 0, tokens)


def write_region(
    allocation: Allocation,
    region: Region,
    index: int | tuple[int, ...],
    values: Tensor,
    step: int,
    layer: int,
) -> None:
    """Publish ``values`` from the host, tagged, at the units that follow ``region[index]``.

    ``index`` are leading indices of the region's shape (a token; a token and a head; ...); the
    values, of the region's type, are written in order from there and must end inside it.
    """
    at = (index,) if isinstance(index, int) else index
    if len(at) > len(region.shape) or any(
        not 0 <= i < n for i, n in zip(at, region.shape, strict=False)
    ):
        raise ValueError(f"index {at} is outside region {region.name} of shape {region.shape}")
    if values.dtype != _VALUE_TYPES[region.dtype]:
        raise ValueError(
            f"region {region.name} holds {_VALUE_TYPES[region.dtype]}, got {values.dtype}"
        )
    words = values.contiguous().flatten().view(torch.int32)
    first, unit = 0, region.count
    for i, n in zip(at, region.shape, strict=False):
        unit //= n
        first += i * unit
    if words.numel() > unit:
        raise ValueError(f"region {region.name}{list(at)} holds {unit} units, got {words.numel()}")
    if region.kind == "pairs":
        words = torch.stack((words, torch.full_like(words, tag(step, layer))), dim=-1)
    allocation.write(words, region.offset + first * region.unit_bytes)


class _Buffer:
    """One allocation with named regions."""

    def __init__(self, allocation: Allocation, regions: Mapping[str, Region]) -> None:
        self._allocation = allocation
        self.regions = regions

    @property
    def addr(self) -> int:
        return self._allocation.addr

    @property
    def nbytes(self) -> int:
        return self._allocation.nbytes

    def region(self, name: str) -> Region:
        """The named region; ValueError lists the names there are."""
        if name not in self.regions:
            raise ValueError(f"no region {name!r}; there are {', '.join(self.regions)}")
        return self.regions[name]

    def view(
        self,
        name: str,
        *,
        step: int | None = None,
        layer: int | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Typed values of a region and the mask of those published by (step, layer).

        See ``read_region``.
        """
        region = self.region(name)
        return read_region(self._allocation, region, step=step, layer=layer, tokens=tokens)

    def put(
        self, name: str, index: int | tuple[int, ...], values: Tensor, step: int, layer: int
    ) -> None:
        """Publish ``values`` as a kernel would, from ``region[index]`` on (``write_region``)."""
        write_region(self._allocation, self.region(name), index, values, step, layer)

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        self._allocation.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class Scratch(_Buffer):
    """K4's mailboxes between the CTAs of one rank: zeroed once, then only ever overwritten.

    A (step, layer) pair is never reused on the same scratch, since its stale tags would match:
    replays and reruns bump the step. What a launch overwrites was last read by an earlier launch
    of the same rank, which has ended, so one copy of each region is enough.
    """

    def __init__(self, shape: RankShape, memory: Memory, rank: int = 0) -> None:
        self.rank = rank
        allocation = memory.alloc("scratch", scratch_bytes(shape), rank=rank, zero=True)
        super().__init__(allocation, scratch_layout(shape))


class PeerBuffers:
    """The symmetric buffers of a group of ``npes`` ranks held by one process.

    One uncached buffer per rank, and per rank a device array of every rank's address, which is
    what the kernels take as ``peers``. ``npes`` = 1 is the solo form: a rank that is its own peer.

    Why no region is ever overwritten while a peer may still read it, though nothing returns to
    the host between layers: to push layer L's MLP partials (``ffn``) a rank must have passed layer
    L's attention reduce; that needs every peer's layer-L push to ``attn``, and a peer makes it only
    after it has finished reading layer L-1's ``ffn``. The same with the roles exchanged. So ranks
    are at most half a layer apart and ``attn`` and ``ffn`` double-buffer each other. The gathered
    sums ``a_ag`` and ``ffn_ag`` hang on the same dependence: an owner gathers a layer's sum only
    after every peer's push of that layer. So do the candidates ``sel_cp``: a rank sends layer
    L+1's only after layer L's ``ffn`` reduce, which needs every peer's push, made after that peer
    had selected its layer-L blocks.
    """

    def __init__(self, shape: RankShape, memory: Memory, npes: int) -> None:
        self.npes = npes
        self._regions = peer_layout(shape, npes)
        self._allocations: list[Allocation] = []
        self._buffers: list[_Buffer] = []
        self._tables: list[Allocation] = []
        try:
            for rank in range(npes):
                allocation = memory.alloc(
                    "peer", peer_bytes(shape, npes), rank=rank, zero=True, uncached=True
                )
                self._allocations.append(allocation)
                self._buffers.append(_Buffer(allocation, self._regions))
            table = torch.tensor([a.addr for a in self._allocations], dtype=torch.int64)
            for rank in range(npes):
                self._tables.append(memory.upload("peers", table, rank=rank))
        except BaseException:
            self.free()
            raise

    @property
    def regions(self) -> Mapping[str, Region]:
        return self._regions

    def addr(self, rank: int) -> int:
        """The address of ``rank``'s own buffer."""
        return self._allocations[rank].addr

    def table_addr(self, rank: int) -> int:
        """The address of ``rank``'s int64 [npes] array of every buffer's address."""
        return self._tables[rank].addr

    def view(
        self,
        rank: int,
        name: str,
        *,
        step: int | None = None,
        layer: int | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Typed values of ``rank``'s region and the mask of those published by (step, layer)."""
        values, mask = self._buffers[rank].view(name, step=step, layer=layer, tokens=tokens)
        assert mask is not None  # every peer region is tagged
        return values, mask

    def put(
        self,
        rank: int,
        name: str,
        index: int | tuple[int, ...],
        values: Tensor,
        step: int,
        layer: int,
    ) -> None:
        """Publish ``values`` into ``rank``'s region as a peer would (``write_region``)."""
        self._buffers[rank].put(name, index, values, step, layer)

    def free(self) -> None:
        """Give all buffers and tables back. Idempotent."""
        for allocation in (*self._allocations, *self._tables):
            allocation.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class StepCounter:
    """The device's step: an int32 that every launch of a decode step reads its tags from."""

    def __init__(self, memory: Memory, rank: int = 0) -> None:
        self._allocation = memory.upload("step", torch.zeros(1, dtype=torch.int32), rank=rank)

    @property
    def addr(self) -> int:
        return self._allocation.addr

    @property
    def value(self) -> int:
        return int(self._allocation.read(torch.int32, (1,)).item())

    def set(self, value: int) -> None:
        """Set the step; ValueError where its tags would not fit."""
        tag(value, MAX_LAYER)
        self._allocation.write(torch.tensor([value], dtype=torch.int32))

    def increment(self) -> int:
        """The next step, so that no tag of an earlier one matches."""
        self.set(self.value + 1)
        return self.value

    def free(self) -> None:
        self._allocation.free()
