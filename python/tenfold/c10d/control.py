"""The worker control plane: a process answers requests over HTTP, as c10d's `WorkerServer` does.

A handler is a function of a request and a response. Its name cannot be reused. Every handler of the process,
in Python or in Rust, is available through every `_WorkerServer` of the process, and through the server that
`TENFOLD_WORKER_SERVER` starts: by `POST /handler/<name>?key=value`, or by `tenfold worker`.

>>> def greet(request, response):
...     response.set_content(f"hello {request.get_param('who')}", "text/plain")
>>> _register_handler("greet", greet)
>>> "greet" in _get_handler_names()
True
>>> response = _Response()
>>> _get_handler("greet")(_Request(params=[("who", "rank 3")]), response)
>>> response.content
b'hello rank 3'
>>> _register_handler("greet", greet)
Traceback (most recent call last):
    ...
ValueError: Handler greet already registered

Handlers in Python run on daemon threads, one for each pending request.
"""

import atexit
import faulthandler
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence

from tenfold import _tenfold

__all__ = [
    "_Request",
    "_Response",
    "_WorkerServer",
    "_get_handler",
    "_get_handler_names",
    "_register_handler",
    "place",
]

# The variable that starts a server with the first group.
_VARIABLE = "TENFOLD_WORKER_SERVER"


class _Request:
    """The request to a handler: a body and parameters.

    >>> request = _Request(b"text", [("a", "1"), ("a", "2")])
    >>> request.body(), request.get_param("a"), request.get_param("b")
    ('text', '1', '')
    """

    def __init__(self, body: bytes = b"", params: Sequence[tuple[str, str]] = ()) -> None:
        self._body = body
        self._params = list(params)

    def body(self) -> str:
        """Returns the body as text. Raises `UnicodeDecodeError` if it is not text, as c10d does."""
        return self._body.decode()

    def get_param(self, name: str) -> str:
        """Returns the first parameter of this name, or an empty string."""
        return next((value for key, value in self._params if key == name), "")

    def params(self) -> list[tuple[str, str]]:
        """Returns all parameters in the order in which they were sent. c10d has no such method."""
        return list(self._params)


class _Response:
    """The response of a handler. By default it is empty, with status 200.

    >>> response = _Response()
    >>> response.set_content('{"ready": true}', "application/json")
    >>> response.set_status(202)
    >>> response.status, response.content_type, response.content
    (202, 'application/json', b'{"ready": true}')
    """

    def __init__(self) -> None:
        self._content = b""
        self._content_type = "text/plain"
        self._status = 200

    def set_content(self, content: str | bytes, content_type: str) -> None:
        """Sets the content and its type, such as `text/plain`."""
        if not isinstance(content, str | bytes):
            raise TypeError(f"set_content(): content is str or bytes, not {type(content).__name__}")
        if not isinstance(content_type, str):
            raise TypeError(f"set_content(): content_type must be str, not {type(content_type).__name__}")
        self._content = content.encode() if isinstance(content, str) else content
        self._content_type = content_type

    def set_status(self, status: int) -> None:
        """Sets the HTTP status, from 200 to 599."""
        if not 200 <= status <= 599:
            raise ValueError(f"{status} is not a status of an answer: say 200 to 599")
        self._status = status

    @property
    def content(self) -> bytes:
        """The content."""
        return self._content

    @property
    def content_type(self) -> str:
        """The type of the content."""
        return self._content_type

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._status


_Handler = Callable[[_Request, _Response], None]


def _register_handler(name: str, handler: _Handler) -> None:
    """Registers a handler for the life of the process. Raises `ValueError` if the name is taken."""
    if not callable(handler):
        raise TypeError(f"_register_handler(): a handler can be called, {handler!r} cannot")
    _threads.register(name, handler)


def _get_handler(name: str) -> _Handler:
    """Returns the handler of this name, in Python or Rust. Raises `ValueError` if there is none.

    >>> response = _Response()
    >>> _get_handler("ping")(_Request(), response)
    >>> response.status, response.content
    (200, b'pong')
    >>> _get_handler("pong")
    Traceback (most recent call last):
        ...
    ValueError: Failed to find handler pong
    """
    if name not in _tenfold.control_names():
        raise ValueError(f"Failed to find handler {name}")
    if name in _threads.handlers:
        return _threads.handlers[name]

    def call(request: _Request, response: _Response) -> None:
        body = request.body()
        params = request.params() if isinstance(request, _Request) else []
        status, kind, content = _tenfold.control_call(
            name, body.encode() if isinstance(body, str) else body, params
        )
        try:
            response.set_content(content.decode(), kind)
        except UnicodeDecodeError:
            response.set_content(content, kind)
        response.set_status(status)

    return call


