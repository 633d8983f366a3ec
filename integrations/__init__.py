"""Installed as `upguard_plugin.integrations`; one module per framework, loaded when used."""

if __name__ != "upguard_plugin.integrations":
    raise ImportError(f"import this package as upguard_plugin.integrations, not {__name__!r}")
