"""How fast the server serves a tail, beside what this machine could do at best and beside peers, in one run.

    python benchmarks/peers/make_venvs.py                     # once: an environment for each peer
    python -m benchmarks.serving [--tails tiny,mobilenet] [--systems …] [--layouts apart,shared] [--clients 1,4,8]
                                 [--seconds S] [--rounds N] [--open-loop] [--echo] [--curve] [--json PATH]

**Tails.** Both are made by ``splitfleet split`` from a Keras model, so all systems serve files of one bundle; weights
and requests are random (:mod:`benchmarks.serving.tails`). ``tiny``: 14×14×64 int8 → two convolutions → 100 logits; so
little to compute that what is around it shows. ``mobilenet``: MobileNetV2 at 224 px from its sixth block on, 28×28×32
int8 → 1000 logits; shows the computation.

**Systems** (:mod:`benchmarks.serving.systems`). All but ``splitfleet-auto`` run the same SavedModel, and the answers of
all are compared with those of the SavedModel in this process: each in full before and after a round, and one number of
every single answer during it.

================  ====================================================================================================
``ceiling``       no network: a process runs the SavedModel on batches as large as there are clients
``bare``          a ROUTER in a loop of a few lines that runs what waits: no checks, deadlines, bounds, metrics
``splitfleet``    ``splitfleet serve --engine tensorflow``; clients speak its wire format over DEALERs
``…-auto``        ``splitfleet serve --engine auto``: of the engines for the same tail the fastest
``…-curve``       as ``splitfleet``, with keys, one for each client (``--curve``)
``mosec``         HTTP server in Rust, the tail in a process of its own
``litserve``      uvicorn, the tail in a process of its own, ``fast_queue``
``ray``           Ray Serve: HTTP proxy, one replica with ``@serve.batch``
``echo``          the bare loop without a tail (``--echo``)
================  ====================================================================================================

The peers take and give raw bytes as bodies of HTTP/1.1 over connections that are kept; each file in
``benchmarks/peers`` says how its peer is configured. All get the same largest batch and the same delay; each has one
copy of the tail, which has all cores of its layout. The largest batch is the largest number of clients unless
``--max-batch`` says otherwise: peers hold a batch up for the whole delay when it cannot get full, so any larger one
would slow them down, and not splitfleet, which waits for as many as there were last.

**Layouts.** ``apart``: the server with all its processes on one core, the clients on the other. ``shared``: all of
them on both. The processes are bound before they start anything, and before each measurement every thread of every
process of a server is looked at: one that may run elsewhere ends the benchmark.

**Clients.** One process with one connection for each client and a plain epoll loop, so that HTTP and ZeroMQ cost it
about the same, little. ``client`` in the table is how busy it kept a core; where that comes near 100 % it is the client
that was measured, and a warning says so. A closed loop asks anew when the answer is there. The open loop
(``--open-loop``) sends at random times (Poisson) whatever comes back, at fractions of what the bare loop managed with
the most clients, over 256 connections; a latency begins when the request was due, not when it could be sent.

**Rounds.** All servers of a layout run all the time, but those that are not measured are stopped (SIGSTOP): Ray alone
would take several percent of a core. In each round each system has its turn, beginning with another one each time,
since the machine is not equally fast all the time. Each turn begins with a warm-up that is not counted. Figures are
medians over rounds, ratios are medians of the rounds' ratios, and the JSON file has every round. An answer that is an
error, wrong, or missing is counted, never dropped; only right answers count as requests.

**Figures.** Requests per second, latencies at the client; CPU time of the server's processes, all of them, per request;
their resident memory, shared pages counted for each process (``rss``) or divided (``pss``, in the JSON file); bytes per
request on the connection, with the framing of HTTP and ZMTP, without TCP/IP and CURVE. ``others`` is the CPU time of
all else on the machine, in cores: with much of it, only ``cpu`` is worth reading.
"""
