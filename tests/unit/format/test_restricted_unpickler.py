"""Hostile bytes: crafted pickles and forged lengths end in a typed error, in a child with little memory and no mercy.

Each case runs in a process of its own whose address space is limited: a crash, a kill or a huge allocation fails here.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from overlapping_zip import overlapping
from torch.distributed.device_mesh import DeviceMesh
from warm_python import run_warm

from aio_ckpt.checkpoint.catalog import Item
from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.restricted_unpickler import BUDGET_FACTOR, MAX_TUPLES
from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.restore.plan_fills import new_tensor

SPARE_BYTES = 512 << 20
"""Address space that a reader may take beyond what the child has when it begins."""

CHILD = """
import io, resource, sys
from pathlib import Path
import torch
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.rank_manifest import decode_rank
from aio_ckpt.format.root_manifest import decode_root
from aio_ckpt.leaves.objects import (decode_object, encode_object)
from aio_ckpt.state.skeleton import decode_skeleton

decode_object(encode_object("warm", io.BytesIO(b"x")), name="warm", trusted=False)
readers = {
    "metadata": lambda data: parse_metadata(data, name="file"),
    "object": lambda data: decode_object(data, name="file", trusted=False),
    "rank": lambda data: decode_rank(data, name="file"),
    "root": lambda data: decode_root(data, name="file"),
    "skeleton": lambda data: decode_skeleton(data, name="file"),
}
files = sorted(Path(sys.argv[1]).iterdir())
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), used + int(sys.argv[2])))
for file in files:
    try:
        readers[file.suffix[1:]](file.read_bytes())
    except AioCkptError as error:
        print(file.name, type(error).__name__, " ".join(str(error).split())[:200], flush=True)
    except BaseException as error:
        print(file.name, "UNTYPED", repr(error)[:200], flush=True)
    else:
        print(file.name, "read", flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each case, all in one child: the one that kills it has no outcome."""
    folder = tmp_path_factory.mktemp("cases")
    names = {f"{number:03}.{reader}": name for number, (name, (reader, _)) in enumerate(CASES.items())}
    for file, name in names.items():
        data = CASES[name][1]
        (folder / file).write_bytes(data() if callable(data) else data)
    done = run_warm(CHILD, str(folder), str(SPARE_BYTES), options=(), timeout=300)
    lines = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {names[file]: rest for file, rest in lines} | {"the end": f"{done.returncode} {done.stderr[-300:]}"}


def archive(data_pkl: bytes, **records: bytes) -> bytes:
    """A ``torch.save`` zip of our making."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        zipped.writestr("archive/data.pkl", data_pkl)
        zipped.writestr("archive/version", b"3\n")
        zipped.writestr("archive/byteorder", records.pop("byteorder", b"little"))
        for name, record in records.items():
            zipped.writestr(f"archive/data/{name.removeprefix('_')}", record)
    return made.getvalue()


DEEP = 200_000
KEY_OF_TUPLES = b"\x80\x02}" + b")" + b"\x85" * DEEP + b"K\x01s."
"""``{((((...)))): 1}``: its hash leaves the stack."""
KEY_THROUGH_MEMO = b"\x80\x02})q\x00" + b"0h\x00\x85q\x00" * DEEP + b"h\x00K\x01s."
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
TEXT_FQN = b"X\x03\x00\x00\x00fqn"
KEY_IN_AN_INDEX = b"\x80\x02}" + INDEX + b")\x81}" + TEXT_FQN + b")" + b"\x85" * 7000 + b"sbK\x01s."
CYCLE = (
    *(b"\x80\x02}", INDEX, b")\x81q\x00}", TEXT_FQN, b"h\x00", b"\x85" * 7000, b"sbK\x01s."),
)  # fmt: skip


def test_as_many_tuples_as_a_key_may_hold_are_read() -> None:
    many = b"\x80\x02" + b")\x850" * 10_000
    sound = archive(many + b"})" + b"\x85" * (MAX_TUPLES - 1) + b"K\x01s.")
    assert isinstance(decode_object(sound, name="o", trusted=False), dict)
    with pytest.raises(CorruptCheckpointError, match="deeper"):
        decode_object(archive(many + b"})" + b"\x85" * MAX_TUPLES + b"K\x01s."), name="o", trusted=False)


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x7f", b"r\x00\x10\x00\x00"])
def test_a_memo_index_beyond_the_pickle_takes_no_memory(put: bytes) -> None:
    assert decode_object(archive(b"\x80\x02N" + put + b"."), name="o", trusted=False) is None


def test_what_a_pickle_copies_is_counted() -> None:
    value = b"X" + struct.pack("<I", 10_000) + b"a" * 10_000
    call = b"h\x00(h\x01X\x06\x00\x00\x00latin1tR0"
    pickled = b"\x80\x02c_codecs\nencode\nq\x00" + value + b"q\x01" + call * 1000 + b"."
    with pytest.raises(CorruptCheckpointError, match=f"would take more than {BUDGET_FACTOR} times its length"):
        decode_object(archive(pickled), name="o", trusted=False)


@pytest.mark.parametrize(
    "op", [b"I1\n.", b"(ios\nsystem\n.", b"\x80\x02\x82\x01.", b"\x80\x05\x97.", b"\x80\x04)\x92."]
)
def test_opcodes_that_no_reader_needs_are_refused(op: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="holds the opcode"):
        decode_object(archive(op), name="o", trusted=False)


DOUBLED = b"K\x01K\x02\x86q\x00" + b"h\x00\x86q\x00" * 60
"""A tuple that holds a tuple twice, which holds one twice, ..."""


def test_what_stands_in_many_places_and_is_no_key_is_read() -> None:
    found = decode_object(archive(b"\x80\x02](" + DOUBLED + b"e."), name="x", trusted=False)
    assert isinstance(found, list)
    inner: Any = found[0]
    for _ in range(60):
        inner = inner[0]
    assert inner == (1, 2)


def storage(kind: bytes, count: int, key: bytes = b"0") -> bytes:
    number = b"\x8a\x08" + struct.pack("<q", count)
    return b"(X\x07\x00\x00\x00storagec%bX\x01\x00\x00\x00%bX\x03\x00\x00\x00cpu%btQ" % (kind, key, number)


def tensor(kind: bytes, count: int, key: bytes = b"0") -> bytes:
    view = b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(kind, count, key) + view


FLOATS = b"torch\nFloatStorage\n"
FORGED_OBJECTS: dict[str, bytes] = {
    "a storage larger than its record": archive(b"\x80\x02" + tensor(FLOATS, 1 << 30) + b".", _0=bytes(8)),
    "a storage that the other byte order would write beyond": archive(
        b"\x80\x02" + tensor(FLOATS, 1 << 24) + b".", _0=bytes(8), byteorder=b"big"
    ),
    "a storage without a record": archive(b"\x80\x02" + tensor(FLOATS, 2) + b"."),
    "a storage of a negative length": archive(b"\x80\x02" + tensor(FLOATS, -2) + b".", _0=bytes(8)),
    "the record of another storage": archive(
        b"\x80\x02" + tensor(FLOATS, 2) + tensor(FLOATS, 100, b"1") + b"\x86.", _0=bytes(400), _1=bytes(8)
    ),
    "untyped": archive(b"\x80\x02" + tensor(b"torch.storage\nUntypedStorage\n", 1 << 30) + b".", _0=bytes(8)),
}


def test_a_sound_storage_is_read() -> None:
    floats = torch.tensor([1.5, 2.5])
    data = archive(b"\x80\x02" + tensor(FLOATS, 2) + b".", _0=floats.numpy().tobytes())
    assert torch.equal(decode_object(data, name="o", trusted=False), floats)


TERABYTE = (
    b"ctorch._utils\n_rebuild_tensor_v2\n("
    + storage(b"torch\nByteStorage\n", 1)
    + b"K\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85K\x00\x85\x89ccollections\nOrderedDict\n)RtR"
)
"""A tensor over one byte, expanded to a terabyte."""


def copied(function: bytes, value: bytes, more: bytes = b"") -> bytes:
    """A list of 20,000 copies of a value that the pickle holds once."""
    call = b"h\x00(h\x01" + more + b"tR"
    return archive(b"\x80\x02](" + function + b"q\x00" + value + b"q\x01" + call * 20_000 + b"e.")


NUMBERS = b"".join(b"M" + struct.pack("<H", number) for number in range(10_000))
TEXT = b"X\xa0\x86\x01\x00" + b"a" * 100_000
COPIED: dict[str, bytes] = {
    "copies of a text": copied(b"c_codecs\nencode\n", TEXT, b"X\x05\x00\x00\x00utf-8"),
    "copies of a list, as sets": copied(b"cbuiltins\nset\n", b"](" + NUMBERS + b"e"),
    "copies of a dict": copied(b"ccollections\nOrderedDict\n", b"}(" + NUMBERS + b"u"),
}
STARVING: dict[str, bytes] = {
    "bytearray(2**33)": b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "torch.Tensor(2**33)": b"ctorch\nTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "torch.FloatTensor(2**33)": b"ctorch\nFloatTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R",
    "bytearray of a tensor that is expanded": b"cbuiltins\nbytearray\n" + TERABYTE + b"\x85R",
    "set of a tensor that is expanded": b"cbuiltins\nset\n" + TERABYTE + b"\x85R",
    "a device tensor of one that is expanded": (
        b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
        + TERABYTE
        + b"ctorch\nfloat64\nX\x03\x00\x00\x00cpu\x89tR"
    ),
    "an odd codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x08\x00\x00\x00punycode\x86R",
}


def packed() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("archive/data.pkl", b"\x80\x02N.")
        zipped.writestr("archive/version", b"3\n" + bytes(64 << 20))
    return made.getvalue()


def expanded() -> bytes:
    """A tensor over one byte, a terabyte, as the content of a BytesIO."""
    return archive(b"\x80\x02c_io\nBytesIO\n)\x81" + TERABYTE + b"K\x00N\x87b.", _0=b"x")


class Runs:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(5))
def test_a_crafted_pickle_in_an_object_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    data = archive(pickle.dumps({"a": Runs(Path.touch, mark), "b": Runs(exec, f"open({str(mark)!r}, 'w')")}, protocol))
    with pytest.raises((UnsafeObjectError, CorruptCheckpointError), match=r"^o: "):
        decode_object(data, name="o", trusted=False)
    assert not mark.exists()


