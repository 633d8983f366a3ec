"""Installed as `upguard_plugin.launch`; starts training commands with capture on."""

if __name__ != "upguard_plugin.launch":
    raise ImportError(f"import this package as upguard_plugin.launch, not {__name__!r}")
