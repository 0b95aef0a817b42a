"""From `mt.prepare` to the first step, and from the hooks of `loss.backward()` to the round in the base."""
