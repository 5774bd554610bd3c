"""Traces of real requests, replayed through the store's own index and policies.

Nothing is read from or written to a disk: what is simulated is who stays. The counting rules are
those of :class:`kvstore.replay.tiers.Tiers`.
"""
