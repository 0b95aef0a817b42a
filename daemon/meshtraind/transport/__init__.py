"""Frames, requests and back-pressure over any stream."""
