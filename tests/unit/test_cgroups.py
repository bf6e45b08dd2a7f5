"""Which cgroups' limits hold for a process, and what of them can still be had, wherever their files are mounted.

The trees are those that the kernel shows: in a container, in a namespace, in the older version, in both at once.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvhold.cgroups import Bound, Cgroups

MIB, GIB = 1 << 20, 1 << 30
V1 = "9223372036854771712"
PID = 4711
Make = Callable[..., Cgroups]


def group(folder: Path, version: int, limit: str | int, used: int = 0, *, pid: int | None = None, **stat: int) -> None:
    """Write the files of a cgroup; ``high`` among ``stat`` is a limit, too."""
    high = stat.pop("high", "max")
    files = {
        1: {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.use_hierarchy": 1},
        2: {"memory.max": limit, "memory.high": high, "memory.current": used},
    }[version]
    files |= {"cgroup.procs": "" if pid is None else pid, "memory.stat": "\n".join(f"{k} {v}" for k, v in stat.items())}
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/stat").write_text(f"{PID} (python) S 1")
    return tmp_path


@pytest.fixture
def make(host: Path) -> Make:
    """A process's view: its line of /proc/self/cgroup, and roots and places of what is mounted."""

    def view(own: str, *mounts: tuple[str, str, str]) -> Cgroups:
        kinds = {"cgroup2": "cgroup2 cgroup2 rw,nsdelegate", "memory": "cgroup cgroup rw,memory"}
        kinds |= {"huge": "cgroup2 cgroup2 rw,memory_hugetlb_accounting", "cpu": "cgroup cgroup rw,cpu,cpuacct"}
        lines = [f"{i} 1 0:{i} {r} {at} rw shared:7 - {kinds[k]}" for i, (r, at, k) in enumerate(mounts, 30)]
        (host / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + "\n".join(lines) + "\n")
        (host / "proc/self/cgroup").write_text(own)
        return Cgroups(host)

    return view


def limits(cgroups: Cgroups) -> list[int]:
    return [bound.total for bound in cgroups.bounds()]


def test_version_2_from_the_own_group_to_the_root(make: Make, host: Path) -> None:
    """systemd's MemoryMax is on a service or a slice, and a pod's on the parent of its containers."""
    top = host / "sys/fs/cgroup"
    group(top / "a.slice", 2, 8 * GIB, 7 * GIB)
    group(top / "a.slice/b.service", 2, "max", 2 * GIB)
    group(top / "a.slice/b.service/own", 2, 3 * GIB, 1 * GIB, high=2 * GIB)
    cgroups = make("0::/a.slice/b.service/own\n", ("/", "/sys/fs/cgroup", "cgroup2"))
    own, above = cgroups.bounds()
    assert own == Bound(f"cgroup {top}/a.slice/b.service/own", 2 * GIB, 1 * GIB)
    assert above == Bound(f"cgroup {top}/a.slice", 8 * GIB, 1 * GIB)


def test_version_2_in_a_container(make: Make, host: Path) -> None:
    """Its own group is the root that it sees, with a limit that the real root cannot have."""
    group(host / "sys/fs/cgroup", 2, 3 * GIB)
    assert limits(make("0::/\n", ("/", "/sys/fs/cgroup", "cgroup2"))) == [3 * GIB]


def test_no_limit_anywhere(make: Make, host: Path) -> None:
    (host / "sys/fs/cgroup/a").mkdir(parents=True)  # the memory controller is not enabled in it
    (host / "sys/fs/cgroup/a/cgroup.procs").touch()
    assert limits(make("0::/a\n", ("/", "/sys/fs/cgroup", "cgroup2"))) == []
    group(host / "memory/a", 1, V1)
    assert limits(make("4:memory:/a\n0::/\n", ("/", "/memory", "memory"))) == []
    assert limits(make("")) == []
    assert Cgroups(host / "nowhere").bounds() == []


def test_version_1_and_hybrid(make: Make, host: Path) -> None:
    group(host / "sys/fs/cgroup/memory/job", 1, 4 * GIB, 3 * GIB)
    group(host / "sys/fs/cgroup/memory/job/step", 1, V1, 3 * GIB)
    (host / "sys/fs/cgroup/unified").mkdir(parents=True)
    own = "9:name=systemd:/\n5:cpu,cpuacct:/job\n4:memory:/job/step\n0::/user.slice\n"
    mounts = [("/", "/sys/fs/cgroup/cpu,cpuacct", "cpu"), ("/", "/sys/fs/cgroup/unified", "cgroup2")]
    cgroups = make(own, *mounts, ("/", "/sys/fs/cgroup/memory", "memory"))
    assert cgroups.bounds() == [Bound(f"cgroup {host}/sys/fs/cgroup/memory/job", 4 * GIB, 1 * GIB)]


def test_version_1_of_before_all_limits_were_inherited(make: Make, host: Path) -> None:
    group(host / "m/a", 1, 4 * GIB)
    group(host / "m/a/b", 1, 8 * GIB)
    (host / "m/a/memory.use_hierarchy").write_text("0\n")
    assert limits(make("4:memory:/a/b\n", ("/", "/m", "memory"))) == [8 * GIB]


