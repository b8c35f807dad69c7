"""Settings that all tests share."""

from hypothesis import settings

# no test depends on time: a loaded machine is slow, not wrong
settings.register_profile("pathspace", deadline=None)
settings.load_profile("pathspace")
