"""Every byte of the arena and every key that was asked for is accounted for, in the report and in the metrics."""

import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from testbed.process.manager_process import Manager
from testbed.process.peers import Engine, Peer, http_address, populated, status, until

from kvhold import protocol as wire

QUARTER = 256 << 10


def metrics(manager: Manager) -> dict[str, float]:
    """A scrape, after a look at its identities; states are named ``state:leased``."""
    with urllib.request.urlopen(http_address(manager.log) + "/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        found = {
            f"state:{sample.labels['state']}" if sample.labels else sample.name: sample.value
            for family in families
            for sample in family.samples
            if not sample.labels or "state" in sample.labels
        }
    states = [value for name, value in found.items() if name.startswith("state:")]
    assert min(states) >= 0
    assert sum(states) == found["kvhold_arena_bytes"]
    answered = ("kvhold_keys_resident_total", "kvhold_keys_not_stored_total", "kvhold_keys_budget_total")
    assert sum(found[name] for name in answered) == found["kvhold_keys_asked_total"]
    return found


def purge(manager: Manager) -> None:
    admin = Peer(manager.socket)
    admin.join("admin")
    admin.send(wire.Purge())
    admin.expect(wire.Purged)
    admin.close()


def test_the_sums_hold_at_every_moment(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    populated(manager.socket)
    fresh = metrics(manager)
    assert fresh["state:free_pages"] == fresh["kvhold_arena_bytes"] == 32 << 20
    assert fresh["kvhold_sessions"] == 0

    engine = Engine(manager.socket, "one", slots=8, shard=QUARTER)
    now = metrics(manager)
    assert now["state:credit"] == 8 * QUARTER
    assert now["kvhold_sessions"] == 2

    chain = list(range(60))
    engine.store(chain)
    engine.scheduler.slots(8)
    now = metrics(manager)
    assert now["state:credit"] == 8 * QUARTER
    assert now["state:resident"] == 60 * QUARTER
    assert now["kvhold_objects"] == now["kvhold_commits_total"] == 60

    op, resident, *_ = engine.scheduler.ask([*range(50), 1000, 50, 51], skip=10)
    assert resident == 50
    now = metrics(manager)
    assert now["state:leased"] == 40 * QUARTER
    assert now["state:resident"] == 20 * QUARTER
    assert now["kvhold_keys_asked_total"] == 53
    assert now["kvhold_keys_resident_total"] == 50
    assert now["kvhold_keys_not_stored_total"] == 3

    engine.store(chain[:3])
    assert metrics(manager)["kvhold_duplicates_total"] == 3

    purge(manager)
    until(lambda: metrics(manager)["kvhold_purged_total"] == 60, "all purged")
    now = metrics(manager)
    assert now["state:doomed"] == 40 * QUARTER
    assert now["state:resident"] == 0
    engine.scheduler.release(op)
    engine.scheduler.sync()
    assert metrics(manager)["state:doomed"] == 0

    engine.bye()
    until(lambda: metrics(manager)["state:free_pages"] == 32 << 20, "all is free again")
    assert metrics(manager)["kvhold_sessions"] == 0


def test_the_sums_hold_in_a_full_arena(serve: Callable[..., Manager]) -> None:
    """More is stored than fits, more is asked for than may be leased."""
    manager = serve("--http", "127.0.0.1:0")
    populated(manager.socket)
    engine = Engine(manager.socket, "one", slots=8, shard=QUARTER)
    other = Engine(manager.socket, "two", slots=16, shard=4096, namespace=b"o" * 32)
    engine.store(list(range(300)))
    other.store(list(range(100)))
    now = metrics(manager)
    assert now["kvhold_evicted_total"] > 0
    assert now["kvhold_commits_total"] == 400
    assert now["kvhold_objects"] == 400 - now["kvhold_evicted_total"]

    op, resident, *leased = engine.scheduler.ask(list(range(300 - 104, 300)))
    now = metrics(manager)
    assert len(leased) == resident == 96  # three quarters of 32 MiB
    assert now["kvhold_keys_budget_total"] == 8
    assert now["state:leased"] == 96 * QUARTER
    engine.scheduler.release(op)
    engine.scheduler.sync()
    other.works(list(range(100)))
    metrics(manager)


def test_the_sums_hold_for_who_is_lost(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    engine = Engine(manager.socket, "one", slots=8)
    engine.store([1, 2, 3, 4])
    engine.scheduler.ask([1, 2, 3])
    engine.scheduler.slots(8)
    engine.scheduler.close()
    until(lambda: metrics(manager)["kvhold_sessions"] == 0, "both halves are lost")
    now = metrics(manager)
    assert now["state:orphaned"] == 8 * 4096
    assert now["state:leased"] == 3 * 4096
    assert now["state:credit"] == 0
    assert now["kvhold_orphaned_bytes"] == 11 * 4096


def test_the_report_says_the_same(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    populated(manager.socket)
    engine = Engine(manager.socket, "one")
    engine.store([1, 2])
    engine.works([1, 2])
    report, now = status(manager.socket), metrics(manager)
    assert {f"state:{name}": size for name, size in report["accounts"].items()} == {
        name: size for name, size in now.items() if name.startswith("state:")
    }
    assert report["objects"] == now["kvhold_objects"] == 2
    assert report["counters"]["queries"] == now["kvhold_queries_total"]
    assert [(s["role"], s["instance"], s["open"]) for s in report["sessions"]] == [
        ("scheduler", "one", True),
        ("worker", "one", True),
    ]
    assert report["spaces"][0]["objects"] == 2


def test_questions_turns_and_clients_are_counted(serve: Callable[..., Manager]) -> None:
    manager = serve("--http", "127.0.0.1:0")
    engine = Engine(manager.socket, "one")
    engine.store([1, 2, 3])
    before = labelled(manager)
    for _ in range(5):
        engine.works([1, 2, 3])
    engine.scheduler.send(wire.Lookup(70, ((1, b"12345678"),)), wire.Prepare(71, 1, ((1, b"12345678"),)))
    engine.scheduler.sync()
    now = labelled(manager)
    for kind, count in (("query", 11), ("lookup", 1), ("prepare", 1)):  # each looks once more, whether all is heard
        name = f'kvhold_answer_seconds_count{{kind="{kind}"}}'
        assert now[name] - before[name] == count
        assert now[name] == now[f'kvhold_answer_seconds_bucket{{kind="{kind}",le="+Inf"}}']
        assert now[f'kvhold_answer_seconds_sum{{kind="{kind}"}}'] < 60
    assert now["kvhold_turn_seconds_count"] > before["kvhold_turn_seconds_count"] > 0
    assert now['kvhold_clients_connected{kind="engines"}'] == 2
    assert now['kvhold_clients_connected{kind="strangers"}'] == 0
    assert now['kvhold_clients_limit{kind="engines"}'] >= 128
    assert now["kvhold_unfinished"] == 0
    assert now["process_open_fds"] > 5


def labelled(manager: Manager) -> dict[str, float]:
    """A scrape, by name and labels as they are written."""
    with urllib.request.urlopen(http_address(manager.log) + "/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
