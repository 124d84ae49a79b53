"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # the machine may be shared
settings.load_profile("unhurried")
