"""Measurements that assert that the answers are right before they time them."""
