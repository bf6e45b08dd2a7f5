"""A store is named by a URL without secrets; whatever cannot be right is refused with what to write."""

from pathlib import Path

import pytest

from kvhold.tiers.remote.url import MIN_FREE, parse_remote


def test_what_is_said_is_what_is_meant() -> None:
    folder = parse_remote("file:///mnt/kv%20cache/?min_free=5GiB&pool=blue")
    assert (folder.scheme, folder.path, folder.min_free, folder.pool) == ("file", "/mnt/kv cache", 5 << 30, "blue")
    assert parse_remote("file:///mnt/kv").min_free == MIN_FREE
    redis = parse_remote("redis://cache.example:6380/2")
    assert (redis.host, redis.port, redis.path, redis.pool) == ("cache.example", 6380, "2", "default")
    assert parse_remote("redis://").port == 6379
    mooncake = parse_remote("mooncake://10.0.0.1:50051?protocol=tcp&local=10.0.0.2")
    assert (mooncake.host, mooncake.port, mooncake.local, mooncake.extra) == ("10.0.0.1", 50051, "10.0.0.2", "mooncake")
    assert parse_remote("unix:///run/redis.sock").path == "/run/redis.sock"
    bucket = parse_remote("s3://kv-cache/a/b/?endpoint=http://127.0.0.1:8333&region=eu-1")
    assert (bucket.host, bucket.path, bucket.endpoint) == ("kv-cache", "a/b", "http://127.0.0.1:8333")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("memcached://h:1", "kind of store"),
        ("/mnt/kv", "kind of store"),
        ("redis://h", "HOST:PORT"),
        ("redis://h:1/x", "number of a database"),
        ("redis://h:1?polo=x", "no parameter 'polo'; it has pool, secret_file"),
        ("redis://h:1?pool=", "empty"),
        ("redis://h:1?pool=a&pool=b", "twice"),
        ("redis://h:1?pool=a/b", "name of a pool"),
        ("redis://h:1?secret_file=x", "absolute path"),
        ("redis://h:1#x", "#"),
        ("mooncake://h", "HOST:PORT"),
        ("mooncake://h:1/x", "leave it out"),
        ("mooncake://h:1?protocol=rdma", "write protocol=tcp"),
        ("unix://run/redis.sock", "three slashes"),
        ("file://mnt/kv", "three slashes"),
        ("file:///mnt?min_free=much", "not a size"),
        ("s3://B", "name of a bucket"),
        ("s3://kvs?endpoint=127.0.0.1:8333", "https://HOST:PORT"),
    ],
)
def test_what_cannot_be_right_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^remote: .*{says}"):
        parse_remote(url)


@pytest.mark.parametrize(
    "url", ["redis://me:hunter2@h:1/0", "s3://key:hunter2@kvs/x", "s3://kvs?endpoint=http://me:hunter2@h:1"]
)
def test_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"KVHOLD_REMOTE_PASSWORD|AWS_ACCESS_KEY_ID") as refused:
        parse_remote(url)
    assert "hunter2" not in str(refused.value)


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_REMOTE_PASSWORD", "one")
    assert parse_remote("redis://").secret("KVHOLD_REMOTE_PASSWORD") == "one"
    (tmp_path / "secret").write_text("KVHOLD_REMOTE_USER=me\nKVHOLD_REMOTE_PASSWORD = two\n")
    config = parse_remote(f"redis://?secret_file={tmp_path}/secret")
    assert config.secret("KVHOLD_REMOTE_PASSWORD") == "two"
    assert "two" not in repr(config) + str(config) + config.shown
