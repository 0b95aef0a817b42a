"""The other devices: found by mDNS, dialled, greeted, linked, missed."""
