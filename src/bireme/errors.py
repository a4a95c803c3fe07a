"""The errors that Bireme raises by name. No torch, no server imports.

Every message says what was being done, which id, the value, the bound and, where one exists, the flag that changes it.
"""


class BiremeError(Exception):
    """Base of every error that Bireme raises on purpose."""


class ConfigError(BiremeError, ValueError):
    """A configuration (config.json, a flag, a tensor-parallel split) that cannot be run."""


class CheckpointError(BiremeError):
    """A checkpoint that cannot be loaded: missing, extra, misshapen or truncated tensors."""


class InvalidRequestError(BiremeError, ValueError):
    """A request that can never be served; the server answers 400.

    Args:
        message: what is wrong, with the value and the bound.
        param: the request field at fault, in the API's spelling, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(BiremeError):
    """The waiting queue is at its bound (max_waiting): the request was refused, a later one may be served (429)."""


class ExecutorError(BiremeError):
    """A rank failed, died or answered out of order: the executor is poisoned and serves nothing any more."""


class EngineDeadError(BiremeError):
    """The engine process is gone or poisoned; every open request ends with this and /health is 503."""
