"""For which lengths of a prefix a pool has what it takes to resume from its end."""


def ends_of(there: bytes, window: int | None) -> list[int]:
    """Lengths, in pages, that can be resumed from; ``there`` says of each page whether it is stored.

    With a ``window`` the last that many pages have to be there, or all if there are fewer; without one all have to be.
    """
    ends, run = [], 0
    for length, tier in enumerate(there, 1):
        run = run + 1 if tier else 0
        if run >= min(length, window if window is not None else length):
            ends.append(length)
    return ends
