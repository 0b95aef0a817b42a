"""Which devices may run code here: keys, pins, TLS with both sides pinned, and pairing by a code that is typed."""