def test_the_limit_of_a_version_1_ancestor_that_cannot_be_seen(make: Make, host: Path) -> None:
    """What others use of it is not told: at most the own part's use is known."""
    group(host / "m", 1, V1, 1 * GIB, hierarchical_memory_limit=3 * GIB, total_inactive_file=GIB // 2)
    [bound] = make("4:memory:/\n", ("/", "/m", "memory")).bounds()
    assert bound == Bound(f"a cgroup above {host}/m", 3 * GIB, 5 * GIB // 2)
    group(host / "m", 1, 3 * GIB, 1 * GIB, hierarchical_memory_limit=3 * GIB)
    assert limits(make("4:memory:/\n", ("/", "/m", "memory"))) == [3 * GIB]


@pytest.mark.parametrize("own", ["/docker/0a", "/docker/0a/job"])
def test_the_host_s_names_in_a_container(make: Make, host: Path, own: str) -> None:
    """Without a cgroup namespace a name starts at the host's root, and the container sees its own part of the tree."""
    group(host / "sys/fs/cgroup/memory", 1, 3 * GIB)
    group(host / "sys/fs/cgroup/memory/job", 1, V1)
    assert limits(make(f"4:memory:{own}\n", ("/docker/0a", "/sys/fs/cgroup/memory", "memory"))) == [3 * GIB]


def test_of_several_mounts_the_one_that_shows_most(make: Make, host: Path) -> None:
    """Also where a place has a blank in its name."""
    group(host / "part", 2, 2 * GIB)
    group(host / "the whole/a", 2, 1 * GIB)
    group(host / "the whole/a/b", 2, 2 * GIB)
    mounts = [("/a/b", "/part", "cgroup2"), ("/", "/the\\040whole", "cgroup2"), ("/a/b", "/gone", "cgroup2")]
    assert limits(make("0::/a/b\n", *mounts)) == [2 * GIB, 1 * GIB]


def test_another_branch_is_not_ours(make: Make, host: Path) -> None:
    group(host / "m", 1, 1 * GIB)
    assert limits(make("4:memory:/a/b\n", ("/a/c", "/m", "memory"))) == []
    assert limits(make("4:memory:/../c\n", ("/", "/m", "memory"))) == []


def test_a_tree_from_above_the_namespace(make: Make, host: Path) -> None:
    """The levels in between have names that the kernel does not tell: the group is the one with this process in it."""
    group(host / "m", 1, 9 * GIB)
    group(host / "m/pods/other/x", 1, 1 * GIB, pid=12)
    group(host / "m/pods", 1, 4 * GIB)
    group(host / "m/pods/this", 1, V1)
    group(host / "m/pods/this/x", 1, 3 * GIB, pid=PID)
    assert limits(make("4:memory:/x\n", ("/../..", "/m", "memory"))) == [3 * GIB, 4 * GIB, 9 * GIB]
    # Named from a level above the namespace's root, and where none has this process: what is above in any case.
    assert limits(make("4:memory:/../this/x\n", ("/../..", "/m", "memory"))) == [3 * GIB, 4 * GIB, 9 * GIB]
    group(host / "m/pods/this/x", 1, 3 * GIB)
    assert limits(make("4:memory:/x\n", ("/../..", "/m", "memory"))) == [9 * GIB]
    assert limits(make("4:memory:/../../pods/other\n", ("/../../pods", "/m/pods", "memory"))) == [4 * GIB]


def test_a_process_that_is_moved(make: Make, host: Path) -> None:
    """Batch systems and service managers move processes after they began."""
    group(host / "m/a", 2, 2 * GIB)
    group(host / "m/b", 2, 1 * GIB)
    cgroups = make("0::/a\n", ("/", "/m", "cgroup2"))
    assert limits(cgroups) == [2 * GIB]
    (host / "proc/self/cgroup").write_text("0::/b\n")
    assert limits(cgroups) == [1 * GIB]
    (host / "m/b/memory.max").write_text("4096\n")
    assert limits(cgroups) == [4096]


def test_page_cache_can_be_had(make: Make, host: Path) -> None:
    """A container that has read its weights has used all of its memory, and most of it comes back."""
    group(host / "m", 2, 16 * GIB, 16 * GIB, inactive_file=2 * GIB, active_file=10 * GIB, slab_reclaimable=128 * MIB)
    [bound] = make("0::/\n", ("/", "/m", "cgroup2")).bounds()
    assert bound.free == 2 * GIB + 5 * GIB + 64 * MIB
    group(host / "m", 1, 16 * GIB, 16 * GIB, inactive_file=1, total_inactive_file=12 * GIB, total_active_file=2 * GIB)
    [bound] = make("4:memory:/\n", ("/", "/m", "memory")).bounds()
    assert bound.free == 13 * GIB


def test_huge_pages_count_where_the_hierarchy_says_so(make: Make, host: Path) -> None:
    group(host / "m", 2, 3 * GIB)
    assert make("0::/\n", ("/", "/m", "cgroup2")).bounds(huge_pages=True) == []
    assert [bound.total for bound in make("0::/\n", ("/", "/m", "huge")).bounds(huge_pages=True)] == [3 * GIB]


@pytest.mark.parametrize(
    ("total", "reserve"),
    [(1 * GIB, 128 * MIB), (8 * GIB, GIB), (16 * GIB, GIB), (80 * GIB, 4 * GIB), (2048 * GIB, 2048 * GIB // 20)],
)
def test_the_reserve_is_a_share_of_what_bounds(total: int, reserve: int) -> None:
    assert Bound("", total, total).spare == total - reserve
    assert Bound("", total, reserve // 2).spare == 0
