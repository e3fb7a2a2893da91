"""Plugins: the hooks they may implement, where installed ones are found, what they registered and what failed."""

from kestrel.plugins.discovery import GROUP, Candidate, installed
from kestrel.plugins.host import PluginHost, PluginInfo

__all__ = ["GROUP", "Candidate", "PluginHost", "PluginInfo", "installed"]
