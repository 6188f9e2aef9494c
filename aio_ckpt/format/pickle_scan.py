"""Scanner of pickles: executes the opcodes on stand-ins for values and runs no code of the pickle. Pure.

Each of the three readers of pickles (``.metadata``, a tensor item, an object) scans first, by its own allow-list.
An unpickler that itself runs no code can still end the process or take memory by a number of the file. The scanner
counts the memory that an unpickler would take beyond a constant for each opcode, and refuses a pickle that takes more
than ``BUDGET_FACTOR`` times its length. It counts these:

- The memo: the C unpickler sizes it by the index, 64 GiB by five bytes.
- Copies: ``set(x)`` copies an ``x`` that the pickle holds once and names often.

It also refuses tuples nested deeper than ``MAX_TUPLES``, as a tuple hashes by recursion in C without a limit. And it
refuses what a caller's callback refuses: torch's reader of storages believes the number of elements of the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError

BUDGET_FACTOR = 64
"""Bytes that the memo and the copies may take, by byte of the pickle. A sound pickle takes below 45."""
_LEAST_BYTES = 1024
"""A shorter pickle may take as much as one of this length."""
_POINTER_BYTES = 8

MAX_TUPLES = 1000
"""Most tuples inside each other. The hash of such a tuple takes 0.1 MiB of the C stack."""


class _Value:
    """A tuple, a container or an instance on the stack."""

    __slots__ = ("depth", "items", "nbytes")

    def __init__(self, depth: int, items: list[Any] | None = None, *, nbytes: int | None = 0) -> None:
        self.nbytes = nbytes
        """Memory that a copy takes; None if nothing tells, as of a tensor."""
        self.depth = depth
        """Tuples inside each other, from this value down. The values of a container count: a hash may cover them."""
        self.items = items
        """Values of a tuple; None for another type."""


class _Global:
    """A class or function on the stack."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def scan(
    data: bytes,
    opcodes: frozenset[int],
    *,
    on_global: Callable[[str, str], None] | None = None,
    on_call: Callable[[str, list[Any]], None] | None = None,
    on_storage: Callable[[list[Any]], None] | None = None,
    copies: frozenset[str] = frozenset(),
) -> int:
    """Execute a pickle on stand-ins up to STOP.

    Args:
        data: the pickle.
        opcodes: the allowed ones, a subset of ``ALL_OPCODES``.
        on_global: gets module and name of each global.
        on_call: gets the full name of the called class or function, and the arguments.
        on_storage: gets the values of a persistent id.
        copies: full names of functions whose result takes about as much memory as their arguments.

    Returns:
        The offset of STOP. If an opcode is not allowed, is malformed or lacks its operands, the offset of that opcode.
        If an argument ends after the data, the offset of that end.

    Raises:
        CorruptCheckpointError: tuples nested too deep, or the budget is spent.
        UnsafeObjectError: a copy of a value whose length nothing tells.
        Exception: a callback raised it.
    """
    return _Machine(data, on_global, on_call, on_storage, copies).run(opcodes)


def check_calls(data: bytes, storage_bytes: Callable[[str], int | None], element_bytes: dict[str, int]) -> None:
    """Refuse what ``torch.load(weights_only=True)`` takes on trust. ``data`` is the archive's ``data.pkl``.

    If torch's unpickler does not know an opcode, it ends there, and so does the scan, without an error.

    Args:
        data: the pickle.
        storage_bytes: length of the record of a storage by its key; None if there is none.
        element_bytes: size of an element by the full name of its storage class.

    Raises:
        CorruptCheckpointError: a storage that is not as long as its record; see :func:`scan`.
        UnsafeObjectError: a call that takes memory by a number, or whose arguments torch does not check.
    """

    def on_storage(pid: list[Any]) -> None:
        match pid:
            case ["storage", _Global(name=kind), str(key), _, int(count)] if kind in element_bytes:
                stored = storage_bytes(key)
                if stored != count * element_bytes[kind]:
                    raise CorruptCheckpointError(f"a storage of {count} elements of {kind} over {stored} stored bytes")
            case _:
                raise CorruptCheckpointError("a storage that is none")

    scan(data, ALL_OPCODES, on_call=_check_call, on_storage=on_storage, copies=_COPIES)


