"""Whose folder it is: other processes, other models, and folders that cannot be used."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from firsttoken.core.errors import ConfigError
from firsttoken.kvcache.disk import DiskConfig, Outcome, ShardMeta
from tests.kvcache.test_disk_store import get, put
from tests.support.disk_shards import MIB, OTHER_MODEL, open_store, shard

# ------------------------------------------------- two stores, one folder


def test_the_second_process_reads_and_does_not_write(tmp_path: Path) -> None:
    writer = open_store(tmp_path)
    assert put(writer, shard(1)) is Outcome.DONE
    reader = open_store(tmp_path, refresh_s=0.01)
    assert reader.read_only
    assert not writer.read_only
    assert reader.contains(shard(1).key)
    assert get(reader, shard(1)) is Outcome.DONE
    assert put(reader, shard(2)) is Outcome.READ_ONLY
    reader.drop(shard(1).key)
    assert get(writer, shard(1)) is Outcome.DONE
    assert put(writer, shard(3)) is Outcome.DONE
    assert get(reader, shard(3)) is Outcome.DONE  # found though it was not known
    writer.drop(shard(1).key)
    for _ in range(1000):
        if reader.contains(shard(3).key) and not reader.contains(shard(1).key):
            break
        threading.Event().wait(0.01)
    assert reader.contains(shard(3).key)
    assert get(reader, shard(1)) is Outcome.ABSENT
    writer.close()
    reader.close()


def test_a_reader_follows_when_the_writer_stores_longer_shards(tmp_path: Path) -> None:
    writer = open_store(tmp_path)
    long = shard(1, num_tokens=64)
    short = ShardMeta(long.key, bytes(32), 32, long.tokens[128:])
    assert put(writer, short) is Outcome.DONE
    reader = open_store(tmp_path)
    assert put(writer, long) is Outcome.DONE
    assert get(reader, long) is Outcome.DONE
    assert get(reader, short) is Outcome.TOKENS
    assert get(writer, long) is Outcome.DONE  # a reader removes nothing
    writer.close()
    reader.close()


def test_another_models_files_are_counted_and_go_first(tmp_path: Path) -> None:
    size = MIB // 4 - 4096
    theirs = open_store(tmp_path, OTHER_MODEL, cap_bytes=MIB)
    for number in range(2):
        assert put(theirs, shard(number, identity=OTHER_MODEL), size) is Outcome.DONE
    theirs.close()
    ours = open_store(tmp_path, cap_bytes=MIB)
    assert (ours.stats().files, ours.stats().strangers) == (0, 2)
    for number in range(3):
        assert put(ours, shard(number), size) is Outcome.DONE
    assert (ours.stats().files, ours.stats().strangers) == (3, 1)
    ours.close()
    theirs = open_store(tmp_path, OTHER_MODEL, cap_bytes=MIB)
    assert theirs.stats().files == 1  # what was not in the way is warm for it
    theirs.close()


# ------------------------------------------------- at the start errors are the user's


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("cap_bytes", 5, "got 5"), ("threads", 0, "got 0"), ("max_reads", 0, "max_reads"), ("margin_bytes", -1, "-1")],
)
def test_options_that_cannot_be_honoured_are_refused(tmp_path: Path, field: str, value: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DiskConfig(**{"folder": tmp_path, "cap_bytes": MIB, field: value})


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="a-file"):
        open_store(blocked)
    (tmp_path / "firsttoken-kv").symlink_to("/tmp")
    with pytest.raises(ConfigError, match=r"firsttoken-kv must be a folder of its own"):
        open_store(tmp_path)

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    free = tmp_path / "free"
    monkeypatch.setattr("firsttoken.kvcache.disk.folder.os.open", denied)
    with pytest.raises(ConfigError, match=r"free/firsttoken-kv: Permission denied"):
        open_store(free)
    monkeypatch.undo()
    monkeypatch.setattr("firsttoken.kvcache.disk.folder.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        open_store(free)


def test_only_the_last_part_of_a_folder_is_made(tmp_path: Path) -> None:
    """A mount that failed must not have another disk filled in its place."""
    store = open_store(tmp_path / "kv")
    store.close()
    missing = tmp_path / "mount" / "kv"
    with pytest.raises(ConfigError, match=f"cannot make {missing}: {missing.parent} does not exist"):
        open_store(missing)
    assert not missing.parent.exists()


def test_the_start_says_what_will_not_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, margin_bytes=100 * MIB)
    assert store.start_warnings() == []
    monkeypatch.setattr(store._folder, "free_bytes", lambda: 70 * MIB)
    monkeypatch.setattr(store._folder, "total_bytes", lambda: 63 * MIB)
    short, small = store.start_warnings()
    assert f"{tmp_path} has 70 MiB free, and 100 MiB are left to others" in short
    assert f"{tmp_path} may take 64 MiB, but the whole file system has 63 MiB" in small
    reader = open_store(tmp_path)
    [said] = reader.start_warnings()
    assert said.startswith(f"another process writes {tmp_path}")
    reader.close()
    store.close()
    monkeypatch.setattr("firsttoken.kvcache.disk.folder.Folder.free_bytes", lambda _: 0)
    caplog.clear()
    open_store(tmp_path, margin_bytes=MIB).close()
    assert caplog.text == "", "the margin is told at the start, and nothing is over the cap"


def test_a_disk_that_fills_while_it_is_used_is_told_once_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, margin_bytes=100 * MIB)
    numbers = iter(range(100))

    def write(free_mib: int) -> tuple[Outcome | None, list[str]]:
        monkeypatch.setattr(store._folder, "free_bytes", lambda: free_mib * MIB)
        caplog.clear()
        outcome = store.put(shard(next(numbers)), bytes(MIB)).wait(20)
        return outcome, [record.getMessage() for record in caplog.records if "MiB free" in record.getMessage()]

    assert write(110) == (Outcome.DONE, [])
    assert write(110) == (Outcome.DONE, [])
    outcome, [said] = write(70)
    assert outcome is Outcome.NO_SPACE
    for part in (str(tmp_path), "only 70 MiB free", "100 MiB are left to others", "--kv-disk-size"):
        assert part in said
    assert write(60) == (Outcome.NO_SPACE, [])
    assert write(102) == (Outcome.DONE, []), "that may be over in a moment"
    assert write(60) == (Outcome.NO_SPACE, [])
    outcome, [said] = write(126)
    assert (outcome, "126 MiB free: KV is written to files again" in said) == (Outcome.DONE, True)
    assert len(write(60)[1]) == 1
    store.start_warnings()
    store.close()


def test_what_the_start_said_of_a_full_disk_is_not_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, margin_bytes=100 * MIB)
    monkeypatch.setattr(store._folder, "free_bytes", lambda: 70 * MIB)
    assert len(store.start_warnings()) == 1
    assert store.put(shard(1), bytes(MIB)).wait(20) is Outcome.NO_SPACE
    assert "MiB free" not in caplog.text
    store.close()
