"""Every error that kvstore raises, each with the exit code of the command that ends by it.

::

    KVStoreError                1   something failed
    ├── UsageError              2   an argument or option is wrong
    │   └── InvalidKey          2   a key, shard or block length out of bounds
    ├── NotFound                4   a block or namespace is not there
    │   └── UnknownNamespace    4
    ├── CorruptBlock            5   a record fails verification
    ├── CorruptStore            5   the store's own files are damaged
    │   └── EngineDied          5   the process that looked at an engine died of it
    ├── StoreNotFound          10   no store at this path
    ├── StoreLocked            11   another process holds it
    ├── DaemonUnavailable      12   nobody listens, or not ready in time
    │   └── DeadlineExceeded   12   the daemon did not answer in time
    ├── ConfigError            13   a setting is invalid
    ├── StoreFull              14   no room, and nothing may be evicted
    ├── FormatUnsupported      15   the store is newer than this program
    ├── StoreExists             1   a store or foreign files are already there
    ├── KeyConflict             1   same key, another length
    ├── Busy                    1   no buffer free now; try again
    ├── Cancelled               1   the request was cancelled by its client
    ├── ReadOnly                1   the store takes no writes at present
    ├── PermissionDenied        1   the operating system refuses access
    ├── EngineError             1   an engine or its library failed
    │   └── EngineHung          1   the process that looked at an engine did not answer
    └── ProtocolError           1   bytes on the wire that make no sense

A message says what happened, to which key or path; ``hint`` says what to do next. Both are one
sentence, lower case at the start, so that ``kvstore: {message}. {hint}`` reads well.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Root of the tree. ``exit_code`` belongs to the class, ``hint`` is the next step."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class UsageError(KVStoreError):
    exit_code = 2


class InvalidKey(UsageError):
    pass


class NotFound(KVStoreError):
    exit_code = 4


class UnknownNamespace(NotFound):
    pass


class CorruptBlock(KVStoreError):
    exit_code = 5


class CorruptStore(KVStoreError):
    exit_code = 5


class EngineDied(CorruptStore):
    pass


class StoreNotFound(KVStoreError):
    exit_code = 10


class StoreLocked(KVStoreError):
    exit_code = 11


class DaemonUnavailable(KVStoreError):
    exit_code = 12


class DeadlineExceeded(DaemonUnavailable):
    pass


class ConfigError(KVStoreError):
    exit_code = 13


class StoreFull(KVStoreError):
    exit_code = 14


class FormatUnsupported(KVStoreError):
    exit_code = 15


class StoreExists(KVStoreError):
    pass


class KeyConflict(KVStoreError):
    pass


class Busy(KVStoreError):
    pass


class Cancelled(KVStoreError):
    pass


class ReadOnly(KVStoreError):
    pass


class PermissionDenied(KVStoreError):
    pass


class EngineError(KVStoreError):
    pass


class EngineHung(EngineError):
    pass


class ProtocolError(KVStoreError):
    pass


def again(error: KVStoreError) -> KVStoreError:
    """Return an error to raise once more: one exception has one traceback."""
    return type(error)(error.message, error.hint)
