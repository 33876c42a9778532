"""The loader's state: its format, how it is made, and what is refused when it is loaded.

A state describes the last batch that was handed to the caller, never prefetched work. It is plain JSON, has the same
keys for the loader's life, holds identities of at most a window (run-length coded), and is local to a rank: all ranks
save after the same step. `gather` makes one state of all ranks' states, which also resumes on another number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from odb.errors import ConfigError
from odb.exchange.rendezvous import exchange_texts
from odb.feed.engine import ResumePoint, RoundMark
from odb.feed.source import Level, remaining
from odb.plan.types import I64, Measures, RoundState

#: Of the format. A state of another version is refused.
STATE_VERSION = 2


def encode_ids(ids: Iterable[int]) -> str:
    """Integers as a short text: the steps from one to the next, runs of equal steps once ("100 2x3": 100 102 104 106)."""
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    if not len(values):
        return ""
    steps = np.diff(values, prepend=0)
    firsts = np.flatnonzero(np.diff(steps, prepend=steps[0] + 1))
    counts = np.diff(firsts, append=len(steps))
    runs = zip(steps[firsts].tolist(), counts.tolist(), strict=True)
    return " ".join(f"{step}x{count}" if count > 1 else str(step) for step, count in runs)


def decode_ids(text: str) -> I64:
    """The integers that `encode_ids` was given, shape (n,)."""
    runs = [(int(step), int(count or 1)) for step, _, count in (run.partition("x") for run in text.split())]
    steps, counts = np.array(runs, np.int64).reshape(-1, 2).T
    return np.cumsum(np.repeat(steps, counts))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ids(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool((decode_ids(value) >= 0).all())
    except (ValueError, OverflowError):
        return False


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_item, value))


def _is_row(value: Any) -> bool:
    return _is_list(value, _is_count) and len(value) == 3


def _is_level(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_list(value[0], _is_count) and _is_ids(value[1])


def _is_settings(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(part, str) for pair in value.items() for part in pair)


#: Numbers of `RoundState` that say how far a shared order was granted and used.
_LEDGER = ("num_keys", "next_key", "num_granted", "num_drawn")


def _is_ledger(value: Any) -> bool:
    """None where shares are fixed."""
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {*_LEDGER, "waiting"}
        and all(_is_count(value[name]) for name in _LEDGER)
        and _is_list(value["waiting"], lambda block: _is_list(block, _is_count) and len(block) == 2)
    )


#: What stands under each key of a local state.
_KEYS: dict[str, Callable[[Any], bool]] = {
    "version": _is_count,
    "rank": _is_count,
    "world_size": _is_count,
    "epoch": _is_count,
    "step": _is_count,
    "is_last": lambda value: isinstance(value, bool),
    "stand_in": lambda value: type(value) is int,
    "round": _is_count,
    "cursor": _is_count,
    "pending": lambda value: _is_list(value, _is_ids),
    "partial": lambda value: _is_list(value, _is_row),
    "carry": _is_ids,
    "age": _is_ids,
    "observed_samples": _is_count,
    "observed_tokens": _is_count,
    "emitted_samples": _is_count,
    "all_emitted_samples": _is_count,
    "agreement_digest": lambda value: type(value) is int,
    "ledger": _is_ledger,
    "levels": lambda value: _is_list(value, _is_level),
    "order_digest": lambda value: isinstance(value, str),
    "sampler_epoch": lambda value: value is None or _is_count(value),
    "settings": _is_settings,
}

State = dict[str, Any]


class Loader(Protocol):
    """What `gather` asks of an `ODBDataLoader`."""

    config: Any

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def state_dict(self) -> State: ...


def capture(
    mark: RoundMark | None,
    last_step: int,
    *,
    epoch: int,
    rank: int,
    world_size: int,
    grad_accum_steps: int,
    levels: tuple[Level, ...],
    order_digest: str,
    sampler_epoch: int | None,
    settings: dict[str, str],
) -> State:
    """The state after step `last_step` of an epoch, from the mark of that step's round (None: before the first)."""
    common: State = {
        "version": STATE_VERSION,
        "rank": rank,
        "world_size": world_size,
        "levels": [[list(one.cursors), encode_ids(one.extra)] for one in levels],
        "order_digest": order_digest,
        "sampler_epoch": sampler_epoch,
        "settings": dict(settings),
    }
    if mark is None:
        return common | _point_fields(_fresh(epoch), epoch)
    num_taken = max(0, last_step - mark.first_step + 1)
    pending = mark.groups[num_taken:]
    rows = np.concatenate([mark.partial, mark.totals[:num_taken]])
    num_partial = len(rows) % grad_accum_steps if pending else 0
    partial = rows[len(rows) - num_partial :]
    stand_in = int(mark.stand_ins[num_taken])
    point = ResumePoint(pending, partial, mark.state, mark.cursor, mark.is_last, stand_in, waiting=mark.waiting)
    return common | _point_fields(point, epoch)


def _fresh(epoch: int) -> ResumePoint:
    return ResumePoint((), np.zeros((0, 3), np.int64), RoundState.start(epoch), 0, False)


