"""The planning core: pure functions over arrays, no torch, no I/O, no clock."""
