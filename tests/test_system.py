"""This machine: how much memory it has, where caches go, and files that are replaced whole or not at all."""

import os
import platform
from pathlib import Path

import pytest

from speedtransfer import system
from speedtransfer.errors import InvalidValueError, StorageError


@pytest.fixture
def of_this_machine(monkeypatch):
    monkeypatch.delenv("SPEEDTRANSFER_HOST_BYTES", raising=False)
    # Read anew each time.
    monkeypatch.setattr(system, "_physical_bytes", system._physical_bytes.__wrapped__)


def test_bytes_of_memory(monkeypatch, of_this_machine):
    found = system.physical_bytes()
    assert 0 < system.available_bytes() <= found <= 1 << 50
    for told, expected in {"64e9": 64_000_000_000, "123": 123, "64 GB": 64_000_000_000, "": found}.items():
        monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", told)
        assert system.physical_bytes() == expected, told
    for told in ("much", "inf", "-5", "0"):
        monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", told)
        with pytest.raises(InvalidValueError, match=f"HOST_BYTES in the environment is '{told}'"):
            system.physical_bytes()
    monkeypatch.delenv("SPEEDTRANSFER_HOST_BYTES")
    monkeypatch.setattr(Path, "read_text", lambda path, *args: os.stat("/nowhere"))
    assert system.available_bytes() == system.physical_bytes() // 2


@pytest.fixture
def files(monkeypatch, of_this_machine):
    """Files of the control groups around this process, made up."""
    found = {"/proc/meminfo": "MemAvailable: 4000000 kB\n"}

    def read(path, *args):
        if str(path) in found:
            return found[str(path)]
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(system.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 20}[name])
    return found


@pytest.mark.parametrize("group", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_container(files, group):
    assert (system.physical_bytes(), system.available_bytes()) == (1 << 32, 4_096_000_000)
    for limit, expected in {"1000000\n": 1_000_000, "max\n": 1 << 32, str(1 << 62): 1 << 32}.items():
        files[f"/sys/fs/cgroup/{group}"] = limit
        assert system.physical_bytes() == expected


def test_the_smallest_limit_of_the_groups_around_it(files):
    files["/proc/self/cgroup"] = "0::/user/job/step\n"
    for group, limit in {"user": "3000000000\n", "user/job": "2000000000\n", "user/job/step": "max\n"}.items():
        files[f"/sys/fs/cgroup/{group}/memory.max"] = limit
    assert system.physical_bytes() == system.available_bytes() == 2_000_000_000


GROUPS = {
    "0::/job": ("/sys/fs/cgroup/job", "memory.max", "memory.current", "inactive_file"),
    "7:cpu,cpuacct:/job\n4:memory:/job": (
        "/sys/fs/cgroup/memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", GROUPS)
def test_what_a_group_holds_is_not_available(files, line):
    folder, limit, held, droppable = GROUPS[line]
    files |= {"/proc/self/cgroup": line, f"{folder}/{limit}": "2000000000", f"{folder}/{held}": "1500000000"}
    assert system.available_bytes() == 2_000_000_000, "what is held is not told"
    files[f"{folder}/memory.stat"] = f"anon 5\n{droppable} 300000000\n"
    assert system.available_bytes() == 800_000_000
    assert system.physical_bytes() == 2_000_000_000
    files[f"{folder}/{held}"] = "2400000000"
    assert system.available_bytes() == 0


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SPEEDTRANSFER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert system.cache_folder() == Path.home() / ".cache" / "speedtransfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert system.cache_folder() == tmp_path / "speedtransfer"
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "mine"))
    assert system.cache_folder() == tmp_path / "mine"


# --- files that are replaced --------------------------------------------------------------------------------------------


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), system.replace_file(path) as file:
        file.writelines([b"half", "a str"])
    assert path.read_bytes() == b"old"
    with system.replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_where_it_cannot(tmp_path):
    path = tmp_path / "missing" / "file"
    for options, words in (({}, "choose a folder you may write to"), ({"remedy": "think again"}, "think again")):
        message = rf"cannot write .*missing.file' \(No such file .*\); {words}$"
        with pytest.raises(StorageError, match=message), system.replace_file(path, **options):
            pytest.fail("there is no such folder")


def test_permissions_are_the_usual_ones_or_those_of_the_one_before(tmp_path, monkeypatch):
    (tmp_path / "usual").touch()
    # It is that of all threads, whose new files everybody could read meanwhile.
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("umask"))
    with system.replace_file(tmp_path / "ours"):
        pass
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode
    for mode in (0o600, 0o640, 0o664):
        (tmp_path / "ours").chmod(mode)
        with system.replace_file(tmp_path / "ours"):
            (new,) = (each for each in tmp_path.iterdir() if each.name not in ("usual", "ours"))
            assert new.stat().st_mode & 0o777 == mode
        assert (tmp_path / "ours").stat().st_mode & 0o777 == mode


# --- processors and programs --------------------------------------------------------------------------------------------


def test_cpu_features_as_a_system_lists_them(tmp_path, monkeypatch):
    if Path("/proc/cpuinfo").exists() and platform.machine() == "x86_64":
        assert {"fpu", "sse2"} <= system.cpu_features()
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(system, "Path", lambda path: info)
    assert system.cpu_features() == set()
    for name in ("flags\t", "Features"):
        info.write_text(f"processor\t: 0\n{name}\t: fpu bf16\n\nprocessor\t: 1\n{name}\t: fpu bf16\n")
        assert system.cpu_features() == {"fpu", "bf16"}
