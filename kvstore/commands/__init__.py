"""The commands by subject; ``frame`` has what all of them share.

They import what they need when they run, so that ``kvstore --help`` is quick.
"""
