"""What can go wrong between a script or command and the mesh. Every text is for a person and says what to do."""

from meshwire.frames.header import WIRE_VERSION


class MeshtrainError(Exception):
    """The base of all of them."""


class DaemonNotRunning(MeshtrainError):
    """There is no daemon behind this data folder."""


class ConnectionLost(MeshtrainError):
    """The daemon on this device went away, or gives no sign of life."""


class OtherVersion(ConnectionLost):
    """The daemon on this device was started from another version of meshtrain (W6)."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(
            f"the daemon on this device speaks wire version {version}, what is installed here {WIRE_VERSION}: it was "
            "started before meshtrain was installed anew (meshtrain down, then meshtrain up), or from elsewhere"
        )


class UnexpectedReply(MeshtrainError):
    """The daemon on this device answers with something else than was asked for: it is of another version."""

    def __init__(self, name: str, answer: object) -> None:
        super().__init__(
            f"the daemon answered {name} with {type(answer).__name__}; it is of another version than what is installed "
            "here"
        )


class RequestError(MeshtrainError):
    """The daemon could not do what it was asked for."""


class UsageError(MeshtrainError):
    """The script calls the API in a way that cannot work."""


class NotSupported(MeshtrainError):
    """The script uses a feature that cannot be trained this way; the text names the alternative."""


class NonFiniteGradient(MeshtrainError):
    """V1 with `--on-nan stop`: some peer's gradient held NaN or an infinity. The text names parameter and peer."""

    def __init__(
        self,
        round_: int,
        reason: str,
        remedy: str = "to leave such rounds out and go on: meshtrain submit --on-nan skip",
    ) -> None:
        super().__init__(f"round {round_} is void: {reason}; {remedy}")
        self.round = round_
        self.reason = reason


class JobStopped(MeshtrainError):
    """The job was cancelled or has failed on another peer."""
