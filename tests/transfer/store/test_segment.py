"""A segment's files: modes, lock, which one a process takes, and what a start finds."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import transfer.store.segment as module
from tests.transfer.store.conftest import keys_of
from transfer.memory.digest import digest_of
from transfer.store.refs import StoreError, chain
from transfer.store.segment import FOLDER, RECORD_BYTES, TURN, Segment, open_segment, slot_bytes
from transfer.store.slots import Held


def write(segment: Segment, name: str, slots: list[int]) -> list[Held]:
    """Records of a prompt's blocks in these slots."""
    refs = chain(keys_of(name, len(slots)))
    held = [Held(ref, slot, digest_of(ref.key)) for ref, slot in zip(refs, slots, strict=True)]
    for one in held:
        segment.write(one)
    return held


def reopened(directory: Path, slots: int, fingerprint: str = "m", block_bytes: int = 100) -> list[Held]:
    segment = open_segment(directory, fingerprint, block_bytes)
    found = segment.take(slots)
    segment.close()
    return found


def filled(directory: Path, name: str, slots: list[int], fingerprint: str = "m") -> list[Held]:
    segment = open_segment(directory, fingerprint, 100)
    segment.take(8)
    held = write(segment, name, slots)
    segment.close()
    return held


def test_a_start_finds_what_was_written_in_its_order(tmp_path: Path) -> None:
    held = filled(tmp_path, "a", [5, 0, 7])
    assert reopened(tmp_path, 8) == held


def test_what_was_cleared_is_not_found(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, "m", 100)
    segment.take(8)
    held = write(segment, "a", [0, 1])
    segment.clear(0)
    segment.close()
    assert reopened(tmp_path, 8) == held[1:]


def test_of_two_records_of_a_block_the_later_counts_and_the_other_is_cleared(tmp_path: Path) -> None:
    segment = open_segment(tmp_path, "m", 100)
    segment.take(8)
    write(segment, "a", [3])
    later = write(segment, "a", [1])
    segment.close()
    assert reopened(tmp_path, 8) == later
    data = next(tmp_path.glob("*/*.index")).read_bytes()
    assert not any(data[3 * RECORD_BYTES : 4 * RECORD_BYTES])


@pytest.mark.parametrize("at", [0, 4, 20, 50, 90, 119, 135])
def test_a_torn_record_is_dropped(tmp_path: Path, at: int) -> None:
    held = filled(tmp_path, "a", [0, 1])
    index = next(tmp_path.glob("*/*.index"))
    data = bytearray(index.read_bytes())
    data[at] ^= 0xFF
    index.write_bytes(data)
    assert reopened(tmp_path, 8) == held[1:]


@pytest.mark.parametrize("size", [0, 100, RECORD_BYTES, RECORD_BYTES + 1])
def test_a_truncated_index_has_what_is_left(tmp_path: Path, size: int) -> None:
    held = filled(tmp_path, "a", [0, 1])
    index = next(tmp_path.glob("*/*.index"))
    index.write_bytes(index.read_bytes()[:size])
    assert reopened(tmp_path, 8) == held[: size // RECORD_BYTES]


def test_fewer_and_more_slots(tmp_path: Path) -> None:
    held = filled(tmp_path, "a", [0, 7])
    assert reopened(tmp_path, 4) == held[:1]
    assert next(tmp_path.glob("*/*.blocks")).stat().st_size == 4 * slot_bytes(100)
    assert reopened(tmp_path, 16) == held[:1]


@pytest.mark.parametrize(("fingerprint", "block_bytes"), [("other", 100), ("m", 104)])
def test_another_model_finds_nothing_and_clears_what_it_takes(
    tmp_path: Path, fingerprint: str, block_bytes: int
) -> None:
    filled(tmp_path, "a", [0, 1])
    assert reopened(tmp_path, 8, fingerprint, block_bytes) == []
    assert reopened(tmp_path, 8) == []


def test_a_process_takes_the_free_segment_with_the_most_of_its_blocks(tmp_path: Path) -> None:
    segments = [open_segment(tmp_path, name, 100) for name in ("a", "b", "b")]
    for segment, count in zip(segments, (1, 1, 3), strict=True):
        segment.take(8)
        write(segment, str(segment.path), list(range(count)))
    paths = [segment.path for segment in segments]
    assert len(set(paths)) == 3
    for segment in segments:
        segment.close()
    again = [open_segment(tmp_path, "b", 100) for _ in range(2)]
    assert [segment.path for segment in again] == [paths[2], paths[1]]
    for segment in again:
        segment.close()


def test_processes_that_start_at_once_find_their_own_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is held while it has every free segment locked and counts. The other one has not chosen before it goes on."""
    names = ("a", "b")
    segments = [open_segment(tmp_path, name, 100) for name in names]
    for segment, name in zip(segments, names, strict=True):
        segment.take(8)
        write(segment, name, [0])
        segment.close()
    counts, goes_on, records = threading.Event(), threading.Event(), Segment.records
    held = iter([True])

    def slowly(segment: Segment) -> Iterator[tuple[int, Held]]:
        if next(held, False):
            counts.set()
            assert goes_on.wait(60)
        return records(segment)

    monkeypatch.setattr(Segment, "records", slowly)
    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(open_segment, tmp_path, "b", 100)
            assert counts.wait(60)
            second = pool.submit(open_segment, tmp_path, "a", 100)
            assert not wait([second], timeout=0.3).done
        finally:
            goes_on.set()
        chosen = [first.result(60), second.result(60)]
    assert [segment.path for segment in chosen] == [segments[1].path, segments[0].path]
    for segment in chosen:
        segment.close()


def test_a_process_that_chooses_for_too_long_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = filled(tmp_path, "a", [0, 1])
    monkeypatch.setattr(module, "TURN_S", 0.05)
    with (tmp_path / FOLDER / TURN).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert reopened(tmp_path, 8) == held


def test_where_one_segment_cannot_be_read_none_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [open_segment(tmp_path, "m", 100) for _ in range(3)]
    for segment in segments:
        segment.close()
    records = Segment.records

    def broken(segment: Segment) -> Iterator[tuple[int, Held]]:
        if segment.path == segments[1].path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return records(segment)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "records", broken)
        with pytest.raises(OSError, match="Input/output error"):
            open_segment(tmp_path, "m", 100)
    again = [open_segment(tmp_path, "m", 100) for _ in range(3)]
    assert [segment.path for segment in again] == [segment.path for segment in segments]
    for segment in again:
        segment.close()


def test_modes_keep_others_out(tmp_path: Path) -> None:
    filled(tmp_path, "a", [0])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {FOLDER: 0o700, TURN: 0o600, "segment-0.index": 0o600, "segment-0.blocks": 0o600}


def widened(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("make", [widened, linked])
def test_a_folder_that_others_reach_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / FOLDER)
    with pytest.raises(StoreError, match="0700"):
        open_segment(tmp_path, "m", 100)


def test_a_linked_segment_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, "a", [0])
    index = next(tmp_path.glob("*/*.index"))
    index.rename(tmp_path / "target")
    index.symlink_to(tmp_path / "target")
    before = (tmp_path / "target").read_bytes()
    segment = open_segment(tmp_path, "m", 100)
    assert segment.path.name == "segment-1.index"
    segment.close()
    assert (tmp_path / "target").read_bytes() == before
