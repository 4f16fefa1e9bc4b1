"""The candidate's process: loads its code and answers calls, until the judge hangs up. `python -c` runs the text of this file.

Nothing here is trusted. What goes back over the socket is what the candidate claims its functions return; the judge alone
compares. One message each way per call, as the text of Python literals behind its length in bytes (4, big-endian).
"""

import contextlib
import socket
import sys


def _receive(channel) -> str:
    with channel.makefile("rb", buffering=0) as stream:
        size = stream.read(4)
        if len(size) < 4:
            raise EOFError
        data, left = [], int.from_bytes(size, "big")
        while left:
            data.append(stream.read(left))
            if not data[-1]:
                raise EOFError
            left -= len(data[-1])
    return b"".join(data).decode()


def _send(channel, reply) -> None:
    data = repr(reply).encode()
    channel.sendall(len(data).to_bytes(4, "big") + data)


def _main(channel) -> None:
    namespace = {"__name__": "candidate"}
    code = _receive(channel)
    try:
        exec(compile(code, "candidate", "exec"), namespace)
        _send(channel, ("value", None))
    except BaseException as error:
        _send(channel, ("error", type(error).__name__, str(error)))
    while True:
        name, args, kwargs = eval(_receive(channel))  # the judge wrote it
        try:
            _send(channel, ("value", namespace[name](*args, **kwargs)))
        except BaseException as error:
            _send(channel, ("error", type(error).__name__, str(error)))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        _main(socket.socket(fileno=int(sys.argv[1])))
