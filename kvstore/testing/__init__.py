"""What engines are tested with, ours and anyone else's; needs pytest and hypothesis.

A test of an engine is five lines::

    class TestMyEngine(EngineTests):
        def make(self, context: EngineContext) -> Engine:
            return MyEngine(context)

:class:`FaultyEngine` wraps an engine and fails on order, for tests of what is built on engines.
"""

from kvstore.testing.faulty import Fault, FaultyEngine
from kvstore.testing.suite import EngineTests

__all__ = ["EngineTests", "Fault", "FaultyEngine"]
