"""diagnostics: how does this network behave?

Conservation: :func:`conserved`, the quantities that gradient flow keeps constant, one per unit.
"""

from diagnostics.conservation import conserved

__all__ = ["conserved"]
