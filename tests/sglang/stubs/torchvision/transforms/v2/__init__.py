"""Names for type hints and defaults."""

from torchvision.transforms import __getattr__  # noqa: F401  this module has it, too
