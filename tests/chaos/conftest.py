"""Real runs, as in the integration tests."""

from tests.integration.conftest import engine, run

__all__ = ["engine", "run"]
