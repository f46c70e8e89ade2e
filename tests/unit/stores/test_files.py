"""Files of stores: whole or refused, whatever happens to them."""

import gc
import os
import random
import shutil
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from vllm_kvevict.stores.files import StoreFiles, digest, unpack
from vllm_kvevict.stores.folder import check_folder

NAME = "ab" * 20
FAULTS = 1000


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "0.split": torch.tensor([[0, 2, 4]], dtype=torch.int32),
        "0.0.pages": torch.randint(256, (4, 96), generator=generator).to(torch.uint8),
        "0.0.values": torch.rand(4, 8, 2, generator=generator),
    }


def written(folder, seed: int = 0, rank: int = 0) -> StoreFiles:
    files = StoreFiles(folder, {"model": "a"})
    files.write(NAME, rank, tensors(seed))
    return files


def same(found: dict[str, torch.Tensor], seed: int = 0) -> bool:
    expected = tensors(seed)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def test_what_is_written_is_read(tmp_path):
    files = written(tmp_path)
    assert same(unpack(files.read(NAME, 0, 10**6).map()))
    assert files.path(NAME, 0).exists() and not files.path(NAME, 1).exists()
    assert [path.name for path in files.folder.iterdir()] == [f"{NAME}.0.safetensors"]
    assert files.folder.stat().st_mode & 0o077 == 0
    files.remove(NAME, 2)
    with pytest.raises(FileNotFoundError):
        files.read(NAME, 0, 10**6)


def test_present_are_those_of_all_ranks(tmp_path):
    files, other = written(tmp_path), "cd" * 20
    files.write(other, 0, tensors())
    files.write(other, 1, tensors())
    assert files.present({NAME, other, "ef" * 20}, 1) == {NAME, other}
    assert files.present({NAME, other, "ef" * 20}, 2) == {other}


def damage(data: bytes, rng: random.Random) -> bytes:
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + rng.randbytes(1 + at % 50)
    if kind == 2:  # A hole, as a disk that was full leaves it.
        return data[:at] + bytes(len(data) - at)
    if kind == 3:  # Two pieces change places.
        size = 1 + at % 64
        other = rng.randrange(len(data))
        first, last = sorted((at, other))
        middle = data[first + size : last]
        swapped = data[last : last + size] + middle + data[first : first + size]
        return data[:first] + swapped + data[last + size :]
    broken = bytearray(data)
    # Half of all flips meet the header, which is small.
    at = at if kind == 4 else rng.randrange(8 + int.from_bytes(data[:8], "little"))
    broken[at] ^= 1 << rng.randrange(8)
    return bytes(broken)


def test_faults_are_refused_or_harmless(tmp_path):
    files, rng, refused = written(tmp_path), random.Random(5), 0
    path = files.path(NAME, 0)
    whole = path.read_bytes()
    for _ in range(FAULTS):
        path.write_bytes(damage(whole, rng))
        try:
            found = unpack(files.read(NAME, 0, 10**4).map())
        except ValueError:
            refused += 1
        else:
            assert same(found)
    assert refused > 0.9 * FAULTS


def test_a_file_of_another_store_rank_or_server_is_refused(tmp_path):
    files = written(tmp_path)
    data = files.path(NAME, 0).read_bytes()
    other = StoreFiles(tmp_path, {"model": "b"})
    for path in [files.path("cd" * 20, 0), files.path(NAME, 1), other.path(NAME, 0)]:
        path.write_bytes(data)
    for reader, name, rank in [(files, "cd" * 20, 0), (files, NAME, 1), (other, NAME, 0)]:
        with pytest.raises(ValueError, match="a different store"):
            reader.read(name, rank, 10**6)


def test_what_is_no_file_is_refused(tmp_path):
    files = StoreFiles(tmp_path, {})
    path = files.path(NAME, 0)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        files.read(NAME, 0, 10**6)
    path.unlink()
    (tmp_path / "secret").write_bytes(b"x" * 100)
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        files.read(NAME, 0, 10**6)
    path.unlink()
    path.write_bytes(b"x" * (2 << 20))
    with pytest.raises(ValueError, match="too large"):
        files.read(NAME, 0, 10**4)


