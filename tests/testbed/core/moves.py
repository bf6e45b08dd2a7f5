"""From which state to which rows have gone."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvhold.core.catalogue import Catalogue
from kvhold.core.rows import Rows, State


def recorded(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """(former state, state) of every move that a row of any core makes from now on, until the test ends."""
    moves = set[tuple[int, int]]()
    move, lease, release = Rows.move, Catalogue.lease, Catalogue.release

    def moved(rows: Rows, row: int, state: int) -> bool:
        former = rows.state[row]
        done = move(rows, row, state)
        if done:
            moves.add((former, state))
        return done

    # These two change states without `Rows.move`, for speed.
    def leased(catalogue: Catalogue, rows: Sequence[int]) -> Any:
        resident = [row for row in rows if catalogue.state[row] == State.RESIDENT]
        kept = lease(catalogue, rows)
        moves.update((State.RESIDENT, State.LEASED) for row in resident if catalogue.state[row] == State.LEASED)
        return kept

    def released(catalogue: Catalogue, rows: Sequence[int]) -> None:
        held = [row for row in rows if catalogue.state[row] == State.LEASED]
        release(catalogue, rows)
        moves.update((State.LEASED, State.RESIDENT) for row in held if catalogue.state[row] == State.RESIDENT)

    monkeypatch.setattr(Rows, "move", moved)
    monkeypatch.setattr(Catalogue, "lease", leased)
    monkeypatch.setattr(Catalogue, "release", released)
    return moves
