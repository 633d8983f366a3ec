"""Every collective of torch.distributed, as events."""

from upguard_plugin.capture.collectives.probe import CollectiveProbe

__all__ = ["CollectiveProbe"]
