"""Every exception that `odb` raises on purpose.

    ODBError
    |-- ConfigError (ValueError)          an option is wrong, unknown or contradicts another one
    |-- MeasureError (ValueError)         a sample can't be measured, is empty, too long, or was measured wrongly
    |-- SampleError (RuntimeError)        producing a sample failed and its own exception can't be rebuilt here
    |-- ChannelClosed (ConnectionError)   the process at the other end of a channel is gone
    |-- ProcessDied (RuntimeError)        a process of ours ended without saying why
    `-- ExchangeError (RuntimeError)      the ranks can't go on together
        |-- DisagreementError             ranks run with different settings, data or plans
        |-- PeerFailedError               another rank failed and said why
        |-- PeerClosedError               another rank left the epoch, and this one asked for more of it
        |-- PeerLostError                 another rank vanished without a word
        `-- ExchangeTimeout (TimeoutError) a rank neither answered nor said that it is busy

User mistakes are `ValueError`s so that existing handlers keep working; `assert` is kept for our own mistakes.
"""

from __future__ import annotations


class ODBError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ODBError, ValueError):
    """An option is wrong, unknown, or contradicts another one."""


class MeasureError(ODBError, ValueError):
    """A processed sample can't be measured, is empty or too long, or its measure turned out to be wrong."""


class SampleError(ODBError, RuntimeError):
    """Producing or collating a sample failed; the text holds the original type, message and traceback."""


class ChannelClosed(ODBError, ConnectionError):
    """The process at the other end of a channel is gone."""


class ProcessDied(ODBError, RuntimeError):
    """A process of ours ended without saying why; the text names it and its exit code or signal."""


class ExchangeError(ODBError, RuntimeError):
    """The ranks can't go on together. `ranks` names the culprits where they are known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[ExchangeError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class DisagreementError(ExchangeError):
    """Ranks run with different settings, different data or different plans."""


class PeerFailedError(ExchangeError):
    """Another rank failed; the text carries its type, message and traceback."""


class PeerClosedError(ExchangeError):
    """Another rank left the epoch, and this rank asked for a batch that can't be planned any more."""


class PeerLostError(ExchangeError):
    """Another rank vanished without a word."""


class ExchangeTimeout(ExchangeError, TimeoutError):
    """A rank neither answered within the time limit nor said that it waits for its consumer."""
