"""Transports between ranks: see `odb.exchange.base` for the contract."""
