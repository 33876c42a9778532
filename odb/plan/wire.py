"""A report as a row of int64, and digests that fit into one int64."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from odb.errors import DisagreementError
from odb.plan.types import I64, NUM_QUANTILES, Report, ReportTable, Status

#: Raised whenever the meaning of a row changes, so that mixed installations find out in the first round.
WIRE_VERSION = 2

_FIELDS = (
    "epoch",
    "round",
    "status",
    "num_held",
    "num_groups",
    "held_tokens",
    "observed_samples",
    "observed_tokens",
    "emitted_samples",
    "config_digest",
    "agreement_digest",
    "num_keys",
    "next_key",
    "num_granted",
    "num_drawn",
)

_STATUSES = frozenset(int(status) for status in Status)

#: int64 values of a row: version, fields, quantiles.
ROW_WIDTH = 1 + len(_FIELDS) + NUM_QUANTILES


def encode(report: Report) -> I64:
    """The row of a report, shape (ROW_WIDTH,)."""
    values = [WIRE_VERSION, *(int(getattr(report, name)) for name in _FIELDS), *report.cost_quantiles]
    assert len(values) == ROW_WIDTH, len(values)
    return np.array(values, np.int64)


def decode(row: I64, rank: int) -> Report:
    """The report in a row that came from `rank`.

    Raises:
        DisagreementError: the row has another version or width, or a status that does not exist.
    """
    if row.ndim != 1 or not len(row) or row[0] != WIRE_VERSION or len(row) != ROW_WIDTH:
        version = int(row.flat[0]) if row.size else None
        raise DisagreementError(
            f"rank {rank} sent a report of version {version} and shape {row.shape}, expected version {WIRE_VERSION} "
            f"and shape ({ROW_WIDTH},); install the same version of odb on all ranks",
            (rank,),
        )
    values = dict(zip(_FIELDS, row[1 : 1 + len(_FIELDS)].tolist(), strict=True))
    if values["status"] not in _STATUSES:
        raise DisagreementError(f"rank {rank} sent an unknown status {values['status']}", (rank,))
    values["status"] = Status(values["status"])
    return Report(**values, cost_quantiles=tuple(row[1 + len(_FIELDS) :].tolist()))


def decode_all(rows: I64) -> tuple[Report, ...]:
    """The reports of all ranks from the gathered rows, shape (W, ROW_WIDTH). Raises as `decode` does."""
    return tuple(decode(row, rank) for rank, row in enumerate(rows))


def decode_table(rows: I64) -> ReportTable:
    """The same as columns: what thousands of ranks sent is checked and read at once. Raises as `decode` does."""
    if rows.ndim != 2 or rows.shape[1] != ROW_WIDTH or (rows[:, 0] != WIRE_VERSION).any():
        return ReportTable.of(decode_all(rows))
    columns = dict(zip(_FIELDS, np.ascontiguousarray(rows[:, 1 : 1 + len(_FIELDS)].T), strict=True))
    table = ReportTable(**columns, cost_quantiles=rows[:, 1 + len(_FIELDS) :])
    if not np.isin(table.status, list(_STATUSES)).all():
        return ReportTable.of(decode_all(rows))
    return table


def digest(text: str, *more: bytes) -> int:
    """A number in 0..2**63-1 that stands for a text, and for bytes beside it."""
    state = hashlib.blake2b(text.encode(), digest_size=8)
    for part in more:
        state.update(b"%d:" % len(part) + part)
    return int.from_bytes(state.digest(), "little") >> 1


def digest_of(facts: Mapping[str, str]) -> int:
    """The digest of named facts, whatever order they come in."""
    return digest("\n".join(f"{name}={facts[name]!r}" for name in sorted(facts)))
