"""Loading a configuration file, as for ``kvferry daemon --config`` and doctor."""

from __future__ import annotations

from pathlib import Path

from kvferry.daemon.config.config_file import read_file
from kvferry.daemon.config.conflicts import check_together
from kvferry.daemon.config.schema import Config


def load_config(path: Path) -> Config:
    """Return the configuration in a TOML file.

    Raises:
        ConfigError: the file cannot be read or parsed, a key is unknown or has a wrong value, or two keys exclude each
            other; names the keys, their values and what is allowed.
    """
    config = read_file(path, Config)
    check_together(config, path)
    return config
