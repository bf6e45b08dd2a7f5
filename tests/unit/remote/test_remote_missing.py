"""What a store needs and this host lacks is named, with how it is had."""

import pytest

from kvhold.tiers.remote.child import cannot
from kvhold.tiers.remote.url import parse_remote


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("redis://", ImportError("No module named 'redis'"), "pip install 'kvhold[redis]'"),
        ("s3://kvs", ImportError("No module named 'obstore'"), "pip install 'kvhold[objects]'"),
        ("mooncake://h:1", ImportError("No module named 'mooncake'"), "pip install 'kvhold[mooncake]'"),
        (
            "mooncake://h:1",
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "apt-get install libibverbs1",
        ),
        ("file:///mnt", OSError("/mnt is not a folder"), "/mnt is not a folder"),
    ],
)
def test_what_is_missing_is_named(url: str, error: Exception, says: str) -> None:
    assert says in cannot(parse_remote(url), error)