def _point_fields(point: ResumePoint, epoch: int) -> State:
    state = point.state
    return {
        "epoch": epoch,
        "step": state.step - len(point.pending),
        "is_last": point.is_last,
        "stand_in": point.stand_in,
        "round": state.round,
        "cursor": point.cursor,
        "pending": [encode_ids(ids) for ids in point.pending],
        "partial": point.partial.tolist(),
        "carry": encode_ids(state.window.ids),
        "age": encode_ids(state.age),
        "observed_samples": state.observed_samples,
        "observed_tokens": state.observed_tokens,
        "emitted_samples": state.emitted_samples,
        "all_emitted_samples": state.all_emitted_samples,
        "agreement_digest": state.agreement_digest,
        "ledger": _ledger_fields(point),
    }


def measure_settings(config: Any) -> dict[str, str]:
    """How samples are measured: another way gives other lengths and weights, so other plans. Functions by name."""
    functions = {name: getattr(config, name) for name in ("length_fn", "loss_tokens_fn", "patches_fn")}
    out = {name: "None" if fn is None else _name_of(fn) for name, fn in functions.items()}
    return out | {"ignore_index": repr(config.ignore_index), "label_shift": repr(config.label_shift)}


def _name_of(fn: Any) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def _ledger_fields(point: ResumePoint) -> dict[str, Any] | None:
    """Where the shared order is granted round by round: how far, and what this rank has not used of it."""
    state = point.state
    if state.num_keys < 0:
        return None
    numbers = {name: getattr(state, name) for name in _LEDGER}
    return numbers | {"waiting": [list(block) for block in point.waiting]}


def _with_ledger(point: ResumePoint, fields: dict[str, Any] | None) -> ResumePoint:
    if fields is None:
        return point
    blocks = tuple((int(first), int(end)) for first, end in fields["waiting"])
    state = replace(point.state, **{name: fields[name] for name in _LEDGER})
    return replace(point, state=state, waiting=blocks)


def point_of(state: State) -> ResumePoint | None:
    """Where the epoch goes on; None at its start."""
    if not (state["pending"] or state["round"]):
        return None
    carry = decode_ids(state["carry"])
    nothing = np.zeros(len(carry), np.int64)  # measured again when the samples are read again
    point = ResumePoint(
        pending=tuple(decode_ids(ids) for ids in state["pending"]),
        partial=np.array(state["partial"], np.int64).reshape(-1, 3),
        state=RoundState(
            epoch=state["epoch"],
            round=state["round"],
            window=Measures(carry, nothing, nothing, nothing, nothing),
            age=decode_ids(state["age"]),
            observed_samples=state["observed_samples"],
            observed_tokens=state["observed_tokens"],
            emitted_samples=state["emitted_samples"],
            all_emitted_samples=state["all_emitted_samples"],
            step=state["step"] + len(state["pending"]),
            agreement_digest=state["agreement_digest"],
        ),
        cursor=state["cursor"],
        is_last=state["is_last"],
        stand_in=state["stand_in"],
        is_stream=state["settings"]["shares"] == "iterable",
    )
    return _with_ledger(point, state["ledger"])


