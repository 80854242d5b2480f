"""In place of CANN's own Python package, which SGLang asks which chip this is."""

from __future__ import annotations


class rt:  # noqa: N801  CANN's name
    """CANN's runtime."""

    @staticmethod
    def get_device_info(device: int, attribute: int) -> tuple[int, int]:  # noqa: ARG004
        """Return an architecture before 3510, and success."""
        return 2201, 0
