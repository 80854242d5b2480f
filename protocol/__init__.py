"""The wire protocol: messages, codec, errors, versions and configuration.

Uses no socket, clock, event loop or torch. Everything else in kvferry is built on it.
"""

if __name__ != "kvferry.protocol":
    raise ImportError(f"import kvferry.protocol, not {__name__}: that would be a second copy of it")

VERSION = "0.1.0"
"""kvferry's version, as in pyproject.toml; reading the package's metadata would take longer."""
