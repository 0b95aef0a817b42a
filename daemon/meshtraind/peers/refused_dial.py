"""Finds out whether nobody listens at an address: a fresh dial is refused. Silence, and any other answer, tell
nothing."""

import asyncio

from meshwire.addresses import Address

READ_BYTES = 4096
PAUSE_S = 0.02  # between two dials, where the first one was taken and dropped


async def refuses(address: Address, within_s: float) -> bool:
    """Dials until the dial is refused or `within_s` are over.

    A process that ends may lose its connections before its listener: then the first dial is taken, and dropped.
    """
    try:
        async with asyncio.timeout(within_s):
            while True:
                await _until_dropped(address)
                await asyncio.sleep(PAUSE_S)
    except ConnectionRefusedError:
        return True
    except OSError:  # no way there, or nobody answers in time
        return False


async def _until_dropped(address: Address) -> None:
    """Raises OSError when nobody takes the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        while await reader.read(READ_BYTES):
            pass
    except ConnectionResetError:
        return  # dropped, too
    finally:
        writer.transport.abort()
