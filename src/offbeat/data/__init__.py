"""Data sets of the reproductions: fetched once, checked, kept in a cache folder, read with numpy alone."""

from offbeat.data.cache import cache_folder
from offbeat.data.images import Images, cifar10
from offbeat.data.text import Text, wikitext2

__all__ = ["Images", "Text", "cache_folder", "cifar10", "wikitext2"]
