"""The packed log, a :class:`~kvhold.core.backing.Backing`: records one after the other in segments, given up whole.

``segments`` is where records lie, ``device`` how a log does, ``writes`` what is written and which segments make room,
``recovery`` what was found at the start, ``backing`` all of it as the core sees it, ``events`` what only a log is told
and asks for.
"""
