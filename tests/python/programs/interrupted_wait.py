"""Waits on one of the package's stores until Ctrl-C, then uses the store: KIND CALL PATH."""

import sys

from tenfold import _tenfold

kind, call, path = sys.argv[1:]
stores = {
    "tcp": lambda: _tenfold.TCPStore("127.0.0.1", 0, is_master=True),
    "hash": _tenfold.HashStore,
    "file": lambda: _tenfold.FileStore(path, 1),
    "prefix": lambda: _tenfold.PrefixStore("p", _tenfold.TCPStore("127.0.0.1", 0, is_master=True)),
}
store = stores[kind]()
calls = {
    "get": lambda: store.get("never"),
    "wait": lambda: store.wait(["never"]),
    "multi_get": lambda: store.multi_get(["never"]),
    "barrier": lambda: store.barrier("never", 2),
    "queue_pop": lambda: store.queue_pop("never"),
    "open": lambda: _tenfold.TCPStore("127.0.0.1", 0, 2, is_master=True),
}
print("waiting", flush=True)
try:
    calls[call]()
except KeyboardInterrupt:
    store.set("key", "value")
    print("interrupted, then", store.get("key").decode(), flush=True)
