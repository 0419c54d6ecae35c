"""Real runs, as in the integration tests."""

from tests.integration.conftest import run

__all__ = ["run"]
