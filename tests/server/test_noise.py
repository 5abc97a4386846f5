"""The device's noise is the client's, bit for bit."""

import numpy as np
import pytest
import torch

from paceline.server.noise import Key, gumbel, gumbel_on_device
from paceline.shared.noise import gumbel as shared_gumbel

KEYS = [
    Key(0, 0, 0),
    Key(2**64 - 1, 63, 4095),
    Key(1 << 63, 0, 2**32 - 1),
    Key(12345, 1, 7),
    Key(0, 0, 0),
    Key(12345, 1, 8),
]


@pytest.mark.parametrize("vocab_size", [1, 4, 5, 49_152, 50_001])
def test_torch_and_numpy_agree_bit_for_bit(vocab_size):
    expected = np.stack([shared_gumbel(k.seed, k.position, np.arange(vocab_size), k.choice) for k in KEYS])
    for rows in (
        gumbel(KEYS, vocab_size, torch.device("cpu")),
        gumbel_on_device(KEYS, vocab_size, torch.device("cpu")),
    ):
        assert rows.dtype == torch.float32
        assert rows.numpy().tobytes() == expected.tobytes()


@pytest.mark.gpu
def test_cuda_and_numpy_agree_bit_for_bit():
    rows = gumbel(KEYS, 151_936, torch.device("cuda"))
    expected = np.stack([shared_gumbel(k.seed, k.position, np.arange(151_936), k.choice) for k in KEYS])
    assert rows.cpu().numpy().tobytes() == expected.tobytes()
