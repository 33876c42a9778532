"""Chunks of records as one block: everything arrives as it was, and few samples hold little memory."""

from __future__ import annotations

import gc
import os
import pickle
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odb.errors import SampleError
from odb.feed.chunk import Record, pack, unpack
from odb.feed.measure import Measure
from odb.feed.parcel import BLOCK_BYTES, Packer, Parcel, PostOffice
from odb.feed.ring import Ring, make_ring

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
]


def records_of(samples: list[Any]) -> list[Record]:
    return [Record(7 * k, sample, Measure(k + 1, k, 0, 8)) for k, sample in enumerate(samples)]


def round_trip(records: list[Record]) -> list[Record]:
    body = pack(records)
    block = np.full(body.num_bytes, 0xAA, np.uint8)
    body.write_into(block)
    assert b"".join(body.pieces()) == block.tobytes() or _only_padding_differs(body, block)
    return unpack(block.data, len(body.head), len(body.sizes))


def _only_padding_differs(body: Any, block: np.ndarray[Any, Any]) -> bool:
    """Written into a block, the gaps between buffers keep what was there."""
    joined = np.frombuffer(b"".join(body.pieces()), np.uint8)
    return len(joined) == len(block) and bool((block[joined != block] == 0xAA).all())


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        assert torch.equal(a.detach(), b.detach()) or bool((a != a).any())
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape and b.flags.writeable
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 100, shape or [1])[0] if not shape else torch.randint(0, 100, shape)
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    return tensor.t() if tensor.ndim == 2 and draw(st.booleans()) else tensor


def values() -> Any:
    arrays = tensors().filter(lambda t: t.dtype != torch.bfloat16).map(lambda t: t.numpy().copy())
    plain = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.booleans())
    leaf = st.one_of(tensors(), tensors(), arrays, plain)
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
        max_leaves=4,
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), values(), max_size=3), min_size=1, max_size=4))
def test_samples_of_any_kind_arrive_as_they_were(samples: list[Any]) -> None:
    records = records_of(samples)
    for before, after in zip(records, round_trip(records), strict=True):
        assert (before.id, before.measure, before.rejected, before.text) == (
            after.id,
            after.measure,
            after.rejected,
            after.text,
        )
        assert_same(before.sample, after.take())


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_of_one_dtype_arrive_as_they_were(dtype: torch.dtype) -> None:
    samples = [
        {"x": torch.arange(n).to(dtype), "y": torch.ones(n, 2).to(dtype), "z": torch.tensor(n).to(dtype)}
        for n in (3, 0, 5)
    ]
    for before, after in zip(samples, round_trip(records_of(samples)), strict=True):
        assert_same(before, after.take())


def test_one_object_under_two_keys_stays_one() -> None:
    samples = [{"input_ids": (ids := torch.arange(n)), "labels": ids} for n in (3, 4)]
    for record in round_trip(records_of(samples)):
        sample = record.take()
        assert sample["input_ids"] is sample["labels"]
    shared = torch.arange(3)
    mixed = [{"input_ids": shared, "labels": shared}, {"input_ids": torch.arange(2), "labels": torch.arange(2)}]
    first, second = (record.take() for record in round_trip(records_of(mixed)))
    assert first["input_ids"] is first["labels"] and second["input_ids"] is not second["labels"]


def test_what_is_rejected_and_what_is_no_plain_dict_goes_along() -> None:
    records = [
        Record(1, None, None, "empty", "why"),
        Record(2, OrderedDict(a=torch.ones(2)), Measure(2, 2, 0, 8)),
        Record(3, (1, "x"), Measure(1, 1, 0, 8)),
    ]
    for before, after in zip(records, round_trip(records), strict=True):
        assert_same(tuple(before[:1]) + tuple(before[2:]), tuple(after[:1]) + tuple(after[2:]))
        assert_same(before.sample, after.take())


def test_a_part_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SampleError, match=r"\['fn'\]"):
        pack(records_of([{"input_ids": torch.arange(3), "fn": lambda: 0}]))


def test_samples_do_not_see_each_other_and_have_storage_of_their_own_size() -> None:
    first, second = (r.take() for r in round_trip(records_of([{"x": torch.zeros(4)}, {"x": torch.zeros(6)}])))
    first["x"] += 1
    assert second["x"].sum() == 0 and second["x"].untyped_storage().nbytes() == 24


def test_few_samples_that_are_left_of_a_chunk_do_not_keep_it() -> None:
    records = round_trip(records_of([{"x": torch.full((1000,), float(k))} for k in range(16)]))
    kept = records[5].take()
    address = kept["x"].data_ptr()
    last = records[9]
    del records, kept
    gc.collect()
    sample = last.take()
    assert torch.equal(sample["x"], torch.full((1000,), 9.0))
    assert abs(sample["x"].data_ptr() - address) != 4 * 4000  # moved out of the block that held all


def arrived(sent: Any) -> Parcel:
    parcel = pickle.loads(pickle.dumps(sent))
    assert type(parcel) is Parcel
    return parcel


@pytest.fixture
def without_lending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odb.feed.parcel.NUM_LENT", 0)


@pytest.mark.usefixtures("without_lending")
def test_blocks_are_free_again_once_a_parcel_was_opened_or_thrown_away() -> None:
    office = PostOffice(1, num_blocks=2)
    packer: Packer = office.packer
    records = records_of([{"x": torch.arange(100)}])
    for _ in range(5):
        parcels = [arrived(packer(records)) for _ in range(3)]  # the third finds no block and carries its bytes
        for parcel in parcels[1:]:
            assert_same(records[0].sample, parcel.open()[0].take())
        del parcel, parcels
        ring = office.rings[0]
        assert ring is not None and all(ring.is_free(k) for k in range(2))


