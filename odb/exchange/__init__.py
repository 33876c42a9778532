"""Transports between ranks. `base` has their contract, `memory` and `gloo` keep it."""