def check_state(state: Any) -> State:
    """A deep copy of a state, if it is one.

    Raises:
        ConfigError: no state of an odb loader, or one of another version; the text says what was found.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise ConfigError(
            f"this is no state of an odb loader: got {type(state).__name__}, expected loader.state_dict()"
        )
    if state["version"] != STATE_VERSION:
        raise ConfigError(
            f"this state has version {state['version']!r}, this package reads version {STATE_VERSION}: resume with the "
            "version of odb that saved it, or start the epoch anew (set_epoch)"
        )
    if "refused" in state:
        raise ConfigError(str(state["refused"]))
    if "ranks" in state:
        return merge(state["ranks"])
    missing, unknown = sorted(_KEYS - state.keys()), sorted(state.keys() - _KEYS)
    if missing or unknown:
        raise ConfigError(f"this state is damaged: missing keys {missing}, unknown keys {unknown}")
    wrong = [f"{key}={state[key]!r:.60}" for key, is_right in _KEYS.items() if not is_right(state[key])]
    if wrong or len(decode_ids(state["age"])) != len(decode_ids(state["carry"])):
        raise ConfigError(f"this state is damaged: {', '.join(wrong) or 'age and carry differ in length'}")
    copy: State = json.loads(json.dumps(state))
    return copy


def check_fits(state: State, *, rank: int, world_size: int, settings: dict[str, str]) -> None:
    """Refuses a local state that belongs elsewhere.

    Raises:
        ConfigError: another number of ranks, another rank, or another setting that changes plans. The text shows both
            sides and the remedy.
    """
    if state["world_size"] != world_size:
        raise ConfigError(
            f"this state was saved on {state['world_size']} data-parallel ranks, this run has {world_size}: load the "
            "state that odb.resume.gather(loader) gave, or that odb.resume.merge makes of all ranks' states"
        )
    if state["rank"] != rank:
        raise ConfigError(
            f"this is the state of rank {state['rank']}, loaded on rank {rank}: save and load one state per rank, or "
            "one for all with odb.resume.gather(loader)"
        )
    if world_size > 1 and state["round"] and settings.get("tail") == repr("skip"):
        raise ConfigError(
            "tail='skip' gives ranks different numbers of steps, so that ranks which stop together are at different "
            "places: such an epoch can't be resumed in its middle. Use tail='filler', or start the epoch anew (set_epoch)"
        )
    saved = state["settings"]
    names = sorted((saved.keys() | settings.keys()) - {"sharding"})  # see `check_sharding`
    differing = [k for k in names if saved.get(k) != settings.get(k)]
    if differing:
        sides = "; ".join(f"{k}: saved {saved.get(k, 'nothing')}, now {settings.get(k, 'nothing')}" for k in differing)
        raise ConfigError(
            f"the state was saved with other settings ({sides}): the rest of the epoch would not be the one that was "
            "interrupted. Use the saved settings, or start the epoch anew (set_epoch)"
        )


def check_sharding(state: State, is_elastic: bool) -> None:
    """Refuses to go on in the middle of an epoch whose samples were shared out otherwise.

    Raises:
        ConfigError: shows both sides and the remedy.
    """
    was_elastic = state["ledger"] is not None
    if state["round"] and was_elastic != is_elastic:
        names = {True: "elastic", False: "static"}
        raise ConfigError(
            f"the state was saved with {names[was_elastic]} sharding, this loader's is {names[is_elastic]}: give "
            f"sharding={names[was_elastic]!r}, or start the epoch anew (set_epoch)"
        )


def check_order(state: State, order_digest: str) -> None:
    """Refuses to go on in the middle of an order that the sampler does not give any more.

    Raises:
        ConfigError: shows both digests and the remedy.
    """
    if state["round"] and state["order_digest"] != order_digest:
        raise ConfigError(
            f"the sampler gives another order than when the state was saved (digest {state['order_digest']}, now "
            f"{order_digest}): its order must depend on the epoch alone. Give DistributedSampler, or a sampler that is "
            "seeded from set_epoch, or no sampler, so that odb's own order by seed and epoch is used; and call set_epoch as "
            "the interrupted run did"
        )


def merge(states: list[State]) -> State:
    """One state of all ranks' states, in any order. Resumes on the same number of ranks, or on another.

    Raises:
        ConfigError: a rank is missing or there twice, or the states were not saved after the same step.
    """
    checked = sorted((check_state(one) for one in states), key=lambda one: int(one["rank"]))
    if not checked:
        raise ConfigError("merge needs the states of all ranks, got none")
    world_size = checked[0]["world_size"]
    ranks = [one["rank"] for one in checked]
    if ranks != list(range(world_size)):
        raise ConfigError(f"merge needs the states of ranks 0 to {world_size - 1}, got those of ranks {ranks}")
    for name in ("epoch", "step", "world_size"):
        values = [one[name] for one in checked]
        if len(set(values)) > 1:
            raise ConfigError(f"the states were not saved after the same step: {name} is {values} on ranks {ranks}")
    return {"version": STATE_VERSION, "ranks": checked}


def refused(reason: str) -> State:
    """A state that no loader takes: loading it raises `ConfigError(reason)`, and tells the other ranks."""
    return {"version": STATE_VERSION, "refused": reason}


def gather(loader: Loader) -> State:
    """`merge` of all ranks' states, on every rank. The one collective of this module: call it on all ranks."""
    texts = exchange_texts(json.dumps(loader.state_dict()), loader.rank, loader.world_size, loader.config.timeout_s)
    return merge([json.loads(text) for text in texts])


def resized(state: State, rank: int, world_size: int) -> State:
    """What one of `world_size` ranks loads of a merged state that was saved on another number of ranks.

    Every view that no rank had emitted is read exactly once; steps that were agreed on are planned anew.
    """
    ranks: list[State] = state["ranks"]
    extra = [i for one in ranks for ids in (*one["pending"], one["carry"]) for i in decode_ids(ids).tolist()]
    cursors, waiting = _used(ranks)
    level = [cursors, encode_ids(sorted([*extra, *waiting]))]
    first = ranks[0]
    fresh = _point_fields(_fresh(first["epoch"]), first["epoch"])
    return first | fresh | {"rank": rank, "world_size": world_size, "levels": [*first["levels"], level]}


def _used(ranks: list[State]) -> tuple[list[int], list[int]]:
    """How much of the order is used up, share by share, and identities of what was granted and not read."""
    first = ranks[0]
    if first["ledger"] is None:
        return [one["cursor"] for one in ranks], []
    shared = remaining(int(first["settings"]["num_samples"]), levels_of(first))
    blocks = [block for one in ranks for block in one["ledger"]["waiting"]]
    return [first["ledger"]["next_key"]], [i for start, end in blocks for i in shared[start:end].tolist()]


def levels_of(state: State) -> tuple[Level, ...]:
    """The interruptions of the state's epoch on other numbers of ranks."""
    return tuple(Level(tuple(cursors), tuple(decode_ids(extra).tolist())) for cursors, extra in state["levels"])
