"""The fault laboratory: power loss, kills and failing calls, judged by what was acknowledged.

::

    __main__   which points are run, and what makes the laboratory red
    table      one line for each engine, filesystem and phase
    lab        a point: a store is driven through a phase, struck, opened again and judged
    drive      the phases
    strike     the moment: before the n-th call, at a named point, after a time
    disks      filesystems whose power can be cut; disks that log what is written to them
    tracing    strace on a running child: kills it, or makes its calls fail
    served     the same with the real daemon and its clients
    oracle     what the store has acknowledged, kept outside of it
    judge      what the store has afterwards
    controls   faults put into kvstore itself, each of which the laboratory must find

Whatever a point does follows from the seed and its number: ``python -m tests.faults --seed S
--point N`` does it again.
"""
