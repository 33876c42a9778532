"""The public loader: `ODBDataLoader`, and `wrap` and `apply` for a `DataLoader` that exists already."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from odb import resume
from odb.collators import BlockMaskCollator, FlattenCollator, PadCollator, PerSample
from odb.config import OPTION_NAMES, ODBConfig, make_config
from odb.errors import ConfigError
from odb.exchange.gloo import GlooAddress, report_failure
from odb.exchange.rendezvous import admit_peers, global_rank_and_size, refuse, refuse_at_exit, rendezvous
from odb.feed import supervise
from odb.feed.backend import (
    Backend,
    InlineBackend,
    ProcessBackend,
    close_collected,
    failure_text,
    what_ends_the_program,
)
from odb.feed.elastic import ENDLESS, shared_order, why_static
from odb.feed.engine import ResumePoint, RoundMark
from odb.feed.messages import Counts
from odb.feed.node import NodeSpec, measurer_of
from odb.feed.source import Level, Order, Reading, SourceConfig, set_epoch
from odb.metrics import LoaderStats
from odb.plan import grants
from odb.plan.wire import digest
from odb.resume import State
from odb.step import STEP_INFO_KEY, ODBStepInfo

logger = logging.getLogger("odb")

#: Keyword arguments that mean what `torch.utils.data.DataLoader` says.
LOADER_NAMES = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
_DEFAULT_PREFETCH = 64
_MAX_UNSIZED_KEYS = 1 << 25
_MAX_EXTRA = 1 << 16  # indices that a sampler may give beyond twice its length and not be endless


class ODBDataLoader:
    """Batches under a token budget, decided after preprocessing, the same number on every rank.

    A plain iterable (no `torch.utils.data.DataLoader`), so that frameworks leave it alone.

    Args:
        dataset: map-style or iterable; gives processed single samples.
        shuffle: shuffle `odb`'s own order (by `seed` and epoch). Only without a sampler.
        sampler: this rank's own share, used as it is. `DistributedSampler` is understood.
        batch_sampler: flattened; its batches are not used.
        num_workers: processes that read the dataset. 0: everything runs in this process, one sample after another.
        collate_fn: samples of one group -> batch; runs in the collate process. None: `odb.collators.PadCollator`, in the
            packed layout `FlattenCollator`, or `BlockMaskCollator` with several rows a batch.
        prefetch_factor: *samples* that each worker may work ahead (64).
        batch_size: ignored; said once in the log where it is not None or 1.
        pin_memory, timeout, worker_init_fn, multiprocessing_context, generator, persistent_workers: as in PyTorch.
        **options: see `odb.ODBConfig`; `config=ODBConfig(...)` instead of them.

    Raises:
        ConfigError: an unknown or wrong option; the text names the right one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        **options: Any,
    ) -> None:
        self.config: ODBConfig = make_config(options, LOADER_NAMES)
        _check_workers(num_workers, prefetch_factor, persistent_workers, timeout)
        _check_order(dataset, shuffle, sampler, batch_sampler)
        for name, value in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
            if value is not None and not callable(value):
                raise ConfigError(f"{name} must be callable or None, got {value!r}")
        if batch_size not in (None, 1):
            logger.info("batch_size=%r is not used: token_budget decides how many samples a batch holds", batch_size)
        if not in_order:
            logger.info("in_order=False is not used: batches depend on lengths, never on which worker is faster")
        self.dataset = dataset
        self.batch_size = None
        self.num_workers = num_workers
        self.drop_last = self.config.drop_last
        self.pin_memory = pin_memory
        self.generator = generator
        self.collate_fn = collate_fn if collate_fn is not None else _default_collator(self.config)
        _check_collator(self.collate_fn, self.config)
        self._shuffle = bool(shuffle)
        self._user_sampler, self._user_batch_sampler = sampler, batch_sampler
        self.sampler = _EpochSampler(self, sampler, batch_sampler)
        self._epoch = 0
        self._stats = LoaderStats()
        self._backend: Backend | None = None
        self._iterator: weakref.ref[_EpochIterator] | None = None
        self._is_closed = False
        _speak_at_exit()
        self._address: GlooAddress | None = None
        self._mark: RoundMark | None = None
        self._mark_epoch: int | None = None  # of the pass that the state is about; None: no pass since set_epoch
        self._last_step = -1
        self._levels: tuple[Level, ...] = ()
        self._order_digest = ""
        self._num_keys = 0  # of the user's sampler in an earlier pass, at most
        self._sampler_epoch: int | None = None  # what the user's sampler was told last
        self._loaded: State | None = None
        self._has_warned_duplicates = False
        self._has_warned_oversize = False
        self._has_said_static = False
        self._context = multiprocessing_context
        self._source = SourceConfig(
            dataset=dataset,
            reading=Reading(
                measurer_of(self.config),
                self.config.on_sample_error,
                collate_fn.process if isinstance(collate_fn, PerSample) else None,
            ),
            num_workers=num_workers,
            prefetch_samples=_DEFAULT_PREFETCH if prefetch_factor is None else prefetch_factor,
            persistent_workers=persistent_workers,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=_start_method(multiprocessing_context),
            timeout=timeout,
        )

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        """One epoch of batches; ends an epoch that is still open. Mappings carry their `ODBStepInfo`."""
        return self._begin(attach=True)

    def steps(self) -> Iterator[tuple[Any, ODBStepInfo]]:
        """One epoch of `(batch, info)`, for batches of any kind; nothing is added to the batch."""
        return self._begin(attach=False)

    def _begin(self, *, attach: bool) -> _EpochIterator:
        if self._is_closed:
            raise RuntimeError("this loader is closed; make a new one")
        previous = self._iterator() if self._iterator is not None else None
        if previous is not None:
            previous.close()
        start = time.perf_counter()
        backend = self._ensure_backend()
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        with self._telling_peers():
            order, point = self._resumed(self._make_order())
        generation = backend.begin(order, base_seed, point)
        self._mark, self._mark_epoch, self._last_step = self._mark_at(order, point)
        self._levels, self._loaded = order.levels, None
        self._epoch += 1
        iterator = _EpochIterator(self, backend, generation, attach, start)
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Unknown before the epoch is over: raises `TypeError`."""
        raise TypeError(
            "the number of batches is not known before preprocessing has shown the lengths: count epochs or samples "
            "(info.all_samples_this_step), or give your trainer max_steps; len(loader.dataset) is the number of samples"
        )

    def __bool__(self) -> bool:
        """True: `if loader:` asks whether there is one, not for its length."""
        return True

    # ---- epochs, life

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch` (a pass, finished or broken off, advances it by one)."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"set_epoch needs an integer >= 0, got {epoch!r}")
        if self._loaded is not None and self._loaded["epoch"] != epoch:
            logger.warning(
                "set_epoch(%d) gives up the loaded state of epoch %d: the next pass starts anew",
                epoch,
                self._loaded["epoch"],
            )
            self._loaded = None
        self._epoch = epoch
        self._forget_pass()
        self._tell_samplers(epoch)

    def _tell_samplers(self, epoch: int) -> None:
        self._sampler_epoch = epoch
        for target in (self._user_sampler, self._user_batch_sampler):  # their own epoch is theirs until told here
            set_epoch(target, epoch)
            set_epoch(getattr(target, "sampler", None), epoch)

    def _forget_pass(self) -> None:
        """From here on the state is about the pass to come."""
        self._mark, self._mark_epoch, self._last_step, self._levels = None, None, -1, ()

    def state_dict(self) -> State:
        """Where this rank's loader is: behind the last batch that was handed over. Local, JSON, small (see `odb.resume`).

        All ranks save after the same step; each loads its own, or all load `odb.resume.gather(loader)`. Behind the
        last batch of an epoch the rest of it is empty; once the loop has ended, the next epoch is what comes.
        """
        if self._loaded is not None:
            return resume.check_state(self._loaded)
        return resume.capture(
            self._mark,
            self._last_step,
            epoch=self._epoch if self._mark_epoch is None else self._mark_epoch,
            rank=self.rank,
            world_size=self.world_size,
            grad_accum_steps=self.config.grad_accum_steps,
            levels=self._levels,
            order_digest=self._order_digest,
            sampler_epoch=self._sampler_epoch,
            settings=self._state_settings(),
        )

    def load_state_dict(self, state: State) -> None:
        """Goes on behind the batch that the state describes; takes effect at the next `iter()`. Copies its argument.

        Raises:
            ConfigError: another version, rank, number of ranks, or setting that changes plans; shows both sides.
        """
        with self._telling_peers():
            state = self._own_state(resume.check_state(state))
            resume.check_fits(state, rank=self.rank, world_size=self.world_size, settings=self._state_settings())
        self._epoch = state["epoch"]
        if state["sampler_epoch"] is not None:
            self._tell_samplers(state["sampler_epoch"])
        self._loaded = state

    def _own_state(self, state: State) -> State:
        """This rank's part of a state of all ranks; any other state as it is."""
        if "ranks" not in state:
            return state
        saved, world_size = len(state["ranks"]), self.world_size
        if saved == world_size:
            own: State = state["ranks"][self.rank]
            return own
        if self.config.oversize_policy == "split":
            raise ConfigError(
                f"a state of {saved} ranks can't go on with {world_size} where on_oversize='split' cut samples into pieces, "
                "some of which were used: resume on the same number of ranks, or start the epoch anew (set_epoch)"
            )
        if self._order_kind() == "own" and self.config.join:
            return resume.resized(state, self.rank, world_size)
        raise ConfigError(
            f"a state of {saved} ranks can go on with {world_size} only where odb makes the order itself (map-style "
            "dataset, no sampler, join=True): resume on the same number of ranks, or start the epoch anew (set_epoch)"
        )

    @contextmanager
    def _telling_peers(self) -> Iterator[None]:
        """What goes wrong on this rank alone must not leave the others waiting."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if self._backend is None:
                refuse(reason, self.config.dp_rank, self.config.dp_world_size)
            elif self._address is not None:
                report_failure(self._address, reason)
            raise

    def _state_settings(self) -> dict[str, str]:
        """What must be equal before and after a resume."""
        settings = self._settings() | resume.measure_settings(self.config)
        if self._order_kind() != "iterable":
            return settings
        stream = (
            f"{self.num_workers} workers, {self._source.chunk} samples a task"  # gives the order in which samples come
        )
        return settings | {"stream": stream}

    def _settings(self) -> dict[str, str]:
        return self.config.plan_config().signature() | self._data_fingerprint()

    def _resumed(self, order: Order) -> tuple[Order, ResumePoint | None]:
        """The order and the place at which the next epoch starts."""
        keys = order.keys if order.common is None else order.common
        plain = keys.tolist() if isinstance(keys, np.ndarray) else keys
        self._order_digest = "" if plain is None else str(digest(repr(list(plain))))
        state = self._loaded
        if state is None:
            return self._started(order), None
        resume.check_sharding(state, order.is_elastic)
        resume.check_order(state, self._order_digest)
        point = resume.point_of(state)
        levels = resume.levels_of(state)
        if point is None:
            return self._started(replace(order, levels=levels)), None
        order = replace(order, levels=levels, head=point.head, cursor=point.cursor, waiting=point.waiting)
        return replace(order, is_complete=0 <= point.state.num_keys <= point.state.next_key), point

    def _started(self, order: Order) -> Order:
        """An order from its start: with the first grants where it is shared."""
        if not order.is_elastic:
            return order
        num_keys = order.num_keys if order.passes else ENDLESS
        quota = self.config.sample_quota
        block = grants.first_block(num_keys, order.rank, order.world_size, quota)
        last = grants.first_block(num_keys, order.world_size - 1, order.world_size, quota)
        return replace(order, waiting=((block.start, block.stop),), is_complete=last.stop >= num_keys)

    def _mark_at(self, order: Order, point: ResumePoint | None) -> tuple[RoundMark | None, int, int]:
        """What `state_dict` starts from before the first batch of a pass is handed over."""
        if point is None:
            return None, order.epoch, -2
        first = point.state.step - len(point.pending)
        no_totals = np.zeros((len(point.pending), 3), np.int64)
        marks = np.array([point.stand_in], np.int64)
        mark = RoundMark(
            first,
            point.pending,
            no_totals,
            point.partial,
            point.state,
            point.cursor,
            point.is_last,
            marks,
            point.waiting,
        )
        return mark, order.epoch, first - 1

    @property
    def rank(self) -> int:
        """This rank among the data-parallel ones."""
        return self.config.dp_rank if self.config.dp_rank is not None else global_rank_and_size()[0]

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.config.dp_world_size if self.config.dp_world_size is not None else global_rank_and_size()[1]

    def stats(self) -> LoaderStats:
        """What this rank's loader has handed over so far. Local: talks to nobody."""
        return self._stats + LoaderStats()

    def close(self) -> None:
        """Ends the collate process and its workers. Idempotent; also done at garbage collection and at exit."""
        self._is_closed = True
        self._drop_backend()

    def _drop_backend(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if self._backend is not None:
            self._backend.close()
        self._backend = None

    _finalizer: weakref.finalize[..., Any] | None = None
    _home: tuple[int, int, int] | None = None  # process, rank and number of ranks that the backend was made for

    def __enter__(self) -> ODBDataLoader:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._backend is not None and (text := failure_text(error)):
            self._backend.close(text)  # the other ranks learn why this one leaves
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a loader can't be copied or pickled: it holds processes and its place among the ranks. Make a new one, and "
            "put it where this one is with load_state_dict(loader.state_dict())"
        )

    def __repr__(self) -> str:
        return (
            f"ODBDataLoader(token_budget={self.config.token_budget}, num_workers={self.num_workers}, "
            f"epoch={self._epoch}, dataset={type(self.dataset).__name__})"
        )

    # ---- making

    def _ensure_backend(self) -> Backend:
        home = (os.getpid(), self.rank, self.world_size)
        if self._backend is not None and self._home != home:  # forked, or the default group came or went meanwhile
            self._drop_backend()
        if self._backend is None:
            self._home = home
            backend = self._make_backend()
            self._backend = backend
            self._finalizer = weakref.finalize(self, close_collected, backend)
            supervise.at_exit(backend.close_at_exit)  # before multiprocessing waits for the collate process
            _speak_at_exit()
        return self._backend

    def _make_backend(self) -> Backend:
        start_method = self._source.multiprocessing_context or multiprocessing.get_start_method()
        forks = self.num_workers > 0 and start_method == "fork"
        spec = self._make_spec(forks)
        try:
            if self.num_workers == 0:
                return InlineBackend(spec)
            return ProcessBackend(spec, start_method, _pinner(self.pin_memory))
        finally:
            if forks and spec.address is not None:
                admit_peers(spec.address)

    def _make_spec(self, forks: bool) -> NodeSpec:
        config = self.config
        with self._telling_peers():
            fingerprint = self._settings()
        address = rendezvous(
            dp_rank=config.dp_rank,
            dp_world_size=config.dp_world_size,
            timeout_s=config.timeout_s,
            fingerprint=fingerprint,
            forks=forks,
        )
        self._address = address
        self._warn_of_lone_rank()
        return NodeSpec(
            options=config,
            source=self._source,
            collate_fn=self.collate_fn,
            address=address,
            config_digest=digest(repr(sorted(fingerprint.items()))),
        )

    def _warn_of_lone_rank(self) -> None:
        started = os.environ.get("WORLD_SIZE", "")
        if self.config.dp_world_size is None and started.isdigit() and int(started) > self.world_size == 1:
            logger.warning(
                "WORLD_SIZE=%s, but torch.distributed is not initialised: this rank reads all of the data. Call "
                "torch.distributed.init_process_group first, or give dp_rank=0, dp_world_size=1 if that is meant",
                started,
            )

    def _data_fingerprint(self) -> dict[str, str]:
        kind = self._order_kind()
        out = {"shares": kind, "sharding": "elastic" if self._is_elastic() else "static"}
        if kind == "own" or self._is_elastic():  # one order is shared: it must be the same everywhere
            out |= {"num_samples": str(len(self.dataset)), "shuffle": str(self._shuffle)}
        if kind == "sampler" and self._is_elastic():
            sampler = self._user_sampler
            out["sampler"] = repr([getattr(sampler, name) for name in ("seed", "shuffle", "drop_last")])
        return out

    def _is_elastic(self) -> bool:
        """Whether shares are granted round by round. Says once why not, where there are several ranks."""
        reason = why_static(self.config, self.dataset, self._user_sampler, self._user_batch_sampler, self.world_size)
        if reason and self.config.sharding == "elastic" and self.world_size > 1:
            raise ConfigError(f"sharding='elastic' can't be had here: {reason}. Give sharding='auto' or 'static'")
        if reason and self.config.sharding == "auto" and self.world_size > 1 and not self._has_said_static:
            self._has_said_static = True
            logger.info("sharding is static: %s", reason)
        return not reason

    def _order_kind(self) -> str:
        if isinstance(self.dataset, IterableDataset):
            return "iterable"
        return "own" if self._user_sampler is None and self._user_batch_sampler is None else "sampler"

    def _make_order(self) -> Order:
        world = self.world_size
        common: dict[str, Any] = {"epoch": self._epoch, "rank": self.rank, "world_size": world}
        passes = 0 if self.config.sample_quota is not None else 1
        kind = self._order_kind()
        if kind == "iterable":
            return Order(keys=(), **common)
        common["is_elastic"] = self._is_elastic()
        if kind == "own":
            return Order(
                num_samples=len(self.dataset), shuffle=self._shuffle, seed=self.config.seed, passes=passes, **common
            )
        if common["is_elastic"]:
            indices = shared_order(self._user_sampler)
            return Order(num_samples=len(indices), common=indices, passes=passes, **common)
        self._warn_of_duplicates(world)
        return Order(keys=self._keys(), passes=passes, **common)

    def _warn_of_oversize(self, info: ODBStepInfo) -> None:
        if not self._has_warned_oversize:
            self._has_warned_oversize = True
            logger.warning(
                "sample %s has %d padded tokens, more than token_budget=%d allows: such samples go alone (said once; "
                "stats().bound_by['oversize'] counts them). on_oversize='skip' or 'error' treats them otherwise",
                *info.sample_ids,
                info.padded_tokens,
                self.config.token_budget,
            )

    def _warn_of_quota(self) -> None:
        """Called behind an epoch's last batch."""
        quota, num = self.config.sample_quota, 0 if self._mark is None else self._mark.state.all_emitted_samples
        if quota is not None and num < quota:
            logger.warning(
                "epoch %d ended after %d samples, before sample_quota=%d: a stream has no more",
                self._epoch - 1,
                num,
                quota,
            )

    def _keys(self) -> Any:
        plan = self.config.plan_config()
        keys = _materialised(self._user_sampler, self._user_batch_sampler, self.config.sample_quota, plan.window)
        if self._num_keys and not len(keys):
            logger.warning(
                "the sampler gave no index for epoch %d and %d before: an iterator can be gone through once, give a "
                "sampler whose __iter__ begins anew",
                self._epoch,
                self._num_keys,
            )
        self._num_keys = max(self._num_keys, len(keys))
        return keys

    def _warn_of_duplicates(self, world: int) -> None:
        plain = isinstance(self._user_sampler, (RandomSampler, SequentialSampler))
        if world > 1 and plain and not self._has_warned_duplicates:
            self._has_warned_duplicates = True
            logger.warning(
                "a %s is used as this rank's own share: unless the dataset was sharded by hand, every rank reads all "
                "of it. Give a torch.utils.data.DistributedSampler, or no sampler, so that odb shards by itself",
                type(self._user_sampler).__name__,
            )

    def _on_counts(self, before: Counts | None, now: Counts) -> None:
        """Adds what an epoch's running counts have grown by."""
        stats = self._stats
        stats.rejected += Counter(now.rejected) - Counter(before.rejected if before else {})
        stats.dropped += Counter(now.dropped) - Counter(before.dropped if before else {})
        stats.cut += Counter(now.cut) - Counter(before.cut if before else {})
        stats.rounds += now.rounds - (before.rounds if before else 0)
        stats.max_held_tokens = max(stats.max_held_tokens, now.max_held_tokens)
        if now.mark is not None:
            self._mark = now.mark


