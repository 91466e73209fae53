"""PyTorch's own TCPStore servers, started and stopped on request.

Reads lines: `start` hosts one more store and answers `listening on HOST:PORT`, `stop PORT` ends it. One
process serves a whole test session, because importing torch costs seconds and a server nothing.
"""

import sys

from torch.distributed import TCPStore

servers = {}
for line in sys.stdin:
    verb, *port = line.split()
    if verb == "start":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        servers[store.port] = store
        print(f"listening on 127.0.0.1:{store.port}", flush=True)
    else:
        del servers[int(port[0])]
