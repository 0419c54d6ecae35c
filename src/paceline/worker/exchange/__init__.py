"""A worker's exchange with the servers.

* `entry.py`           Entry: joins the run: offers the models, attaches to all servers, makes a Client.
* `client.py`          Client: what a worker that has joined says: leases, votes, calls, state, checkpoints.
* `direct_exchange.py` DirectExchange: push, pull and assign, answered before they return.
* `pipeline.py`        PipelinedExchange: the same, with payloads that travel while the worker computes.
* `frame_threads.py`   FrameThreads: the threads that carry them.
* `early_slices.py`    StagedPushes, EarlySlices: slices that leave during backward.
* `grants.py`          Grant: leases; LeasesAhead: those that a worker asks for before it needs them.
* `sample_report.py`   SampleReport: samples that no push accounts for.
* `server_links.py`    ServerLinks: connections to the servers, their deadlines and resumption.
* `placements.py`      Placements: which server holds which slices, now and next.
* `link_carrier.py`    LinkCarrier: how payloads travel on a link. The server's end is in `ps/carriers/`.
* `shared_link.py`     SharedLink: in memory that a server on this host sees, too.
* `inline_link.py`     InlineLink: on the link's socket.
* `device_link.py`     DeviceLink: on a device that the server uses, too.
* `mirrored_link.py`   MirroredLink: in shared memory, from and to which a device copies slices by itself.
* `link_watch.py`      LinkWatch: lets the device's work go on when its server is gone.
* `exchange_memory.py` ExchangeMemory: the memory that servers on the worker's host see, too.
* `device_memory.py`   DeviceMemory: the memory of a device that it shares with them.
* `payloads.py`        Payloads: what is written behind a message.
* `encoders.py`        Encoders: compressed gradients; DifferenceReader: compressed replies.
* `run_news.py`        RunNews: what the lead told; RequestNumbers: how requests are numbered.
* `free_exchange.py`   FreeExchange: dogwild's exchange thread.
* `openmp.py`          pauses torch's threads while a worker waits.
"""

__all__: list[str] = []
