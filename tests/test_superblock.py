"""The superblock engine: the contract, and what only it has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.backends.base import Blocks, Engine, EngineContext
from kvstore.backends.superblock import SuperblockEngine
from kvstore.testing import EngineTests


SMALL = {"superblock_bytes": 66 << 20}


class TestSuperblock(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return SuperblockEngine(replace(context, options=SMALL))


class TestBuffered(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return SuperblockEngine(replace(context, options={"io": "buffered", **SMALL}))


class TestMapped(EngineTests):
    def make(self, context: EngineContext) -> Engine:
        return SuperblockEngine(replace(context, options={"io": "mmap", **SMALL}))
