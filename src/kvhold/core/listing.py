"""``kvhold keys``: what can be found of one (namespace, group), row by row, in bounded parts."""

from kvhold.core import events as ev
from kvhold.core.common import Common
from kvhold.core.rows import TIERS
from kvhold.core.turns import Work

_ROWS, _MOVES = (1 << 32) - 1, (1 << 30) - 1


def listing(common: Common, event: ev.List) -> Work:
    """A cursor is the next row, and how many objects had been given another row: since then, it starts over."""
    catalogue = common.catalogue
    state, owner, key = catalogue.state, catalogue.owner, catalogue.key
    moves, row = event.cursor >> 32, event.cursor & _ROWS
    now = catalogue.moves & _MOVES
    row = row if moves == now else 0
    keys: list[bytes] = []
    tiers = bytearray()
    last = row + ev.MAX_LISTED
    while row < min(last, len(state)) and (index := catalogue.find(event.namespace, event.group)) is not None:
        end = min(row + ev.MAX_BATCH, last, len(state))
        for one in range(row, end):
            if key[one] and owner[one] == index.id and not catalogue.expected(one):
                keys.append(key[one])
                tiers.append(TIERS[state[one]])
        row = end
        yield []
    over = row < last and catalogue.moves & _MOVES == now
    yield [ev.Listed(event.session, b"".join(keys), bytes(tiers), 0 if over else now << 32 | row)]