def test_tensors_that_no_store_has_are_refused(tmp_path):
    files = StoreFiles(tmp_path, {})
    about = {"fingerprint": files.fingerprint, "name": NAME, "rank": "0", "sha256": "0"}
    files.path(NAME, 0).write_bytes(save({"0.split": torch.tensor(1.5)}, about))
    with pytest.raises(ValueError, match="does not hold a store"):
        files.read(NAME, 0, 10**6)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 8, b"\xff" * 64, b"[" * 200, (100).to_bytes(8, "little") + b"[" * 100]
)
def test_bytes_that_are_no_safetensors(data):
    with pytest.raises(ValueError):
        unpack(bytearray(data))


def test_the_digest_covers_names_types_shapes_and_values():
    one = tensors()
    digests = {digest(one, {}), digest(one, {"name": "x"})}
    for name, other in [
        ("0.split", one["0.split"].view(3, 1)),
        ("0.split", one["0.split"].view(torch.float32)),
        ("0.0.pages", one["0.0.pages"] ^ 1),
    ]:
        digests.add(digest(one | {name: other}, {}))
    digests.add(digest({f"{name}x": tensor for name, tensor in one.items()}, {}))
    assert len(digests) == 6


def test_the_files_used_longest_ago_leave(tmp_path):
    size = written(tmp_path).path(NAME, 0).stat().st_size
    files = StoreFiles(tmp_path, {"model": "a"}, max_bytes=3 * size)
    for number in range(4):
        files.write(f"{number:040x}", 0, tensors())
        os.utime(files.path(f"{number:040x}", 0), (number, number))
    os.utime(files.path(NAME, 0), (9, 9))
    files.read(f"{0:040x}", 0, 10**6)
    assert files.path(f"{0:040x}", 0).stat().st_mtime > time.time() - 60
    files.trim()
    left = sorted(path.name.partition(".")[0] for path in files.folder.iterdir())
    assert left == sorted([f"{0:040x}", f"{3:040x}", NAME])


def test_what_others_keep_in_the_folder_stays(tmp_path):
    """A model's weights, which an operator has beside the stores, are not ours to remove."""
    weights = tmp_path / "llama" / "model-00001-of-00002.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"x" * 5000)
    os.utime(weights, (1, 1))
    size = written(tmp_path).path(NAME, 0).stat().st_size
    files = StoreFiles(tmp_path, {"model": "a"}, max_bytes=size)
    files.trim()
    assert weights.exists() and files.path(NAME, 0).exists(), "nor do they count"
    files.write("cd" * 20, 0, tensors())
    files.trim()
    assert weights.exists() and len(list(files.folder.iterdir())) == 1


