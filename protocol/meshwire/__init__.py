"""What peers must agree on. Pure: no asyncio, sockets, clocks, randomness, threads or torch."""
