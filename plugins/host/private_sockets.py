"""Keep the sockets on which Monarch listens from other users of the host.

A process with a Monarch host listens on Unix sockets with abstract names, whatever transport is
enabled: a host's children connect there. Such a name has no file and so no mode, and whoever
connects runs code. Monarch draws the name itself and no setting changes that, but it advertises the
address that the socket then has. So here the name becomes a path in a directory of mode 0700, in
the one call that binds it: the entry for `bind` in the table by which Monarch's library calls the C
library (ELF's global offset table) points to `_bind`.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib
import mmap
import os
import platform
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from cartridge_forge.plugins.host.directories import owned_directory
from cartridge_forge.protocols.errors import RunError

LIBRARY = "monarch._rust_bindings"
RUNTIME_DIR = "XDG_RUNTIME_DIR"  # where Monarch makes the directory of its processes' sockets
MOST_BYTES = 40  # of the base's name: a socket's whole path has at most 107
PT_LOAD, PT_DYNAMIC = 1, 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
DT_RELACOUNT = 0x6FFFFFF9
# Relocations that are an entry of the table: GLOB_DAT and JUMP_SLOT.
ENTRIES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
BIND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)

_directory: Path | None = None
_references: list[object] = []  # what the table points to, and the lock


def use_private_sockets() -> Path | None:
    """Have Monarch's hosts of this process listen in a new directory of mode 0700, and return it;
    None on a system without abstract names. Call it before the first use of Monarch, which it
    imports. The directory goes with the process (`remove`). Raises RunError where Monarch's library
    does not let itself be changed."""
    global _directory
    if sys.platform != "linux" or _directory is not None:
        return _directory
    library = importlib.import_module(LIBRARY).__file__
    assert library is not None
    libc = ctypes.CDLL(None, use_errno=True)
    callback = BIND(_binder(libc.bind))
    try:
        root, lock = owned_directory(_base(), "forge-sockets")
        slots = list(_entries(library, "bind"))
        for slot in slots:
            _write(libc, slot, ctypes.cast(callback, ctypes.c_void_p).value or 0)
    except OSError as error:
        raise RunError(f"no directory for the sockets of this process: {error}") from error
    if not slots:
        raise RunError(
            f"{library} calls no `bind` that can be changed, so its sockets were open to every "
            "user of this host; install the version of constraints.txt"
        )
    _references.extend((callback, libc, lock))
    _directory = root
    os.environ[RUNTIME_DIR] = str(root)
    atexit.register(remove)
    return root


def remove() -> None:
    """Remove the directory, at this process's end: none can connect any more."""
    if _directory is not None and f"-{os.getpid()}-" in _directory.name:  # not in a forked child
        shutil.rmtree(_directory, ignore_errors=True)


def _base() -> str:
    """Return the directory for sockets: the user's own for this session, else the temporary one."""
    for base in (os.environ.get(RUNTIME_DIR, ""), tempfile.gettempdir()):
        if base and len(os.fsencode(base)) <= MOST_BYTES and os.access(base, os.W_OK):
            return base
    return "/tmp"


def _binder(bind: Callable[..., int]) -> Callable[[int, int, int], int]:
    """Return a `bind` that gives a socket a path in the directory for an abstract name."""

    def private_bind(descriptor: int, address: int, length: int) -> int:
        try:
            raw = ctypes.string_at(address, length)
            if int.from_bytes(raw[:2], sys.byteorder) == socket.AF_UNIX and raw[2:3] == b"\0":
                name = raw[3:].rstrip(b"\0")
                plain = name.isalnum() and name.isascii()
                path = os.fsencode(
                    f"{_directory}/{(name if plain else name.hex().encode()).decode()}"
                )
                raw = raw[:2] + path + b"\0"
                return bind(descriptor, ctypes.create_string_buffer(raw, len(raw)), len(raw))
            return bind(descriptor, ctypes.c_void_p(address), length)
        except Exception:  # none may pass into Monarch's library
            ctypes.set_errno(errno.EACCES)
            return -1

    return private_bind


def _entries(library: str, function: str) -> Iterator[int]:
    """Yield the addresses of the table's entries for `function` in a library that is loaded."""
    base = _load_address(library)
    kinds = ENTRIES.get(platform.machine(), ())

    def at(address: int, form: str) -> tuple[int, ...]:
        return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))

    (headers,) = at(base + 32, "<Q")
    size, count = at(base + 54, "<HH")
    segments = [at(base + headers + i * size, "<IIQQQQQQ") for i in range(count)]
    bias = base - min(s[3] for s in segments if s[0] == PT_LOAD)
    start, length = next((s[3], s[6]) for s in segments if s[0] == PT_DYNAMIC)
    dynamic = dict(struct.iter_unpack("<QQ", ctypes.string_at(bias + start, length)))

    def absolute(tag: int) -> int:
        value = dynamic[tag]
        return value if value >= bias else value + bias  # made absolute by glibc alone

    # Of DT_RELA the first DT_RELACOUNT name no symbol.
    tables = [(DT_RELA, dynamic.get(DT_RELASZ, 0), dynamic.get(DT_RELACOUNT, 0))]
    if DT_JMPREL in dynamic:
        tables.append((DT_JMPREL, dynamic[DT_PLTRELSZ], 0))
    for tag, size_bytes, skipped in tables:
        if not size_bytes:
            continue
        rows = ctypes.string_at(absolute(tag) + skipped * 24, size_bytes - skipped * 24)
        for offset, info, _ in struct.iter_unpack("<QQq", rows):
            if info & 0xFFFFFFFF in kinds:
                (name,) = at(absolute(DT_SYMTAB) + (info >> 32) * 24, "<I")
                if ctypes.string_at(absolute(DT_STRTAB) + name).decode() == function:
                    yield bias + offset


def _maps() -> Iterator[tuple[int, int, str, int, str]]:
    """Yield this process's mapped pages: first, behind the last, permissions, offset, file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, offset, _, _, *file = line.split(maxsplit=5)
        first, stop = (int(end, 16) for end in span.split("-"))
        yield first, stop, permissions, int(offset, 16), file[0] if file else ""


def _load_address(library: str) -> int:
    """Return where the first page of a loaded library is. Raises OSError where it is not loaded."""
    loaded = str(Path(library).resolve())
    for first, _, _, offset, file in _maps():
        if offset == 0 and file == loaded:
            return first
    raise OSError(f"{library} is not loaded")


def _write(libc: ctypes.CDLL, slot: int, value: int) -> None:
    """Write a pointer to an entry of the table, which the loader may have made read-only. Raises
    OSError."""
    read_only = any(first <= slot < stop and "w" not in how for first, stop, how, _, _ in _maps())
    page, size = ctypes.c_void_p(slot - slot % mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
    if read_only and libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "the table of a library stays read-only")
    ctypes.c_void_p.from_address(slot).value = value
    if read_only:
        libc.mprotect(page, size, mmap.PROT_READ)