def test_a_folder_that_is_mounted_read_only_is_read(tmp_path, monkeypatch):
    files = written(tmp_path)

    def refused(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("vllm_kvevict.stores.files.os.utime", refused)
    assert same(unpack(files.read(NAME, 0, 10**6).map()))


def test_a_full_disk_costs_the_file_only(tmp_path, monkeypatch):
    files = StoreFiles(tmp_path, {})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_kvevict.stores.files.os.replace", full)
    files.write_soon(NAME, 0, tensors(), lambda: None)
    files.flush()
    assert not list(files.folder.iterdir())


def refused(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fault", ["folder gone", "full", "read-only", "no descriptors"])
def test_failed_writes_keep_nothing_and_say_so_once(tmp_path, monkeypatch, caplog, fault):
    """vLLM's logger would keep the error, its traceback, and so the tensors of 128 stores."""
    files = StoreFiles(tmp_path / "stores", {})
    if fault == "folder gone":
        shutil.rmtree(tmp_path / "stores")
    elif fault == "full":
        monkeypatch.setattr("vllm_kvevict.stores.files.os.write", refused)
    else:
        monkeypatch.setattr("vllm_kvevict.stores.files.tempfile.mkstemp", refused)
    kept = []
    for number in range(5):
        store = tensors(number)
        kept += [weakref.ref(tensor) for tensor in store.values()]
        files.write_soon(f"{number:040x}", 0, store, lambda: None)
        del store
    files.flush()
    gc.collect()
    assert not any(one() is not None for one in kept)
    lines = [r for r in caplog.records if "was not written to a file" in r.getMessage()]
    assert len(lines) == 1 and str(tmp_path) in lines[0].getMessage()
    assert files.results() == {f"{number:040x}": False for number in range(5)}
    assert files.results() == {} and not list(tmp_path.glob("*/*/*"))
    assert (tmp_path / "stores").exists() == (fault != "folder gone"), "it may be unmounted"


def test_a_disk_that_hangs_is_not_waited_for_at_the_end(tmp_path):
    files, go = StoreFiles(tmp_path, {}), threading.Event()
    files.write_soon(NAME, 0, tensors(), go.wait)
    files.flush(0.05)
    assert files.results() == {}
    go.set()
    files.flush()
    assert files.results() == {NAME: True}


def test_a_file_that_may_not_be_removed_keeps_no_other(tmp_path, monkeypatch):
    size = written(tmp_path).path(NAME, 0).stat().st_size
    files = StoreFiles(tmp_path, {"model": "a"}, max_bytes=2 * size)
    for number in range(4):
        files.write(f"{number:040x}", 0, tensors())
        os.utime(files.path(f"{number:040x}", 0), (number, number))
    files.path(NAME, 0).unlink()
    unlink = Path.unlink

    def some(self, *args, **kwargs):
        if self == files.path(f"{0:040x}", 0):
            raise PermissionError
        unlink(self, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", some)
    files.trim()
    left = sorted(path.name.partition(".")[0] for path in files.folder.iterdir())
    assert left == [f"{0:040x}", f"{3:040x}"]


def test_a_folder_that_others_control_is_refused(tmp_path, monkeypatch):
    StoreFiles(tmp_path / "own", {})
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="every user may write") as refusal:
        StoreFiles(tmp_path / "open", {})
    assert "\n" not in str(refusal.value)
    (tmp_path / "open").chmod(0o1777)
    sticky = StoreFiles(tmp_path / "open", {})
    sticky.folder.chmod(0o777)
    with pytest.raises(ValueError, match="every user may write"):
        StoreFiles(tmp_path / "open", {})
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2770)
    StoreFiles(tmp_path / "group", {})
    monkeypatch.setattr("vllm_kvevict.stores.folder.os.geteuid", lambda: 12345)
    if (owner := (tmp_path / "own").stat().st_uid) == 0:
        owner = 54321
        os.chown(tmp_path / "own", owner, -1)
    with pytest.raises(ValueError, match=f"belongs to user {owner}"):
        StoreFiles(tmp_path / "own", {})


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "read-only"])
def test_what_cannot_be_a_folder_is_refused_in_one_sentence(tmp_path, monkeypatch, kind):
    folder = tmp_path / "stores"
    if kind == "dangling link":
        folder.symlink_to(tmp_path / "nowhere")
    elif kind == "read-only":
        monkeypatch.setattr(Path, "mkdir", raising(OSError(30, "Read-only file system")))
    else:
        folder.touch()
    if kind == "below a file":
        folder = folder / "mine"
    with pytest.raises(ValueError, match=f"the folder {folder} cannot be used") as refusal:
        StoreFiles(folder, {})
    assert "\n" not in str(refusal.value)
    if "file" in kind:
        with pytest.raises(ValueError, match=f"{tmp_path / 'stores'} is not a folder"):
            check_folder(folder)
    else:
        check_folder(folder)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def test_files_of_other_weights_are_apart(tmp_path):
    files, folder = written(tmp_path), StoreFiles(tmp_path, {"model": "a"}).folder
    files.use("x")
    with pytest.raises(FileNotFoundError):
        files.read(NAME, 0, 10**6)
    files.write(NAME, 0, tensors(1))
    assert same(unpack(files.read(NAME, 0, 10**6).map()), 1)
    files.use("")
    assert files.folder == folder and same(unpack(files.read(NAME, 0, 10**6).map()))


