"""Python programs that tests start as processes of their own, forked from one that has imported torch already.

A fresh interpreter takes two seconds of CPU to import torch, once for each of a hundred tests. A fork of this module's
server, run as a script, has it. It is a process like any other: a child of the tests', with its own arguments,
environment, streams and ``__main__``, that ends as interpreters end.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import json
import os
import socket
import subprocess
import sys
import textwrap
import types
import warnings
from typing import Any

from child_python import child_environment

_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES = 1 << 20


class WarmPython(subprocess.Popen[str]):
    """``subprocess.Popen`` of ``source``, which may be indented, with ``args`` in its ``sys.argv[1:]``."""

    def __init__(
        self,
        source: str,
        *args: str,
        options: tuple[str, ...] = ("-W", "error"),
        is_end_tested: bool = False,
        **popen: Any,
    ) -> None:
        """What C++ does behind the end of an interpreter is done for ``is_end_tested`` only: most of its time."""
        assert options in ((), ("-W", "error")), "another option needs an interpreter of its own"
        self._told = {
            "source": textwrap.dedent(source),
            "args": args,
            "warnings_are_errors": bool(options),
            "is_end_tested": is_end_tested,
        }
        super().__init__(["warm python", *args], text=True, **popen)

    def _execute_child(self, *given: Any) -> None:
        # Its parameters are subprocess's own affair; these names are those of Python 3.11 to 3.14.
        found = inspect.signature(super()._execute_child).bind(*given).arguments
        pipes = [found[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        environment = dict(os.environ if found["env"] is None else found["env"])
        told = {**self._told, "environment": environment, "path": sys.path, "directory": os.getcwd()}
        try:
            self.pid = _start(json.dumps(told).encode(), streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def __exit__(self, kind: type[BaseException] | None, *given: Any) -> None:
        if kind is not None:
            self.kill()  # it may wait for what the test, which failed, does not do any more
        super().__exit__(kind, *given)


def run_warm(source: str, *args: str, timeout: float = 60, **given: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of ``source``, its output captured; ``given`` are parameters of ``WarmPython``."""
    with WarmPython(source, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@functools.cache
def _server(pid: int) -> socket.socket:
    """The server of the process ``pid``; ends with it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (mine, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=child_environment())

    def end_it() -> None:
        if os.getpid() == pid:
            mine.close()
            server.wait()

    atexit.register(end_it)
    return mine


def _start(told: bytes, streams: list[int]) -> int:
    server = _server(os.getpid())
    prctl = ctypes.CDLL(None).prctl
    # Who forked the process ends at once, so that it becomes a child of this one, to be waited for.
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        socket.send_fds(server, [told], streams)
        return int(server.recv(100))
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# -- the server -----------------------------------------------------------------------------------


def _serve(tests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a process is to run, in that process; None in the server, once the tests have ended."""
    while True:
        told, streams, _, _ = socket.recv_fds(tests, _MAX_BYTES, 3)
        if not told:
            return None
        reader, writer = os.pipe()
        between = _fork()
        if between:
            os.close(writer)
            for fd in streams:
                os.close(fd)
            pid = os.read(reader, 100)
            os.close(reader)
            os.waitpid(between, 0)
            tests.send(pid)
            continue
        pid = _fork()
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return json.loads(told), streams


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12, for the threads that numpy keeps
        return os.fork()


def _become(told: dict[str, Any], streams: list[int]) -> dict[str, Any]:
    """Take over streams, environment and arguments; returns the names of a ``__main__`` of its own."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["directory"])
    sys.path[:], sys.argv[:] = told["path"], ["-c", *told["args"]]
    if told["warnings_are_errors"]:
        warnings.simplefilter("error")
    if not told["is_end_tested"]:
        # The interpreter has ended when this runs. The destructors of torch's static objects take twice its time.
        c = ctypes.CDLL(None)
        assert c.on_exit(c._exit, None) == 0
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(main)


if __name__ == "__main__":
    # What those who are forked need: ranks need the most.
    import gc
    import importlib

    _OF_TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "torch.testing")
    sys.modules["triton"] = None  # type: ignore[assignment]  # each process would tell of its leaks when it ends
    for _name in (*_OF_TORCH, "numpy.random", "pytest", "hypothesis", "aio_ckpt.dcp", "aio_ckpt.sync"):
        importlib.import_module(_name)
    del sys.modules["triton"]

    gc.freeze()  # else each process copies all of it, when it ends
    with socket.socket(fileno=int(sys.argv[1])) as _tests:
        _found = _serve(_tests)
    if _found is not None:
        exec(compile(_found[0]["source"], "<string>", "exec"), _become(*_found))
