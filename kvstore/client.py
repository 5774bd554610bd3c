"""The blocking client: one connection, safe to share between threads.

::

    with Client("/run/kvstore/kvstore.sock") as client:
        client.put(key, block)
        block = client.get(key)

Every call has a deadline (``timeout``). A connection that broke is made anew by the next call; a
call that failed is not repeated by itself, since a put may have arrived. Standard library and numpy
only: model servers import this module.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvstore.operations import Operations, Sizes, Staging, raise_for
from kvstore.regions import DEFAULT_TOTAL_BYTES
from kvstore.waiting import Threads

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator

    from kvstore.credentials import Credentials

__all__ = ["Client", "Sizes", "Staging", "connect", "raise_for"]

P = ParamSpec("P")
T = TypeVar("T")


def _run(step: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks where others would give way."""
    try:
        step.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    step.close()
    raise AssertionError("a blocking operation gave way")


def _blocking(
    operation: Callable[Concatenate[Operations, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(operation)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(operation(client._operations, *args, **kwargs))

    return call


def _iterating(
    operation: Callable[Concatenate[Operations, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    @wraps(operation)
    def iterate(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        steps = operation(client._operations, *args, **kwargs)
        try:
            while True:
                try:
                    item = _run(steps.__anext__())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            _run(steps.aclose())

    return iterate


class Client:
    """Talks to the daemon at ``path``: a Unix socket, ``tls://HOST:PORT`` or, on this machine,
    ``tcp://HOST:PORT``.

    ``timeout`` is in seconds, for every call that names none. ``credentials``: files for TCP;
    those that the environment names, if None. What the calls do and raise is told
    at :class:`~kvstore.operations.Operations`.
    """

    def __init__(
        self,
        path: str,
        timeout: float = 30.0,
        *,
        staging_bytes: int = DEFAULT_TOTAL_BYTES,
        check: bool | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._operations = Operations(
            path,
            timeout,
            Threads,
            staging_bytes=staging_bytes,
            check=check,
            credentials=credentials,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. May be called twice; the next call opens it again."""
        self._operations.close()

    @property
    def timeout(self) -> float:
        return self._operations.timeout

    namespace = _blocking(Operations.namespace)
    put = _blocking(Operations.put)
    put_many = _blocking(Operations.put_many)
    put_from = _blocking(Operations.put_from)
    put_staged = _blocking(Operations.put_staged)
    get = _blocking(Operations.get)
    get_many = _blocking(Operations.get_many)
    get_into = _blocking(Operations.get_into)
    get_staged = _blocking(Operations.get_staged)
    stream_get = _iterating(Operations.stream_get)
    contains = _blocking(Operations.contains)
    prefix = _blocking(Operations.prefix)
    touch = _blocking(Operations.touch)
    delete = _blocking(Operations.delete)
    pin = _blocking(Operations.pin)
    unpin = _blocking(Operations.unpin)
    subscribe = _iterating(Operations.subscribe)
    flush = _blocking(Operations.flush)
    status = _blocking(Operations.status)
    list = _iterating(Operations.list)
    admin = _blocking(Operations.admin)
    follow = _iterating(Operations.follow)

    @contextmanager
    def staging(self, nbytes: int, *, timeout: float | None = None) -> Iterator[Staging]:
        """Lease ``nbytes`` of memory shared with the daemon, at most 256 MiB.

        Raises Busy when there is no room for it, UsageError where memory cannot be shared.
        """
        lease = self._operations.staging(nbytes, timeout=timeout)
        staging = _run(lease.__aenter__())
        try:
            yield staging
        finally:
            _run(lease.__aexit__(None, None, None))


def connect(address: str, timeout: float = 30.0) -> Client:
    """Return a client of the daemon at ``address``; see :class:`Client`."""
    return Client(address, timeout)