def test_a_read_that_nobody_waits_for_ends(tmp_path, monkeypatch):
    files, asked = written(tmp_path), []
    monkeypatch.setattr("vllm_kvevict.stores.files.CHUNK_BYTES", 100)

    def wanted():
        asked.append(1)
        return len(asked) < 3

    with pytest.raises(OSError, match="the read was abandoned"):
        files.read(NAME, 0, 10**6, wanted)
    assert len(asked) == 3


def test_safetensors_reads_our_files(tmp_path):
    found = load_file(written(tmp_path).path(NAME, 0))
    assert same(found)


def test_what_waits_to_be_written_is_bounded(tmp_path, monkeypatch):
    """A large one alone is written; beside it a further one is not, and later one is again."""
    monkeypatch.setattr("vllm_kvevict.stores.files.MAX_WAITING_BYTES", 8)
    files, go = StoreFiles(tmp_path, {}), threading.Event()
    files.write_soon("a" * 40, 0, tensors(), go.wait)
    files.write_soon("b" * 40, 0, tensors(), go.wait)
    go.set()
    files.flush()
    files.write_soon("c" * 40, 0, tensors(), go.wait)
    files.flush()
    assert sorted(path.name[0] for path in files.folder.iterdir()) == ["a", "c"]


def test_writing_waits_until_the_tensors_are_there(tmp_path):
    files, order = StoreFiles(tmp_path, {}), []
    host = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}

    def ready():
        order.append(files.path(NAME, 0).exists())
        for name, tensor in tensors().items():
            host[name].copy_(tensor)

    files.write_soon(NAME, 0, host, ready)
    files.flush()
    assert order == [False] and same(unpack(files.read(NAME, 0, 10**6).map()))


def test_what_a_killed_server_began_to_write_goes(tmp_path):
    files = written(tmp_path)
    old, new = files.folder / ".store-old", files.folder / ".store-new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    again = StoreFiles(tmp_path, {"model": "a"})
    assert not old.exists() and new.exists() and again.path(NAME, 0).exists()


def names(files: StoreFiles) -> list[str]:
    return sorted(path.name for path in files.folder.iterdir())


