"""Worker processes, in which tails run: what the server knows of them, and what they do.

::

    server (I/O thread)                               worker N
    TailHost ── Worker ═ control, a socket pair ═════ main thread: loads and unloads
       │          ├───── pulse, ZeroMQ heartbeats ─── ZeroMQ's own thread
       │          └───── end of the process
       └── Line ═════════ a socket pair per tail ════ a thread per tail: features in, outputs out

The server's side is :mod:`worker`, :mod:`line`, :mod:`stream`, :mod:`launch` and :mod:`pulse`; the other is
:mod:`process` and :mod:`host`; :mod:`frames` is what they say to each other. Nothing here can unpickle.
"""
