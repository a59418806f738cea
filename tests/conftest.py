"""Makes the helper modules beside the tests importable, and puts tensors on a chosen device.

M3LAB_TEST_DEVICE=cuda runs the tests of single operations (``test_ops_*.py``) on that device.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if device := os.environ.get("M3LAB_TEST_DEVICE"):
    import torch

    torch.set_default_device(device)