class Listings:
    """Counts the listings of a folder and of those inside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = str(folder), 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if event in ("os.scandir", "os.listdir") and str(args[0]).startswith(self.folder):
            self.count += 1


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_limit_is_kept_and_the_folder_is_seldom_listed(tmp_path, ranks):
    """The first rank counts what all ranks write."""
    size = written(tmp_path).path(NAME, 0).stat().st_size
    files = StoreFiles(tmp_path, {"model": "a"}, max_bytes=100 * size, ranks=ranks)
    listings, largest, stores = Listings(tmp_path), 0, 300 // ranks
    for number in range(stores):
        name = f"{number:040x}"
        for rank in range(1, ranks):
            files.write(name, rank, tensors())
        files.write_soon(name, 0, tensors(), lambda: None)
        files.flush()
        largest = max(largest, len(os.listdir(files.folder)) * size)
    assert 80 * size < largest <= (100 + ranks) * size
    # A listing reads the folder and the one in it.
    assert (listings.count - stores) / 2 < 150, "not at every write"


def test_what_other_servers_write_counts_after_a_while(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vllm_kvevict.stores.folder.monotonic", lambda: now[0])
    own = StoreFiles(tmp_path, {"model": "a"}, max_bytes=100_000)
    own.write_soon(NAME, 0, tensors(), lambda: None)
    own.flush()
    other = StoreFiles(tmp_path, {"model": "b"})
    while sum(path.stat().st_size for path in tmp_path.glob("*/*")) < 150_000:
        other.write(f"{len(names(other)):040x}", 0, tensors())
    now[0] += 61
    own.write_soon("cd" * 20, 0, tensors(), lambda: None)
    own.flush()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 100_000
    assert own.path("cd" * 20, 0).exists()


def test_unfinished_files_count(tmp_path):
    """Abandoned ones leave first; others are being written, and hidden files are not ours."""
    size = written(tmp_path).path(NAME, 0).stat().st_size
    files = StoreFiles(tmp_path, {"model": "a"}, max_bytes=3 * size)
    files.write("cd" * 20, 0, tensors())
    os.utime(files.path(NAME, 0), (9, 9))
    kept = files.folder / ".nfs0001", files.folder / ".store-new"
    for path in (files.folder / ".store-old", *kept):
        path.write_bytes(b"x" * size)
    os.utime(files.folder / ".store-old", (1, 1))
    os.utime(kept[0], (1, 1))
    files.trim()
    assert names(files) == sorted([*(path.name for path in kept), *left(NAME, "cd" * 20)])
    (files.folder / ".store-more").write_bytes(b"x" * size)
    files.trim()
    assert not files.path(NAME, 0).exists() and files.path("cd" * 20, 0).exists()


def left(*stores: str) -> list[str]:
    return [f"{store}.0.safetensors" for store in stores]


def test_without_a_limit_half_of_the_space_is_used(tmp_path, monkeypatch, caplog):
    size = written(tmp_path).path(NAME, 0).stat().st_size
    free = 5 * size
    monkeypatch.setattr(
        "vllm_kvevict.stores.folder.os.statvfs",
        lambda _: SimpleNamespace(f_bavail=free, f_frsize=1),
    )
    files = StoreFiles(tmp_path, {"model": "a"})
    files.announce_limit()
    (line,) = [r.getMessage() for r in caplog.records if "may take up to" in r.getMessage()]
    assert "max=100G" in line and str(tmp_path) in line
    for number in range(9):
        files.write_soon(f"{number:040x}", 0, tensors(), lambda: None)
        files.flush()
    assert sum(path.stat().st_size for path in files.folder.iterdir()) <= 3 * size
    caplog.clear()
    StoreFiles(tmp_path, {"model": "a"}, max_bytes=size).announce_limit()
    assert not caplog.records


@pytest.mark.parametrize("late", [False, True])
def test_a_store_counts_as_written_when_all_ranks_have_written(tmp_path, monkeypatch, late):
    """Only the first rank's report reaches the scheduler."""
    monkeypatch.setattr("vllm_kvevict.stores.files.PEER_TIMEOUT_S", 20.0 if late else 0.1)
    first, second = (StoreFiles(tmp_path, {"model": "a"}, ranks=2) for _ in range(2))
    first.write_soon(NAME, 0, tensors(), lambda: None)
    if late:
        time.sleep(0.05)
        second.write_soon(NAME, 1, tensors(), lambda: None)
        second.flush()
        assert second.results() == {NAME: True}
    first.flush(30)
    assert first.results() == {NAME: late}


def test_a_folder_for_new_weights_that_others_control_is_not_used(tmp_path, caplog):
    files = written(tmp_path)
    files.use("new weights")
    files.folder.mkdir()
    files.folder.chmod(0o777)
    files.write_soon(NAME, 0, tensors(), lambda: None)
    files.flush()
    assert files.results() == {NAME: False} and not names(files)
    assert [r for r in caplog.records if "other users control" in r.getMessage()]
    shutil.copy(written(tmp_path).path(NAME, 0), files.path(NAME, 0))
    with pytest.raises(PermissionError, match="other users control"):
        files.read(NAME, 0, 10**6)
    assert names(files) == left(NAME), "nor is anything removed from it"
    files.folder.chmod(0o700)
    files.path(NAME, 0).unlink()
    files.write(NAME, 0, tensors())
    assert same(unpack(files.read(NAME, 0, 10**6).map()))
