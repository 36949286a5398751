"""Servers on loopback whose replies a test writes byte by byte."""

import socket
import threading
from contextlib import contextmanager, suppress


@contextmanager
def hostile(answer):
    """Serve each connection by a call of `answer(connection)`; yield the URL."""

    def each(connection):
        with connection, suppress(OSError):  # the receiver has ended the connection
            answer(connection)

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=each, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
