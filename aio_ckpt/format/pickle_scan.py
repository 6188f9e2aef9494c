"""Looks through a pickle without running it: what could crash or starve an unpickler that itself runs no code. Pure.

A tuple hashes by recursion in C without a limit, so a key of 100,000 tuples inside each other ends the process, and one
of 60 that hold the next one twice takes for ever; torch's reader of storages believes the number of elements that the
pickle gives; ``bytearray(n)`` takes n bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError

__all__ = ["MAX_TUPLES", "check_calls", "check_nesting"]

MAX_TUPLES = 1000
"""Tuples inside each other, at most: a hash of so many takes 0.1 MiB of the stack."""

_MAX_HASHED = 1 << 22
"""Values in one key, at most, each counted in every place where it stands: a hash of so many takes 0.1 s."""


class _Tuple:
    """A tuple on the stack."""

    __slots__ = ("depth", "items", "places")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.places = _bounded(1 + sum(map(_places, items)))
        self.depth = 1 + max((_depth(item) for item in items), default=0)
        if self.depth > MAX_TUPLES:
            raise CorruptCheckpointError(f"the pickle nests tuples deeper than {MAX_TUPLES}")


class _Global:
    """A class or function on the stack."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Other:
    """A container or an instance: what is put into it may be hashed with it."""

    __slots__ = ("depth", "places", "total")

    def __init__(self, depth: int = 0, places: int = 1) -> None:
        self.depth = depth
        self.places = places
        """Of its largest value; an instance, which may have a hash of them all, has those of all."""
        self.total = places
        """Of all its values."""


def _depth(value: Any) -> int:
    return getattr(value, "depth", 0)


def _places(value: Any) -> int:
    """Values that a hash of ``value`` goes through, each as often as it stands there."""
    return getattr(value, "places", 1)


def _bounded(places: int) -> int:
    """No more than is refused: doubled without end the number itself would take all the memory."""
    return min(places, _MAX_HASHED + 1)


def _check_hashed(values: Iterable[Any]) -> None:
    if max(map(_places, values), default=0) > _MAX_HASHED:
        raise CorruptCheckpointError(f"the pickle has a key of more than {_MAX_HASHED} values")


def check_nesting(data: bytes) -> None:
    """Refuse keys whose hash would leave the stack, or never end.

    Raises:
        CorruptCheckpointError: tuples deeper than ``MAX_TUPLES``, or a key of too many values.
    """
    _Machine(data, None, None).run()


def check_calls(data: bytes, storage_bytes: Callable[[str], int | None], element_bytes: dict[str, int]) -> None:
    """Refuse what ``torch.load(weights_only=True)`` takes on trust. ``data`` is the archive's ``data.pkl``.

    Args:
        data: the pickle.
        storage_bytes: length of the record of a storage by its key; None if there is none.
        element_bytes: size of an element by the full name of its storage class.

    Raises:
        CorruptCheckpointError: a storage that is not as long as its record; tuples too deep.
        UnsafeObjectError: a call that takes memory by a number, or whose arguments torch does not check.
    """

    def on_storage(pid: _Tuple) -> None:
        match pid.items:
            case ["storage", _Global(name=kind), str(key), _, int(count)] if kind in element_bytes:
                stored = storage_bytes(key)
                if stored != count * element_bytes[kind]:
                    raise CorruptCheckpointError(f"a storage of {count} elements of {kind} over {stored} stored bytes")
            case _:
                raise CorruptCheckpointError("a storage that is none")

    _Machine(data, _check_call, on_storage).run()


def _check_call(name: str, arguments: list[Any]) -> None:
    first = arguments[0] if arguments else None
    codec = arguments[1] if len(arguments) > 1 else None
    is_sized = name == "builtins.bytearray" and isinstance(first, int)
    is_odd_codec = name == "_codecs.encode" and codec not in ("latin1", "latin-1", "utf-8")
    if is_sized or is_odd_codec or name in _REFUSED or name.endswith("Tensor"):
        raise UnsafeObjectError(f"the pickle calls {name}, whose arguments nothing checks")


_REFUSED = frozenset({"torch._utils._rebuild_nested_tensor", "torch._utils._rebuild_qtensor"})

# -- the machine ------------------------------------------------------------------------------------

