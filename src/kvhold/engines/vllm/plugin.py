"""vLLM's plugin entry point. It runs in every vLLM process, also of people who never use kvhold."""


def register() -> None:
    """Make ``KvHoldConnector`` known to vLLM by its bare name; does nothing more and never raises."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector("KvHoldConnector", "kvhold.engines.vllm.connector", "KvHoldConnector")
    except Exception:  # noqa: BLE001 - registered already, or a vLLM we do not know: the connector itself says so
        return
