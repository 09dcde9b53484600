"""The fixtures of the integration tests, for stacks that lose their services."""

from tests.integration.conftest import folder, module_folder, oracle

__all__ = ["folder", "module_folder", "oracle"]