class _EpochIterator:
    """One pass. Leaving it early (break, del) tells the collate process."""

    def __init__(self, loader: ODBDataLoader, backend: Backend, generation: int, attach: bool, start: float) -> None:
        self._loader = loader
        self._backend = backend
        self._generation = generation
        self._attach = attach
        self._start = start
        self._is_first = True
        self._is_over = False
        self._broken: BaseException | None = None  # what ended this pass before its end
        self._counts: Counts | None = None

    def __iter__(self) -> _EpochIterator:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            self._raise_again()
            raise StopIteration
        asked = time.perf_counter()
        try:
            delivery = self._backend.next(self._generation, self._note_counts)
        except BaseException as error:
            self._broken = error
            self.close()
            raise
        stats = self._loader._stats
        got = time.perf_counter()
        stats.wait_s += got - asked
        if self._is_first:
            self._is_first = False
            stats.first_batch_s = got - self._start
        if delivery is None:
            self._is_over = True
            self._loader._warn_of_quota()
            self._loader._forget_pass()
            raise StopIteration
        _count_step(stats, delivery.info, delivery.bound)
        if delivery.bound == "oversize":
            self._loader._warn_of_oversize(delivery.info)
        self._loader._last_step = max(self._loader._last_step, delivery.info.step)
        if not self._attach:
            return delivery.batch, delivery.info
        if isinstance(delivery.batch, MutableMapping):
            delivery.batch[STEP_INFO_KEY] = delivery.info
        return delivery.batch

    def _raise_again(self) -> None:
        """A pass that broke must not look like one that is over to whoever catches its error and goes on."""
        if isinstance(self._broken, Exception):
            raise self._broken
        if self._broken is not None:
            raise RuntimeError(
                f"this epoch was ended by {type(self._broken).__name__}: begin another"
            ) from self._broken

    def _note_counts(self, counts: Counts) -> None:
        self._loader._on_counts(self._counts, counts)
        self._counts = counts

    def close(self) -> None:
        """Leaves the epoch."""
        if not self._is_over:
            self._is_over = True
            self._backend.end(self._generation)

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            self.close()


