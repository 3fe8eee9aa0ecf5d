"""A program for the place of ``sys.executable`` whose processes need not import what this process has imported."""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from processes import COMPUTING, fork

PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = [os.getcwd(), dict(os.environ), *sys.argv]
    socket.send_fds(server, [json.dumps(words).encode() + b"\\n"], [0, 1, 2])
    sys.exit(int(server.recv(3) or 1))
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[str]:
    """Give a program that runs ``-m MODULE WORDS`` in a fresh copy of this process, as this process is now.

    A module's process ends with the program, however the program ends. On machines where copies cannot compute, the
    program is ``sys.executable``.
    """
    if COMPUTING != "fork":
        yield sys.executable
        return
    program, address = folder / "python", str(folder / "socket")
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        process = fork(partial(_serve, server), folder / "printed.txt")
        try:
            yield str(program)
        finally:
            process.kill()
            process.join()


def _serve(server: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        program, _ = server.accept()
        message, files, *_ = socket.recv_fds(program, 1 << 16, 3)
        while not message.endswith(b"\n"):
            message += program.recv(1 << 16)
        if os.fork() == 0:
            _run(program, files, *json.loads(message))
        program.close()
        for file in files:
            os.close(file)


def _reap(*signalled: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _run(program: socket.socket, files: Sequence[int], folder: str, environment: dict[str, str], *words: str) -> None:
    """Run a module with the files as standard input, output and error, and end this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    os.environ.update(environment)
    sys.executable, option, module, *sys.argv[1:] = words
    threading.Thread(target=lambda: program.recv(1) or os._exit(1), daemon=True).start()
    code: object = 0
    try:
        assert option == "-m"
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    program.send(str(int(code or 0)).encode())  # pyright: ignore[reportArgumentType]
    os._exit(0)
