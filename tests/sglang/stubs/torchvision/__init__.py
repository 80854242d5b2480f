"""Stands in for torchvision, of which there is no build beside a CPU's torch: SGLang imports it also for text models.

Every name of its modules is a class that nothing calls.
"""

__version__ = "0.28.0"  # transformers looks
