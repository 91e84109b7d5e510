"""Who holds which examples, how they learn, and TFF processes for it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