def test_chunks_larger_than_a_block_are_lent_once_that_is_known_to_work() -> None:
    office = PostOffice(1, num_blocks=2)
    packer: Packer = office.packer
    records = records_of([{"pixels": torch.ones(BLOCK_BYTES // 4 + 1)}])
    ring = office.rings[0]
    assert ring is not None and not ring.may_lend
    for _ in range(4):
        got = arrived(packer(records)).open()[0].take()
        assert_same(records[0].sample, got)
        got["pixels"] += 1  # private: the next one doesn't see it
    assert ring.may_lend and len(packer._lent) <= 1


def test_a_ring_gives_blocks_out_one_by_one() -> None:
    ring = Ring(3, 100)
    claimed = [ring.claim(10) for _ in range(4)]
    assert sorted(claimed[:3]) == [0, 1, 2] and claimed[3] is None  # type: ignore[type-var]
    ring.release(1)
    assert ring.claim(10) == 1 and ring.claim(10) is None
    ring.reset()
    assert ring.claim(10) is not None


BIG = 1 << 16  # bytes from which a block is lent


def filled(ring: Ring, value: int) -> int:
    number = ring.claim(BIG)
    assert number is not None
    ring.block(number, BIG)[:] = value
    return number


def test_a_block_is_lent_as_long_as_anything_refers_to_it() -> None:
    ring = Ring(3, 2 * BIG, num_lent=1)
    first = filled(ring, 7)
    tensor = torch.from_numpy(ring.take(first, BIG)[10:20])
    view = tensor[2:4]
    del tensor
    gc.collect()
    assert not ring.is_free(first) and ring.claim(10) == 1
    copied = ring.take(1, BIG)  # one is lent: this one is copied
    ring.block(1, BIG)[:] = 9
    assert ring.is_free(1) and view.tolist() == [7, 7] and not copied.any()
    del view
    assert ring.is_free(first)
    small = filled(ring, 1)
    assert ring.take(small, BIG - 1).all() and ring.is_free(small)  # a small one always


def test_contents_go_where_contents_of_their_size_were() -> None:
    ring = Ring(4, BIG)
    sizes = [100, BIG, 10, 5000]
    for round_ in range(50):
        order = sizes[round_ % 4 :] + sizes[: round_ % 4]
        claimed = {size: ring.claim(size) for size in order}
        assert sorted(claimed.values()) == [0, 1, 2, 3]  # type: ignore[type-var]
        for number in claimed.values():
            assert number is not None
            ring.release(number)
    assert sorted(ring._taken.tolist()) == sorted(sizes)


def test_new_workers_get_no_block_that_is_lent() -> None:
    ring = Ring(2, BIG, num_lent=2)
    lent = ring.take(filled(ring, 3), BIG)
    assert filled(ring, 4) == 1  # its worker dies before it is read
    ring.reset()
    assert ring.claim(10) == 1 and ring.claim(10) is None
    assert (lent == 3).all()
    del lent
    assert ring.claim(10) == 0


def test_a_forked_process_gives_nothing_back() -> None:
    ring = Ring(1, BIG, num_lent=1)
    lent = ring.take(filled(ring, 3), BIG)
    child = os.fork()
    if not child:
        del lent
        os._exit(not ring.is_free(0) and 5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert not ring.is_free(0) and (lent == 3).all()


def memory_of(ring: Ring) -> int:
    """Bytes that a ring's pages take, in whichever process they are mapped."""
    return 512 * os.fstat(ring.fd).st_blocks


def test_a_busy_moment_does_not_keep_memory_for_good() -> None:
    large = 32 << 20
    ring = Ring(12, large, num_lent=12)
    numbers = [ring.claim(large) for _ in range(11)]
    for number in numbers:
        assert number is not None
        ring.block(number, large)[:] = 1
    assert memory_of(ring) >= 11 * large
    lent = [ring.take(number, large) for number in numbers[:2] if number is not None]
    for number in numbers[2:]:
        assert number is not None
        ring.release(number)
    lent.append(ring.take(filled(ring, 5), BIG))
    assert memory_of(ring) <= 10 * large + BIG  # 3 blocks are in use: free ones keep as much, and 128 MiB
    assert (lent[0] == 1).all() and (lent[1] == 1).all()
    lent[:2] = []
    lent.append(ring.take(filled(ring, 5), BIG))
    assert memory_of(ring) <= 8 * large + BIG
    assert all((array == 5).all() for array in lent)
    lent.clear()
    kept = [ring.take(filled(ring, number), BIG) for number in range(3)]
    ring.give_up()
    assert memory_of(ring) <= 3 * BIG + 4096 and all((array == number).all() for number, array in enumerate(kept))
    kept.clear()
    assert memory_of(ring) <= 4096


def test_a_limit_on_address_space_leaves_most_of_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 << 30, 4 << 30))
    ring = make_ring(100, 64 << 20, 1)
    assert ring is not None and 100 * ring.capacity <= (4 << 30) // 32


def test_a_ring_makes_do_with_small_blocks_where_memory_is_limited() -> None:
    child = os.fork()
    if not child:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        ring = make_ring(10, 16 << 20, 1)
        none = make_ring(1000, 16 << 20, 1)
        os._exit(0 if ring is not None and ring.capacity == 1 << 20 and none is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("without_lending")
def test_a_parcel_of_workers_that_are_gone_frees_no_block_of_the_next_ones() -> None:
    office = PostOffice(1, num_blocks=1)
    records = records_of([{"x": torch.arange(100)}])
    old = arrived(office.packer(records))
    office.reset()
    new = arrived(office.packer(records))
    del old
    ring = office.rings[0]
    assert ring is not None and not ring.is_free(0)
    assert_same(records[0].sample, new.open()[0].take())
    assert ring.is_free(0)
