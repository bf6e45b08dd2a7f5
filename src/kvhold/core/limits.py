"""Every budget of the core in one place. All of them may be changed while it runs, also below what is in use."""

from dataclasses import dataclass, field

SECOND = 1_000_000_000


@dataclass(slots=True, frozen=True)
class Quota:
    """What one namespace is sure of, and what it may not exceed, in slot bytes of the arena."""

    floor: int = 0
    limit: int = 1 << 62  # none


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """Shares are of the arena; times are nanoseconds."""

    prepared_share: float = 0.75
    """Bytes that are leased or on their way from a log, of all engines. The rest is kept for publishing."""
    engine_share: float = 0.75
    """The same of one engine, counting what it was the first to lease."""
    credit_share: float = 0.25
    """Bytes granted to publish into, of all engines together."""
    lost_share: float = 0.5
    """Bytes whose owners are lost but not proved dead; above it no new engine is let in."""
    max_objects: int = 32_000_000
    """Objects that are known, in DRAM or in a log. Each takes about 250 bytes of the manager's own memory."""
    queries: int = 64
    """Questions of one engine that wait for an answer."""
    all_queries: int = 1024
    operations: int = 4096
    """Questions of one engine that are answered and not given up."""
    keys: int = 2 << 20
    """Keys that all of these name together. Each takes 16 bytes of the manager's own memory."""
    credits: int = 16_384
    """Slots granted to one engine and not used yet."""
    spaces: int = 64
    """Spaces that one engine has open, and cache groups of one namespace."""
    known_spaces: int = 8192
    """Spaces that are known. Each takes about 2 KiB of the manager's own memory, however little is stored there."""
    brought_spaces: int = 1024
    """Of those, spaces that one engine was the first to open. With more, what it left longest ago is forgotten."""
    read_bytes: int = 256 << 20
    """Bytes being read from logs at once."""
    write_batch: int = 16 << 20
    """Bytes of one write to a log; there is one at a time per log."""
    write_queue: int = 65_536
    """Objects that wait to be written; further ones are not."""
    write_rate: int = 0
    """Bytes a second written to each log; 0 is no limit."""
    second_touch: bool = False
    """Write an object only when it is stored for the second time."""
    answer_ns: int = 30 * SECOND
    """How long an answer may wait for reads; then what is there is the answer. Clients ask for that long before."""
    hung_ns: int = 2 * SECOND
    """A log that takes longer for a read is not waited for any more until it has ended."""
    lease_ns: int = 60 * SECOND
    """How long an answered lease is kept for a restore to start. Clients give up after a fraction of it."""
    hear_ns: int = SECOND
    """How much longer it is kept each time that its owner has said something that is not taken in yet."""
    stall_ns: int = 60 * SECOND
    """A restore that takes longer is reported."""
    ask_ns: int = 20_000_000
    """How long a question waits for backings to say what they have; then what was heard counts."""
    ask_batch: int = 512
    """Keys that a question asks for at once, of those that nobody has here."""
    ask_keys: int = 4096
    """Keys that one question asks for at most."""
    asks: int = 64
    """Batches that are asked of one backing and not answered; with more, what is asked for counts as late."""
    heard: int = 65_536
    """Answers that are remembered. Each takes 17 bytes of the manager's own memory."""
    there_ns: int = 5 * SECOND
    """How long a backing's word is believed that it has an object,"""
    absent_ns: int = SECOND
    """and that it has not."""
    get_ns: int = SECOND
    """How long somebody waits for what such a backing is giving."""
    proved_ns: int = 600 * SECOND
    """How long it is believed that it has what it was given, or has given: what is used after that is offered again."""
    put_rate: int = 0
    """Bytes a second given to such a backing; 0 is no limit."""
    not_got_ns: int = 30 * SECOND
    """How long what a backing did not give, or gave wrong, is not tried again, whatever it says."""
    retry_ns: int = 10 * SECOND
    """How long a log is left alone after repeated errors."""
    quotas: dict[bytes, Quota] = field(default_factory=dict)
    """By namespace."""