def _count_step(stats: LoaderStats, info: ODBStepInfo, bound: str) -> None:
    if bound == "probe":
        return
    stats.steps += 1
    stats.idle_steps += info.idle
    stats.emitted_samples += info.local_samples
    stats.real_tokens += info.local_tokens
    stats.padded_tokens += 0 if info.idle else info.padded_tokens
    stats.loss_tokens += info.local_loss_tokens
    stats.bound_by[bound] += 1


def _speak_at_exit() -> None:
    """Has ranks that wait for a loader of this one told where its program fails, before any loader is closed (takes time)."""
    global _unspoken
    _unspoken()
    _unspoken = supervise.at_exit(_tell_who_waits)


def _tell_who_waits() -> None:
    if text := failure_text(what_ends_the_program()):
        refuse_at_exit(text)


def _nothing() -> None:
    """What there is to withdraw at first."""


_unspoken: Callable[[], None] = _nothing


class _EpochSampler:
    """What frameworks see as `loader.sampler`: something whose `set_epoch` reaches the loader."""

    def __init__(self, loader: ODBDataLoader, sampler: Any, batch_sampler: Any) -> None:
        self._loader = weakref.ref(loader)
        self.sampler = sampler
        self.batch_sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """The loader's next pass is epoch `epoch`."""
        loader = self._loader()
        if loader is not None:
            loader.set_epoch(epoch)


