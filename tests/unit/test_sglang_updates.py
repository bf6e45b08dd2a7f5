"""Weight updates of an SGLang engine, as one rank follows them. SGLang itself is not needed."""

import pytest
import torch.distributed as distributed

from kvhold.engines.sglang.updates import Updates, engine_token


def rank(engine: str = "engine 1") -> Updates:
    return Updates(lambda: engine)


def test_ranks_of_an_engine_have_one_salt_after_the_same_updates() -> None:
    first, second, other = rank(), rank(), rank("engine 2")
    salts = {first.salt}
    for what in ("update_weights_from_disk", "update_weights_from_tensor", "clear"):
        for each in (first, second, other):
            each.clear() if what == "clear" else each.changing(what)
        assert first.salt == second.salt != other.salt
        salts |= {first.salt, other.salt}
    assert len(salts) == 7, "a former namespace is spoken of again"


def test_nothing_is_published_until_the_tree_is_flushed() -> None:
    updates = rank()
    assert updates.settled
    updates.changing("update_weights_from_disk")
    updates.clear()
    assert not updates.settled, "a clear says nothing of what the engine has computed"
    assert updates.flushed()
    assert updates.settled
    assert not updates.flushed()


def test_a_clear_leaves_what_the_engine_has() -> None:
    updates = rank()
    updates.clear()
    assert updates.settled
    assert updates.salt


def test_each_storage_is_told_after_the_salt_has_changed() -> None:
    updates, seen = rank(), list[tuple[bytes, bool]]()

    def rekeyed() -> None:
        seen.append((updates.salt, updates.settled))

    updates.listen(rekeyed, {})
    updates.changing("update_weights_from_ipc")
    updates.clear()
    assert seen == [(seen[0][0], False), (updates.salt, False)]
    updates.forget(rekeyed)
    updates.clear()
    assert len(seen) == 2


def test_one_storage_that_fails_does_not_keep_another_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    updates, told = rank(), list[bytes]()

    def fails() -> None:
        raise OSError("no")

    updates.listen(fails, {})
    updates.listen(lambda: told.append(updates.salt), {})
    updates.changing("update_weights_from_disk")
    assert told == [updates.salt]
    assert "could not change its namespaces" in caplog.text


def test_ranks_agree_on_a_token_that_no_other_start_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    tokens = []
    for _ in range(2):
        store = distributed.HashStore()  # one for all ranks of a start
        monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda store=store: store)
        ranks = {engine_token() for _ in range(3)}
        assert len(ranks) == 1
        tokens += ranks
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    assert len({*tokens, engine_token(), engine_token()}) == 4
