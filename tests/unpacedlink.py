"""A link to another member that is no socket: what a played one has in place of the kernel's word and pace."""


class UnpacedLink:
    """Base of what stands for a `RoundLink` without a kernel below it."""

    def path(self) -> None:
        """There is no kernel that could tell."""

    def share(self, owner: object, bytes_s: float | None) -> None:
        """Nobody sets a pace where nothing was told."""
        raise AssertionError(owner, bytes_s)