def _default_collator(config: ODBConfig) -> Callable[[list[Any]], Any]:
    """What makes batches of samples where the user gives nothing."""
    common: dict[str, Any] = {"ignore_index": config.ignore_index, "pad_to_multiple_of": config.pad_to_multiple_of}
    if config.layout == "padded":
        return PadCollator(**common)
    if config.rows_per_batch == 1:
        return FlattenCollator(**common)
    capacity = config.token_budget // config.rows_per_batch
    return BlockMaskCollator(row_capacity=capacity, max_samples=config.max_samples, **common)


def _check_collator(collate_fn: Callable[[list[Any]], Any], config: ODBConfig) -> None:
    """Refuses odb's own collators of the other layout: batches would hold many times the budget, or lose labels."""
    own = collate_fn.then if isinstance(collate_fn, PerSample) else collate_fn
    wrong = PadCollator if config.layout == "packed" else (FlattenCollator, BlockMaskCollator)
    if isinstance(own, wrong):
        fitting = "FlattenCollator or BlockMaskCollator" if config.layout == "packed" else "PadCollator"
        hint = "; per_sample takes it as then=..." if isinstance(collate_fn, PerSample) else ""
        raise ConfigError(
            f"{type(own).__name__} does not make batches of layout={config.layout!r}: use odb.collators.{fitting}{hint}, "
            "or the other layout"
        )


