"""Finds what turns bytes into running code: unpickling, eval and exec, a shell.

Blocks and files come from others, and so may every byte of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "joblib", "jsonpickle"),
    *("marshal", "shelve"),
    "multiprocessing",  # its pipes and queues unpickle
}
NAMES = {"eval", "exec", "__import__", "Unpickler", "read_pickle", "ProcessPoolExecutor"}
CALLS = {
    *("torch.load", "yaml.load", "yaml.unsafe_load", "builtins.eval", "builtins.exec"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "code.interact", "logging.config.listen"),
}
NEVER = {"shell", "allow_pickle"}
"""Arguments that may be nothing but False."""


def unsafe(source: str, allowed: Set[str] = frozenset()) -> list[str]:
    """Return the unsafe names that a module uses, those ``allowed`` left out."""
    return [
        what
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.expr, ast.stmt))
        for what in _in_node(node)
        if what not in allowed
    ]


def _in_node(node: ast.expr | ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        for one in node.names:
            full = f"{module}.{one.name}"
            if module.split(".")[0] in MODULES or one.name in NAMES or full in CALLS:
                yield full
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield node.id
    elif isinstance(node, ast.Attribute):
        full = ast.unparse(node)
        if node.attr in NAMES or full in CALLS or full.split(".")[0] in MODULES:
            yield full
    elif isinstance(node, ast.Call):
        yield from _arguments(node)


def _arguments(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        given = keyword.value
        if keyword.arg in NEVER and not (isinstance(given, ast.Constant) and given.value is False):
            yield f"{keyword.arg}={ast.unparse(given)}"
