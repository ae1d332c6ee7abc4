"""Counts what XLA compiles in this process, so that a compile after readiness is seen."""

from __future__ import annotations

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0
_listening = False


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    if event == _EVENT:
        with _lock:
            _count += 1


def start_counting() -> None:
    """Begin to count, once per process; further calls do nothing."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _listening = True


def num_compiles() -> int:
    """Programs compiled, or taken from the persistent cache, since `start_counting`."""
    return _count