def _check_workers(num_workers: int, prefetch_factor: int | None, persistent: bool, timeout: float) -> None:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers must be an integer >= 0, got {num_workers!r}")
    if prefetch_factor is not None and (
        isinstance(prefetch_factor, bool) or not isinstance(prefetch_factor, int) or prefetch_factor < 1
    ):
        raise ConfigError(
            f"prefetch_factor must be an integer >= 1 (samples per worker) or None, got {prefetch_factor!r}"
        )
    if persistent and num_workers == 0:
        raise ConfigError("persistent_workers=True needs num_workers > 0")
    if timeout < 0:
        raise ConfigError(f"timeout must be >= 0 seconds, got {timeout!r}")


def _check_order(dataset: Any, shuffle: Any, sampler: Any, batch_sampler: Any) -> None:
    given = [n for n, v in (("sampler", sampler), ("batch_sampler", batch_sampler)) if v is not None]
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
            raise ConfigError(f"{name} must be iterable, got {value!r}")
    if len(given) == 2:
        raise ConfigError("give sampler or batch_sampler, not both")
    if given and shuffle:
        raise ConfigError(f"{given[0]} decides the order, shuffle=True would too: give one")
    if isinstance(dataset, IterableDataset):
        if given or shuffle:
            raise ConfigError(
                f"an iterable dataset decides its own order: {given[0] if given else 'shuffle'} can't be used with it"
            )
        return
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"dataset must be map-style (__getitem__, __len__) or a torch IterableDataset, got {type(dataset).__name__}"
        )
    if not given and not hasattr(dataset, "__len__"):
        raise ConfigError(f"a dataset without a sampler needs __len__; {type(dataset).__name__} has none")


