"""LDS of the CTAs of one routine, with the race check.

The shadow holds, per 4-byte word, the last wave that changed it and in which barrier interval,
and per wave the interval in which it last read it. Two waves in one interval, one of them changing
the word, is a race. Several waves storing the value a word already holds is allowed (counted).
"""

from __future__ import annotations

import numpy as np
import torch

_WAVE_BITS = 5
_MAX_EPOCH = 255


class Lds:
    """``n_ctas`` pieces of ``nbytes`` each; waves up to 16."""

    def __init__(self, n_ctas: int, nbytes: int, n_waves: int, device: torch.device) -> None:
        self.n_ctas = n_ctas
        self.nbytes = nbytes
        self.words = max((nbytes + 15) // 16 * 4, 4)  # never empty: views need a row
        self.planes = 8 if n_waves <= 8 else 16
        self.device = device
        total = n_ctas * self.words
        self.data = _zeros(total * 4, np.uint8, device)
        self.views = {
            1: self.data,
            2: self.data.view(torch.int16),
            4: self.data.view(torch.int32),
            8: self.data.view(torch.int64),
            16: self.data.view(torch.int32).view(-1, 4),
        }
        self.writer = _zeros(total, np.int16, device)  # epoch << 5 | wave + 1; 0: never written
        self.reader = _zeros(total * self.planes, np.uint8, device)  # epoch, a byte a wave
        self.reader_rows = self.reader.view(-1, self.planes)
        self.epoch = torch.ones(n_ctas, dtype=torch.int16, device=device)
        self.same_value_stores = 0

    def barrier(self, rows: torch.Tensor) -> None:
        """A new interval for these CTAs."""
        self.epoch[rows] += 1
        if int(self.epoch.max()) > _MAX_EPOCH:
            self.writer &= (1 << _WAVE_BITS) - 1
            self.reader.zero_()
            self.epoch.fill_(1)

    def reads_race(
        self, words: torch.Tensor, rows: torch.Tensor, waves: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record reads; 1-D flat word indices with each one's CTA row and wave.

        Returns (never written, changed by another wave in this interval) as bool tensors.
        """
        writer = self.writer.index_select(0, words)
        epoch = self.epoch.index_select(0, rows)
        never = writer == 0
        raced = ((writer >> _WAVE_BITS) == epoch) & ((writer & 31) != (waves + 1))
        self.reader.scatter_(0, words * self.planes + waves, epoch.to(torch.uint8))
        return never, raced

    def writes_race(
        self,
        words: torch.Tensor,
        rows: torch.Tensor,
        waves: torch.Tensor,
        changed: torch.Tensor,
    ) -> torch.Tensor:
        """Record stores (after their conflicts were looked up); returns the racing ones.

        ``changed``: the store gives the word another value than it held.
        """
        writer = self.writer.index_select(0, words)
        epoch = self.epoch.index_select(0, rows)
        raced = ((writer >> _WAVE_BITS) == epoch) & ((writer & 31) != (waves + 1))
        read = self.reader_rows.index_select(0, words) == epoch.to(torch.uint8)[:, None]
        read.scatter_(1, waves[:, None], False)
        conflict = (raced | read.any(1)) & changed
        keep = ~changed & (writer != 0)
        self.same_value_stores += int((raced & keep).sum())
        entry = (epoch << _WAVE_BITS) | (waves + 1).to(torch.int16)
        self.writer.scatter_(0, words, torch.where(keep, writer, entry))
        return conflict


def _zeros(n: int, dtype: type, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(n, dtype=dtype))
    return torch.zeros(n, dtype=torch.from_numpy(np.zeros(1, dtype=dtype)).dtype, device=device)