def _check_call(name: str, arguments: list[Any]) -> None:
    codec = arguments[1] if len(arguments) > 1 else None
    is_odd_codec = name == "_codecs.encode" and codec not in ("latin1", "latin-1", "utf-8")
    is_mesh = name == _MESH and bool(arguments)  # its own pickles call it without
    if is_odd_codec or is_mesh or name in _REFUSED or name.endswith("Tensor"):
        raise UnsafeObjectError(f"the pickle calls {name}, whose arguments nothing checks")


_COPIES = frozenset(
    {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("bytearray", "set")}
    | {"collections.Counter", "collections.OrderedDict", "torch.Size", "_codecs.encode"}
)
_MESH = "torch.distributed.device_mesh.DeviceMesh"
"""Torch allows it once ``torch.distributed.tensor`` is imported. Making one opens a rendezvous, and waits in it."""
_REFUSED = frozenset(
    f"torch._utils._rebuild_{kind}"
    for kind in ("nested_tensor", "qtensor", "device_tensor_from_cpu_tensor", "device_tensor_from_numpy")
)
"""The last two copy a tensor, which may be one element that is expanded to a terabyte."""

# -- the machine ------------------------------------------------------------------------------------

_INST = b"i"[0]
_MAX_NAME_BYTES = 4096
"""Most bytes of the module and name of a global."""
_SKIPPED_BYTES = {0x80: 1, 0x95: 8, b"G"[0]: 8}
"""Length of the argument of PROTO, FRAME and BINFLOAT."""
_INT_BYTES = {b"K"[0]: 1, b"M"[0]: 2, b"J"[0]: 4}
_LENGTH_BYTES = {**dict.fromkeys(b"U\x8c\x8aC", 1), **dict.fromkeys(b"XTB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""By opcode, the size of the length field that follows it."""
_TEXTS, _LONGS = frozenset(b"UX\x8c\x8d"), frozenset(b"\x8a\x8b")
_PUT_BYTES = {b"q"[0]: 1, b"r"[0]: 4, 0x94: 0}
_GET_BYTES = {b"h"[0]: 1, b"j"[0]: 4}
_TUPLE_SIZES = {b")"[0]: 0, 0x85: 1, 0x86: 2, 0x87: 3}
_ADDED = {b"a"[0]: 1, b"s"[0]: 2, b"b"[0]: 1}
"""Values that APPEND, SETITEM and BUILD take from the stack and put into the value below."""
_MADE_OF_MARKED, _ADDING_MARKED = frozenset(b"ld\x91"), frozenset(b"eu\x90")
_CALLED = {b"R"[0]: 2, 0x81: 2, 0x92: 3}
"""Values that REDUCE, NEWOBJ and NEWOBJ_EX take from the stack: the function and its arguments."""


class _Machine:
    """Stack, marks and memo of an unpickler, with stand-ins for values.

    Each method executes the opcodes that its docstring names. It takes the opcode and the offset of its argument, and
    returns the offset at which the argument ends.
    """

    def __init__(
        self,
        data: bytes,
        on_global: Callable[[str, str], None] | None,
        on_call: Callable[[str, list[Any]], None] | None,
        on_storage: Callable[[list[Any]], None] | None,
        copies: frozenset[str],
    ) -> None:
        self._data = data
        self._copies = copies
        self._on_global = on_global
        self._on_call = on_call
        self._on_storage = on_storage
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._memo_slots = 0
        self._left_bytes = BUDGET_FACTOR * max(len(data), _LEAST_BYTES)

    def take(self, nbytes: int) -> None:
        """Count memory that the unpickler would take.

        Raises:
            CorruptCheckpointError: the budget is spent.
        """
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            raise CorruptCheckpointError(f"the pickle would take more than {BUDGET_FACTOR} times its length")

    def run(self, opcodes: frozenset[int]) -> int:
        """Execute the pickle up to STOP, and return the offset that :func:`scan` returns."""
        data, at = self._data, 0
        try:
            while at < len(data) and data[at] in opcodes:
                at = _STEPS[data[at]](self, data[at], at + 1)
        except (IndexError, KeyError):
            pass
        return at

    def skip(self, op: int, at: int) -> int:
        """Skip the argument of PROTO, FRAME or BINFLOAT."""
        if op == b"G"[0]:
            self._stack.append(None)
        return at + _SKIPPED_BYTES[op]

    def push_int(self, op: int, at: int) -> int:
        """Push the number of BININT, BININT1 or BININT2."""
        stop = at + _INT_BYTES[op]
        self._stack.append(int.from_bytes(self._data[at:stop], "little", signed=op == b"J"[0]))
        return stop

    def push_counted(self, op: int, at: int) -> int:
        """Push a text, bytes or a LONG, whose length precedes it."""
        start = at + _LENGTH_BYTES[op]
        stop = start + int.from_bytes(self._data[at:start], "little")
        raw = self._data[start:stop]
        is_text, is_number = op in _TEXTS, op in _LONGS
        number = int.from_bytes(raw, "little", signed=True) if is_number else 0
        self._stack.append(raw.decode("utf-8", "replace") if is_text else number if is_number else raw)
        return stop

    def put(self, op: int, at: int) -> int:
        """Execute BINPUT, LONG_BINPUT or MEMOIZE."""
        stop = at + _PUT_BYTES[op]
        index = int.from_bytes(self._data[at:stop], "little") if op != 0x94 else len(self._memo)
        if index >= self._memo_slots:
            self.take(2 * _POINTER_BYTES * (index + 1 - self._memo_slots))  # it doubles when it grows
            self._memo_slots = index + 1
        self._memo[index] = self._stack[-1]
        return stop

    def get(self, op: int, at: int) -> int:
        """Execute BINGET or LONG_BINGET."""
        stop = at + _GET_BYTES[op]
        self._stack.append(self._memo[int.from_bytes(self._data[at:stop], "little")])
        return stop

    def push_global(self, op: int, at: int) -> int:
        """Execute GLOBAL. INST has the same argument; no reader needs it, so the scan ends there."""
        texts = self._data[at : at + _MAX_NAME_BYTES].split(b"\n", 2)
        module, name = texts[0], texts[1]
        texts[2]
        self._tell_global(module.decode("utf-8", "replace"), name.decode("utf-8", "replace"))
        if op == _INST:
            raise KeyError(op)
        return at + len(module) + len(name) + 2

    def push_stack_global(self, op: int, at: int) -> int:
        """Execute STACK_GLOBAL."""
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise KeyError(op)
        self._tell_global(module, name)
        return at

    def _tell_global(self, module: str, name: str) -> None:
        if self._on_global is not None:
            self._on_global(module, name)
        self._stack.append(_Global(f"{module}.{name}"))

    def push_constant(self, _: int, at: int) -> int:
        """Push the value of NONE, NEWTRUE or NEWFALSE."""
        self._stack.append(None)
        return at

    def push_container(self, _: int, at: int) -> int:
        """Push the container of EMPTY_LIST, EMPTY_DICT or EMPTY_SET."""
        self._stack.append(_Value(0))
        return at

    def push_tuple(self, op: int, at: int) -> int:
        """Push the tuple of EMPTY_TUPLE or TUPLE1 to TUPLE3."""
        size = _TUPLE_SIZES[op]
        items = [self._stack[-number] for number in range(size, 0, -1)]
        del self._stack[len(self._stack) - size :]
        self._stack.append(_tuple_of(items))
        return at

    def take_marked(self, op: int, at: int) -> int:
        """Take all values above a mark: into a tuple, a new container, or the container below the mark."""
        items = self._pop_mark()
        if op == b"t"[0]:
            self._stack.append(_tuple_of(items))
            return at
        if op in _MADE_OF_MARKED:
            self._stack.append(_Value(0))
        _deepen(self._stack[-1], items)
        return at

    def add(self, op: int, at: int) -> int:
        """Execute APPEND, SETITEM or BUILD."""
        values = [self._stack.pop() for _ in range(_ADDED[op])]
        _deepen(self._stack[-1], values)
        return at

    def call(self, op: int, at: int) -> int:
        """Execute REDUCE, NEWOBJ or NEWOBJ_EX."""
        taken = [self._stack.pop() for _ in range(_CALLED[op])]
        function, arguments = taken[-1], taken[-2]
        nbytes = None
        if isinstance(function, _Global):
            values = getattr(arguments, "items", None) or []
            if self._on_call is not None:
                self._on_call(function.name, values)
            if function.name in self._copies:
                nbytes = sum(_copied_bytes(function.name, value) for value in values)
                self.take(nbytes)
        self._stack.append(_Value(_depth_of(taken), nbytes=nbytes))
        return at

    def push_storage(self, _: int, at: int) -> int:
        """Execute BINPERSID."""
        pid = self._stack.pop()
        if self._on_storage is not None and isinstance(pid, _Value) and pid.items is not None:
            self._on_storage(pid.items)
        self._stack.append(_Value(0, nbytes=None))
        return at

    def move(self, op: int, at: int) -> int:
        """Execute MARK, POP, POP_MARK or DUP."""
        if op == b"("[0]:
            self._marks.append(self._stack)
            self._stack = []
        elif op == b"2"[0]:
            self._stack.append(self._stack[-1])
        elif op == b"0"[0] and self._stack:
            self._stack.pop()
        else:
            self._pop_mark()
        return at

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items


_STEPS: dict[int, Callable[[_Machine, int, int], int]] = {
    **dict.fromkeys(_SKIPPED_BYTES, _Machine.skip),
    **dict.fromkeys(_INT_BYTES, _Machine.push_int),
    **dict.fromkeys(_LENGTH_BYTES, _Machine.push_counted),
    **dict.fromkeys(_PUT_BYTES, _Machine.put),
    **dict.fromkeys(_GET_BYTES, _Machine.get),
    **dict.fromkeys(_TUPLE_SIZES, _Machine.push_tuple),
    **dict.fromkeys(b"N\x88\x89", _Machine.push_constant),
    **dict.fromkeys(b"]}\x8f", _Machine.push_container),
    **dict.fromkeys(_ADDED, _Machine.add),
    **dict.fromkeys((*_MADE_OF_MARKED, *_ADDING_MARKED, *b"t"), _Machine.take_marked),
    **dict.fromkeys(_CALLED, _Machine.call),
    **dict.fromkeys(b"ci", _Machine.push_global),
    **dict.fromkeys(b"(012", _Machine.move),
    0x93: _Machine.push_stack_global,
    b"Q"[0]: _Machine.push_storage,
}
"""By opcode, the method that executes it."""
ALL_OPCODES = frozenset(_STEPS)
"""Opcodes that the scanner executes: protocols 2 to 5, without the extension registry and out-of-band buffers."""


def _depth_of(values: Sequence[Any]) -> int:
    return max([getattr(value, "depth", 0) for value in values], default=0)


def _tuple_of(items: list[Any]) -> _Value:
    depth = 1 + _depth_of(items)
    if depth > MAX_TUPLES:
        raise CorruptCheckpointError(f"the pickle nests tuples deeper than {MAX_TUPLES}")
    return _Value(depth, items, nbytes=_POINTER_BYTES * len(items))


def _deepen(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, _Value) and owner.items is None:
        owner.depth = max(owner.depth, _depth_of(values))
        if owner.nbytes is not None:
            owner.nbytes += _POINTER_BYTES * len(values)


def _copied_bytes(function: str, value: Any) -> int:
    """Return the memory that a copy of an argument takes.

    Raises:
        UnsafeObjectError: nothing tells it: ``bytearray(n)`` takes n bytes, and a tensor may expand one element.
    """
    nbytes: int | None = len(value) if isinstance(value, str | bytes) else getattr(value, "nbytes", None)
    if nbytes is None:
        raise UnsafeObjectError(f"the pickle calls {function} with a value whose length nothing tells")
    return nbytes