def _start_method(context: Any) -> str | None:
    known = multiprocessing.get_all_start_methods()
    if isinstance(context, str) and context not in known:
        raise ConfigError(f"multiprocessing_context must be one of {', '.join(known)} or a context, got {context!r}")
    if context is None or isinstance(context, str):
        return context
    return str(context.get_start_method())


def _pinner(pin_memory: bool) -> Callable[[Any], Any] | None:
    if not pin_memory:
        return None
    if not torch.cuda.is_available():
        logger.info("pin_memory=True has no effect: no accelerator is available")
        return None
    return torch.Tensor.pin_memory


def _materialised(sampler: Any, batch_sampler: Any, quota: int | None, window: int) -> Any:
    """A sampler's pass as an array where it gives integers, else as a list. An endless one needs a quota."""
    given = sampler if sampler is not None else batch_sampler
    # With a quota nobody needs more than that and what is held: a further pass begins anew.
    most = _MAX_UNSIZED_KEYS if quota is None else quota + 2 * window
    flatten = itertools.chain.from_iterable
    if hasattr(given, "__len__"):  # which endless samplers may have all the same, for progress bars
        most = 2 * len(given) + max(_MAX_EXTRA, 0 if quota is None else most)
        drawn: list[Any] = list(itertools.islice(given, most))
        keys = drawn if sampler is not None else list(flatten(drawn))
    else:
        keys = drawn = list(itertools.islice(given if sampler is not None else flatten(given), most))
    if quota is None and len(drawn) == most:
        says = f"says that it has {len(given)}" if hasattr(given, "__len__") else "has no __len__"
        raise ConfigError(
            f"the sampler {says} and gave more than {most} indices or batches: an endless sampler needs join=False and "
            "sample_quota=..., which says when an epoch is over"
        )
    if keys and all(type(key) is int for key in keys):
        return np.asarray(keys, np.int64)
    return keys


