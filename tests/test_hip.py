"""Whether there is a ROCm device, and the sentence of what is not built yet."""

import pytest
import torch

from m3lab.backends import hip


def test_a_torch_without_rocm_has_no_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # an NVIDIA machine
    assert not hip.available()
    assert hip.describe() == "no ROCm device: this torch is not a ROCm build"


def test_a_rocm_torch_that_sees_no_device_has_none(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not hip.available()
    assert "HIP 7.0 and sees none" in hip.describe()


def test_launching_says_that_it_is_not_built_yet():
    with pytest.raises(NotImplementedError, match="not built yet; run with the backend"):
        hip.launch()