FORGED_LENGTHS: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    **{
        f"{reader} {code:#x}": (reader, b"\x81" + b"\xa7tensors" * (reader == "rank") + bytes([code]) + b"\xff" * 4)
        for reader in ("rank", "skeleton")
        for code in (0xDD, 0xDF, 0xC6, 0xDB)
    },
    "a skeleton of millions of lists": ("skeleton", b"\x91" * DEEP),
    "a root of millions of lists": ("root", b"[" * DEEP),
    "metadata: a long text": ("metadata", b"\x80\x02X\xff\xff\xff\x7fa."),
    "metadata: long bytes": ("metadata", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."),
    "metadata: a far memo": ("metadata", b"\x80\x02Nr\xff\xff\xff\x7f."),
    "metadata: a long frame": ("metadata", b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN."),
    "object: a long text": ("object", archive(b"\x80\x02X\xff\xff\xff\x7fa.")),
    "object: a packed record": ("object", packed),
    "object: records inside of each other": ("object", lambda: overlapping(5000, bytes(100_000))),
    "object: more bytes than are stored": ("object", expanded()),
}
NESTED: dict[str, tuple[str, bytes]] = {
    "metadata: tuples": ("metadata", KEY_OF_TUPLES),
    "metadata: tuples through the memo": ("metadata", KEY_THROUGH_MEMO),
    "metadata: tuples in an index": ("metadata", KEY_IN_AN_INDEX),
    "metadata: an index that holds itself": ("metadata", b"".join(CYCLE)),
    "metadata: lists": ("metadata", b"\x80\x02" + b"]" * DEEP + b"."),
    "object: tuples": ("object", archive(KEY_OF_TUPLES)),
    "object: tuples through the memo": ("object", archive(KEY_THROUGH_MEMO)),
}
CASES: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    **NESTED,
    **FORGED_LENGTHS,
    **{case: ("object", data) for case, data in FORGED_OBJECTS.items()},
    **{case: ("object", data) for case, data in COPIED.items()},
    **{case: ("object", archive(b"\x80\x02" + call + b".", _0=b"x")) for case, call in STARVING.items()},
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_bytes_end_in_a_typed_error(outcomes: dict[str, str], case: str) -> None:
    assert case in outcomes, f"the reader died: {outcomes['the end']}"
    kinds = ("CorruptCheckpointError", "Mismatch", *(("UnsafeObjectError",) if case in STARVING else ()))
    assert outcomes[case].startswith(kinds), outcomes[case]


def test_what_the_encoder_writes_passes_the_guard() -> None:
    shapes = [torch.Size((2, 3, 4, 5))] * 2000
    dicts = [{}, OrderedDict(), set(), (), []] * 2000
    for value in (
        shapes,
        dicts,
        bytearray(b"abc"),
        complex(1, 2),
        {1, 2},
        io.BytesIO(b"x" * 100),
        b"",
        list(range(5000)),
        10**3000,
    ):
        data = encode_object("o", value)
        got = decode_object(data, name="o", trusted=False)
        assert type(got) is type(value)
        assert (got.getvalue() if isinstance(got, io.BytesIO) else got) == (
            value.getvalue() if isinstance(value, io.BytesIO) else value
        )


def test_no_memory_is_taken_for_a_shape_that_the_stored_bytes_cannot_fill() -> None:
    """An expanded tensor stores one element for any shape, so that an item agrees with the metadata about it."""
    item = Item(
        name="w",
        file="__0_0.distcp",
        dtype=torch.float32,
        shape=(1 << 40,),
        stride=(0,),
        offsets=(0,),
        storage_offset=0,
        raw_offset=320,
        raw_bytes=4,
        block_bytes=BLOCK_BYTES,
        sums=(),
        record_crc32=None,
    )
    with pytest.raises(CorruptCheckpointError, match=r"'w': shape .* needs more bytes than the 4 that are stored"):
        new_tensor("w", (item,), None)


def test_a_device_mesh_is_not_made_by_a_pickle() -> None:
    """It would open a rendezvous. Torch allows the class once ``torch.distributed.tensor`` is imported."""
    made = b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\nX\x03\x00\x00\x00cpu]K\x00a\x86R."
    with (
        torch.serialization.safe_globals([DeviceMesh]),
        pytest.raises(UnsafeObjectError, match=r"torch\.distributed\.device_mesh\.DeviceMesh"),
    ):
        decode_object(archive(made), name="o", trusted=False)
