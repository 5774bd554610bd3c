"""The table of engines. Others come in by the entry point group `kvstore.backends`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from kvstore import __version__
from kvstore.backends.base import Engine
from kvstore.errors import ConfigError, EngineError

ENTRY_POINTS = "kvstore.backends"
BUILT_IN = {
    "memory": "kvstore.backends.memory:MemoryEngine",
    "filesystem": "kvstore.backends.filesystem:FilesystemEngine",
    "superblock": "kvstore.backends.superblock:SuperblockEngine",
    "lmdb": "kvstore.backends.lmdb:LmdbEngine",
    "leveldb": "kvstore.backends.leveldb:LeveldbEngine",
    "sqlite": "kvstore.backends.sqlite:SqliteEngine",
    "rocksdb": "kvstore.backends.rocksdb:RocksdbEngine",
}
ALIASES = {"mmap": "superblock"}
"""Names that stand for an engine with ``io`` of that name."""


def plain_name(name: str) -> str:
    """Return the name that STORE.json has for an engine."""
    return ALIASES.get(name, name)


def engine_names() -> list[str]:
    """Return the names of all engines, built in and installed, without importing them."""
    return sorted({*BUILT_IN, *entry_points(group=ENTRY_POINTS).names})


def engine_package(name: str) -> tuple[str, str]:
    """Return the name and version of the package that an engine comes with."""
    if plain_name(name) in BUILT_IN:
        return "kvstore", __version__
    package = _installed(name).dist
    return (package.name, package.version) if package is not None else ("unknown", "")


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine called ``name``.

    Built-in names cannot be taken over by another package. Raises ConfigError for an unknown name,
    EngineError when its module or library cannot be imported or is no engine.
    """
    try:
        found: object = _load(name)
    except (ImportError, AttributeError) as error:
        hint = f"install what it needs, for example: pip install 'kvstore[{name}]'"
        raise EngineError(f"engine {name!r} cannot be loaded: {error}", hint) from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineError(f"engine {name!r} is {found!r}, no subclass of Engine")
    return found


def _load(name: str) -> object:
    name = plain_name(name)
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(import_module(module), attribute)
    return _installed(name).load()


def _installed(name: str) -> EntryPoint:
    # Most opens are of built-in engines, so the slow walk over all installed packages is here only.
    for point in entry_points(group=ENTRY_POINTS, name=name):
        return point
    raise ConfigError(f"there is no engine {name!r}", f"choose one of {', '.join(engine_names())}")
