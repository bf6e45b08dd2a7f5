"""Everything that decides in kvhold: events in, effects out; no sockets, files, threads or clock of its own.

``events`` names what may happen and what may be asked of the shell, ``arena`` cuts the DRAM arena into slots,
``catalogue`` remembers the objects and their recency, ``sessions`` who may still touch which bytes, and ``state``
puts them together behind one method, :meth:`kvhold.core.state.Core.handle`.
"""

from kvhold.core.state import Core

__all__ = ["Core"]
