"""What a user may set of SGLang's half of the cache, beside SGLang's own keys."""

from collections.abc import Mapping
from typing import Any

from kvhold.engines.common.settings import ManagerSettings, load_settings

WHERE = "--hicache-storage-backend-extra-config"
_SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Keys of SGLang 0.5.23's own that it hands on; the last comes of an option for its file storage."""


class SglangSettings(ManagerSettings, frozen=True, forbid_unknown_fields=True):
    """``docs/configuration.md`` says the same, and a test compares the two."""

    read_deadline_ms: float = 2500.0
    """How long a restore may wait for what has to be read from SSD; then what has arrived is restored."""
    find_deadline_ms: float = 200.0
    """How long a question about what is stored may wait for the manager; then nothing is."""
    publish_deadline_ms: float = 500.0
    """How long storing pages may wait for the manager and for room, beside the copies; then the rest is not stored."""


def settings_of(extra: Mapping[str, Any] | None) -> SglangSettings:
    """Those in SGLang's extra configuration. Raises ValueError that names the setting, the value and the remedy."""
    given = {name: value for name, value in (extra or {}).items() if name not in _SGLANGS}
    return load_settings(given, WHERE, SglangSettings)
