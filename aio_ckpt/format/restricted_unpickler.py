"""Restricted unpickler: it resolves and calls what its reader allows, and runs no other code of a pickle.

The readers of ``.metadata``, of tensor items and of objects derive from it, each with its own allow-list. A pickle
could also end the process or take memory by few bytes. These are refused:

- Tuples nested deeper than ``MAX_TUPLES`` as a key: a tuple hashes by recursion in C without a limit.
- Calls that together take more than ``BUDGET_FACTOR`` times the length of the pickle: ``set(x)`` copies an ``x`` that
  the pickle holds once and names often.
- Lengths and memo indexes need no check: this unpickler reads what is there, and its memo is a dict.

Source: ``pickle.py`` of Python 3.11 to 3.14, ``pickletools``.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

BUDGET_FACTOR = 64
"""Bytes that the calls of a pickle may take, by byte of the pickle. A sound pickle takes below 45."""
_LEAST_BYTES = 1024
"""A shorter pickle may take as much as one of this length."""
_ITEM_BYTES = 32
"""Bytes that an item of a copied container takes."""
MAX_TUPLES = 1000
"""Most tuples inside each other in a key. The hash of such a tuple takes 0.1 MiB of the C stack."""
_MAX_HASHED = 1 << 22
"""Most values in one key, counted in every place."""


class RefusedError(Exception):
    """The pickle needs a class or function that its reader does not allow. The text begins with its name."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """A class or function that a pickle may name."""

    value: Any
    """Value that the pickle gets for the name."""
    make: Callable[..., object] | None = None
    """Called where the pickle calls ``value``. It checks its arguments. None: the pickle must not call it."""
    new: Callable[..., object] | None = None
    """Called in place of ``value.__new__``. None: ``make``."""
    nbytes: int = 256
    """Memory that a call takes beside its arguments."""


def check_key(key: object) -> None:
    """Refuse a key whose hash would leave the C stack or take too long.

    Raises:
        ValueError: it is such a key.
    """
    level, depth, count = [key], 0, 0
    while tuples := [value for value in level if isinstance(value, tuple)]:
        depth, count = depth + 1, count + sum(map(len, tuples))
        if depth > MAX_TUPLES:
            raise ValueError(f"a key of tuples nested deeper than {MAX_TUPLES}")
        if count > _MAX_HASHED:
            raise ValueError(f"a key of more than {_MAX_HASHED} values")
        level = [part for value in tuples for part in value]


def make_set(kind: Callable[[list[Any]], Any], items: Any = ()) -> Any:
    """Return the set or frozenset of a list, as protocol 2 makes them.

    Raises:
        ValueError: the hash of an item would take too long.
        TypeError: ``items`` is no list.
    """
    if items != () and type(items) is not list:
        raise TypeError(f"a set of a {type(items).__name__}")
    found: list[Any] = [*items]
    for item in found:
        check_key(item)
    return kind(found)


class _Opcodes(dict[int, Any]):
    def __missing__(self, opcode: int) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle holds the opcode {opcode:#04x}, which no reader here needs")


class RestrictedUnpickler(pickle._Unpickler):
    """Unpickler without the opcodes that protocols 2 to 5 do not need. A subclass gives the allow-list."""

    _FILLED: frozenset[type] = frozenset({list, deque, set, dict, OrderedDict, Counter, defaultdict})
    """Types that the pickle may add items to."""

    stack: list[Any]
    append: Callable[[Any], None]
    readline: Callable[[], bytes]
    pop_mark: Callable[[], list[Any]]
    proto: int
    dispatch: ClassVar[dict[int, Any]]

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file, encoding="utf-8")
        self._nbytes = len(data)
        self._left_bytes = BUDGET_FACTOR * max(len(data), _LEAST_BYTES)
        self._found: dict[int, tuple[str, Allowed]] = {}
        """By the id of their values: names that the pickle has named."""

    def allowed(self, module: str, name: str) -> Allowed:
        """Return what stands for a global.

        Raises:
            RefusedError: it is not allowed.
        """
        raise RefusedError(f"{module}.{name}")

    def fill(self, value: Any, state: Any) -> None:
        """Give an instance its state.

        Raises:
            RefusedError: instances of its type take none.
        """
        raise RefusedError(f"{type(value).__module__}.{type(value).__qualname__}")

    def takes_items(self, kind: type) -> bool:
        """Return whether the pickle may add items to values of this type, by their own methods."""
        return kind in self._FILLED

    def read_all(self) -> Any:
        """Return the value of the pickle, which must end where the data ends."""
        value = self.load()
        if self._file.tell() != self._nbytes:
            raise pickle.UnpicklingError("the pickle does not end where its data ends")
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return the value that stands for a global. Protocols 0 to 2 name the modules of Python 2."""
        if self.proto < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self.register(f"{module}.{name}", self.allowed(module, name))

    def register(self, name: str, allowed: Allowed) -> Any:
        """Return the value of an allowed global, which the pickle may call from now on."""
        self._found[id(allowed.value)] = name, allowed
        return allowed.value

    def _called(self, function: Any, arguments: Any, *, is_new: bool) -> object:
        name, allowed = self._found.get(id(function), ("", None))
        if allowed is None or allowed.make is None:
            raise RefusedError(name or f"a {type(function).__name__}, which the pickle calls")
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"the pickle calls {name} without a tuple of arguments")
        self._take(allowed.nbytes, arguments)
        return (allowed.new if is_new and allowed.new is not None else allowed.make)(*arguments)

    def _take(self, nbytes: int, copied: Iterable[Any]) -> None:
        """Count memory that a call takes, with copies of its arguments."""
        for value in copied:
            if isinstance(value, str | bytes | bytearray):
                nbytes += len(value)
            elif isinstance(value, tuple | list | dict | set | frozenset):
                nbytes += _ITEM_BYTES * len(value)
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            raise pickle.UnpicklingError(f"the pickle would take more than {BUDGET_FACTOR} times its length")

    # -- opcodes ------------------------------------------------------------------------------------

    def load_global(self) -> None:
        module, name = self.readline(), self.readline()
        if module[-1:] != b"\n" or name[-1:] != b"\n":
            raise EOFError("the pickle breaks off in a name")
        self.append(self.find_class(module[:-1].decode("utf-8"), name[:-1].decode("utf-8")))

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments, is_new=False)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments, is_new=True)

    def load_build(self) -> None:
        state = self.stack.pop()
        self._take(0, state if type(state) is tuple else (state,))
        self.fill(self.stack[-1], state)

    def _target(self) -> Any:
        """Return the container on the stack, which gets items."""
        target = self.stack[-1]
        if not self.takes_items(type(target)):
            raise RefusedError(f"a {type(target).__name__}, which the pickle adds items to")
        return target

    def load_append(self) -> None:
        item = self.stack.pop()
        self._target().append(item)

    def load_appends(self) -> None:
        items = self.pop_mark()
        self._target().extend(items)

    def load_setitem(self) -> None:
        item, key = self.stack.pop(), self.stack.pop()
        check_key(key)
        self._target()[key] = item

    def load_setitems(self) -> None:
        items = self.pop_mark()
        target = self._target()
        for key, item in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, tuple):
                check_key(key)
            target[key] = item

    def load_additems(self) -> None:
        items = self.pop_mark()
        target = self._target()
        for item in items:
            check_key(item)
            target.add(item)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.append(frozenset(items))

    dispatch = _Opcodes(
        {code: pickle._Unpickler.dispatch[code] for code in b"\x80\x95.NKMJG\x88\x89\x8a\x8bUX\x8c\x8dCB\x8e](t)}01"}
        | {code: pickle._Unpickler.dispatch[code] for code in b"\x85\x86\x87\x8fqr\x94hj\x93Q"}
        | {ord("c"): load_global, ord("R"): load_reduce, 0x81: load_newobj, ord("b"): load_build}
        | {ord("a"): load_append, ord("e"): load_appends, ord("s"): load_setitem, ord("u"): load_setitems}
        | {0x90: load_additems, 0x91: load_frozenset}
    )
    """What executes each opcode: PROTO FRAME STOP, the plain values, POP and POP_MARK, the memo, and the above."""
