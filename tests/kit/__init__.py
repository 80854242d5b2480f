"""What tests build their worlds from: ``kit.daemon()``, ``kit.serving()``, ``kit.engine()``, ``kit.pool()``."""

from tests.kit.daemons import daemon

__all__ = ["daemon"]
