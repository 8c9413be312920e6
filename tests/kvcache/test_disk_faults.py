"""Each way in which a file or the disk can be bad: a counted miss or refusal, never an error, never other KV."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firsttoken.core.identity import Identity
from firsttoken.kvcache.disk import DiskStore, Outcome, ShardMeta, aligned_buffer, files
from firsttoken.kvcache.disk.buffers import Scratch
from firsttoken.kvcache.disk.format import Header, encode
from tests.support.disk_shards import IDENTITY, MIB, OTHER_MODEL, file_of, kv_buffer, kv_bytes, open_store, shard

SIZE = 600
META = shard(1)
DAMAGE = {Outcome.FORMAT, Outcome.CUT, Outcome.CORRUPT}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    store = open_store(tmp_path)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    store.close()
    return file_of(tmp_path, META)


def read(path: Path, into: memoryview, *, direct: bool) -> Outcome:
    into[:] = bytes(SIZE)
    result = files.read_file(str(path), META, IDENTITY.salted_root(""), [into], Scratch(), direct=direct, touch=False)
    return result.outcome


@pytest.mark.parametrize("aligned", [True, False])
def test_every_flipped_bit_is_a_miss(small_file: Path, aligned: bool) -> None:
    into = aligned_buffer(SIZE + 1)[:SIZE] if aligned else aligned_buffer(SIZE + 1)[1:]
    assert read(small_file, into, direct=True) is Outcome.DONE
    assert into == kv_bytes(META, SIZE)
    good = small_file.read_bytes()
    fd = os.open(small_file, os.O_WRONLY)
    seen = set()
    for at, byte in enumerate(good):
        # All bits of all that means something, and one of each byte of the header's padding.
        for bit in range(8) if at < 350 or at >= 4080 else [at % 8]:
            os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
            outcome = read(small_file, into, direct=True)
            assert outcome in DAMAGE, f"bit {bit} of byte {at}: {outcome}"
            seen.add(outcome)
        os.pwrite(fd, bytes([byte]), at)
    os.close(fd)
    assert seen >= {Outcome.FORMAT, Outcome.CORRUPT}
    assert read(small_file, into, direct=True) is Outcome.DONE


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_at_any_length_is_a_miss(small_file: Path, direct: bool) -> None:
    into = aligned_buffer(SIZE)
    for length in reversed(range(small_file.stat().st_size)):
        os.truncate(small_file, length)
        assert read(small_file, into, direct=direct) in DAMAGE, f"cut to {length}"


def test_a_longer_file_is_a_miss(small_file: Path) -> None:
    with small_file.open("ab") as file:
        file.write(b"x")
    assert read(small_file, aligned_buffer(SIZE), direct=True) is Outcome.CUT


def changed(**fields: object) -> bytes:
    """The file with another header that is whole in itself."""
    crc = files.zlib.crc32(kv_bytes(META, SIZE))
    values = {"meta": META, "identity": IDENTITY.salted_root(""), "payload_bytes": SIZE, "payload_crc": crc, **fields}
    return encode(Header(**values)) + kv_bytes(META, SIZE)  # type: ignore[arg-type]


def other_tokens() -> ShardMeta:
    return ShardMeta(META.key, META.parent, META.start, META.tokens[:-4] + b"\1\2\3\4")


def flipped(at: int) -> bytes:
    raw = bytearray(changed())
    raw[at] ^= 1
    return bytes(raw)


CASES: dict[str, tuple[Callable[[], bytes], Outcome]] = {
    "payload bit": (lambda: flipped(5000 - 400), Outcome.CORRUPT),
    "header bit": (lambda: flipped(100), Outcome.CORRUPT),
    "version": (lambda: flipped(8), Outcome.FORMAT),
    "empty": (lambda: b"", Outcome.CUT),
    "cut in the header": (lambda: changed()[:1000], Outcome.CUT),
    "cut in the payload": (lambda: changed()[:-1], Outcome.CUT),
    "zeros": (lambda: bytes(5000), Outcome.FORMAT),
    "other bytes": (lambda: b"\x80\x04\x95" * 2000, Outcome.FORMAT),
    "other model": (lambda: changed(identity=OTHER_MODEL.salted_root("")), Outcome.IDENTITY),
    "other tokens": (lambda: changed(meta=other_tokens()), Outcome.TOKENS),
    "other shard": (lambda: changed(meta=shard(2)), Outcome.TOKENS),
    "other parent": (lambda: changed(meta=ShardMeta(META.key, bytes(32), 0, META.tokens)), Outcome.TOKENS),
    "other start": (lambda: changed(meta=ShardMeta(META.key, META.parent, 16, META.tokens)), Outcome.TOKENS),
    "more tokens": (lambda: changed(meta=ShardMeta(META.key, META.parent, 0, META.tokens * 40)), Outcome.TOKENS),
    "other size": (lambda: changed(payload_bytes=SIZE - 1)[:-1], Outcome.SIZE),
    "other checksum": (lambda: changed(payload_crc=7), Outcome.CORRUPT),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_is_a_counted_miss_and_is_removed(tmp_path: Path, case: str) -> None:
    store = open_store(tmp_path)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    make, outcome = CASES[case]
    file_of(tmp_path, META).write_bytes(make())
    into = aligned_buffer(SIZE)
    assert store.get(META, into).wait(30) is outcome
    assert store.stats().misses == {outcome.value: 1}
    assert not store.contains(META.key)
    assert not file_of(tmp_path, META).exists()
    assert store.stats().nbytes == 0
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE  # and a good one takes its place
    assert store.get(META, into).wait(30) is Outcome.DONE
    assert into == kv_bytes(META, SIZE)
    store.check()
    store.close()


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_from_an_earlier_run_is_never_a_hit(tmp_path: Path, case: str) -> None:
    open_store(tmp_path).close()
    make, _ = CASES[case]
    file_of(tmp_path, META).write_bytes(make())
    store = open_store(tmp_path)
    into = aligned_buffer(SIZE)
    assert store.get(META, into).wait(30) is not Outcome.DONE
    stats = store.stats()
    if case in ("version", "zeros", "other bytes", "other model"):
        assert (stats.files, stats.strangers, stats.damaged) == (0, 1, 0)  # another program's, perhaps
    elif case in ("header bit", "empty", "cut in the header", "cut in the payload", "other shard"):
        assert (stats.files, stats.strangers, stats.damaged) == (0, 0, 1)
        assert not file_of(tmp_path, META).exists()
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    assert store.get(META, into).wait(30) is Outcome.DONE
    store.check()
    store.close()


def test_the_model_on_the_folder_is_the_one_that_hits(tmp_path: Path) -> None:
    """The same folder, the same tokens, another model, KV format or adapter: nothing is found."""
    store = open_store(tmp_path)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    store.close()
    for other in (
        OTHER_MODEL,
        Identity(model="model-a", kv_format="bfloat16/2x2x8/16/0"),
        Identity(model="model-a", kv_format="float32/2x2x8/16/0", adapter="lora"),
    ):
        store = open_store(tmp_path, other)
        into = aligned_buffer(SIZE)
        assert store.get(shard(1, identity=other), into).wait(30) is Outcome.ABSENT
        assert store.get(META, into).wait(30) is Outcome.ABSENT  # even under the very same key
        store.close()
        reader_of = open_store(tmp_path, IDENTITY)
        assert reader_of.get(META, into).wait(30) is Outcome.DONE
        reader_of.close()


# ------------------------------------------------- the system says no


def write_error(code: int, after: int) -> Callable[..., int]:
    """A `pwritev` that fails at its call ``after``, having written half of what it was given."""
    calls = 0
    real = os.pwritev

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls <= after:
            return real(fd, buffers, offset)
        if calls == after + 1 and buffers[0].nbytes >= 8192:
            return real(fd, [buffers[0][:4096]], offset)  # a short write first, as a disk that fills up makes
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.ENOSPC, Outcome.NO_SPACE),
        (errno.EDQUOT, Outcome.NO_SPACE),
        (errno.EIO, Outcome.IO_ERROR),
        (errno.EROFS, Outcome.IO_ERROR),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_write_that_fails_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, outcome: Outcome, after: int
) -> None:
    store = open_store(tmp_path)
    good = shard(2)
    size = 9 * MIB  # three calls
    assert store.put(good, kv_buffer(good, SIZE)).wait(30) is Outcome.DONE
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwritev", write_error(code, after))
        assert store.put(META, kv_buffer(META, size)).wait(30) is outcome
    assert store.stats().refused == {outcome.value: 1}
    assert store.stats().errors == {errno.errorcode[code]: 1}
    assert sorted(path.suffix for path in (tmp_path / "firsttoken-kv").iterdir()) == ["", ".kv"]
    assert not store.contains(META.key)
    into = aligned_buffer(SIZE)
    assert store.get(good, into).wait(30) is Outcome.DONE
    assert store.put(META, kv_buffer(META, size)).wait(30) is Outcome.DONE
    store.check()
    store.close()


@pytest.mark.parametrize("call", ["open", "fdatasync", "rename", "statvfs"])
def test_any_call_of_a_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = open_store(tmp_path)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        if call == "fdatasync":
            patch.setattr(files, "_sync_data", fail)
        else:
            patch.setattr(os, call, fail)
        outcome = store.put(META, kv_buffer(META, SIZE)).wait(30)
    assert outcome is (Outcome.NO_SPACE if call == "statvfs" else Outcome.IO_ERROR)
    assert store.stats().errors == {"EACCES": 1}
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    store.check()
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_a_read_that_fails_is_a_counted_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store = open_store(tmp_path)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE

    def fail(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    into = aligned_buffer(SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        assert store.get(META, into).wait(30) is Outcome.IO_ERROR
    assert store.stats().misses == {"io_error": 1}
    assert store.stats().errors == {errno.errorcode[code]: 1}
    # Too many open files say nothing about this one; else it would cost every later request an error as well.
    assert store.contains(META.key) == (code == errno.EMFILE)
    store.check()
    store.close()


def test_a_file_system_that_turns_out_to_have_no_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    if not store.stats().direct:
        pytest.skip("this file system has none anyway")
    real = os.open

    def without_direct(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(files.os, "open", without_direct)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    into = aligned_buffer(SIZE)
    assert store.get(META, into).wait(30) is Outcome.DONE
    assert into == kv_bytes(META, SIZE)
    assert store.stats().errors == {"EINVAL": 1}
    assert not store.stats().direct
    store.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    """No margin and a cap beyond the disk: what fits is there and right, the rest is refused, none is wrong."""
    store = open_store(tiny_disk, cap_bytes=64 * MIB, threads=4)
    size = 100_000
    metas = [shard(number) for number in range(40)]
    handles = [store.put(meta, kv_buffer(meta, size)) for meta in metas]
    outcomes = [handle.wait(30) for handle in handles]
    assert Outcome.DONE in outcomes
    assert set(outcomes) <= {Outcome.DONE, Outcome.NO_SPACE}
    (tiny_disk / "others").write_bytes(bytes(min(400_000, os.statvfs(tiny_disk).f_bavail * 4096)))
    into = aligned_buffer(size)
    for meta in metas:
        expected = Outcome.DONE if store.contains(meta.key) else Outcome.ABSENT
        assert store.get(meta, into).wait(30) is expected
        assert expected is Outcome.ABSENT or into == kv_bytes(meta, size)
    store.check()
    store.close()


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    shutil.rmtree(tmp_path / "firsttoken-kv")
    assert store.get(META, aligned_buffer(SIZE)).wait(30) is Outcome.ABSENT
    outcome = store.put(META, kv_buffer(META, SIZE)).wait(30)
    assert outcome in (Outcome.IO_ERROR, Outcome.NO_SPACE)
    store.drop(META.key)
    store.check()
    store.close()


def test_the_log_says_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(files.os, "pwritev", write_error(errno.EIO, 0))
    for number in range(20):
        assert store.put(shard(number), kv_buffer(shard(number), SIZE)).wait(30) is Outcome.IO_ERROR
    assert len(caplog.records) == 1
    assert "writing a shard failed: [Errno 5]" in caplog.text
    assert store.stats().errors == {"EIO": 20}
    store.close()


def test_an_unforeseen_failure_costs_neither_thread_nor_waiter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr("firsttoken.kvcache.disk.transfers.write_file", lambda *_, **__: 1 // 0)
        assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.IO_ERROR
    assert store.stats().errors == {"unforeseen": 1}
    assert "ZeroDivisionError" in caplog.text
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    store.check()
    store.close()


# ------------------------------------------------- a reader during a write


def test_a_reader_during_writes_gets_all_or_nothing(tmp_path: Path) -> None:
    """A second store reads one key again and again while the first writes, drops and evicts it."""
    size = 300_000
    writer = open_store(tmp_path, cap_bytes=MIB, sync=False)
    reader: DiskStore = open_store(tmp_path, cap_bytes=MIB)
    stop = threading.Event()
    seen: list[Outcome | None] = []
    wrong: list[int] = []

    def read_on() -> None:
        into = aligned_buffer(size)
        while not stop.is_set():
            into[:] = bytes(size)
            seen.append(reader.get(META, into).wait(30))
            if seen[-1] is Outcome.DONE and into != kv_bytes(META, size):
                wrong.append(len(seen))

    thread = threading.Thread(target=read_on)
    thread.start()
    payload = kv_buffer(META, size)
    others = [(meta, kv_buffer(meta, size)) for meta in map(shard, range(2, 6))]
    for turn in range(150):
        assert writer.put(META, payload).wait(30) is Outcome.DONE
        if turn % 2:
            writer.drop(META.key)
        else:
            assert all(writer.put(meta, kv).wait(30) is Outcome.DONE for meta, kv in others)
    stop.set()
    thread.join()
    assert not wrong
    assert set(seen) == {Outcome.DONE, Outcome.ABSENT}
    writer.close()
    reader.close()


# ------------------------------------------------- what comes late or failed costs nothing later


def test_a_removal_that_comes_late_spares_the_new_file(tmp_path: Path) -> None:
    """A worker is about to remove a key's file, dropped or found bad, when the key is stored again."""
    store = open_store(tmp_path)
    into = aligned_buffer(SIZE)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    old = store._index.get(META.key)
    assert old is not None
    store.drop(META.key)
    assert store.put(META, kv_buffer(META, SIZE)).wait(30) is Outcome.DONE
    store._shelf.unlink(META.key, 0)
    assert store.get(META, into).wait(30) is Outcome.DONE
    store._shelf.forget(old)
    assert store.contains(META.key)
    assert store.get(META, into).wait(30) is Outcome.DONE
    store.check()
    store.close()


def test_writes_that_fail_keep_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, cap_bytes=MIB)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwritev", write_error(errno.EIO, 0))
        for number in range(20):
            payload = kv_buffer(shard(number), 200_000)
            assert store.put(shard(number), payload).wait(30) is Outcome.IO_ERROR
    size = MIB - 8192  # all of the cap
    assert store.put(META, kv_buffer(META, size)).wait(30) is Outcome.DONE
    store.check()
    store.close()
