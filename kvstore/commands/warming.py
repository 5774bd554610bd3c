"""``kvstore warm``: blocks that come into memory ahead of their use."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvstore.commands.frame import INTERRUPTED, PARTLY, Call, Command, online
from kvstore.commands.names import (
    NAMESPACE_ID,
    Name,
    described,
    listed,
    read_key,
    read_namespace,
    read_size,
    require,
)
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.client import Client
    from kvstore.render import Progress

WARM_KEYS = 512
"""Keys in a request: far below what one may have (128 KiB), and quickly done."""
FULL_SHARE = 0.9
"""When so much of the memory is taken by what was warmed, the rest would drive out the first: slots
of several sizes never fill it to the last byte."""
RATE_SECONDS = 0.25
"""With --rate, what is asked for at a time takes about so long."""


@click.command(
    cls=Command,
    example=(
        "kvstore list > hot.txt; kvstore warm --from hot.txt\n"
        "kvstore warm --recent 10GiB --rate 500MiB/s\nkvstore warm --namespace llama\n"
        "kvstore warm --tokens prompts.jsonl --namespace 0123456789abcdef0123456789abcdef"
    ),
    exits=online(
        e0="what is there and has room in memory is in memory",
        e1="failed, or the daemon keeps no blocks in memory",
        e3="some blocks could not be read",
        e4="unknown namespace",
    ),
)
@click.option("--from", "source", metavar="FILE|-", help="Blocks, as list prints them.")
@click.option("--tokens", metavar="FILE|-", help="Prompts of the vLLM whose --namespace it is.")
@click.option("--recent", metavar="SIZE", help="What was used last, as much of it.")
@click.option("--namespace", metavar="NAME|@FILE|ID", help="What was used last of this namespace.")
@click.option("--rate", metavar="SIZE/s", help="Read no more than so many bytes a second.")
@click.option("-n", "--dry-run", is_flag=True, help="Only list the blocks.")
@click.pass_obj
def warm(
    call: Call,
    source: str | None,
    tokens: str | None,
    recent: str | None,
    namespace: str | None,
    rate: str | None,
    dry_run: bool,
) -> int:
    """Bring blocks into the daemon's memory ahead of their use.

    A line of --from is NAMESPACE-ID SHARD KEY, or KEY alone in the namespace "default", shard 0.
    A line of --tokens is a JSON list of token ids, or a request to vLLM with such a list as prompt.
    When as much is there as the memory holds, the rest is skipped. Clients go first: one of the
    daemon's workers reads, a little at a time.
    """
    _check_source(source, tokens, recent, namespace)
    speed = read_size(None if rate is None else rate.removesuffix("/s"), "--rate")
    if speed == 0:
        raise UsageError("--rate is 0", "write for example 200MiB/s")
    size = read_size(recent, "--recent")
    space = None if namespace is None else read_namespace(namespace)
    lines = None if source is None else list(read_names(source))
    with call.client() as client:
        require(client, namespace)
        asked = {"op": "recent", "bytes": size, "namespace": space and space.id}
        if tokens is not None and space is not None:
            lines = list(_prompted(tokens, space.id, space.known(client)))
        names = lines if lines is not None else _recent(client, asked)
        if dry_run:
            call.output.stream("blocks", map(described, names), {"dry_run": True})
            return 0
        return _warm(call, client, names, speed, newest_last=lines is None)


def _check_source(
    source: str | None, tokens: str | None, recent: str | None, namespace: str | None
) -> None:
    """Raise UsageError unless it is told, in one way, what is to be warmed."""
    ways = (source, tokens, recent if recent is not None or tokens else namespace)
    if sum(way is not None for way in ways) != 1:
        raise UsageError("warm wants one source", "use --from FILE, or --recent and --namespace")
    if tokens is not None and namespace is None:
        raise UsageError(
            "--tokens wants the namespace of a vLLM", "see kvstore inspect --namespaces"
        )


def _prompted(source: str, identity: str, record: Mapping[str, object]) -> Iterator[Name]:
    """Yield the blocks of the prompts in a file. Raises UsageError."""
    from kvstore import tokens

    for number, text in enumerate(_lines(source), 1):
        if text.strip():
            try:
                prompt = tokens.read_prompt(text)
            except UsageError as error:
                where = f"line {number} of {source}: {error.message}"
                raise UsageError(where, error.hint) from None
            for key in tokens.keys_in(record, prompt):
                yield identity, 0, key.hex()


def read_names(source: str) -> Iterator[Name]:
    """Yield the blocks that lines of a file, or of stdin for ``-``, name. Raises UsageError."""
    from kvstore import keys

    default = keys.namespace_id(keys.named(keys.DEFAULT_NAMESPACE)).hex()
    for number, text in enumerate(_lines(source), 1):
        words = text.split()
        if not words:
            continue
        namespace, shard, key = words if len(words) == 3 else (default, "0", words[0])
        good = len(words) in (1, 3) and NAMESPACE_ID.fullmatch(namespace) and shard.isdecimal()
        if not good or int(shard) > keys.MAX_SHARD:
            raise UsageError(
                f"line {number} of {source} is {text.strip()[:60]!r}",
                "write NAMESPACE-ID SHARD KEY, or KEY alone",
            )
        try:
            yield namespace.lower(), int(shard), read_key(key).hex()
        except UsageError as error:
            raise UsageError(f"line {number} of {source}: {error.message}", error.hint) from None


def _lines(source: str) -> list[str]:
    if source == "-" and sys.stdin is None:
        raise UsageError("stdin is closed", "give a file with --from FILE, or pipe the list in")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except OSError as error:
        raise UsageError(
            f"list {source}: {error.strerror}", "give a readable file, or - for stdin"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"list {source} is no text", "give what list printed") from None
    return text.splitlines()


def _recent(client: Client, asked: Mapping[str, object]) -> list[Name]:
    return [
        (one[0], one[1], one[2]) for part in client.follow(asked) for one in listed(part, "blocks")
    ]


class Warming:
    """A warm under way: what became of the blocks so far."""

    def __init__(self, client: Client, rate: int | None, progress: Progress) -> None:
        self._client = client
        self._rate = rate
        self._progress = progress
        self._began = time.monotonic()
        self.counts = dict.fromkeys(("loaded", "present", "absent", "skipped", "failed"), 0)
        self.bytes = 0
        self.full = False
        """Memory holds no more of them."""

    def warm(self, where: tuple[str, int], keys: list[str]) -> None:
        """Have the daemon read some blocks of one namespace and shard."""
        while keys and not self.full:
            asked: dict[str, object] = {"op": "warm", "namespace": where[0], "shard": where[1]}
            asked["keys"] = keys[:WARM_KEYS]
            if self._rate is not None:
                asked["bytes"] = max(1, int(self._rate * RATE_SECONDS))
            answer = cast("dict[str, int]", self._client.admin(asked))
            for name in self.counts:
                self.counts[name] += answer[name]
            self.bytes += answer["bytes"]
            self.full = self.bytes >= FULL_SHARE * answer["memory_capacity_bytes"]
            self._progress.add(answer["done"])
            keys = keys[answer["done"] :]
            self._keep_to_rate()
        self.counts["skipped"] += len(keys)

    def _keep_to_rate(self) -> None:
        if self._rate is not None:
            ahead = self.bytes / self._rate - (time.monotonic() - self._began)
            time.sleep(max(0.0, ahead))


def _warm(
    call: Call, client: Client, names: list[Name], rate: int | None, *, newest_last: bool
) -> int:
    interrupted = False
    with call.output.progress(len(names), "block") as progress:
        warming = Warming(client, rate, progress)
        try:
            for where, keys in _batches(names):
                # Of what is read in one go the first block counts as used last.
                warming.warm(where, keys[::-1] if newest_last else keys)
        except KeyboardInterrupt:
            interrupted = True
    document = {**warming.counts, "bytes": warming.bytes, "interrupted": interrupted}
    call.output.result(document, [_warmed_line(warming)])
    if interrupted:
        call.output.error("Interrupted", INTERRUPTED, "interrupted")
        return INTERRUPTED
    return PARTLY if warming.counts["failed"] else 0


def _batches(names: list[Name]) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """Yield keys of one namespace and shard together, in about the order in which they came."""
    waiting: dict[tuple[str, int], list[str]] = {}
    for namespace, shard, key in names:
        keys = waiting.setdefault((namespace, shard), [])
        keys.append(key)
        if len(keys) == WARM_KEYS:
            yield (namespace, shard), waiting.pop((namespace, shard))
    yield from waiting.items()


def _warmed_line(warming: Warming) -> str:
    from kvstore import render

    counts = ", ".join(f"{name} {number:,}" for name, number in warming.counts.items())
    full = "; memory holds no more of them" if warming.full and warming.counts["skipped"] else ""
    return f"{counts}; {render.size(warming.bytes)} in memory{full}"
