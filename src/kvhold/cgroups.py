"""What bounds this process's memory below the host's own: each of its cgroups from its own up to the visible root."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 62
"""Version 1 writes "no limit" as the greatest number of whole pages, which differs between processors."""


@dataclass(frozen=True)
class Bound:
    """``free`` of the ``total`` bytes that all processes below ``owner`` may have together, as far as is known."""

    owner: str
    total: int
    free: int

    @property
    def reserve(self) -> int:
        """Bytes that are left to everybody else: a twentieth and at least 1GiB, but never more than an eighth."""
        return min(max(1 << 30, self.total // 20), self.total // 8)

    @property
    def spare(self) -> int:
        """Bytes that may be taken."""
        return max(0, self.free - self.reserve)


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy: ``root`` is the cgroup that is seen at ``at``, named as the process names its own."""

    root: str
    at: Path
    version: int
    counts_huge_pages: bool


class Cgroups:
    """This process's cgroups, whichever they are when it is asked. ``host`` is where /proc and the mounts are."""

    def __init__(self, host: Path = Path("/")) -> None:
        self._host = host
        self._own = ""
        self._chains: list[tuple[_Mount, list[Path]]] = []

    def bounds(self, huge_pages: bool = False) -> list[Bound]:
        """Each limit that holds for this process. With ``huge_pages`` those that count huge pages."""
        try:
            own = (self._host / "proc/self/cgroup").read_text()
            if own != self._own:  # it may be moved, which batch systems do after it began
                self._chains = list(_chains(self._host, own))
                self._own = own
        except OSError:
            return []
        found: list[Bound] = []
        for mount, chain in self._chains:
            if not huge_pages:
                found += _bounds_1(chain) if mount.version == 1 else _bounds_2(chain)
            elif mount.counts_huge_pages:
                found += _bounds_2(chain)
        return found


def _chains(host: Path, own: str) -> Iterator[tuple[_Mount, list[Path]]]:
    """For each hierarchy that may limit memory, the folders of the process's cgroups that can be seen, lowest first."""
    mounts = list(_mounts(host))
    for line in own.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        chains = [(mount, _chain(mount, name, host)) for mount in mounts if mount.version == version]
        if chains:  # several show the same, or parts of it
            yield max(chains, key=lambda each: len(each[1]))


def _mounts(host: Path) -> Iterator[_Mount]:
    for line in (host / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, at = (_unescape(field) for field in before.split()[3:5])
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            huge = "memory_hugetlb_accounting" in options.split(",")
            yield _Mount(root, host / at.lstrip("/"), 2, huge)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _Mount(root, host / at.lstrip("/"), 1, False)


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _chain(mount: _Mount, name: str, host: Path) -> list[Path]:
    """The folder of cgroup ``name`` and those of its ancestors, as far up as ``mount`` shows them.

    In a cgroup namespace both names begin at the namespace's root, with one ``..`` for each level above it.
    """
    root_up, root_down = _split(mount.root)
    name_up, name_down = _split(name)
    if root_up == name_up and name_down[: len(root_down)] == root_down:
        lowest = mount.at.joinpath(*name_down[len(root_down) :])
    elif root_up > name_up and not root_down:  # the levels in between have names that are not told
        lowest = _search(mount.at, root_up - name_up, name_down, host)
    else:
        return []  # another branch
    chain = [lowest, *lowest.parents]
    chain = chain[: chain.index(mount.at) + 1]
    return [folder for folder in chain if (folder / "cgroup.procs").exists()]


def _split(name: str) -> tuple[int, list[str]]:
    """How many levels above the namespace's root ``name`` starts, and the way down from there."""
    parts = [part for part in PurePosixPath(name).parts if part != "/"]
    up = parts.count("..")
    return up, parts[up:]


def _search(top: Path, levels: int, below: list[str], host: Path) -> Path:
    """The folder ``below`` one that is ``levels`` under ``top`` and has this process in it; else ``top`` itself."""
    try:
        own = (host / "proc/self/stat").read_text().split()[0]
        for folder in top.glob("/".join(["*"] * levels)):
            found = folder.joinpath(*below)
            if own in _text(found / "cgroup.procs").split():
                return found
    except OSError:
        pass
    return top


def _bounds_2(chain: list[Path]) -> Iterator[Bound]:
    for folder in chain:
        # Above `high` nobody is killed, but the kernel slows down all who allocate.
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        if set(limits) != {None}:
            limit = min(each for each in limits if each is not None)
            yield Bound(f"cgroup {folder}", limit, _free_2(folder, limit))


def _free_2(folder: Path, limit: int) -> int:
    used = _number(folder / "memory.current") or 0
    stat = _stat(folder)
    return _free(
        limit, used, stat.get("inactive_file", 0), stat.get("active_file", 0) + stat.get("slab_reclaimable", 0)
    )


def _bounds_1(chain: list[Path]) -> Iterator[Bound]:
    least = UNLIMITED
    for folder in chain:
        if folder != chain[0] and _number(folder / "memory.use_hierarchy") == 0:
            continue  # limits of before Linux 5.11 may be of the group's own processes alone
        limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None:
            least = min(least, limit)
            yield Bound(f"cgroup {folder}", limit, _free_1(folder, limit))
    hidden = _stat(chain[0]).get("hierarchical_memory_limit", UNLIMITED) if chain else UNLIMITED
    if hidden < least:  # of an ancestor that cannot be seen, nor what others use of it
        yield Bound(f"a cgroup above {chain[-1]}", hidden, _free_1(chain[-1], hidden))


def _free_1(folder: Path, limit: int) -> int:
    used = _number(folder / "memory.usage_in_bytes") or 0
    stat = _stat(folder)
    return _free(limit, used, stat.get("total_inactive_file", 0), stat.get("total_active_file", 0))


def _free(limit: int, used: int, idle: int, active: int) -> int:
    """What can still be had: unused, or page cache and the like that the kernel gives up for whoever asks.

    As in the kernel's own MemAvailable for the whole host, all of it counts but a part of what is in use: without that
    it would only be read again at once. Weights that were just mapped and read are `active` on kernels with
    generations of pages (MGLRU), so that leaving out all of it, as the kubelet does, would leave nothing.
    """
    return max(0, limit - used + min(used, idle + active // 2))


def _number(path: Path) -> int | None:
    """The number in a file of the kernel; None for no limit and where there is no such file."""
    text = _text(path).strip()
    if not text.isdigit() or int(text) >= UNLIMITED:
        return None
    return int(text)


def _stat(folder: Path) -> dict[str, int]:
    lines = [line.split() for line in _text(folder / "memory.stat").splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not enabled here, or gone meanwhile
        return ""
