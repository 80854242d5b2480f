"""``kvferry doctor``: checks what a host has and lacks for kvferry, with fixes. Read-only."""

if __name__ != "kvferry.clients.cli.doctor":
    raise ImportError(f"import kvferry.clients.cli.doctor, not {__name__}: that would be a second copy of it")
