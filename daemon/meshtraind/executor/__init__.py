"""The bytes of a round: performs on memory what the round machine and the exchanges say has become possible."""