_FIXED = {
    **dict.fromkeys(b"\x80Kh", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G\x95", 8),
}
"""Bytes after an opcode that says nothing of its own about their number."""
_COUNTED = {**dict.fromkeys(b"U\x8c\x8aC", 1), **dict.fromkeys(b"XTB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""Bytes of the length that follows an opcode."""
_TEXTS = b"UX\x8c\x8d"
_NEW = b"]})\x8f"
_ONE_INTO = b"as"
"""APPEND takes one value, SETITEM two."""
_MARKED_INTO = b"eu\x90"
_MADE_OF_MARKED = b"ld\x91"
_KEY_STEPS = {b"d"[0]: 2, b"u"[0]: 2, 0x90: 1, 0x91: 1}
"""How far what is hashed stands apart among what a mark begins: keys of a dict, which alternate, elements of a set."""
_HASHING = frozenset({"builtins.set", "builtins.frozenset", "collections.OrderedDict", "collections.Counter"})
"""Calls that hash what they are given."""
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3}
_INT_SIZES = {b"K"[0]: 1, b"M"[0]: 2}


class _Machine:
    """Executes a pickle on stand-ins. Stops without a word where it is malformed: the unpickler will say it."""

    def __init__(
        self,
        data: bytes,
        on_call: Callable[[str, list[Any]], None] | None,
        on_storage: Callable[[_Tuple], None] | None,
    ) -> None:
        self._data = data
        self._on_call = on_call
        self._on_storage = on_storage
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> None:
        """Until STOP, an opcode unknown here (as torch's unpickler would stop there too), or the end."""
        data, at = self._data, 0
        try:
            while at < len(data) and data[at] != 0x2E:
                at = self._step(data[at], at + 1)
        except (IndexError, KeyError, ValueError) as error:
            if isinstance(error, CorruptCheckpointError):  # it refines ValueError
                raise
            return

    def _step(self, op: int, at: int) -> int:
        """Execute ``op``, whose argument begins at ``at``; where the next one begins."""
        data, stack = self._data, self._stack
        if op in _COUNTED:
            start = at + _COUNTED[op]
            at = start + int.from_bytes(data[at:start], "little")
            raw = data[start:at]
            stack.append(
                raw.decode("utf-8", "replace") if op in _TEXTS else int.from_bytes(raw, "little", signed=op == 0x8A)
            )
        elif op in b"qr\x94":
            return self._memoize(op, at)
        elif op in b"hj":
            size = _FIXED[op]
            stack.append(self._memo[int.from_bytes(data[at : at + size], "little")])
            return at + size
        elif op in _FIXED:
            if op in _INT_SIZES or op == 0x4A:
                stack.append(int.from_bytes(data[at : at + _FIXED[op]], "little", signed=op == 0x4A))
            elif op == 0x47:
                stack.append(None)
            return at + _FIXED[op]
        elif op in b"c":
            module, name, _ = data[at : at + 4096].split(b"\n", 2)
            stack.append(_Global(f"{module.decode('utf-8', 'replace')}.{name.decode('utf-8', 'replace')}"))
            return at + len(module) + len(name) + 2
        else:
            self._plain(op)
        return at

    def _memoize(self, op: int, at: int) -> int:
        size = {b"q"[0]: 1, b"r"[0]: 4}.get(op, 0)
        key = int.from_bytes(self._data[at : at + size], "little") if size else len(self._memo)
        self._memo[key] = self._stack[-1]
        return at + size

    def _plain(self, op: int) -> None:
        """An opcode without an argument."""
        stack = self._stack
        if op in b"N\x88\x89":
            stack.append(None)
        elif op == 0x28:
            self._marks.append(stack)
            self._stack = []
        elif op in _NEW:
            stack.append(_Tuple([]) if op == 0x29 else _Other())
        elif op in _TUPLE_SIZES:
            size = _TUPLE_SIZES[op]
            items = [stack[-number] for number in range(size, 0, -1)]
            stack[-size:] = [_Tuple(items)]
        elif op == 0x74:
            items = self._pop_mark()
            self._stack.append(_Tuple(items))
        elif op in _MADE_OF_MARKED or op in _MARKED_INTO:
            items = self._pop_mark()
            if op in _MADE_OF_MARKED:
                self._stack.append(_Other())
            if op in _KEY_STEPS:
                _check_hashed(items[:: _KEY_STEPS[op]])
            _deepen(self._stack[-1], items)
        elif op in _ONE_INTO:
            values = [stack.pop() for _ in range(1 if op == 0x61 else 2)]
            _check_hashed(values[1:])
            _deepen(stack[-1], values)
        elif op in b"R\x81\x92":
            self._call(2 if op != 0x92 else 3)
        else:
            self._rare(op)

    def _rare(self, op: int) -> None:
        stack = self._stack
        if op == 0x62:  # BUILD
            state = stack.pop()
            _deepen(stack[-1], [state])
            if isinstance(stack[-1], _Other):
                stack[-1].places = _bounded(stack[-1].places + getattr(state, "total", 0))
        elif op == 0x51:  # BINPERSID
            pid = stack.pop()
            if self._on_storage is not None and isinstance(pid, _Tuple):
                self._on_storage(pid)
            stack.append(_Other())
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(_Global(f"{module}.{name}"))
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                self._pop_mark()
        elif op == 0x31:  # POP_MARK
            self._pop_mark()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        else:
            raise KeyError(op)

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _call(self, count: int) -> None:
        taken = [self._stack.pop() for _ in range(count)]
        function, arguments = taken[-1], taken[-2]
        if self._on_call is not None and isinstance(function, _Global):
            self._on_call(function.name, arguments.items if isinstance(arguments, _Tuple) else [])
        if isinstance(function, _Global) and function.name in _HASHING:
            _check_hashed([arguments])
        self._stack.append(_Other(max(map(_depth, taken)), _bounded(sum(map(_places, taken)))))


def _deepen(owner: Any, values: list[Any]) -> None:
    if isinstance(owner, _Other):
        owner.depth = max(owner.depth, *map(_depth, values), 0)
        owner.places = max(owner.places, *map(_places, values), 0)
        owner.total = _bounded(owner.total + sum(map(_places, values)))
