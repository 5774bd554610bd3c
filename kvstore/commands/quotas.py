"""The command that limits what a namespace may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.commands.frame import Call, Command, online
from kvstore.commands.names import read_namespace, read_size, require

if TYPE_CHECKING:
    from collections.abc import Mapping

NONE = "none"


@click.command(
    cls=Command,
    example="kvstore quota llama 200GiB\nkvstore quota llama none\nkvstore quota llama",
    exits=online(e4="unknown namespace"),
)
@click.argument("namespace", metavar="NAMESPACE")
@click.argument("size", metavar="[SIZE|none]", required=False)
@click.pass_obj
def quota(call: Call, namespace: str, size: str | None) -> None:
    """Limit what the blocks of a namespace may take.

    NAMESPACE is its name, @FILE with its record, or its id. Beyond the limit its own blocks leave,
    those unused longest first; what finds no room even so is answered as full. none lifts it: then
    the setting namespace_quota holds. Without SIZE it only tells what holds.
    """
    asked: dict[str, object] = {"op": "quota", "namespace": read_namespace(namespace).id}
    if size is not None:
        asked["bytes"] = None if size == NONE else read_size(size, "SIZE")
    with call.client() as client:
        require(client, namespace)
        told = client.admin(asked)
    document = {name: told[name] for name in ("namespace", "quota_bytes", "limit_bytes")}
    call.output.result({**document, "taken_bytes": told["taken_bytes"]}, [_line(told)])


def _line(told: Mapping[str, Any]) -> str:
    from kvstore import render

    quota, limit = told["quota_bytes"], told["limit_bytes"]
    whose = "by namespace_quota" if quota is None else "its own quota"
    holds = "no quota" if limit is None else f"{render.size(limit)} at most, {whose}"
    return f"{told['namespace']}: {render.size(told['taken_bytes'])}, {holds}"
