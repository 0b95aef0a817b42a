"""What lets learners in at the local endpoint: a token for each process, good for its job, for as long as it runs."""

import hmac
import secrets

TOKEN_BYTES = 32


class LearnerTokens:
    """The tokens of all learners of this daemon. A learner takes part in its job and can do nothing else:
    `api/endpoint.py` sees to that.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, str] = {}

    def issue(self, job: str) -> str:
        """A new token for a process of this job."""
        token = secrets.token_hex(TOKEN_BYTES)
        self._jobs[token] = job
        return token

    def revoke(self, token: str) -> None:
        """Ends a token whose process has ended: whatever that has left behind, or told of it, is let in no more."""
        self._jobs.pop(token, None)

    def job_of(self, shown: str) -> str | None:
        """The job that a token is good for; None for any other text."""
        for token, job in self._jobs.items():
            if hmac.compare_digest(shown.encode(), token.encode()):
                return job
        return None
