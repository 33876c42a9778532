"""Random numbers with an address: the same for a sample whichever worker reads it, and again after a resume.

A worker's own random state depends on what that worker read before. A dataset that augments draws from here instead:

    class Augmented(torch.utils.data.Dataset):
        def set_epoch(self, epoch):           # odb tells it, in every worker
            self.epoch = epoch

        def __getitem__(self, index):
            rng = sample_rng(self.seed, self.epoch, index)
            ...
"""

from __future__ import annotations

import operator

import numpy as np

from odb.errors import ConfigError


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed of one sample's own, for any generator: `random.Random(s)`, `torch.Generator().manual_seed(s)`.

    Args:
        seed: of the run, >= 0.
        epoch: as the dataset's `set_epoch` was told, >= 0.
        index: what `__getitem__` was asked for, >= 0.

    Returns:
        An integer in [0, 2**63), the same on every machine; seeds of neighbours are unrelated.

    Raises:
        ConfigError: an argument is no integer or negative.
    """
    return int(_sequence(seed, epoch, index).generate_state(1, np.uint64)[0] >> np.uint64(1))


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """A NumPy generator of one sample's own; arguments as for `sample_seed`."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, epoch, index)))


def _sequence(seed: int, epoch: int, index: int) -> np.random.SeedSequence:
    address = []
    for name, value in (("seed", seed), ("epoch", epoch), ("index", index)):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if number < 0:
            raise ConfigError(f"{name} must be an integer >= 0, got {value!r}")
        address.append(number)
    # The numbers are mixed as 32-bit words without their borders: only a fixed width keeps addresses apart.
    words = [number >> shift & 0xFFFFFFFF for number in address for shift in (0, 32)]
    if max(address) >> 64:
        raise ConfigError(f"seed, epoch and index must be below 2**64, got {address}")
    return np.random.SeedSequence(words)
