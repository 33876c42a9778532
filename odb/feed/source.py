"""Samples, measured, in the sampler's order: the inner `DataLoader`, seen from the collate process.

The inner loader is PyTorch's own, used through its public interface: the user's dataset behind a thin wrapper that
measures each sample where it is made, our index source as batch sampler (several indices a task: one hand-over costs
as much as producing a cheap sample), and a null collate that turns a chunk of samples into one block of memory.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from odb.errors import MeasureError
from odb.feed.chunk import Record
from odb.feed.granted import GrantedKeys
from odb.feed.measure import Measurer
from odb.feed.parcel import Parcel, PostOffice
from odb.feed.raised import Arriving
from odb.feed.supervise import ChildWatch, guard_against_orphaning, ignore_interrupts

MAX_CHUNK = 32  # larger ones gain nothing; the first ones are smaller, so that the first batch comes early
FIRST_CHUNK = 2
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Level:
    """What was left of an epoch when it went on with another number of ranks.

    Attributes:
        cursors: for each of the ranks at that time, how many identities of its share were used up.
        extra: identities that were used up and not emitted.
    """

    cursors: tuple[int, ...]
    extra: tuple[int, ...]


def remaining(num_samples: int, levels: Sequence[Level]) -> np.ndarray[Any, Any]:
    """Identities of one pass that are left after the interruptions in `levels`, ascending, shape (n,)."""
    ids = np.arange(num_samples, dtype=np.int64)
    for level in levels:
        shares = [ids[rank :: len(level.cursors)][cursor:] for rank, cursor in enumerate(level.cursors)]
        ids = np.sort(np.concatenate([*shares, np.array(level.extra, np.int64)]))
    return ids


@dataclass(frozen=True, slots=True)
class Order:
    """Which samples this rank reads in one epoch, and under which identities.

    Either `keys` (what a user's sampler gave) or a share of one order that all ranks compute alike: positions
    `rank, rank + world_size, ...` of `range(num_samples)`, permuted by (seed, epoch) if `shuffle`.
    """

    epoch: int
    rank: int = 0
    world_size: int = 1
    keys: Sequence[Any] | np.ndarray[Any, Any] | None = None
    num_samples: int = 0
    shuffle: bool = False
    seed: int = 0
    passes: int = 1  # how often the order is gone through; 0: without end (a sample quota ends the epoch)
    head: tuple[int, ...] = ()  # identities to read first: planned or carried when the state was saved
    cursor: int = 0  # then go on behind this many keys
    levels: tuple[Level, ...] = ()  # interruptions of this epoch on other numbers of ranks
    is_elastic: bool = False  # who reads which position is granted round by round, see `odb.plan.grants`
    common: np.ndarray[Any, Any] | None = None  # dataset indices by position, where a sampler gave the shared order
    waiting: tuple[tuple[int, int], ...] = ()  # elastic: first and end of each block of keys to read behind `head`
    is_complete: bool = False  # elastic: nothing will be granted behind them

    @property
    def pass_length(self) -> int:
        """Keys of one pass of this rank; of all ranks together where it is elastic."""
        if self.is_elastic:
            return len(self.shared())
        return len(self.keys) if self.keys is not None else len(self._share())

    def shared(self) -> np.ndarray[Any, Any] | range:
        """Identities of one pass in the order in which they are granted."""
        return remaining(self.num_samples, self.levels) if self.levels else range(self.num_samples)

    @property
    def num_left(self) -> int | None:
        """Keys that are read from here on; None: without end."""
        if not self.passes:
            return None
        return len(self.head) + max(0, self.num_keys - self.cursor)

    @property
    def num_keys(self) -> int:
        """Keys of the whole epoch on this rank, those before `cursor` included."""
        return self.passes * self.pass_length

    def _share(self) -> np.ndarray[Any, Any] | range:
        """This rank's positions in one pass of the common order."""
        if self.levels:
            return remaining(self.num_samples, self.levels)[self.rank :: self.world_size]
        return range(self.rank, self.num_samples, self.world_size)

    def pass_keys(self, number: int) -> tuple[np.ndarray[Any, Any], Sequence[Any] | np.ndarray[Any, Any]]:
        """Identities and dataset indices of one pass, shapes (n,) and (n,)."""
        if self.keys is not None:
            n = len(self.keys)
            ids = (np.arange(n, dtype=np.int64) + number * n) * self.world_size + self.rank
            return ids, self.keys
        positions = np.asarray(self._share(), np.int64)
        return positions + number * self.num_samples, permutation(self, number)[positions]


def permutation(order: Order, number: int) -> np.ndarray[Any, Any]:
    """Global order of one pass: position -> dataset index, shape (num_samples,). The same on all ranks."""
    if order.common is not None:
        return order.common
    if not order.shuffle:
        return np.arange(order.num_samples, dtype=np.int64)
    key = np.random.SeedSequence([order.seed, order.epoch, number]).generate_state(2, np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(order.num_samples)


class IndexSource:
    """Batch sampler of the inner loader: chunks of (epoch, identity, index). Never blocks, never runs dry early.

    Chunks go to the workers in turn. They are small at first, so that the first batch comes early, and share out evenly
    what is left in the end, so that no worker has a whole chunk to make while the others are done.
    """

    def __init__(self, max_chunk: int, num_workers: int) -> None:
        self.max_chunk = max_chunk
        self.num_workers = max(1, num_workers)
        self.order = Order(epoch=0, keys=())
        self.granted = GrantedKeys()

    def __iter__(self) -> Iterator[list[tuple[int, int, Any]]]:
        order = self.order
        if order.is_elastic:
            yield from self._granted_chunks(order)
            return
        keys, left, made, size = self._keys(order), order.num_left, 0, 0
        while True:
            if made % self.num_workers == 0:
                size = self._size(made, left)
            chunk = list(islice(keys, size))
            if not chunk:
                return
            yield chunk
            made += 1
            left = None if left is None else left - len(chunk)

    def _size(self, made: int, left: int | None) -> int:
        """Of the next chunk, where so many were made and so many keys are known to be left."""
        grown = FIRST_CHUNK << min(made // (4 * self.num_workers), 16)
        share = self.max_chunk if left is None else -(-left // self.num_workers)
        return max(1, min(self.max_chunk, grown, share))

    def _granted_chunks(self, order: Order) -> Iterator[list[tuple[int, int, Any]]]:
        """Chunks of what is granted so far; an empty one where nothing is."""
        head = list(_head_keys(order))
        for first in range(0, len(head), self.max_chunk):
            yield head[first : first + self.max_chunk]
        shared, passes, made, size = order.shared(), _Passes(order), 0, 0
        while True:
            if made % self.num_workers == 0:
                size = self._size(made, self.granted.num_left)
            positions = self.granted.take(size)
            if positions is None:
                return
            made += bool(positions)
            yield [(order.epoch, *passes.key(position, shared)) for position in positions]

    @staticmethod
    def _keys(order: Order) -> Iterator[tuple[int, int, Any]]:
        yield from _head_keys(order)
        length = order.pass_length
        if not length:
            return
        number, skip = divmod(order.cursor, length)
        while not order.passes or number < order.passes:
            ids, keys = order.pass_keys(number)
            for first in range(skip, length, _BLOCK):  # as plain integers a long pass would take many times its memory
                block = slice(first, first + _BLOCK)
                plain = keys[block].tolist() if isinstance(keys, np.ndarray) else keys[block]
                for identity, key in zip(ids[block].tolist(), plain, strict=True):
                    yield order.epoch, identity, key
            number, skip = number + 1, 0


class _Passes:
    """Positions in the shared order, pass by pass, as identities and dataset indices."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._number = -1
        self._indices = np.empty(0, np.int64)

    def key(self, position: int, shared: np.ndarray[Any, Any] | range) -> tuple[int, int]:
        """Identity and dataset index."""
        number, place = divmod(position, len(shared))
        if number != self._number:
            self._number, self._indices = number, permutation(self._order, number)
        inside = int(shared[place])
        return inside + number * self._order.num_samples, int(self._indices[inside])


def _head_keys(order: Order) -> Iterator[tuple[int, int, Any]]:
    """The identities of `order.head` and their dataset indices, pass by pass as they are asked for."""
    passes: dict[int, np.ndarray[Any, Any]] = {}
    per_pass = len(order.keys) * order.world_size if order.keys is not None else order.num_samples
    for identity in order.head:
        number, position = divmod(identity, per_pass)
        if order.keys is not None:
            key = order.keys[position // order.world_size]
        else:
            if number not in passes:
                passes[number] = permutation(order, number)
            key = passes[number][position]
        yield order.epoch, identity, key.item() if isinstance(key, np.generic) else key


@dataclass(frozen=True)
class Reading:
    """How a raw sample becomes a record."""

    measurer: Measurer
    on_sample_error: str = "raise"  # or "skip"
    transform: Callable[[Any], Any] | None = None


def measured(identity: int, key: Any, sample: Any, reading: Reading) -> Record:
    """The record of a sample; a `None` and a sample of no length are rejected as empty."""
    if sample is None:
        return Record(identity, None, None, "empty", f"the dataset returned None for index {key!r} (sample {identity})")
    try:
        if reading.transform is not None:
            sample = reading.transform(sample)
        measure = reading.measurer(sample)
    except MeasureError as error:
        raise MeasureError(f"sample {identity} (index {key!r}): {error}") from None
    if measure.length == 0:
        return Record(identity, None, None, "empty", f"the sample at index {key!r} (sample {identity}) has no tokens")
    return Record(identity, sample, measure)


class GuardedDataset(Dataset[Any]):
    """A map-style dataset that takes chunks of (epoch, identity, index) and gives records."""

    def __init__(self, dataset: Any, reading: Reading) -> None:
        self.dataset = dataset
        self.reading = reading
        self.epoch: int | None = None

    def __getitem__(self, key: tuple[int, int, Any]) -> Record:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int, Any]]) -> list[Record]:
        """Records of a chunk, in its order; uses the dataset's own `__getitems__` where it has one."""
        if not keys:
            return []
        with Arriving("the dataset", keys):
            return self._records(keys)

    def _records(self, keys: list[tuple[int, int, Any]]) -> list[Record]:
        self._tell_epoch(keys[0][0])
        if hasattr(self.dataset, "__getitems__") and self.reading.on_sample_error == "raise":
            samples = self.dataset.__getitems__([key for _, _, key in keys])
            return [measured(i, key, s, self.reading) for (_, i, key), s in zip(keys, samples, strict=True)]
        return [self._read(identity, key) for _, identity, key in keys]

    def _read(self, identity: int, key: Any) -> Record:
        try:
            return measured(identity, key, self.dataset[key], self.reading)
        except MeasureError:
            raise
        except Exception as error:
            if self.reading.on_sample_error == "raise":
                add_note(error, f"raised by the dataset at index {key!r} (sample {identity})")
                raise
            return Record(identity, None, None, "sample_error", f"index {key!r}: {type(error).__name__}: {error}")

    def _tell_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            set_epoch(self.dataset, epoch)


class GuardedIterable(IterableDataset[Any]):
    """An iterable dataset that gives records without identity; they are numbered when they arrive."""

    def __init__(self, dataset: Any, reading: Reading, epoch: Any) -> None:
        self.dataset = dataset
        self.reading = reading
        self.shared_epoch = epoch  # a shared integer: workers that persist learn of a new epoch through it

    def __iter__(self) -> Iterator[Record]:
        with Arriving("the dataset"):
            set_epoch(self.dataset, int(self.shared_epoch.value))
            for number, sample in enumerate(self.dataset):
                yield measured(number, number, sample, self.reading)


def set_epoch(target: Any, epoch: int) -> None:
    """Tells the epoch to whatever wants to know it."""
    method = getattr(target, "set_epoch", None)
    if callable(method):
        method(epoch)


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to an exception's traceback where this Python can (3.11 and later)."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def keep_chunk(records: list[Record]) -> list[Record]:
    """The null collate where no process border is crossed."""
    return records


@dataclass(frozen=True)
class WorkerInit:
    """`worker_init_fn` of the inner workers: ties them to the collate process, then runs the user's own."""

    collate_pid: int
    use_signal: bool
    user_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        guard_against_orphaning(self.collate_pid, use_signal=self.use_signal)
        ignore_interrupts()
        gc.freeze()  # spares looking through, and under fork copying, what was there before
        info = get_worker_info()
        guarded = getattr(info, "dataset", None)
        if isinstance(guarded, (GuardedDataset, GuardedIterable)):
            # Users reach for their own dataset in worker_init_fn. WorkerInfo refuses plain assignment.
            object.__setattr__(info, "dataset", guarded.dataset)
        if self.user_fn is not None:
            with Arriving("worker_init_fn"):
                self.user_fn(worker_id)


@dataclass(frozen=True)
class SourceConfig:
    """What the inner loader is made of. Picklable where its parts are."""

    dataset: Any
    reading: Reading
    num_workers: int = 0
    prefetch_samples: int = 64  # per worker
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None
    timeout: float = 0

    @property
    def chunk(self) -> int:
        """The most samples that a worker makes in one task."""
        return min(MAX_CHUNK, max(1, self.prefetch_samples)) if self.num_workers else 1

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset has an order of its own."""
        return isinstance(self.dataset, IterableDataset)


class Source:
    """One rank's samples, epoch after epoch. Lives in the process that plans; not thread-safe but for `stop`."""

    def __init__(self, config: SourceConfig, collate_pid: int, use_signal: bool) -> None:
        self.config = config
        self.children = ChildWatch()  # ask it in every wait whether a worker has died
        workers = config.num_workers
        chunk = config.chunk
        self.index_source = IndexSource(chunk, workers)
        self._generator = torch.Generator()
        self._iterator: Iterator[Any] | None = None
        self._number = 0
        prefetch = max(2, -(-config.prefetch_samples // chunk))
        self._post_office = PostOffice(workers, prefetch + 2)
        kwargs: dict[str, Any] = {
            "num_workers": workers,
            "collate_fn": self._post_office.packer if workers else keep_chunk,
            "generator": self._generator,
            "timeout": config.timeout if workers else 0,
            "worker_init_fn": WorkerInit(collate_pid, use_signal, config.worker_init_fn) if workers else None,
        }
        if workers:
            kwargs["prefetch_factor"] = prefetch
            kwargs["persistent_workers"] = config.persistent_workers
            kwargs["multiprocessing_context"] = config.multiprocessing_context
        self.loader: DataLoader[Any] = self._make_loader(chunk, kwargs)

    def _make_loader(self, chunk: int, kwargs: dict[str, Any]) -> DataLoader[Any]:
        config = self.config
        if config.is_iterable:
            import multiprocessing

            self._shared_epoch = multiprocessing.get_context(config.multiprocessing_context).Value("q", 0)
            iterable = GuardedIterable(config.dataset, config.reading, self._shared_epoch)
            return DataLoader(iterable, batch_size=chunk, **kwargs)
        guarded = GuardedDataset(config.dataset, config.reading)
        self.guarded = guarded
        return DataLoader(guarded, batch_sampler=self.index_source, **kwargs)

    def begin(self, order: Order, base_seed: int) -> None:
        """Starts an epoch. Call it on the process's main thread: workers die with the thread that started them."""
        self._generator.manual_seed(base_seed)
        self._number = 0
        self.index_source.order = order
        if order.is_elastic:
            blocks = tuple(range(first, end) for first, end in order.waiting)
            self.index_source.granted.start(blocks, len(order.head), order.is_complete)
        if self.config.is_iterable:
            self._shared_epoch.value = order.epoch
            self._order = order
        if self.config.num_workers and not self.config.persistent_workers:
            self._iterator = None  # the last epoch's workers go before the new ones come
            self._post_office.reset()
        self._iterator = iter(self.loader)
        if self.config.num_workers:
            self.children.install(self.config.num_workers)

    def next_chunk(self) -> Parcel | list[Record] | None:
        """The next records, to be `opened`; None once this epoch's order is used up, or where nobody wants any more."""
        if not self.index_source.order.is_elastic:
            return self._next_of_loader()
        granted = self.index_source.granted
        while True:
            granted.wait()
            if granted.is_released:
                return None
            chunk = self._next_of_loader()
            num = 0 if chunk is None else num_records(chunk)
            granted.came_back(num)
            if chunk is None or num:
                return chunk

    def opened(self, chunk: Parcel | list[Record]) -> list[Record]:
        """The records of a chunk. Each chunk once, in their order."""
        records = chunk if isinstance(chunk, list) else chunk.open()
        return self._numbered(records) if self.config.is_iterable else records

    def grant(self, block: range, is_complete: bool) -> None:
        """Keys of the shared order that this rank may read from now on; `is_complete`: none come behind them."""
        self.index_source.granted.add(block, is_complete)

    def release(self) -> None:
        """Nobody wants more of this epoch: whoever waits for grants goes on."""
        self.index_source.granted.release()

    def _next_of_loader(self) -> Parcel | list[Record] | None:
        assert self._iterator is not None, "begin() first"
        try:
            chunk: Parcel | list[Record] = next(self._iterator)
        except StopIteration:
            return None
        if not isinstance(chunk, list):
            chunk.fetch()  # the worker needs its block
        return chunk

    def _numbered(self, records: list[Record]) -> list[Record]:
        """Identities by arrival; after a resume without what was emitted before."""
        first, order = self._number, self._order
        self._number += len(records)
        numbered = [
            Record((first + k) * order.world_size + order.rank, r.sample, r.measure, r.rejected, r.text)
            for k, r in enumerate(records)
        ]
        if first >= order.cursor:
            return numbered
        wanted = set(order.head)
        return [r for k, r in enumerate(numbered) if first + k >= order.cursor or r.id in wanted]

    def end(self) -> None:
        """Lets the epoch's iterator go; workers that do not persist end with it."""
        if not (self.config.num_workers and self.config.persistent_workers):
            self.children.release()
            self._iterator = None

    def first_record(self, limit: int = 1000) -> Record | None:
        """The first sample of a map-style dataset that can be measured, read in this process."""
        if self.config.is_iterable:
            return None
        try:
            count = min(limit, len(self.config.dataset))
        except TypeError:
            return None
        for index in range(count):
            try:
                record = self.guarded.__getitems__([(self.index_source.order.epoch, index, index)])[0]
            except Exception:  # any sample will do, and its own rank reports a broken one
                continue
            if record.measure is not None:
                return record
        return None

    def record_again(self, identity: int) -> Record | None:
        """A sample of this epoch's order once more, read in this process; None for an iterable dataset."""
        if self.config.is_iterable:
            return None
        return self.guarded.__getitems__(list(_head_keys(replace(self.index_source.order, head=(identity,)))))[0]

    def close(self) -> None:
        """Ends the workers."""
        self._iterator = None
        del self.loader


def num_records(chunk: Parcel | list[Record]) -> int:
    """Records of a chunk, opened or not."""
    return len(chunk) if isinstance(chunk, list) else chunk.size[0]


class Inbox:
    """Chunks drawn ahead of the round that will use them; a thread fills it, the round loop empties it.

    The thread does next to nothing with a chunk but to fetch it: two threads that both run Python code slow each other
    down by more than the work that they share.
    """

    def __init__(self, max_samples: int, max_tokens: int, max_bytes: int) -> None:
        self._limits = (max_samples, max_tokens, max_bytes)
        self._condition = threading.Condition()
        self._chunks: deque[Parcel] = deque()
        self._held = [0, 0, 0]
        self._error: BaseException | None = None
        self._dry = False
        self._stopped = False

    def put(self, chunk: Parcel | None) -> bool:
        """Adds a chunk (None: the source is dry); blocks while full. False once nobody wants more."""
        with self._condition:
            while not self._stopped and any(h >= m for h, m in zip(self._held, self._limits, strict=True)):
                self._condition.wait()
            if chunk is None:
                self._dry = True
            else:
                self._chunks.append(chunk)
                self._count(chunk, 1)
            self._condition.notify_all()
            return not self._stopped and chunk is not None

    def _count(self, chunk: Parcel, sign: int) -> None:
        self._held = [held + sign * size for held, size in zip(self._held, chunk.size, strict=True)]

    def fail(self, error: BaseException) -> None:
        """What went wrong while drawing; raised to whoever takes next, once what was drawn before is used up."""
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def wait(self, timeout: float) -> bool:
        """Whether `take` has something to give or to raise, waiting up to `timeout` seconds for it."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._chunks) or self._dry or self._error is not None, timeout)

    def take(self) -> Parcel | None:
        """The next chunk, None when the source is dry; once `wait` has said so. Raises what `fail` was given."""
        with self._condition:
            if self._chunks:
                chunk = self._chunks.popleft()
                self._count(chunk, -1)
                self._condition.notify_all()
                return chunk
            if self._error is not None:
                raise self._error
            assert self._dry, "wait() first"
            return None

    def stop(self) -> None:
        """Nobody will take any more: lets the filling thread go."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()


def seeded(base_seed: int, rank: int) -> int:
    """A seed of a rank's own, so that ranks with the same global seed do not draw the same augmentations."""
    return int(np.random.SeedSequence([base_seed & (2**63 - 1), rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))
