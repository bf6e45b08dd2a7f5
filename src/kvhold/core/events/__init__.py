"""What may happen to the core (events) and what it asks of its shell (effects).

Sessions are numbered by the shell and never reused. Packed fields are little-endian machine arrays: ``rows`` of
32-bit, ``epochs`` and ``offsets`` of 64-bit unsigned integers; ``keys`` are fixed-length keys, one after the other.

``incoming`` has the events, ``effects`` the effects, ``shared`` what both speak of. All of it is used under this name.
"""

# With stars: each name is said once, where it is told what it means.
from kvhold.core.events.effects import *  # noqa: F403
from kvhold.core.events.incoming import *  # noqa: F403
from kvhold.core.events.shared import *  # noqa: F403
