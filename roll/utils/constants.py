"""Names and limits that several modules share."""

RAY_NAMESPACE = "roll"

# Seconds that a caller waits for its workers when neither the call site nor the configuration says otherwise.
DEFAULT_RPC_TIMEOUT = 3600.0