def wrap(loader: DataLoader[Any], **options: Any) -> ODBDataLoader:
    """A new `ODBDataLoader` with everything that an existing `DataLoader` brings; that one stays as it was."""
    _check_is_loader(loader, "wrap")
    return ODBDataLoader(**(_brought(loader) | _without_clashes(options)))


def _check_is_loader(loader: Any, name: str) -> None:
    if isinstance(loader, ODBDataLoader) or hasattr(loader, "odb_loader"):
        raise ConfigError(f"odb.{name} was given a loader that odb batches already: use it as it is")
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"odb.{name} needs a torch.utils.data.DataLoader, got {type(loader).__name__}")


def _without_clashes(options: dict[str, Any]) -> dict[str, Any]:
    clash = [name for name in options if name in LOADER_NAMES and name not in OPTION_NAMES]
    if clash:
        raise ConfigError(f"{', '.join(clash)}: the existing DataLoader decides this; change it there")
    return options


def _brought(loader: DataLoader[Any]) -> dict[str, Any]:
    """What an existing loader brings, as arguments of ours."""
    out: dict[str, Any] = {
        "dataset": loader.dataset,
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "collate_fn": None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        out["prefetch_factor"] = max(_DEFAULT_PREFETCH, (loader.prefetch_factor or 2) * (loader.batch_size or 1))
    if isinstance(loader.dataset, IterableDataset):
        return out
    if type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None:
        out["sampler"] = loader.sampler
    else:
        out["batch_sampler"] = loader.batch_sampler
    if loader.batch_sampler is not None and loader.drop_last:
        out["drop_last"] = True
    return out


class AppliedLoader(DataLoader[Any]):
    """What `apply` turns an existing `DataLoader` into: the same object, whose batches `odb` makes."""

    odb_loader: ODBDataLoader
    _is_accelerate_prepared = (
        True  # for Accelerate's prepare(), which would else build a loader without odb of its parts
    )

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        # Frameworks make a loader of the same class with another sampler, to shard it: what `apply` did would be lost.
        raise ConfigError(
            "a framework makes this DataLoader anew, to give it a sampler of its own, but odb.apply has changed it and "
            "shards by itself: give the framework an ODBDataLoader (odb.wrap), or what its adapter makes of one "
            "(odb.integrations.lightning.attach, odb.integrations.hf, ...), or tell it not to replace samplers "
            "(Lightning: Trainer(use_distributed_sampler=False))"
        )

    def __iter__(self) -> Any:
        """One epoch of batches, by `odb`."""
        return iter(self.odb_loader)

    def __len__(self) -> int:
        """Unknown: raises `TypeError`."""
        return len(self.odb_loader)

    def __bool__(self) -> bool:
        """See `ODBDataLoader.__bool__`."""
        return True

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch `epoch`."""
        self.odb_loader.set_epoch(epoch)

    def state_dict(self) -> State:
        """See `ODBDataLoader.state_dict`."""
        return self.odb_loader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """See `ODBDataLoader.load_state_dict`."""
        self.odb_loader.load_state_dict(state)


def apply(loader: DataLoader[Any], **options: Any) -> ODBDataLoader:
    """Makes an existing `DataLoader` yield `odb`'s batches, in place; for frameworks that hold the object.

    Returns:
        The `ODBDataLoader` behind it: `stats()`, `close()`, `set_epoch()`.
    """
    handle = wrap(loader, **options)
    cls = type(loader)
    mixed = AppliedLoader if cls is DataLoader else type(f"Applied{cls.__name__}", (AppliedLoader, cls), {})
    loader.__class__ = mixed
    loader.odb_loader = handle
    return handle