def _get_handler_names() -> list[str]:
    """Returns the names of all handlers, sorted."""
    return _tenfold.control_names()


def place() -> str | None:
    """Returns where the server of `TENFOLD_WORKER_SERVER` listens: a path, or a host and a port.

    Returns None if the variable is not set, or while there is no group.

    >>> place() is None
    True
    """
    return _tenfold.control_place()


class _WorkerServer:
    """An HTTP server through which this process can be inspected, as c10d's.

    With a path and no port, the server listens on a Unix socket that only its owner can open. The file is
    removed when the server stops, and replaces a file that a dead process left behind. With a host and a port
    (0: a free one) the server listens on TCP. Any process that reaches it can run every handler, so an
    address that other machines can reach causes a warning.

    Raises `RuntimeError` if it cannot listen there.

    >>> server = _WorkerServer("127.0.0.1", 0)
    >>> server.port > 0
    True
    >>> server.shutdown()
    """

    def __init__(self, host_or_file: str, port: int = -1) -> None:
        self._server = _tenfold.WorkerServer(host_or_file, port)
        _servers.add(self)
        _threads.start()

    @property
    def port(self) -> int:
        """Returns the port of the server; 0 for a Unix socket."""
        return self._server.port

    def shutdown(self) -> None:
        """Stops the server. Running handlers finish. It may be called more than once."""
        self._server.shutdown()


class _Threads:
    """Runs handlers written in Python: one thread fetches requests, and one thread answers each."""

    def __init__(self) -> None:
        self.handlers: dict[str, _Handler] = {"dump_traceback": _dump_traceback}
        self._lock = threading.Lock()
        self._is_started = False

    def register(self, name: str, handler: _Handler) -> None:
        with self._lock:
            if name not in _tenfold.control_names():
                self.handlers[name] = handler  # before a client can request it
            _tenfold.control_register(name)
        self.start_if_asked()

    def start_if_asked(self) -> None:
        if os.environ.get(_VARIABLE):
            self.start()

    def start(self) -> None:
        with self._lock:
            if not self._is_started:
                threading.Thread(target=self._fetch, name="tenfold-control", daemon=True).start()
                self._is_started = True
                _tenfold.control_offer_tracebacks()

    def start_anew_in_child(self) -> None:
        """A forked child has none of its parent's threads, and maybe a lock that one of them held."""
        self._lock = threading.Lock()
        self._is_started = False

    def _fetch(self) -> None:
        while (question := _tenfold.control_next()) is not None:
            try:
                threading.Thread(
                    target=self._answer, args=question, name="tenfold-handler", daemon=True
                ).start()
            except RuntimeError as error:  # the system cannot start more threads
                _tenfold.control_answer(question[0], 503, "text/plain", str(error).encode())

    def _answer(self, number: int, name: str, body: bytes, params: list[tuple[str, str]]) -> None:
        response = _Response()
        try:
            self.handlers[name](_Request(body, params), response)
        except BaseException as error:  # every error is reported to the client
            told = f"Handler {name} failed: {_told(error)}"
            response = _Response()
            response.set_content(told.encode(errors="replace"), "text/plain")
            response.set_status(500)
        _tenfold.control_answer(number, response.status, response.content_type, response.content)


def _told(error: BaseException) -> str:
    """Formats an exception as pybind11 does: the message, then the frames, innermost first."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code is not _Threads._answer.__code__:
            places.append(f"  {code.co_filename}({trace.tb_lineno}): {code.co_name}\n")
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}\n\nAt:\n{''.join(reversed(places))}"


def _dump_traceback(request: _Request, response: _Response) -> None:
    """Answers with the stacks of all Python threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        response.set_content(file.read(), "text/plain")


_servers: weakref.WeakSet[_WorkerServer] = weakref.WeakSet()
_threads = _Threads()
_threads.start_if_asked()
os.register_at_fork(after_in_child=lambda: _threads.start_anew_in_child())


def _end() -> None:
    """After this, no thread returns from Rust into an interpreter that has shut down."""
    _tenfold.control_close()
    for server in list(_servers):
        server.shutdown()


atexit.register(_end)
