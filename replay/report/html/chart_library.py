"""The chart library: Vega, Vega-Lite and vega-embed, as vl-convert-python bundles them."""

from __future__ import annotations

import functools
import importlib.util

from capture.errors import MissingPackage

ONCE_THERE = "window.vegaEmbed = vegaEmbed; window.dispatchEvent(new Event('charts'));"
"""What the bundle does when a browser has run it."""


def require() -> None:
    """Find out whether it is installed.

    Raises:
        MissingPackage: it is not.
    """
    if importlib.util.find_spec("vl_convert") is None:
        raise MissingPackage(
            "reports and charts require vl-convert-python: pip install 'attention-replay[report]'"
        )


def bundle() -> str:
    """A JavaScript module, about 0.9 MB, that asks nothing of a network.

    Raises:
        MissingPackage: it is not installed.
    """
    require()
    return _bundled()


@functools.cache
def _bundled() -> str:
    """Once a process: it takes a second, and whoever watches a recording writes many reports."""
    import vl_convert

    text: str = vl_convert.javascript_bundle(ONCE_THERE)
    return text
